"""The instructions on mbarrier objects (PTX ISA 9.0, "Parallel Synchronization and Communication
Instructions: mbarrier")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flash_helpers.ptx.read.module import Instruction, Operand
from flash_helpers.ptx.run.asynchronous.mbarriers import MBARRIER_BYTES, pending_count, phase_of
from flash_helpers.ptx.run.asynchronous.phases import BLOCK, CLUSTER, NOBODY
from flash_helpers.ptx.run.instructions.access import Port, addresses_of
from flash_helpers.ptx.run.instructions.forms import Form
from flash_helpers.ptx.run.machine import Action, Alu, Machine, Wait, pick
from flash_helpers.ptx.run.memory.regions import Selection

# The lanes with possible objects, the places of these, and the indices among the selected lanes.
Places = Callable[[Selection], tuple[np.ndarray, np.ndarray, Selection]]


def places_of(
    machine: Machine, instruction: Instruction, operand: Operand, *, is_local: bool = False
) -> Places:
    """The mbarrier objects that an operand names. `is_local`: only objects of the lane's own block
    are allowed."""
    addresses = addresses_of(machine, operand)
    port = Port(machine, instruction, MBARRIER_BYTES)
    if is_local:
        port.reaches_others = False
    return lambda selection: port.places(addresses(selection), selection)


def _numbers(machine: Machine, operand: Operand, type_name: str = "u32") -> Callable:
    """An operand of each selected lane."""
    source = machine.source(operand, type_name)

    def numbers(selection: Selection) -> np.ndarray:
        values = pick(source, selection)
        return np.broadcast_to(values, machine.lanes_of(selection).shape)

    return numbers


def _mbarrier(machine: Machine, instruction: Instruction) -> Alu | Action:
    operation = instruction.modifiers[0] if instruction.modifiers else ""
    if operation == "pending_count":
        if len(instruction.operands) != 2:
            raise machine.unsupported(f"{len(instruction.operands)} operands where 2 are due")
        result, state = instruction.operands
        return Alu(((result, "u32"),), ((state, "b64"),), pending_count)
    if operation not in _BUILDERS:
        raise machine.unsupported(f"one of {', '.join(_BUILDERS)} is due")
    build, counts = _BUILDERS[operation]
    if len(instruction.operands) not in counts:
        due = " or ".join(map(str, counts))
        raise machine.unsupported(f"{len(instruction.operands)} operands where {due} are due")
    return build(machine, instruction)


def _init(machine: Machine, instruction: Instruction) -> Action:
    places = places_of(machine, instruction, instruction.operands[0], is_local=True)
    counts = _numbers(machine, instruction.operands[1])
    position = machine.position

    def run_some(selection: Selection) -> None:
        lanes, at, which = places(selection)
        machine.phases.init(position, lanes, at, counts(selection)[which])

    return machine.from_some(run_some)


def _inval(machine: Machine, instruction: Instruction) -> Action:
    places = places_of(machine, instruction, instruction.operands[0], is_local=True)
    position = machine.position

    def run_some(selection: Selection) -> None:
        lanes, at, _ = places(selection)
        machine.phases.inval(position, lanes, at)

    return machine.from_some(run_some)


def _transactions(machine: Machine, instruction: Instruction) -> Action:
    """expect_tx and complete_tx."""
    places = places_of(machine, instruction, instruction.operands[0])
    sizes = _numbers(machine, instruction.operands[1])
    position, phases = machine.position, machine.phases
    expects = instruction.modifiers[0] == "expect_tx"

    def run_some(selection: Selection) -> None:
        lanes, at, which = places(selection)
        mine = sizes(selection)[which].astype(np.int64)
        if expects:
            phases.expect(position, lanes, at, mine)
            return
        for lane, where, size in zip(lanes.tolist(), at.tolist(), mine.tolist(), strict=True):
            phases.complete(position, lane, where, size)

    return machine.from_some(run_some)


def _scope(instruction: Instruction) -> str:
    """The threads to which an operation releases or from which it acquires. Without a scope it is
    that of the cluster: the ISA says .cta, but libraries leave it out where they release memory
    that threads have read to the copies of another block. For written memory there is a lint."""
    return instruction.first((NOBODY, BLOCK)) or CLUSTER


def _arrive(machine: Machine, instruction: Instruction) -> Action:
    """arrive and arrive_drop, with expect_tx too."""
    result, address, *rest = instruction.operands
    destination = machine.destination(result, "b64")
    places = places_of(machine, instruction, address)
    number = _numbers(machine, rest[0]) if rest else None
    expects = instruction.has("expect_tx")
    if number is None and (expects or instruction.has("noComplete")):
        raise machine.unsupported("a number is due")
    drops, may_complete = (
        instruction.modifiers[0] == "arrive_drop",
        not instruction.has("noComplete"),
    )
    position, scope, presence = machine.position, _scope(instruction), machine.shared.presence

    def run_some(selection: Selection) -> None:
        lanes, at, which = places(selection)
        counts, sizes = np.ones(lanes.size, np.int64), None
        if number is not None:
            given = number(selection)[which].astype(np.int64)
            counts, sizes = (counts, given) if expects else (given, None)
        if scope != NOBODY:
            presence.record("mbarrier.arrive", position, lanes, *machine.shared.at(at))
        if instruction.has(CLUSTER):
            presence.release(lanes)
        elif machine.launch.lints and scope == CLUSTER:
            presence.lint_release(position, lanes, machine.shared.at(at)[0])
        destination[lanes] = machine.phases.arrive(
            position,
            lanes,
            at,
            counts,
            expects=sizes,
            drops=drops,
            may_complete=may_complete,
            scope=scope,
        )

    return machine.from_some(run_some)


def _wait(machine: Machine, instruction: Instruction) -> Action:
    """test_wait and try_wait: lanes sleep until their phase is complete. At a test_wait they only
    let other lanes go first. Where no loop tries again, lanes get the answer no at once: a try_wait
    waits for a time that "depends on the system" (PTX ISA 9.0, "mbarrier.try_wait")."""
    result, address, value, *_ = instruction.operands
    by_parity = instruction.has("parity")
    destination = machine.destination(result, "pred")
    places = places_of(machine, instruction, address, is_local=True)
    values = _numbers(machine, value, "u32" if by_parity else "b64")
    position, phases = machine.position, machine.phases
    scope = _scope(instruction)
    is_test = instruction.modifiers[0] == "test_wait"
    is_retried = position in machine.program.retried

    def run_some(selection: Selection) -> None:
        lanes, at, which = places(selection)
        complete = phases.observe(
            position, lanes, at, values(selection)[which], parity=by_parity, scope=scope
        )
        destination[selection] = False
        destination[lanes] = complete

    def is_ready(lanes: np.ndarray) -> np.ndarray:
        mine, at, which = places(lanes)
        ready = np.ones(lanes.size, bool)
        wanted = values(lanes)[which]
        ready[which] = phases.may_go_on(mine, at, wanted, parity=by_parity)
        if not is_retried and not ready.all():
            left = ~ready[which]
            phases.refuse_once(position, mine[left], at[left])
            ready[which] = phases.may_go_on(mine, at, wanted, parity=by_parity)
        return ready

    def reason(lanes: np.ndarray) -> str:
        _, at, which = places(lanes)
        return phases.waited_for(at, values(lanes)[which], name)

    def name(value: int) -> str:
        return f"parity {value}" if by_parity else f"phase {phase_of(value)}"

    def story(lanes: np.ndarray) -> str:
        return phases.last_arrivals(places(lanes)[1])

    machine.waits[position] = Wait(is_ready, reason, story, phases.give_up, is_patient=not is_test)
    return machine.from_some(run_some)


_BUILDERS = {
    "init": (_init, (2,)),
    "inval": (_inval, (1,)),
    "expect_tx": (_transactions, (2,)),
    "complete_tx": (_transactions, (2,)),
    "arrive": (_arrive, (2, 3)),
    "arrive_drop": (_arrive, (2, 3)),
    "test_wait": (_wait, (3,)),
    "try_wait": (_wait, (3, 4)),
}
"""The builder of each operation, and its number of operands."""

_TAKEN = f"{' '.join(_BUILDERS)} pending_count parity noComplete relaxed cta cluster shared "
_TAKEN += "shared::cluster"

FORMS = (Form("mbarrier", _mbarrier, (), ("b64",), _TAKEN, "release acquire"),)
