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
from flash_helpers.ptx.run.machine import Action, Machine
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
    """The instructions of a program as callables, each by its position.

    `actions`: action of every instruction. The action of an instruction that ends a block does
    nothing, since the scheduler runs it, or refuses it. `full`: for each block of the program, its
    actions for all lanes. `members`: the lanes that must execute an instruction together
    (`operations.bind`). `guards`: those of them that are not predicated off. `barriers`, `choices`,
    `taken`: for the instructions that end blocks, the barrier, the target by its index, and the
    lanes whose predicate holds. `sleeps`: instructions that wait. `sleeping_blocks`: blocks of the
    program with such instructions. `meeting_blocks`: blocks with instructions of `members`.
    """

    def __init__(self, machine: Machine, observer: Observer | None) -> None:
        self._machine = machine
        self._observer = observer
        program = machine.program
        self.actions: list[Action] = []
        self.members: dict[int, np.ndarray] = {}
        self.guards: dict[int, Callable[[Selection], np.ndarray]] = {}
        self.barriers: dict[int, Barrier] = {}
        self.taken: dict[int, Callable[[Selection], np.ndarray]] = {}
        self.choices: dict[int, np.ndarray] = {}
        for position, instruction in enumerate(program.instructions):
            machine.position = position
            block = program.block_at(position)
            bind_one = self._ending if position == block.body_end else self._inner
            self.actions.append(bind_one(block, instruction))
        self._spread = Spread(machine)
        unset = machine.launch.unset
        if unset.names:
            machine.poison.unset(unset.names, np.flatnonzero(~machine.gone))
        # Positions whose actions carry poison.
        self._tracked = set(unset.positions)
        for position in self._tracked:
            self.actions[position] = self._spread.tracked(position, self.actions[position])
        for position, names in unset.ends.items():
            self.actions[position] = self._spread.ending(self.actions[position], names)
        self.full: list[list[Callable[[], None]]] = [
            [a.all for a in self.actions[b.start : b.end]] for b in program.blocks
        ]
        # By the block of the program and the slice of lanes: how often it has run, and its actions.
        self._seen: Counter[tuple[int, int, int]] = Counter()
        self._on: dict[tuple[int, int, int], list[Callable[[], None]]] = {}
        self._n_bound = 0
        self.warp_barriers = [
            position
            for position in self.members
            if program.instructions[position].name in BARRIERS
            and program.instructions[position].has("warp")
        ]
        # Taken from the machine: what is bound refers to it.
        self.sleeps, machine.waits = machine.waits, {}
        self.sleeping_blocks = {program.block_of[position] for position in self.sleeps}
        self.meeting_blocks = {program.block_of[position] for position in self.members}

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
        return [a.on(slice(first, end)) for a in self.actions[block.start : block.end]]

    def carry_poison(self) -> Spread:
        """Makes all actions carry poison, from the next one on, by changing the lists that are
        being run. The last instruction of a block, which the scheduler runs, is then one of
        them."""
        for position, action in enumerate(self.actions):
            if position not in self._tracked:
                self.actions[position] = self._spread.tracked(position, action)
        self._tracked.update(range(len(self.actions)))
        self._refill()
        return self._spread

    def follow_boxes(self) -> Mapping[int, Sequence[str]]:
        """Makes actions follow the values of boxes, from the next one on; returns the registers
        that loads of shared memory write and that are followed, by the load."""
        lints = self._machine.lints
        assert lints is not None
        follow = Follow(self._machine, lints.layouts.readers)
        for position in follow.positions:
            self.actions[position] = follow.followed(position, self.actions[position])
        self._refill()
        return follow.loads

    def _refill(self) -> None:
        """Puts the actions into the lists that are being run."""
        for block, runs in zip(self._machine.program.blocks, self.full, strict=True):
            runs[:] = [a.all for a in self.actions[block.start : block.end]]
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
