"""cp.async and the instructions that order it (PTX ISA 9.0, "Asynchronous copy")."""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.read.module import Immediate, Instruction, Register
from flash_helpers.ptx.run.instructions.access import Port, addresses_of
from flash_helpers.ptx.run.instructions.arrivals import places_of
from flash_helpers.ptx.run.instructions.forms import CACHE_HINTS, Form
from flash_helpers.ptx.run.machine import Action, Machine, pick
from flash_helpers.ptx.run.memory.regions import Selection, empty_words


def _cp(machine: Machine, instruction: Instruction) -> Action:
    """cp.async and the instructions that order it."""
    if not instruction.has("async"):
        raise machine.unsupported("only cp.async")
    what = machine.one_of(("commit_group", "wait_group", "wait_all", "ca", "cg"))
    counts = {"commit_group": (0,), "wait_group": (1,), "wait_all": (0,)}.get(what, (3, 4, 5))
    if len(instruction.operands) not in counts:
        raise machine.unsupported(f"{len(instruction.operands)} operands")
    copies, position = machine.copies, machine.position
    if what == "commit_group":
        return machine.from_some(copies.commit)
    if what == "wait_all":
        return machine.from_some(lambda selection: copies.wait(position, selection, None))
    if what == "wait_group":
        groups = instruction.operands[0]
        count = groups.integer if isinstance(groups, Immediate) else None
        if count is None or count < 0:
            raise machine.unsupported("the number of groups must be a literal")
        allowed = min(count, 1 << 31)  # more than a thread can have
        return machine.from_some(lambda selection: copies.wait(position, selection, allowed))
    return _copy(machine, instruction)


def _copy(machine: Machine, instruction: Instruction) -> Action:
    target, source, literal, *rest = instruction.operands
    size = literal.integer if isinstance(literal, Immediate) else 0
    if size not in (4, 8, 16) or (instruction.has("cg") and size != 16):
        raise machine.unsupported("a copy moves 4, 8 or 16 bytes, .cg only 16")
    if instruction.has("L2::cache_hint"):
        rest = rest[:-1]
    source_size = ignored = None
    if rest:
        operand = rest[0]
        if isinstance(operand, Register) and machine.register(operand).dtype == bool:
            ignored = machine.predicate(operand)
        else:
            source_size = machine.source(operand, "u32")
    to_addresses = addresses_of(machine, target)
    from_addresses = addresses_of(machine, source)
    position, copies = machine.position, machine.copies
    port = Port(machine, instruction, size)

    def run_some(selection: Selection) -> None:
        start, lanes = from_addresses(selection), machine.lanes_of(selection)
        length = np.full(lanes.shape, size)
        if source_size is not None:
            length[:] = np.minimum(pick(source_size, selection), size)
        if ignored is not None:
            length[ignored(selection)] = 0
        # Lanes may copy the same bytes to the same place.
        origin = start << 5 | length
        to = to_addresses(selection)
        _, rows, good = port.locate("shared", to, selection, "copy", origin)
        if good is not None:
            selection = lanes = lanes[good]
            start, length = start[good], length[good]
        if lanes.size:
            data = fetch(start, length, selection)
            copies.issue(position, size, lanes, rows, data, start, length)

    def fetch(start: np.ndarray, length: np.ndarray, selection: Selection) -> np.ndarray:
        """The bytes to write; those beyond a copy's own length are zeros."""
        if length.all():
            data = port.read("global", start, selection)
        else:
            data = empty_words(start.size, size)
            some = np.flatnonzero(length)
            if some.size:
                data[some] = port.read("global", start[some], machine.lanes_of(selection)[some])
        if (length < size).any():
            octets = data.view(np.uint8).reshape(start.size, size)
            octets[np.arange(size) >= length[:, None]] = 0
        return data

    return machine.from_some(run_some)


def _arrive(machine: Machine, instruction: Instruction) -> Action:
    """cp.async.mbarrier.arrive: an arrival when all copies that the thread has issued until now are
    complete."""
    places = places_of(machine, instruction, instruction.operands[0])
    position, adds = machine.position, not instruction.has("noinc")

    def run_some(selection: Selection) -> None:
        lanes, at, _ = places(selection)
        machine.transfers.arrive(position, lanes, at, adds=adds)

    return machine.from_some(run_some)


_COPIES = "async shared global ca cg L2::cache_hint commit_group wait_group wait_all"

FORMS = (
    Form("cp", _arrive, (1,), ("b64",), "shared noinc", "async arrive", having="mbarrier"),
    Form("cp", _cp, (), (), _COPIES, CACHE_HINTS),
)
