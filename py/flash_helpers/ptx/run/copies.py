"""cp.async and the instructions that order it (PTX ISA 9.0, "Asynchronous copy")."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from flash_helpers.ptx.read.module import Immediate, Instruction, Register
from flash_helpers.ptx.run.access import GlobalChecker, addresses_of, is_whole
from flash_helpers.ptx.run.integers import Builder
from flash_helpers.ptx.run.machine import Action, Machine, pick
from flash_helpers.ptx.run.memory import ARENA_BASE
from flash_helpers.ptx.run.shared import ALL, Selection


def cp(machine: Machine, instruction: Instruction) -> Action:
    """cp.async and the instructions that order it."""
    opcode = instruction.opcode
    if not instruction.has("async") or instruction.has("bulk") or instruction.has("mbarrier"):
        raise machine.unsupported("only cp.async of compute capability 8.x, without mbarrier")
    copies = machine.copies
    if instruction.has("commit_group"):
        return machine.from_some(copies.commit)
    if instruction.has("wait_group") or instruction.has("wait_all"):
        allowed = None
        if instruction.has("wait_group"):
            count = instruction.operands[0]
            if not isinstance(count, Immediate):
                raise machine.unsupported("the number of groups must be a literal")
            allowed = int(count.value)
        return machine.from_some(lambda selection: copies.wait(selection, allowed))
    if not (instruction.has("ca") or instruction.has("cg")):
        raise machine.unsupported(opcode)
    return _copy(machine, instruction)


def _copy(machine: Machine, instruction: Instruction) -> Action:
    target, source, literal, *rest = instruction.operands
    size = int(literal.value) if isinstance(literal, Immediate) else 0
    if size not in (4, 8, 16) or (instruction.has("cg") and size != 16):
        raise machine.unsupported("a copy moves 4, 8 or 16 bytes, .cg only 16")
    if instruction.has("L2::cache_hint"):
        rest = rest[:-1]
    source_size = ignore = None
    negated = False
    if rest:
        operand = rest[0]
        if isinstance(operand, Register) and machine.register(operand).dtype == bool:
            ignore, negated = machine.source(operand, "pred"), operand.negated
        else:
            source_size = machine.source(operand, "u32")
    to_addresses = addresses_of(machine, target)
    from_addresses = addresses_of(machine, source)
    position = machine.position
    shared, tally, copies = machine.shared, machine.tally, machine.copies
    checker = GlobalChecker(machine, size)
    shift = size.bit_length() - 1

    def run_some(selection: Selection) -> None:
        to, start = to_addresses(selection), from_addresses(selection)
        lanes = machine.lanes_of(selection)
        length = np.full(lanes.shape, size)
        if source_size is not None:
            length[:] = np.minimum(pick(source_size, selection), size)
        if ignore is not None:
            skipped = ~pick(ignore, selection) if negated else pick(ignore, selection)
            length[np.broadcast_to(skipped, lanes.shape)] = 0
        rows, good = shared.rows(position, to, size, selection)
        chosen: Selection = selection
        if good is not None:
            rows, to, start, lanes, length = (x[good] for x in (rows, to, start, lanes, length))
            chosen = lanes
            if not lanes.size:
                return
        shared.begin_copy(position, rows, size, chosen)
        tally.shared_access(position, to, size, None if is_whole(chosen) else lanes)
        copies.issue(position, size, lanes, rows, fetch(start, length, lanes, chosen))

    def fetch(
        start: np.ndarray, length: np.ndarray, lanes: np.ndarray, chosen: Selection
    ) -> np.ndarray:
        """The bytes to write; those beyond a copy's own length are zeros."""
        reading = length > 0
        everyone = reading.all()
        shape = (start.size,) if size <= 8 else (start.size, size // 4)
        data = np.zeros(shape, np.dtype(f"u{min(size, 8)}") if size <= 8 else np.uint32)
        picked = ALL if everyone else np.flatnonzero(reading)
        at = start[picked]
        if not at.size:
            return data
        selection = chosen if everyone else lanes[picked]
        good = checker.check(at, selection)
        if good is not None:
            picked = np.flatnonzero(reading)[good]
            at = start[picked]
            selection = lanes[picked]
            if not at.size:
                return data
        tally.global_access(position, at, size, None if is_whole(selection) else lanes[picked])
        data[picked] = machine.memory.view(size)[(at - ARENA_BASE) >> shift]
        short = np.flatnonzero(length < size)
        if short.size:
            octets = data.view(np.uint8).reshape(start.size, size)
            octets[np.arange(size) >= length[:, None]] = 0
        return data

    return Action(partial(run_some, ALL), run_some)


OPERATIONS: Mapping[str, Builder] = {"cp": cp}
