"""All instructions by name, and how each is bound."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flash_helpers.ptx.errors import MissingLanesError, TrapError
from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run import access, compare, convert, copies, floats, integers, tensor, warps
from flash_helpers.ptx.run.floats import is_float_form
from flash_helpers.ptx.run.integers import Builder
from flash_helpers.ptx.run.machine import Action, Alu, Machine, warp_masks
from flash_helpers.ptx.run.modifiers import unknown_modifier
from flash_helpers.ptx.run.shared import Selection

_WITHOUT_EFFECT = frozenset(
    {"membar", "fence", "nanosleep", "prefetch", "prefetchu", "pmevent", "discard", "applypriority",
     "setmaxnreg", "griddepcontrol"}
)  # fmt: skip
"""The simulator's memory is in order and it has no caches, so ordering and hints change nothing."""


def _no_effect(machine: Machine, instruction: Instruction) -> Action:
    return machine.from_some(lambda selection: None)


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


def _warp_barrier(machine: Machine, instruction: Instruction) -> Action:
    return machine.from_some(lambda selection: None)


OPERATIONS: Mapping[str, Builder] = {
    **integers.OPERATIONS,
    **floats.OPERATIONS,
    **compare.OPERATIONS,
    **convert.OPERATIONS,
    **warps.OPERATIONS,
    **tensor.OPERATIONS,
    **access.OPERATIONS,
    **copies.OPERATIONS,
    **{name: _no_effect for name in _WITHOUT_EFFECT},
    "trap": _trap,
    "brkpt": _trap,
    "createpolicy": _create_policy,
    "bar": _warp_barrier,
    "barrier": _warp_barrier,
}

membership = warps.member_mask


def check_modifiers(machine: Machine, instruction: Instruction) -> None:
    """Raises UnsupportedInstruction for a modifier that is not known."""
    unknown = unknown_modifier(instruction)
    if unknown is not None and instruction.name not in _WITHOUT_EFFECT:
        raise machine.unsupported(f"the modifier .{unknown} is not known")


def bind(machine: Machine, instruction: Instruction) -> Action:
    """Turns an instruction into callables.

    Raises:
        UnsupportedInstruction: its opcode, a modifier or an operand is not known.
    """
    name = instruction.name
    builder = OPERATIONS.get(name)
    if name in integers.INTEGER_FORMS:
        forms = floats.FLOAT_FORMS if is_float_form(instruction) else integers.INTEGER_FORMS
        builder = forms[name]
    if builder is None:
        raise machine.unsupported()
    try:
        built = builder(machine, instruction)
        action = machine.bind_alu(built) if isinstance(built, Alu) else built
    except (StopIteration, IndexError, KeyError, ValueError, TypeError) as error:
        raise machine.unsupported(f"this form is not understood ({error})") from error
    members = membership(machine, instruction)
    if members is not None:
        action = _checked(machine, action, members, guarded=instruction.guard is not None)
    return action if instruction.guard is None else machine.guarded(action, instruction.guard)


def _checked(machine: Machine, action: Action, members: np.ndarray, *, guarded: bool) -> Action:
    """A warp-wide instruction: the lanes that execute it are those that its mask names.

    Lanes that have not come yet are the scheduler's business; here lanes can be missing only
    because a predicate holds them back, or be too many.
    """
    position = machine.position
    constant = members.size == 1
    if constant and int(members[0]) == 0xFFFF_FFFF and not guarded:
        return action
    everywhere = np.broadcast_to(members, (machine.lanes,))
    absent = np.zeros_like(machine.absent_lanes)
    if machine.instruction().name not in warps.MATRIX:
        absent = machine.absent_lanes
    bit = np.uint32(1) << (machine.lane_ids % 32).astype(np.uint32)

    def run_some(selection: Selection) -> None:
        lanes = machine.lanes_of(selection)
        needed = everywhere[selection]
        stranger = (needed & bit[selection]) == 0
        present = np.zeros(machine.lanes, bool)
        present[lanes] = True
        missing = needed & ~(warp_masks(present) | absent)[lanes // 32] if guarded else needed & 0
        wrong = stranger | (missing != 0)
        if not wrong.any():
            action.some(selection)
            return
        first = int(np.flatnonzero(wrong)[0])
        reason = f"{int(missing[first]):#010x} are predicated off"
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
