"""Values of boxes are followed from loads of shared memory through the registers of each lane, for
the lint of `readers`: to global memory, to A and B of `mma`, and to A of `wgmma`.

Nothing is followed until the first load of a box. From then on the instructions between such loads
and such ends run with `followed`. Memory and matrix products end the way. So does a shuffle that
gives one lane's value to its warp; other shuffles mix the values of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.flow import is_wgmma
from flash_helpers.ptx.read.module import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Vector,
)
from flash_helpers.ptx.read.registers import names_of, operands_read, targets
from flash_helpers.ptx.run.execute.rules import has_rows_and_columns, only_computes
from flash_helpers.ptx.run.instructions.access import Port, access_size, addresses_of, space_of
from flash_helpers.ptx.run.machine import Action, Machine
from flash_helpers.ptx.run.memory.regions import ALL, Selection
from flash_helpers.ptx.run.watch.readers import Readers, Trace

_LOADS = frozenset({"ld", "ldu"})
_STORES = frozenset({"st", "red", "atom"})


class _Way(NamedTuple):
    """An instruction on the way of values. `results`: registers that it writes. `sources`:
    registers whose values go on to them. `ends`: of each operand where values come to their end,
    the registers."""

    results: frozenset[str]
    sources: frozenset[str]
    ends: tuple[frozenset[str], ...]

    def among(self, names: Set[str]) -> _Way:
        """The part of the way that concerns some registers."""
        ends = tuple(each & names for each in self.ends)
        return _Way(self.results & names, self.sources & names, ends)


class Follow:
    """The way of the values of a batch. `positions`: the instructions on it. `loads`: the registers
    on it that loads of shared memory write, by the instruction."""

    def __init__(self, machine: Machine, readers: Readers) -> None:
        self._machine = machine
        self._readers = readers
        program = machine.program
        ways = {
            position: _way(instruction)
            for position, instruction in enumerate(program.instructions)
            if position not in machine.refused
        }
        loads = {p for p in ways if _reads_shared(program.instructions[p])}
        hold = _reached(
            set().union(*(ways[p].results for p in loads)),
            [(way.sources, way.results) for way in ways.values()],
        )
        go = _reached(
            set().union(*(names for way in ways.values() for names in way.ends)),
            [(way.results, way.sources) for way in reversed(ways.values())],
        )
        names = {name for name in hold & go if program.registers[name] != "pred"}
        among = {position: way.among(names) for position, way in ways.items()}
        self._ways = {p: way for p, way in among.items() if way.results or any(way.ends)}
        self.positions = list(self._ways)
        self.loads = {p: tuple(among[p].results) for p in loads if among[p].results}

    def followed(self, position: int, action: Action) -> Action:
        """The action of an instruction, which also follows its values."""
        machine, readers = self._machine, self._readers
        machine.position = position
        instruction = machine.program.instructions[position]
        results, sources, ends = self._ways[position]
        names = results.union(sources, *ends)
        look = self._look(instruction, ends)
        executing = self._executing(instruction)
        bits = _bits_mixed(instruction)

        def pass_on(lanes: np.ndarray) -> None:
            held = sources & readers.held.keys()
            if results == held and bits is None and len(held) == 1:
                return  # a sum to which something else is added
            traces = [readers.of(name, lanes) for name in held]
            trace = reduce(Trace.joined, traces) if traces else None
            if trace is not None and bits is not None:
                trace = trace.mixed(bits)
            for name in results:
                readers.put(name, lanes, trace)

        def follow(selection: Selection, run: Callable[[], None]) -> None:
            if not readers.held.keys().isdisjoint(names):
                lanes = readers.among(executing(selection))
                if lanes.size:
                    look(lanes)
                    pass_on(lanes)
            run()

        return Action(
            lambda: follow(ALL, action.all),
            lambda selection: follow(selection, partial(action.some, selection)),
        )

    def _executing(self, instruction: Instruction) -> Callable[[Selection], Selection]:
        """Those of some lanes whose predicate holds."""
        machine, guard = self._machine, instruction.guard
        if guard is None:
            return lambda selection: selection
        holds = machine.predicate(guard)

        def executing(selection: Selection) -> Selection:
            lanes = machine.lanes_of(selection)
            return lanes[np.broadcast_to(holds(selection), lanes.shape)]

        return executing

    def _look(
        self, instruction: Instruction, ends: Sequence[Set[str]]
    ) -> Callable[[np.ndarray], None]:
        """Tells the readers of the values that come to their end at an instruction."""
        machine, readers, position = self._machine, self._readers, self._machine.position

        def multiply(lanes: np.ndarray) -> None:
            for matrix, names in zip("AB", ends, strict=False):
                readers.multiply(position, matrix, names, lanes)

        if instruction.name not in _STORES or not any(ends):
            return multiply
        address = next(o for o in instruction.operands if isinstance(o, Address))
        addresses = addresses_of(machine, address)
        port = Port(machine, instruction, access_size(instruction))
        names = set[str]().union(*ends)

        def store(lanes: np.ndarray) -> None:
            for space, part, some, _ in port.parts(addresses(lanes), lanes):
                if space == "global":
                    readers.store(position, names, machine.lanes_of(some), part)

        return store


def _reached(names: set[str], ways: Sequence[tuple[Set[str], Set[str]]]) -> set[str]:
    """The names that ways lead to from some names. It is fastest if the ways stand in order."""
    found, size = set(names), -1
    while len(found) > size:
        size = len(found)
        for start, end in ways:
            if not found.isdisjoint(start):
                found |= end
    return found


def _way(instruction: Instruction) -> _Way:
    ends = tuple(frozenset(names_of([operand])) for operand in _ends(instruction))
    sources = names_of(operands_read(instruction)) if _goes_on(instruction) else ()
    return _Way(frozenset(filter(None, targets(instruction))), frozenset(sources), ends)


def _goes_on(instruction: Instruction) -> bool:
    """Whether the values of an instruction are followed to its results."""
    if instruction.name == "shfl":
        lane, limits = instruction.operands[2:4]
        is_whole = isinstance(limits, Immediate) and limits.value == WARP - 1
        return not (instruction.has("idx") and isinstance(lane, Immediate) and is_whole)
    return only_computes(instruction) and instruction.name not in _LOADS


def _bits_mixed(instruction: Instruction) -> int | None:
    """The bits of the lane by which a butterfly exchanges; 0 of another shuffle; None of another
    instruction."""
    if instruction.name != "shfl":
        return None
    bits = instruction.operands[2]
    return int(bits.value) if instruction.has("bfly") and isinstance(bits, Immediate) else 0


def _reads_shared(instruction: Instruction) -> bool:
    return instruction.name in _LOADS and space_of(instruction) in ("shared", "generic")


def _ends(instruction: Instruction) -> tuple[Operand, ...]:
    """The operands of an instruction at which values of a box are looked at."""
    operands, name = instruction.operands, instruction.name
    if name in _STORES and space_of(instruction) in ("global", "generic"):
        return operands[2 if name == "atom" else 1 :]
    if name == "mma" and has_rows_and_columns(instruction):
        return operands[1:3]
    if is_wgmma(instruction):
        return tuple(o for o in operands[1:2] if isinstance(o, Vector))
    return ()
