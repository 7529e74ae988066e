"""Poison spreads through the instructions of a batch while it runs, by the rules of `rules`.

A lane whose guard is false keeps its poison. Where the guard itself is poisoned, so are the
results, executed or not. A poisoned branch acts like a selection: if the paths that part there only
load and compute registers before they meet again, those registers are poisoned at the meeting point
on either path. Any other poisoned branch is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.flow import Ending
from flash_helpers.ptx.read.registers import (
    names_of,
    registers_of,
    targets,
)
from flash_helpers.ptx.read.types import size_of
from flash_helpers.ptx.run.execute.codes import union, worst
from flash_helpers.ptx.run.execute.rules import (
    Plan,
    Rules,
    only_computes,
)
from flash_helpers.ptx.run.execute.threads import whole_warps
from flash_helpers.ptx.run.instructions.access import space_of
from flash_helpers.ptx.run.machine import Action, Machine
from flash_helpers.ptx.run.memory.regions import ALL, Selection
from flash_helpers.ptx.run.watch.poison import Codes


def _any(several: Iterable[Codes | None]) -> bool:
    return any(codes is not None and codes.any() for codes in several)


@dataclass(frozen=True)
class _Selection:
    """The point at which the paths from a branch meet, and the registers that are written on
    them."""

    meets: int
    registers: frozenset[str]


class Spread:
    """Carries the poison of a batch through its instructions."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.poison = machine.poison
        self._rules = Rules(machine)
        self._plans: dict[int, Plan] = {}
        self._selections: dict[int, _Selection | None] = {}
        # By the position where ways meet, the registers to poison there, each over all lanes.
        self._due: dict[int, dict[str, Codes]] = {}

    def tracked(self, position: int, action: Action) -> Action:
        """The action, which also passes on the poison of its sources."""
        if position in self.machine.refused:
            return action
        names = registers_of(self.machine.program.instructions[position])
        poisoned = self.poison.registers

        due = self._due

        def run() -> None:
            if position in due:
                self._meet(position, ALL)
            if poisoned.keys().isdisjoint(names):
                action.all()
            else:
                self._run(position, ALL, action.all)

        def run_some(selection: Selection) -> None:
            if position in due:
                self._meet(position, selection)
            if poisoned.keys().isdisjoint(names):
                action.some(selection)
            else:
                self._run(position, selection, partial(action.some, selection))

        def bind(lanes: slice) -> Callable[[], None]:
            on_slice = action.on(lanes)

            def run_slice() -> None:
                if position in due:
                    self._meet(position, lanes)
                if poisoned.keys().isdisjoint(names):
                    on_slice()
                else:
                    self._run(position, lanes, on_slice)

            return run_slice

        return Action(run, run_some, bind)

    def ending(self, action: Action, names: frozenset[str]) -> Action:
        """The first action of a block from which on nothing reads some registers before it writes
        them."""
        poison = self.poison

        def run() -> None:
            poison.forget(names, ALL)
            action.all()

        def run_some(selection: Selection) -> None:
            poison.forget(names, selection)
            action.some(selection)

        return Action(run, run_some)

    def load(self, position: int, selection: Selection, codes: Codes) -> None:
        """See `poison.Carrier`."""
        plan = self._plan(position)
        lanes, results = plan.load(self.machine.lanes_of(selection), codes)
        for name, result in zip(plan.targets, results, strict=True):
            if name is not None and result is not None:
                self.poison.add(name, lanes, result)

    def widest_store(self, space: str) -> int:
        """See `poison.Carrier`."""
        stores = (i for i in self.machine.program.instructions if i.name == "st")
        here = (i for i in stores if i.types and space_of(i) in (space, "generic"))
        return max((size_of(i.types[-1]) for i in here), default=0)

    def _run(self, position: int, selection: Selection, action: Callable[[], None]) -> None:
        plan, poison, machine = self._plan(position), self.poison, self.machine
        lanes, some, unsure = selection, True, None
        if plan.guard is not None:
            guard, holds = plan.guard
            poison.read(position, {guard}, selection)
            unsure = poison.of(guard, selection)
            if plan.is_branch:
                self._part(position, selection, unsure)
            elif plan.is_visible:
                poison.report(position, selection, unsure, "its predicate")
            own = machine.lanes_of(selection)
            lanes = own[np.broadcast_to(holds(selection), own.shape)]
            some = lanes.size > 0
        found = [unsure]
        if some and plan.is_of_warp and not whole_warps(machine.lanes_of(lanes)):
            some = False  # an error, which the action reports
        if some:
            self._check_uses(position, plan, lanes)
            stored, *results = self._made(plan, lanes)
            if _any((stored, *results)) and poison.read(position, plan.sources, lanes):
                stored, *results = self._made(plan, lanes)
            found += [stored, *results]
            self._store(stored, lanes)
            for name, codes in zip(plan.targets, results, strict=True):
                if name is not None:
                    poison.put(name, lanes, codes)
        if _any(found):
            poison.start()
        if unsure is not None:
            for name in filter(None, plan.targets):
                poison.add(name, selection, unsure)
        action()
        poison.stored = None

    def _made(self, plan: Plan, lanes: Selection) -> list[Codes | None]:
        """Codes of the word that an instruction stores, and of its results."""
        stored = None if plan.stored is None else plan.stored(lanes)
        return [stored, *plan.spread(lanes)]

    def _check_uses(self, position: int, plan: Plan, lanes: Selection) -> None:
        for what, operands, count in plan.uses:
            self.poison.read(position, set(names_of(operands)), lanes)
            using = lanes
            if count < WARP:
                using = self.machine.lanes_of(lanes)
                using = using[using % WARP < count]
            self.poison.report(position, using, worst(*self._rules.codes(operands, using)), what)

    def _store(self, codes: Codes | None, lanes: Selection) -> None:
        if codes is not None:
            stored = np.zeros((len(codes), self.machine.lanes), np.int64)
            stored[:, lanes] = codes
            self.poison.stored = stored

    # -- branches ----------------------------------------------------------------------------------

    def _part(self, position: int, selection: Selection, codes: Codes | None) -> None:
        """Lanes come to a branch. `codes`: codes of its predicate."""
        if codes is None or not codes.any():
            return
        if position not in self._selections:
            self._selections[position] = self._selected_by(position)
        found = self._selections[position]
        if found is None:
            self.poison.report(position, selection, codes, "the predicate of this branch")
            return
        due = self._due.setdefault(found.meets, {})
        for name in found.registers:
            held = due.setdefault(name, np.zeros((1, self.machine.lanes), np.int64))
            held[:, selection] = union(held[:, selection], worst(codes))

    def _meet(self, position: int, selection: Selection) -> None:
        """Lanes come to the point where the paths from a poisoned branch meet."""
        due = self._due[position]
        for name, codes in due.items():
            mine = codes[:, selection].copy()
            if mine.any():
                self.poison.add(name, selection, mine)
                codes[:, selection] = 0
        if not any(codes.any() for codes in due.values()):
            del self._due[position]

    def _selected_by(self, position: int) -> _Selection | None:
        """The registers that a branch selects; None if it decides about more than registers."""
        program = self.machine.program
        branch = program.block_at(position)
        registers: set[str] = set()
        ways = {*branch.targets, branch.next}
        last = program.block_of[position]
        while True:
            # Blocks stand in topological order but for the way back to the head of a loop.
            first = min(ways)
            if first <= last:
                return None
            if len(ways) == 1:
                return _Selection(program.blocks[first].start, frozenset(registers))
            block, last = program.blocks[first], first
            for i in range(block.start, block.end):
                if not only_computes(program.instructions[i]):
                    return None
                registers.update(filter(None, targets(program.instructions[i])))
            ways.remove(first)
            ways.update(block.targets)
            if block.ending is Ending.NEXT or program.instructions[block.end - 1].guard is not None:
                ways.add(block.next)

    # -- plans -------------------------------------------------------------------------------------

    def _plan(self, position: int) -> Plan:
        if position not in self._plans:
            self.machine.position = position
            self._plans[position] = self._rules.plan(self.machine.instruction())
        return self._plans[position]
