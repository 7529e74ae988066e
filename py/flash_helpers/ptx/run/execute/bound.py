"""A program bound to a machine: the callable of each instruction, for the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flash_helpers.ptx.errors import UnsupportedInstruction
from flash_helpers.ptx.read.flow import BARRIERS, EXITS, Block, Ending
from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.execute.barriers import Barrier, decode_barrier
from flash_helpers.ptx.run.execute.follow import Follow
from flash_helpers.ptx.run.execute.observe import Observation, Observer
from flash_helpers.ptx.run.execute.spread import Spread
from flash_helpers.ptx.run.instructions.forms import check_features, check_modifiers
from flash_helpers.ptx.run.instructions.operations import bind, refusing
from flash_helpers.ptx.run.instructions.wgmma import watched
from flash_helpers.ptx.run.machine import Action, Machine, Wait
from flash_helpers.ptx.run.memory.regions import Selection

_MODIFIERS = {
    "bra": "uni",
    "brx": "idx uni",
    **dict.fromkeys(EXITS, "uni"),
    **dict.fromkeys(BARRIERS, "sync arrive red cta aligned popc and or"),
}
"""The modifiers of the instructions that end blocks, by opcode."""


_SOON = 3
"""Runs of a block by one slice of lanes before it is bound to the slice."""
_MOST_BOUND = 1 << 18
"""Callables of instructions bound to slices."""


class BoundProgram:
    """The instructions of a program as callables, each by its position. Those of a block of the
    program are bound when lanes first enter it: a problem seldom takes every way of a kernel.

    `actions`: action of every bound instruction. The action of an instruction that ends a block
    does nothing, since the scheduler runs it, or refuses it. `full`: for each block of the program,
    its actions for all lanes. `members`: the lanes that must execute an instruction together
    (`operations.bind`). `guards`: those of them that are not predicated off. `barriers`, `choices`,
    `taken`: for the instructions that end blocks, the barrier, the target by its index, and the
    lanes whose predicate holds. `sleeps`: instructions that wait. `sleeping_blocks`: blocks of the
    program with such instructions. `meeting_blocks`: blocks with instructions of `members`.
    `warp_barriers`: the barriers among `members`.
    """

    def __init__(self, machine: Machine, observer: Observer | None) -> None:
        self._machine = machine
        self._observer = observer
        self.actions: dict[int, Action] = {}
        self.full: dict[int, list[Callable[[], None]]] = {}
        self.members: dict[int, np.ndarray] = {}
        self.guards: dict[int, Callable[[Selection], np.ndarray]] = {}
        self.barriers: dict[int, Barrier] = {}
        self.taken: dict[int, Callable[[Selection], np.ndarray]] = {}
        self.choices: dict[int, np.ndarray] = {}
        self.sleeps: dict[int, Wait] = {}
        self.sleeping_blocks: set[int] = set()
        self.meeting_blocks: set[int] = set()
        self.warp_barriers: list[int] = []
        self._spread = Spread(machine)
        unset = machine.launch.unset
        if unset.names:
            machine.poison.unset(unset.names, np.flatnonzero(~machine.gone))
        # Positions whose actions carry poison, and whether all do.
        self._tracked = set(unset.positions)
        self._carries_all = False
        # By the block of the program and the slice of lanes: how often it has run, and its actions.
        self._seen: Counter[tuple[int, int, int]] = Counter()
        self._on: dict[tuple[int, int, int], list[Callable[[], None]]] = {}
        self._n_bound = 0

    def enter(self, index: int) -> None:
        """Binds a block of the program, unless it is."""
        if index in self.full:
            return
        machine = self._machine
        program, block = machine.program, machine.program.blocks[index]
        unset = machine.launch.unset
        for position in range(block.start, block.end):
            machine.position = position
            bind_one = self._ending if position == block.body_end else self._inner
            action = bind_one(block, program.instructions[position])
            if self._carries_all or position in self._tracked:
                self._tracked.add(position)
                action = self._spread.tracked(position, action)
            if position in unset.ends:
                action = self._spread.ending(action, unset.ends[position])
            self.actions[position] = action
            if position in self.members:
                self.meeting_blocks.add(index)
                instruction = program.instructions[position]
                if instruction.name in BARRIERS and instruction.has("warp"):
                    self.warp_barriers.append(position)
        if machine.waits:
            # Taken from the machine: what is bound refers to it.
            self.sleeps.update(machine.waits)
            machine.waits.clear()
            self.sleeping_blocks.add(index)
        self.full[index] = self._all_of(block)

    def enter_all(self) -> None:
        """Binds every block."""
        for index in range(len(self._machine.program.blocks)):
            self.enter(index)

    def _all_of(self, block: Block) -> list[Callable[[], None]]:
        return [self.actions[position].all for position in range(block.start, block.end)]

    def on(self, index: int, lanes: slice) -> list[Callable[[], None]] | None:
        """The actions of a block of the program for a slice of lanes; None if the slice has not run
        it often enough to be worth binding."""
        key = (index, lanes.start, lanes.stop)
        runs = self._on.get(key)
        if runs is None:
            self._seen[key] += 1
            if self._seen[key] >= _SOON and self._n_bound < _MOST_BOUND:
                runs = self._on[key] = self._bound_to(*key)
                self._n_bound += len(runs)
        return runs

    def _bound_to(self, index: int, first: int, end: int) -> list[Callable[[], None]]:
        block = self._machine.program.blocks[index]
        lanes = slice(first, end)
        return [self.actions[position].on(lanes) for position in range(block.start, block.end)]

    def carry_poison(self) -> Spread:
        """Makes all actions carry poison, from the next one on, by changing the lists that are
        being run. The last instruction of a block, which the scheduler runs, is then one of
        them."""
        self._carries_all = True
        for position in self.actions.keys() - self._tracked:
            self.actions[position] = self._spread.tracked(position, self.actions[position])
        self._tracked.update(self.actions)
        self._refill()
        return self._spread

    def follow_boxes(self) -> Mapping[int, Sequence[str]]:
        """Makes actions follow the values of boxes, from the next one on; returns the registers
        that loads of shared memory write and that are followed, by the load."""
        lints = self._machine.lints
        assert lints is not None
        self.enter_all()
        follow = Follow(self._machine, lints.layouts.readers)
        for position in follow.positions:
            self.actions[position] = follow.followed(position, self.actions[position])
        self._refill()
        return follow.loads

    def _refill(self) -> None:
        """Puts the actions into the lists that are being run."""
        for index, runs in self.full.items():
            runs[:] = self._all_of(self._machine.program.blocks[index])
        for key, runs in self._on.items():
            runs[:] = self._bound_to(*key)

    def _inner(self, block: Block, instruction: Instruction) -> Action:
        """An instruction that does not end its block."""
        machine, observer = self._machine, self._observer
        position = machine.position
        action, members = bind(machine, instruction)
        if members is not None:
            self.members[position] = members
            if instruction.guard is not None:
                self.guards[position] = machine.predicate(instruction.guard)
        action = watched(machine, position, action)
        if observer is None or not observer.wants(instruction):
            return action

        def run_some(selection: Selection) -> None:
            action.some(selection)
            lanes = machine.lanes_of(selection)
            observer.see(Observation(machine, instruction, block.phase, lanes))

        return machine.from_some(run_some)

    def _ending(self, block: Block, instruction: Instruction) -> Action:
        """Decodes the instruction that ends a block, for the scheduler."""
        machine = self._machine
        position, guard = machine.position, instruction.guard
        if guard is not None:
            self.taken[position] = machine.predicate(guard)
        action = Action(_nothing, _nothing)
        try:
            check_features(machine, instruction)
            check_modifiers(machine, instruction, _MODIFIERS[instruction.name].split())
            if block.ending is Ending.BARRIER:
                self.barriers[position] = decode_barrier(machine, instruction)
            elif block.ending is Ending.INDEXED:
                self.choices[position] = machine.source(instruction.operands[0], "u32")
            elif block.ending is Ending.EXIT and instruction.operands:
                raise machine.unsupported(f"{len(instruction.operands)} operands where 0 are due")
        except UnsupportedInstruction as refusal:
            action = refusing(machine, refusal)
            action = machine.guarded(action, guard) if guard else action
        return watched(machine, position, action)


def _nothing(selection: Selection | None = None) -> None:
    """The action of branches, exits and barriers, which the scheduler runs itself."""
