"""Runs the warps of a batch.

Every thread has its own program counter, as since compute capability 7.0. While all threads stand
at the same block, whole arrays are run without any selection. Otherwise the threads whose block
comes first in the program's order run, each warp on its own; instructions that need other lanes of
the warp wait for them, and barriers wait for the threads of the block. Instructions that wait for
something else (`machine.Wait`) put threads to sleep until it has happened.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import InstructionLimitError, OutOfBoundsError
from flash_helpers.ptx.read.flow import Block, Ending
from flash_helpers.ptx.run.execute.barriers import BlockBarriers
from flash_helpers.ptx.run.execute.bound import BoundProgram
from flash_helpers.ptx.run.execute.deadlock import Deadlock
from flash_helpers.ptx.run.execute.meetings import Meetings
from flash_helpers.ptx.run.execute.observe import Observer
from flash_helpers.ptx.run.execute.sleepers import Sleepers
from flash_helpers.ptx.run.execute.threads import (
    ASLEEP,
    AT_BARRIER,
    AT_SYNC,
    DONE,
    RUNNING,
    Group,
    Threads,
    for_each,
)
from flash_helpers.ptx.run.instructions.warps import WHOLE_WARP
from flash_helpers.ptx.run.machine import Machine
from flash_helpers.ptx.run.memory.regions import ALL, Selection

NO_END = 1 << 62
"""A turn that is never over."""
_WAITING_STEPS = 4 * 256

_FAIRNESS = 256
"""Steps after which the threads that have waited longest run, so that spinning on other threads
ends. Sleeping threads are checked then, too."""

_MOST_GROUPS = 1024
"""Groups of lanes that are kept for the next time that they run."""


class Scheduler:
    """Runs one batch to its end."""

    def __init__(
        self,
        machine: Machine,
        max_instructions: int,
        observer: Observer | None = None,
        *,
        strict_barriers: bool = False,
    ) -> None:
        self.machine = machine
        self.program = machine.program
        if observer is not None:
            machine.warpgroups.show = observer.see_product
        self.limit = max_instructions
        # Instructions that all warps have run together, and each lane beyond that.
        self.together = 0
        self.apart = np.zeros(machine.lanes, np.int64)
        self.most_apart = 0
        self.bound = BoundProgram(machine, observer)
        self.threads = Threads(machine)
        self.barriers = BlockBarriers(
            machine, self.threads, self.bound.barriers, strict=strict_barriers
        )
        self.meetings = Meetings(machine, self.threads, self.bound)
        self.sleepers = Sleepers(machine, self.threads, self.bound.sleeps)
        self.last_run = np.zeros(machine.lanes, np.int64)
        # The block of the program at which all threads stand; None while they are apart.
        self._at = None if (self.threads.status == DONE).any() else 0
        self._steps = 0
        self._groups: dict[bytes, Group] = {}
        self.fairness = _FAIRNESS
        self._turn_ends = 0
        self.issued = machine.tally.issued_by(machine.geometry.warps_per_block)
        # Weakly, so that a batch that is done needs no garbage collector to go.
        machine.poison.begin = WeakMethod(self.bound.carry_poison)
        if machine.lints is not None:
            machine.lints.layouts.readers.begin = WeakMethod(self.bound.follow_boxes)

    # -- all threads together ----------------------------------------------------------------------

    def run(self, turn: int = NO_END) -> bool:
        """Runs until every thread has ended, or a warp has run about `turn` more instructions;
        returns whether all have ended."""
        self._turn_ends = self._spent + turn
        while self._spent < self._turn_ends and self.threads.live_lanes.size:
            if self._at is None:
                self._run_apart()
            else:
                self._run_together(self._at)
        if self.threads.live_lanes.size:
            return False
        self.barriers.finish()
        self.machine.transfers.finish()
        return True

    @property
    def n_live_blocks(self) -> int:
        """Blocks with threads that have not ended."""
        return np.unique(self.machine.geometry.block_of(self.threads.live_lanes)).size

    @property
    def is_late(self) -> bool:
        """Whether half of the instructions that the batch may run are spent."""
        return self._spent > self.limit // 2

    @property
    def _spent(self) -> int:
        """Instructions of the warp that has run most, or slightly more."""
        return self.together + self.most_apart

    def _run_together(self, index: int) -> None:
        """Runs from a block until threads part (with `pc` set), or all end, or the turn is over."""
        self._at = None
        machine = self.machine
        blocks = self.program.blocks
        n_blocks = len(machine.geometry.blocks)
        lanes = machine.lanes
        issued = self.issued
        while True:
            if self._spent >= self._turn_ends:
                self._at = index
                return
            block = blocks[index]
            self.bound.enter(index)
            if index in self.bound.sleeping_blocks:
                self.threads.pc[:] = block.start
                self._run_group(block, block.start, machine.lane_ids)
                return
            issued[block.start : block.end] += n_blocks
            self._spend(block, block.end - block.start)
            for run in self.bound.full[index]:
                run()
            ending = block.ending
            if ending is Ending.NEXT:
                following = block.next
            elif ending is Ending.BRANCH or ending is Ending.EXIT:
                target = block.targets[0] if ending is Ending.BRANCH else -1
                following = target
                if block.end - 1 in self.bound.taken:
                    taken = self.bound.taken[block.end - 1](ALL)
                    count = np.count_nonzero(taken)
                    if 0 < count < lanes:
                        self.threads.go(np.flatnonzero(taken), target)
                        self.threads.go(np.flatnonzero(~taken), block.next)
                        return
                    following = target if count else block.next
            elif ending is Ending.INDEXED or not self.barriers.pass_together(block.end - 1):
                self.threads.pc[:] = block.end - 1
                self._finish_block(block, slice(None))
                return
            else:
                following = block.next
            if following < 0:
                self.threads.status[:] = DONE
                machine.end(ALL)
                return
            index = following

    def _spend(self, block: Block, instructions: int, selection: Selection | None = None) -> None:
        """Counts instructions of all warps, or of some, towards the limit."""
        if selection is None:
            self.together += instructions
        else:
            self.apart[selection] += instructions
            self.most_apart = max(self.most_apart, int(self.apart[selection].max()))
        self.machine.tick(instructions)
        if self._spent > self.limit:
            # Never collected: there is no going on.
            raise InstructionLimitError(
                f"a warp has run more than {self.limit} instructions: the kernel may never end; "
                "give a larger max_instructions if it does",
                self.machine.log.site(block.start),
            )

    # -- threads apart -----------------------------------------------------------------------------

    def _run_apart(self) -> None:
        """Runs groups of threads until all stand at one block, or all have ended, or the turn is
        over."""
        machine = self.machine
        while self._spent < self._turn_ends:
            running = self.threads.status == RUNNING
            if not running.any():
                if (self.threads.status == DONE).all():
                    return
                if not (self.sleepers.wake() or self.sleepers.help() or self.sleepers.give_up()):
                    self._resolve_deadlock()
                continue
            self._steps += 1
            machine.transfers.step()
            machine.warpgroups.step()
            if self._steps % self.fairness:
                position = int(self.threads.pc[running].min())
            else:
                self.sleepers.look_after()
                oldest = np.where(running, self.last_run, np.iinfo(np.int64).max).argmin()
                position = int(self.threads.pc[oldest])
            active = running & (self.threads.pc == position)
            block = self.program.block_at(position)
            if position == block.start and active.all():
                self.threads.status[:] = RUNNING
                self._at = self.program.block_of[position]
                return
            lanes = np.flatnonzero(active)
            self.last_run[lanes] = self._steps
            self.threads.status[lanes] = RUNNING
            self._run_group(block, position, lanes)

    def _run_group(self, block: Block, position: int, lanes: np.ndarray) -> None:
        end, first = block.body_end, position
        self.bound.enter(self.program.block_of[position])
        group = self._group_of(lanes)
        self._spend(block, block.end - position, group.selection)
        if position == block.start and (runs := self._runs_of(position, group)) is not None:
            for run in runs:
                run()
            position = end = block.end
        for i in range(position, end):
            if i in self.bound.sleeps or (not group.is_whole and i in self.bound.members):
                self._count(first, i, group)
                lanes, first = self._those_going_on(i, group), i
                if lanes.size == 0:
                    return
                group = self._group_of(lanes)
            self.bound.actions[i].some(group.selection)
        if end < block.end:
            self.bound.actions[end].some(group.selection)
        self._count(first, block.end, group)
        self.threads.pc[group.selection] = block.end - 1
        self._finish_block(block, group.selection)

    def _runs_of(self, position: int, group: Group) -> list[Callable[[], None]] | None:
        """The actions of the block that begins at a position, bound to a group whose lanes all run
        it to its end; None if they are not bound, or may stop in between."""
        index = self.program.block_of[position]
        if (
            index in self.bound.sleeping_blocks
            or not isinstance(group.selection, slice)
            or (not group.is_whole and index in self.bound.meeting_blocks)
        ):
            return None
        return self.bound.on(index, group.selection)

    def _group_of(self, lanes: np.ndarray) -> Group:
        """The group of lanes, which are mostly those of a role."""
        key = lanes.tobytes()
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) == _MOST_GROUPS:
                self._groups.clear()
            group = self._groups[key] = Group.of(lanes, self.machine.geometry)
        return group

    def _count(self, start: int, end: int, group: Group) -> None:
        """Counts instructions [start, end) as executed by the warps of a group."""
        self.issued[start:end] += group.executions

    def _those_going_on(self, position: int, group: Group) -> np.ndarray:
        """Lanes of a group that may execute an instruction now."""
        lanes = group.lanes
        if not group.is_whole and position in self.bound.members:
            lanes, let_go = self.meetings.join(position, lanes)
            for other, met in let_go:
                self._step_past(other, met)
        if position in self.bound.sleeps and lanes.size:
            lanes = self.sleepers.those_ready(position, lanes)
        return lanes

    def _step_past(self, position: int, lanes: np.ndarray) -> None:
        """Lets lanes go on that wait at an instruction of the warp."""
        block = self.program.block_at(position)
        self._count(position, position + 1, self._group_of(lanes))
        self.threads.status[lanes] = RUNNING
        if position + 1 < block.end:
            self.threads.pc[lanes] = position + 1
        else:
            self.threads.pc[lanes] = block.end - 1
            self._finish_block(block, lanes)

    def _finish_block(self, block: Block, selection: Selection) -> None:
        """Ends a block for some lanes: branches, exits, barriers."""
        lanes = self.machine.lane_ids[selection]
        if block.ending is Ending.NEXT:
            self.threads.go(lanes, block.next)
            return
        if block.end - 1 in self.bound.taken:
            taken = self.bound.taken[block.end - 1](lanes)
            self.threads.go(lanes[~taken], block.next)
            lanes = lanes[taken]
            if lanes.size == 0:
                return
        if block.ending is Ending.BRANCH:
            self.threads.go(lanes, block.targets[0])
        elif block.ending is Ending.EXIT:
            self.threads.go(lanes, -1)
        elif block.ending is Ending.INDEXED:
            choice = for_each(self.bound.choices[block.end - 1], lanes)
            for i, target in enumerate(block.targets):
                self.threads.go(lanes[choice == i], target)
            self._check_choice(block, choice, lanes)
        else:
            self.barriers.arrive(block, lanes)

    def _check_choice(self, block: Block, choice: np.ndarray, lanes: np.ndarray) -> None:
        lost = lanes[choice >= len(block.targets)]
        if lost.size:
            self.threads.go(lost, -1)
            index = int(choice[choice >= len(block.targets)][0])
            self.machine.log.report(
                OutOfBoundsError,
                f"target {index} of a list of {len(block.targets)}",
                block.end - 1,
                self.machine.geometry.thread(lost[0]),
                count=lost.size,
            )

    def _resolve_deadlock(self) -> None:
        """Reports the reason why no thread can run. If faults are collected, it lets waiting
        threads go on, or ends them if some sleep. Lanes that wait for lanes of their warp, none of
        which sleeps, come first: sleeping threads may wait for their work."""
        asleep, at_sync = self.threads.having(ASLEEP), self.threads.having(AT_SYNC)
        at_sync = at_sync[~np.isin(at_sync // WARP, asleep // WARP)]
        if at_sync.size:
            position, lanes = self.threads.by_position(at_sync)[0]
            self.meetings.report_missing(position, lanes)
            # Go on without the missing lanes, past the instruction.
            if self.program.instructions[position].name not in WHOLE_WARP:
                self.bound.actions[position].some(lanes)
            self._step_past(position, lanes)
        elif asleep.size:
            Deadlock(self.machine, self.threads, self.barriers, self.sleepers).end()
        else:
            self.barriers.give_up(self.threads.having(AT_BARRIER))

    # -- batches that wait for others --------------------------------------------------------------

    def waits(self) -> bool:
        """Runs some instructions; returns whether every running thread has come back to the same
        instruction with the same registers, while shared memory did not change and global memory
        was read. If global memory does not change either, the loop never ends."""
        if self.sleepers.wake():
            return False
        machine, lanes = self.machine, self.machine.lanes
        files = [file[:, :lanes] for file in machine.register_files]
        before = [file.copy() for file in files]
        pc, shared = self._positions().copy(), machine.shared.data.copy()
        ran, requests = self.together + self.apart, machine.tally.global_requests
        still = self.threads.status != RUNNING
        for _ in range(_WAITING_STEPS):
            if self.run(1):
                return False
            back = ~still & (self._positions() == pc) & (self.together + self.apart > ran)
            some = np.flatnonzero(back)
            for file, old in zip(files, before, strict=True):
                some = some[(file[:, some] == old[:, some]).all(axis=0)]
            still[some] = True
            if still.all():
                is_same = np.array_equal(shared, machine.shared.data)
                return is_same and machine.tally.global_requests > requests
        return False

    def _positions(self) -> np.ndarray:
        """The position of each lane."""
        if self._at is not None:
            self.threads.pc[:] = self.program.blocks[self._at].start
        return self.threads.pc
