"""Values of boxes are followed from loads of shared memory through the registers of each lane, for
the lint of `readers`: to global memory, to A and B of `mma`, and to A of `wgmma`.

Nothing is followed until the first load of a box. From then on the instructions between such loads
and such ends run with `followed`. Memory and matrix products end the way. So does a shuffle that
gives one lane's value to its warp; other shuffles mix the values of lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

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


class Follow:
    """The way of the values of a batch. `positions`: the instructions on it. `loads`: the registers
    on it that loads of shared memory write, by the instruction."""

    def __init__(self, machine: Machine, readers: Readers) -> None:
        self._machine = machine
        self._readers = readers
        program = machine.program
        instructions = [
            (p, i) for p, i in enumerate(program.instructions) if p not in machine.refused
        ]
        ways = [i for _, i in instructions if _goes_on(i)]
        loads = {p: i for p, i in instructions if i.name in _LOADS and _is_in(i, "shared")}
        hold = _closure(
            {name for i in loads.values() for name in _results(i)},
            [(_sources(i), _results(i)) for i in ways],
        )
        go = _closure(
            {name for _, i in instructions for name in names_of(_ends(i))},
            [(_results(i), _sources(i)) for i in ways],
        )
        self._names = {name for name in hold & go if program.registers[name] != "pred"}
        named = {p: self._names.intersection(_results(i)) for p, i in instructions}
        self.loads = {p: tuple(named[p]) for p in loads if named[p]}
        ends = {p for p, i in instructions if not self._names.isdisjoint(names_of(_ends(i)))}
        self.positions = [p for p, _ in instructions if named[p] or p in ends]

    def followed(self, position: int, action: Action) -> Action:
        """The action of an instruction, which also follows its values."""
        machine, readers = self._machine, self._readers
        machine.position = position
        instruction = machine.program.instructions[position]
        look = self._look(instruction)
        executing = self._executing(instruction)
        results = self._names.intersection(_results(instruction))
        sources = self._names.intersection(_sources(instruction) if _goes_on(instruction) else ())
        names = {*results, *sources, *names_of(_ends(instruction))}
        bits = _bits_mixed(instruction)

        def follow(selection: Selection, run: Callable[[], None]) -> None:
            if readers.held.keys().isdisjoint(names):
                run()
                return
            lanes = executing(selection)
            look(lanes)
            traces = [t for t in (readers.of(name, lanes) for name in sources) if t is not None]
            trace = reduce(Trace.joined, traces) if traces else None
            if trace is not None and bits is not None:
                trace = trace.mixed(bits)
            for name in results:
                readers.put(name, lanes, trace)
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

    def _look(self, instruction: Instruction) -> Callable[[Selection], None]:
        """Tells the readers of the values that come to their end at an instruction."""
        machine, readers, position = self._machine, self._readers, self._machine.position
        ends = [self._names.intersection(names_of([o])) for o in _ends(instruction)]

        def multiply(selection: Selection) -> None:
            for matrix, names in zip("AB", ends, strict=False):
                for name in names:
                    readers.multiply(position, matrix, name, machine.lanes_of(selection))

        if instruction.name not in _STORES or not any(ends):
            return multiply
        address = next(o for o in instruction.operands if isinstance(o, Address))
        addresses = addresses_of(machine, address)
        port = Port(machine, instruction, access_size(instruction))

        def store(selection: Selection) -> None:
            for space, part, lanes, _ in port.parts(addresses(selection), selection):
                for name in set().union(*ends) if space == "global" else ():
                    readers.store(position, name, machine.lanes_of(lanes), part)

        return store


def _closure(names: set[str], ways: list[tuple[set[str], set[str]]]) -> set[str]:
    """The names that ways lead to from some names."""
    found, size = set(names), -1
    while len(found) > size:
        size = len(found)
        for start, end in ways:
            if not found.isdisjoint(start):
                found |= end
    return found


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


def _is_in(instruction: Instruction, space: str) -> bool:
    return space_of(instruction) in (space, "generic")


def _results(instruction: Instruction) -> set[str]:
    return set(filter(None, targets(instruction)))


def _sources(instruction: Instruction) -> set[str]:
    return set(names_of(operands_read(instruction)))


def _ends(instruction: Instruction) -> tuple[Operand, ...]:
    """The operands of an instruction at which values of a box are looked at."""
    operands, name = instruction.operands, instruction.name
    if name in _STORES and _is_in(instruction, "global"):
        return operands[2 if name == "atom" else 1 :]
    if name == "mma" and has_rows_and_columns(instruction):
        return operands[1:3]
    if is_wgmma(instruction):
        return tuple(o for o in operands[1:2] if isinstance(o, Vector))
    return ()
