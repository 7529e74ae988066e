"""All instructions by name, with their builders."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from flash_helpers.ptx.errors import MissingLanesError, TrapError, UnsupportedInstruction
from flash_helpers.ptx.read.module import Instruction, Register
from flash_helpers.ptx.read.registers import WITHOUT_EFFECT
from flash_helpers.ptx.run.instructions import (
    access,
    arrivals,
    bulk,
    clusters,
    compare,
    convert,
    copies,
    floats,
    integers,
    runtime,
    tensor,
    tensor_maps,
    warps,
    wgmma,
    wmma,
)
from flash_helpers.ptx.run.instructions.forms import (
    CACHE_HINTS,
    SCOPES,
    SPACES,
    Form,
    Forms,
    by_name,
    find_form,
)
from flash_helpers.ptx.run.machine import Action, Alu, Machine, Wait, pick, warp_masks
from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.run.watch.order import GLOBAL, SHARED


def _no_effect(machine: Machine, instruction: Instruction) -> Action:
    return machine.from_some(lambda selection: None)


def _fence(machine: Machine, instruction: Instruction) -> Action:
    """membar and fence. Memory is in order in the simulator: only the watcher's knowledge changes.
    Fences between proxies other than generic and async order nothing here."""
    order = machine.shared.order
    if planes := _made_visible(machine, instruction):
        return machine.from_some(
            lambda selection: order.proxy_fence(machine.lanes_of(selection), planes)
        )
    if instruction.has("tensormap::generic"):
        return tensor_maps.fence(machine, instruction)
    if instruction.has("mbarrier_init"):
        return machine.from_some(
            lambda selection: machine.phases.fence(machine.lanes_of(selection))
        )
    others = ("proxy", "op_restrict")
    has_flags, is_wide = machine.launch.has_flags, not instruction.has("cta")
    if any(m.startswith(others) for m in instruction.modifiers) or not (has_flags or is_wide):
        return _no_effect(machine, instruction)
    acquires, releases = not instruction.has("release"), not instruction.has("acquire")

    def run_some(selection: Selection) -> None:
        if has_flags:
            order.fence(machine.lanes_of(selection), acquires=acquires, releases=releases)
        if is_wide and releases:
            machine.shared.presence.release(machine.lanes_of(selection))

    return machine.from_some(run_some)


def _made_visible(machine: Machine, instruction: Instruction) -> tuple[int, ...]:
    """The memories of which a fence lets the async proxy see writes of the generic proxy: those
    that it names, or all; none if it only acquires (PTX ISA 9.0, "membar/fence")."""
    if instruction.has("async::generic"):
        return (SHARED,) if instruction.has("release") else ()
    if not instruction.has("proxy") or not instruction.has("async"):
        return ()
    named = instruction.first(("global", "shared", "shared::cluster"))
    planes = {"global": (GLOBAL,), None: (SHARED, GLOBAL)}.get(named, (SHARED,))
    return tuple(p for p in planes if p == SHARED or machine.transfers.writes is not None)


def _warp_barrier(machine: Machine, instruction: Instruction) -> Action:
    """bar.warp.sync; the scheduler makes lanes wait for each other."""
    masks, order = machine.source(instruction.operands[0], "u32"), machine.shared.order

    def run_some(selection: Selection) -> None:
        order.sync_warps(machine.lanes_of(selection), pick(masks, selection))

    return machine.from_some(run_some)


def _launch_order(machine: Machine, instruction: Instruction) -> Action:
    """griddepcontrol. Launches run one after the other: only the watcher's knowledge changes."""
    before = machine.launch_before
    if machine.one_of(("wait", "launch_dependents")) != "wait" or before is None:
        return _no_effect(machine, instruction)
    return machine.from_some(lambda selection: before.wait(machine.lanes_of(selection)))


def _trap(machine: Machine, instruction: Instruction) -> Action:
    position = machine.position

    def run_some(selection: Selection) -> None:
        lane = machine.lanes_of(selection)[0]
        machine.log.report(
            TrapError, "the kernel stops itself", position, machine.geometry.thread(lane)
        )

    return machine.from_some(run_some)


def _create_policy(machine: Machine, instruction: Instruction) -> Alu:
    # A cache policy is opaque; nothing in the simulator looks into it.
    return Alu(((instruction.operands[0], "b64"),), (), lambda: np.zeros(1, np.uint64))


_POLICIES = f"fractional range cvt global L2 {CACHE_HINTS}"
_FENCES = "proxy async async::generic tensormap::generic release acquire global mbarrier_init"
_FENCES_ALIKE = (
    f"{SCOPES} gl sc acq_rel alias shared shared::cluster "
    "sync_restrict::shared::cta sync_restrict::shared::cluster"
)
_HINTS = f"{SPACES} L1 L2 tensormap mask {CACHE_HINTS}"

FORMS: Forms = by_name(
    (
        *integers.FORMS,
        *floats.FORMS,
        *compare.FORMS,
        *convert.FORMS,
        *warps.FORMS,
        *tensor.FORMS,
        *tensor_maps.FORMS,
        *wmma.FORMS,
        *bulk.FORMS,
        *wgmma.FORMS,
        *access.FORMS,
        *copies.FORMS,
        *arrivals.FORMS,
        *runtime.FORMS,
        *clusters.FORMS,
        Form("trap brkpt", _trap, (0,)),
        Form("createpolicy", _create_policy, (1, 2, 3, 4), ("b64",), ignores=_POLICIES),
        # Of one warp only: the scheduler runs the barriers of a block.
        Form("bar barrier", _warp_barrier, (1,), (), "warp", "sync"),
        Form("membar fence", _fence, (), (), _FENCES, _FENCES_ALIKE),
        Form("griddepcontrol", _launch_order, (0,), (), "wait launch_dependents"),
        Form("nanosleep", _no_effect, (1,), ("u32",)),
        Form(" ".join(sorted(WITHOUT_EFFECT)), _no_effect, (), ignores=_HINTS),
    )
)


def bind(machine: Machine, instruction: Instruction) -> tuple[Action, np.ndarray | None]:
    """An instruction as callables, and the lanes that must execute it together (`member_mask`).

    An instruction with an unknown opcode, modifier or operand raises UnsupportedInstruction when
    lanes execute it.
    """
    try:
        action, members = _bind(machine, instruction)
    except UnsupportedInstruction as refusal:
        action, members = refusing(machine, refusal), None
    if instruction.guard is not None:
        action = machine.guarded(action, instruction.guard)
        if wait := machine.waits.get(machine.position):
            machine.waits[machine.position] = _guarded(machine, wait, instruction.guard)
    return action, members


def _guarded(machine: Machine, wait: Wait, guard: Register) -> Wait:
    holds = machine.predicate(guard)
    return replace(wait, is_ready=lambda lanes: ~holds(lanes) | wait.is_ready(lanes))


def refusing(machine: Machine, refusal: UnsupportedInstruction) -> Action:
    """The action of an instruction that cannot be run: it raises."""
    machine.refused[machine.position] = refusal

    def run_some(selection: Selection) -> None:
        raise refusal

    return machine.from_some(run_some)


# Forms by opcode and number of operands: the same few come in thousands of instructions.
_forms: WeakKeyDictionary[Machine, dict[tuple[str, int], Form]] = WeakKeyDictionary()


def _bind(machine: Machine, instruction: Instruction) -> tuple[Action, np.ndarray | None]:
    found = _forms.setdefault(machine, {})
    key = instruction.opcode, len(instruction.operands)
    if key not in found:
        found[key] = find_form(machine, instruction, FORMS)
    built = found[key].build(machine, instruction)
    action = machine.bind_alu(built) if isinstance(built, Alu) else built
    members = warps.member_mask(machine, instruction)
    if members is not None:
        action = _checked(machine, action, members, guarded=instruction.guard is not None)
    return action, members


def _checked(machine: Machine, action: Action, members: np.ndarray, *, guarded: bool) -> Action:
    """A warp-wide instruction, with a check that the lanes that execute it are those of its mask.

    The scheduler waits for lanes that have not come yet. So lanes can be missing here only because
    of a predicate, or because they name other members; there can also be too many.
    """
    position = machine.position
    constant = members.size == 1
    if constant and int(members[0]) == 0xFFFF_FFFF and not guarded:
        return action
    everyone = np.ones(1, np.uint32)
    everywhere = np.broadcast_to(members, (machine.lanes,))
    needs_ended = machine.instruction().name in warps.WHOLE_WARP

    def run_some(selection: Selection) -> None:
        if warps.are_all_named(machine, members, selection):
            action.some(selection)
            return
        needed = everywhere[selection]
        stranger = (needed & machine.lane_bits[selection]) == 0
        missing = needed & ~machine.fellows(selection, members)[selection]
        here = machine.fellows(selection, everyone)[selection] if missing.any() else missing
        if not guarded:
            missing &= here
        elif not needs_ended:
            missing &= ~warp_masks(machine.gone)[selection]
        wrong = stranger | (missing != 0)
        if not wrong.any():
            action.some(selection)
            return
        lanes = machine.lanes_of(selection)
        first = int(np.flatnonzero(wrong)[0])
        reason = f"{int(missing[first]):#010x} are predicated off"
        if missing[first] & here[first]:
            reason = f"{int(missing[first] & here[first]):#010x} execute it with another mask"
        if stranger[first]:
            reason = "and this lane, which executes it too, is not among them"
        machine.log.report(
            MissingLanesError,
            f"the lanes {int(needed[first]):#010x} must execute it together, {reason}",
            position,
            machine.geometry.thread(lanes[first]),
            count=int(wrong.sum()),
        )
        if not wrong.all():
            action.some(lanes[~wrong])

    return machine.from_some(run_some)
