"""Runs the warps of a batch.

Every thread has its own program counter, as since compute capability 7.0. While all threads stand
at the same block, whole arrays are run without any selection. Otherwise the threads whose block
comes first in the program's order run, each warp on its own; instructions that need other lanes of
the warp wait for them, and barriers wait for the threads of the block. Instructions that wait for
something else (`machine.Wait`) put threads to sleep until it has happened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import (
    BarrierError,
    BarrierOperandError,
    DeadlockError,
    InstructionLimitError,
    LeftArrivalsLint,
    MissingLanesError,
    OutOfBoundsError,
    UnsupportedInstruction,
)
from flash_helpers.ptx.read.flow import BARRIERS, Block, Ending
from flash_helpers.ptx.read.module import Immediate, Instruction
from flash_helpers.ptx.run.execute.observe import Observation, Observer
from flash_helpers.ptx.run.execute.spread import Spread
from flash_helpers.ptx.run.instructions.forms import check_modifiers
from flash_helpers.ptx.run.instructions.operations import bind, refusing
from flash_helpers.ptx.run.instructions.warps import WHOLE_WARP
from flash_helpers.ptx.run.instructions.wgmma import watched
from flash_helpers.ptx.run.machine import Action, Machine, Wait, pick, warp_masks
from flash_helpers.ptx.run.memory.regions import ALL, Selection
from flash_helpers.ptx.run.watch.order import Knowledge

_RUNNING, _AT_SYNC, _AT_BARRIER, _ASLEEP, _DONE = range(5)

BARRIERS_OF_BLOCK = 16

NO_END = 1 << 62
"""Of a turn that never is over."""
_WAITING_STEPS = 4 * 256

_FAIRNESS = 256
"""Every so many steps the threads that waited longest run, so that spinning on others ends. Those
that sleep are looked after then, too."""


@dataclass(frozen=True)
class Barrier:
    """A block-wide barrier instruction, decoded.

    name: its number, one element a lane or one for all. count: threads that take part; None for
    the whole block. is_plain: every thread of the block waits at it, under a number that exists.
    waits: False for `bar.arrive`. reduction, predicate, destination: of `bar.red`; the first is
    popc, and or or.
    """

    name: np.ndarray
    count: np.ndarray | None
    is_plain: bool
    waits: bool
    reduction: str | None = None
    predicate: Callable[[Selection], np.ndarray] | None = None
    destination: np.ndarray | None = None


@dataclass(frozen=True)
class Arrival:
    """Threads of one block that came to a barrier together. position: of the instruction.
    knowledge: what they knew then."""

    lanes: np.ndarray
    position: int
    barrier: Barrier
    knowledge: Knowledge


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
        self.strict_barriers = strict_barriers
        # Instructions that all warps have run together, and each lane beyond that.
        self.together = 0
        self.apart = np.zeros(machine.lanes, np.int64)
        self.most_apart = 0
        self.actions: list[Action] = []
        self.members: dict[int, np.ndarray] = {}
        self.barriers: dict[int, Barrier] = {}
        self.taken: dict[int, Callable[[Selection], np.ndarray]] = {}
        self.choices: dict[int, np.ndarray] = {}
        for position, instruction in enumerate(self.program.instructions):
            machine.position = position
            block = self.program.block_at(position)
            if position == block.body_end:
                if instruction.guard is not None:
                    self.taken[position] = machine.predicate(instruction.guard)
                action = self._bind_ending(block, instruction)
                self.actions.append(watched(machine, position, action))
                continue
            action, members = bind(machine, instruction)
            action = watched(machine, position, action)
            self.actions.append(self._observed(action, position, observer))
            if members is not None:
                self.members[position] = members
        self.full: list[list] = [
            [a.all for a in self.actions[b.start : b.end]] for b in self.program.blocks
        ]
        self.warp_barriers = [
            position
            for position in self.members
            if self.program.instructions[position].name in BARRIERS
            and self.program.instructions[position].has("warp")
        ]
        # Taken from the machine: what is bound refers to it.
        self.sleeps, machine.waits = machine.waits, {}
        self.sleeping_blocks = {self.program.block_of[position] for position in self.sleeps}
        """Of the program: where threads may fall asleep."""
        n = machine.lanes
        self.pc = np.zeros(n, np.int64)
        self.status = np.zeros(n, np.int8)
        self.status[machine.thread_ids >= machine.geometry.threads] = _DONE
        self.last_run = np.zeros(n, np.int64)
        self.barrier_predicate = np.zeros(n, bool)
        self.arrivals: dict[tuple[int, int], list[Arrival]] = defaultdict(list)
        # The block of the program at which all threads stand; None while they are apart.
        self._at = None if (self.status == _DONE).any() else 0
        self._steps = 0
        # How things stood when waits gave up, since an mbarrier changed.
        self._stood_still: list[tuple[int, bytes, bytes]] = []
        self.fairness = _FAIRNESS
        self._turn_ends = 0
        self.issued = machine.tally.issued_by(machine.geometry.warps_per_block)
        self.blocked = machine.tally.blocked
        # Weakly, so that a batch that is done needs no garbage collector to go.
        machine.poison.begin = WeakMethod(self._carry_poison)

    def _bind_ending(self, block: Block, instruction: Instruction) -> Action:
        """Decodes the instruction that ends a block. Its action does nothing, since the scheduler
        runs it, or refuses what is not known of it."""
        machine = self.machine
        try:
            check_modifiers(machine, instruction)
            if block.ending is Ending.BARRIER:
                self.barriers[machine.position] = self._decode_barrier(instruction)
            elif block.ending is Ending.INDEXED:
                self.choices[machine.position] = machine.source(instruction.operands[0], "u32")
            elif block.ending is Ending.EXIT and instruction.operands:
                raise machine.unsupported(f"{len(instruction.operands)} operands where 0 are due")
        except UnsupportedInstruction as refusal:
            action = refusing(machine, refusal)
            return machine.guarded(action, instruction.guard) if instruction.guard else action
        return Action(_nothing, _nothing)

    def _decode_barrier(self, instruction: Instruction) -> Barrier:
        machine = self.machine
        reduction = instruction.first(("popc", "and", "or"))
        operands = list(instruction.operands)
        fewest, most = (3, 4) if reduction else (0, 2)
        if not fewest <= len(operands) <= most:
            raise machine.unsupported(f"{len(operands)} operands where {fewest} to {most} are due")
        result: tuple = ()
        if reduction is not None:
            result_type = "b32" if reduction == "popc" else "pred"
            destination = machine.destination(operands.pop(0), result_type)
            result = (reduction, machine.predicate(operands.pop()), destination)
        name = machine.source(operands[0], "u32") if operands else np.zeros(1, np.uint32)
        count = machine.source(operands[1], "u32") if len(operands) > 1 else None
        if (
            count is not None
            and isinstance(operands[1], Immediate)
            and operands[1].value == machine.geometry.threads
            and operands[1].value % WARP == 0
        ):
            count = None
        waits = not instruction.has("arrive")
        if not waits and len(operands) < 2:
            raise machine.unsupported("a number of threads is due")
        is_constant = name.size == 1 and int(name[0]) < BARRIERS_OF_BLOCK
        is_plain = (
            is_constant
            and count is None
            and waits
            and reduction is None
            and instruction.guard is None
        )
        return Barrier(name, count, is_plain, waits, *result)

    def _observed(self, action: Action, position: int, observer: Observer | None) -> Action:
        instruction = self.program.instructions[position]
        if observer is None or not observer.wants(instruction):
            return action
        machine = self.machine
        phase = self.program.block_at(position).phase

        def run_some(selection: Selection) -> None:
            action.some(selection)
            lanes = machine.lanes_of(selection)
            observer.see(Observation(machine, instruction, phase, lanes))

        return machine.from_some(run_some)

    # -- all threads together ----------------------------------------------------------------------

    def run(self, turn: int = NO_END) -> bool:
        """Runs until every thread has ended, or a warp has run about so many more instructions;
        whether all have ended."""
        self._turn_ends = self._spent + turn
        while self._spent < self._turn_ends and self.live_lanes.size:
            if self._at is None:
                self._run_apart()
            else:
                self._run_together(self._at)
        if self.live_lanes.size:
            return False
        for owner, name in sorted(self.arrivals):
            self._tell_left(owner, name, self.arrivals.pop((owner, name)))
        self.machine.transfers.finish()
        return True

    def _carry_poison(self) -> Spread:
        """Lets all actions carry poison, from the next one on: the lists that are being run are
        changed. The last instruction of a block, run by the scheduler, is one of them then."""
        spread = Spread(self.machine)
        for position, action in enumerate(self.actions):
            self.actions[position] = spread.tracked(position, action)
        for block, runs in zip(self.program.blocks, self.full, strict=True):
            runs[:] = [a.all for a in self.actions[block.start : block.end]]
        return spread

    @property
    def live_lanes(self) -> np.ndarray:
        """Lanes whose threads have not ended."""
        return np.flatnonzero(self.status != _DONE)

    @property
    def n_live_blocks(self) -> int:
        """Blocks with such lanes."""
        return np.unique(self.machine.geometry.block_of(self.live_lanes)).size

    @property
    def is_late(self) -> bool:
        """Whether half of the instructions that it may run are spent."""
        return self._spent > self.limit // 2

    @property
    def _spent(self) -> int:
        """Instructions of the warp that has run most, or a little more."""
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
            if index in self.sleeping_blocks:
                self.pc[:] = block.start
                self._run_group(block, block.start, machine.lane_ids)
                return
            issued[block.start : block.end] += n_blocks
            self._spend(block, block.end - block.start)
            for run in self.full[index]:
                run()
            ending = block.ending
            if ending is Ending.NEXT:
                following = block.next
            elif ending is Ending.BRANCH or ending is Ending.EXIT:
                target = block.targets[0] if ending is Ending.BRANCH else -1
                following = target
                if block.end - 1 in self.taken:
                    taken = self.taken[block.end - 1](ALL)
                    count = np.count_nonzero(taken)
                    if 0 < count < lanes:
                        self._part(taken, target, block.next)
                        return
                    following = target if count else block.next
            elif ending is Ending.INDEXED or not self._barrier_together(block):
                self.pc[:] = block.end - 1
                self._finish_block(block, slice(None))
                return
            else:
                following = block.next
            if following < 0:
                self.status[:] = _DONE
                machine.end(ALL)
                return
            index = following

    def _part(self, taken: np.ndarray, target: int, following: int) -> None:
        self._go(np.flatnonzero(taken), target)
        self._go(np.flatnonzero(~taken), following)

    def _go(self, selection: Selection, block: int) -> None:
        if block >= 0:
            self.pc[selection] = self.program.blocks[block].start
            return
        self.status[selection] = _DONE
        self.machine.end(selection)
        for owner, name in list(self.arrivals):
            if (owner, name) in self.arrivals:
                self._release_if_complete(owner, name)

    def _barrier_together(self, block: Block) -> bool:
        barrier = self.barriers.get(block.end - 1)
        # None: it is refused, and its predicate holds nowhere
        if barrier is None or not barrier.is_plain or self.arrivals:
            return False
        self.machine.shared.order.barrier_all()
        return True

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
            running = self.status == _RUNNING
            if not running.any():
                if (self.status == _DONE).all():
                    return
                if not (self._wake() or self._help() or self._give_up()):
                    self._resolve_deadlock()
                continue
            self._steps += 1
            machine.transfers.step()
            machine.warpgroups.step()
            if self._steps % self.fairness:
                position = int(self.pc[running].min())
            else:
                self._look_after_sleepers()
                oldest = np.where(running, self.last_run, np.iinfo(np.int64).max).argmin()
                position = int(self.pc[oldest])
            active = running & (self.pc == position)
            block = self.program.block_at(position)
            if position == block.start and active.all():
                self.status[:] = _RUNNING
                self._at = self.program.block_of[position]
                return
            lanes = np.flatnonzero(active)
            self.last_run[lanes] = self._steps
            self.status[lanes] = _RUNNING
            self._run_group(block, position, lanes)

    def _run_group(self, block: Block, position: int, lanes: np.ndarray) -> None:
        end = block.body_end
        selection, whole, first = _as_selection(lanes), _whole_warps(lanes), position
        self._spend(block, block.end - position, selection)
        for i in range(position, end):
            if i in self.sleeps or (not whole and i in self.members):
                self._count(first, i, lanes)
                lanes, first = self._those_going_on(i, lanes, whole), i
                if lanes.size == 0:
                    return
                selection, whole = _as_selection(lanes), _whole_warps(lanes)
            self.actions[i].some(selection)
        if end < block.end:
            self.actions[end].some(selection)
        self._count(first, block.end, lanes)
        self.pc[lanes] = block.end - 1
        self._finish_block(block, selection)

    def _count(self, start: int, end: int, lanes: np.ndarray) -> None:
        """Counts instructions [start, end) as executed by the warps of some lanes."""
        warps = _warps_of(lanes) // len(self.machine.geometry.blocks)
        self.issued[start:end] += np.bincount(warps, minlength=self.issued.shape[1])

    def _those_going_on(self, position: int, lanes: np.ndarray, whole: bool) -> np.ndarray:
        """Lanes that may execute an instruction now. whole: they are all of their warps."""
        if not whole and position in self.members:
            lanes = self._join(position, lanes)
        if position in self.sleeps and lanes.size:
            lanes = self._those_ready(position, lanes)
        return lanes

    def _join(self, position: int, lanes: np.ndarray) -> np.ndarray:
        """Lanes that may execute a warp-wide instruction now, those among them that have waited for
        the others of their warp; the rest wait."""
        waited = np.flatnonzero((self.status == _AT_SYNC) & (self.pc == position))
        lanes = np.union1d(lanes, waited)
        members = self.members[position]
        instruction = self.program.instructions[position]
        present = self.machine.masks(lanes)
        needed = _for_each(members, lanes)
        if instruction.name not in WHOLE_WARP:
            # A block's last warp may be short: lanes that never were are not waited for.
            present |= self.machine.absent_lanes
        elsewhere = None
        if instruction.name in BARRIERS:
            # Threads that have ended count as arrived (PTX ISA 9.0, "bar.warp.sync",
            # "barrier.cluster"); those that wait at another bar.warp.sync of the same mask have.
            present |= warp_masks(self.status == _DONE)
            if position in self.warp_barriers:
                elsewhere = self._at_other_warp_barriers(position)
                for mask in np.unique(needed):
                    here = lanes[needed == mask]
                    present[here] |= warp_masks(elsewhere == mask)[here]
        ready = (needed & ~present[lanes]) == 0
        self.status[lanes[ready]] = _RUNNING
        waiting = lanes[~ready]
        self.pc[waiting] = position
        self.status[waiting] = _AT_SYNC
        if elsewhere is not None and elsewhere.any():
            for mask in np.unique(needed[ready]):
                met = np.flatnonzero(elsewhere == mask)
                met = met[np.isin(met // WARP, lanes[ready & (needed == mask)] // WARP)]
                for other in np.unique(self.pc[met]).tolist():
                    self._step_past(other, met[self.pc[met] == other])
        return lanes[ready]

    def _those_ready(self, position: int, lanes: np.ndarray) -> np.ndarray:
        """Lanes that may execute an instruction that waits; the others fall asleep."""
        ready = self.sleeps[position].is_ready(lanes)
        asleep = lanes[~ready]
        if asleep.size:
            self.blocked[position] += _warps_of(asleep).size
            self.pc[asleep] = position
            self.status[asleep] = _ASLEEP
        return lanes[ready]

    def _wake(self) -> bool:
        """Lets lanes go on that need not sleep any more; whether there are any."""
        self.machine.phases.wanted.clear()
        asleep = np.flatnonzero(self.status == _ASLEEP)
        for position in np.unique(self.pc[asleep]).tolist():
            lanes = asleep[self.pc[asleep] == position]
            self.status[lanes[self.sleeps[position].is_ready(lanes)]] = _RUNNING
        return bool((self.status[asleep] == _RUNNING).any())

    def _help(self) -> bool:
        """Completes a copy that one of those needs who sleep; whether there is one."""
        return self.machine.transfers.help(self.machine.phases.wanted)

    def _give_up(self) -> bool:
        """Lets lanes go on whose waits have an end, once where nothing else has happened; whether
        there are any."""
        state = self.machine.phases.version, self.pc.tobytes(), self.status.tobytes()
        if not self._stood_still or self._stood_still[0][0] != state[0]:
            self._stood_still = []
        if state in self._stood_still:
            return False
        self._stood_still.append(state)
        return self._let_give_up(lambda wait: wait.give_up is not None)

    def _let_give_up(self, which: Callable[[Wait], bool]) -> bool:
        asleep = np.flatnonzero(self.status == _ASLEEP)
        for position in np.unique(self.pc[asleep]).tolist():
            if which(self.sleeps[position]):
                lanes = asleep[self.pc[asleep] == position]
                self.sleeps[position].give_up(lanes)
                self.status[lanes] = _RUNNING
        return bool((self.status[asleep] == _RUNNING).any())

    def _look_after_sleepers(self) -> None:
        """While others run, which may wait for them by spinning."""
        self._wake()
        self._help()
        self._let_give_up(lambda wait: not wait.is_patient)

    def _at_other_warp_barriers(self, position: int) -> np.ndarray:
        """Of each lane the mask of the bar.warp.sync at which it waits, unless it is the one at the
        position; 0 where it waits at none."""
        masks = np.zeros(self.machine.lanes, np.uint32)
        for other in self.warp_barriers:
            if other != position:
                lanes = np.flatnonzero((self.status == _AT_SYNC) & (self.pc == other))
                masks[lanes] = _for_each(self.members[other], lanes)
        return masks

    def _step_past(self, position: int, lanes: np.ndarray) -> None:
        """Lets lanes go on that wait at an instruction of the warp."""
        block = self.program.block_at(position)
        self._count(position, position + 1, lanes)
        self.status[lanes] = _RUNNING
        if position + 1 < block.end:
            self.pc[lanes] = position + 1
        else:
            self.pc[lanes] = block.end - 1
            self._finish_block(block, lanes)

    def _finish_block(self, block: Block, selection: Selection) -> None:
        """Ends a block for some lanes: branches, exits, barriers."""
        lanes = self.machine.lane_ids[selection]
        if block.ending is Ending.NEXT:
            self._go(lanes, block.next)
            return
        if block.end - 1 in self.taken:
            taken = self.taken[block.end - 1](lanes)
            self._go(lanes[~taken], block.next)
            lanes = lanes[taken]
            if lanes.size == 0:
                return
        if block.ending is Ending.BRANCH:
            self._go(lanes, block.targets[0])
        elif block.ending is Ending.EXIT:
            self._go(lanes, -1)
        elif block.ending is Ending.INDEXED:
            choice = _for_each(self.choices[block.end - 1], lanes)
            for i, target in enumerate(block.targets):
                self._go(lanes[choice == i], target)
            self._check_choice(block, choice, lanes)
        else:
            self._arrive(self.barriers[block.end - 1], block, lanes)

    def _check_choice(self, block: Block, choice: np.ndarray, lanes: np.ndarray) -> None:
        lost = lanes[choice >= len(block.targets)]
        if lost.size:
            self._go(lost, -1)
            index = int(choice[choice >= len(block.targets)][0])
            self.machine.log.report(
                OutOfBoundsError,
                f"target {index} of a list of {len(block.targets)}",
                block.end - 1,
                self.machine.geometry.thread(lost[0]),
                count=lost.size,
            )

    def waits(self) -> bool:
        """Runs a little; whether every thread that runs has come back to where it was, with the
        same registers, while shared memory stayed as it was and global memory was read: if that
        stays as it is too, this goes on for ever."""
        if self._wake():
            return False
        machine, lanes = self.machine, self.machine.lanes
        files = [file[:, :lanes] for file in machine.register_files]
        before = [file.copy() for file in files]
        pc, shared = self._positions().copy(), machine.shared.data.copy()
        ran, requests = self.together + self.apart, machine.tally.global_requests
        still = self.status != _RUNNING
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
        """Where each lane stands."""
        if self._at is not None:
            self.pc[:] = self.program.blocks[self._at].start
        return self.pc

    # -- barriers ----------------------------------------------------------------------------------

    def _arrive(self, barrier: Barrier, block: Block, lanes: np.ndarray) -> None:
        wrong = self._check_operands(barrier, block.end - 1, lanes)
        if wrong.any():
            # Where faults are collected, on without the barrier.
            self._go(lanes[wrong], block.next)
            lanes = lanes[~wrong]
        names = _for_each(barrier.name, lanes)
        if barrier.predicate is not None:
            self.barrier_predicate[lanes] = barrier.predicate(lanes)
        if barrier.waits:
            self.status[lanes] = _AT_BARRIER
            self.pc[lanes] = block.end - 1
        else:
            self._go(lanes, block.next)
        owners = self.machine.geometry.block_of(lanes)
        for owner in np.unique(owners):
            for name in np.unique(names[owners == owner]):
                chosen = lanes[(owners == owner) & (names == name)]
                knowledge = self.machine.shared.order.arrive(chosen)
                arrival = Arrival(chosen, block.end - 1, barrier, knowledge)
                self.arrivals[int(owner), int(name)].append(arrival)
                self._release_if_complete(int(owner), int(name))

    def _check_operands(self, barrier: Barrier, position: int, lanes: np.ndarray) -> np.ndarray:
        """Reports barriers that do not exist, and counts of threads that cannot be (PTX ISA 9.0,
        "barrier"); which lanes name them."""
        most = self.machine.geometry.lanes_per_block
        checks = [
            (
                barrier.name,
                lambda names: names >= BARRIERS_OF_BLOCK,
                "barrier {}: a block has "
                f"{BARRIERS_OF_BLOCK} of them, numbered from 0 to {BARRIERS_OF_BLOCK - 1}",
            )
        ]
        if barrier.count is not None:
            checks.append(
                (
                    barrier.count,
                    lambda counts: (counts == 0) | (counts % WARP != 0) | (counts > most),
                    "a barrier of {} threads: the number must be a multiple of "
                    f"{WARP}, from {WARP} to {most}, the threads of all warps of the block",
                )
            )
        wrong = np.zeros(lanes.shape, bool)
        for operand, is_wrong, text in checks:
            values = _for_each(operand, lanes)
            bad = is_wrong(values)
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                thread = self.machine.geometry.thread(lanes[first])
                self.machine.log.report(
                    BarrierOperandError,
                    text.format(int(values[first])),
                    position,
                    thread,
                    count=int(bad.sum()),
                )
                wrong |= bad
        return wrong

    def _release_if_complete(self, owner: int, name: int) -> None:
        arrivals = self.arrivals[owner, name]
        if not self._is_complete(owner, arrivals):
            return
        del self.arrivals[owner, name]
        self._check_arrived(owner, name, arrivals)
        waiting = [a.lanes for a in arrivals if a.barrier.waits]
        if not waiting:
            self._tell_left(owner, name, arrivals)
        else:
            released = np.concatenate(waiting)
            self._check_aligned(released)
            order = self.machine.shared.order
            known = [arrival.knowledge for arrival in arrivals]
            if arrivals[-1].barrier.count is None and (ended := self._ended(owner)).size:
                # They have arrived as far as the others are concerned.
                known.append(order.arrive(ended))
            order.release(known, released)
            self._release(released)

    def _tell_left(self, owner: int, name: int, arrivals: Sequence[Arrival]) -> None:
        """Lints arrivals without a wait, unless they are all that the barrier is for."""
        newest = arrivals[-1]
        came = sum(arrival.lanes.size for arrival in arrivals)
        due = self._expected(newest.barrier, newest.lanes)
        if self.machine.launch.lints and came < due:
            geometry = self.machine.geometry
            self.machine.log.lint(
                LeftArrivalsLint,
                f"{came} of {due} threads of block {geometry.blocks[owner]} have arrived at "
                f"barrier {name}, and nobody waits for them",
                newest.position,
                geometry.thread(newest.lanes[0]),
            )

    def _is_complete(self, owner: int, arrivals: Sequence[Arrival]) -> bool:
        """Whether nobody is waited for any more. A barrier of the whole block waits for the threads
        that have not ended; one of a number of threads for so many warps, and in each for the
        threads that have not ended (PTX ISA 9.0, "barrier", "exit")."""
        geometry = self.machine.geometry
        arrived = np.zeros(geometry.lanes_per_block, bool)
        for arrival in arrivals:
            arrived[geometry.thread_of(arrival.lanes)] = True
        gone = self.status[geometry.lanes_of(owner)] == _DONE
        if self.strict_barriers:
            gone = np.arange(gone.size) >= geometry.threads
        newest = arrivals[-1]
        if newest.barrier.count is None:
            return bool((arrived | gone).all())
        warps = arrived.reshape(-1, WARP).any(axis=1)
        missing = (gone & ~arrived).reshape(-1, WARP)[warps].sum()
        came = sum(arrival.lanes.size for arrival in arrivals)
        return came + missing >= self._expected(newest.barrier, newest.lanes)

    def _check_arrived(self, owner: int, name: int, arrivals: Sequence[Arrival]) -> None:
        """Reports a barrier of a number of threads at which more have come together: which of them
        it lets go is undefined."""
        newest = arrivals[-1]
        if newest.barrier.count is None:
            return
        came = sum(arrival.lanes.size for arrival in arrivals)
        due = self._expected(newest.barrier, newest.lanes)
        if came > due > WARP:  # one of a warp lets each go by itself
            position = newest.position
            thread = self.machine.geometry.thread(newest.lanes[0])
            detail = (
                f"{came} threads of block {self.machine.geometry.blocks[owner]} come together to "
                f"barrier {name}, which waits for {due}"
            )
            self.machine.log.report(BarrierOperandError, detail, position, thread)

    def _ended(self, owner: int) -> np.ndarray:
        """Lanes of a block whose threads have ended."""
        geometry = self.machine.geometry
        lanes = geometry.lanes_of(owner)[: geometry.threads]
        return lanes[self.status[lanes] == _DONE]

    def _expected(self, barrier: Barrier, lanes: np.ndarray) -> int:
        """Threads that a barrier waits for."""
        if barrier.count is None:
            return self.machine.geometry.threads
        return int(_for_each(barrier.count, lanes)[0])

    def _check_aligned(self, released: np.ndarray) -> None:
        warps = released // WARP
        positions = self.pc[released]
        for position in np.unique(positions):
            instruction = self.program.instructions[position]
            if instruction.name == "barrier" and not instruction.has("aligned"):
                continue
            mine = np.unique(warps[positions == position])
            other = np.unique(warps[positions != position])
            both = np.intersect1d(mine, other)
            if both.size:
                self.machine.log.report(
                    BarrierError,
                    "lanes of one warp arrive at different barrier instructions",
                    int(position),
                    self.machine.geometry.thread(int(both[0]) * WARP),
                )

    def _release(self, lanes: np.ndarray) -> None:
        values = self.barrier_predicate[lanes]
        self.status[lanes] = _RUNNING
        for position in np.unique(self.pc[lanes]):
            chosen = lanes[self.pc[lanes] == position]
            barrier = self.barriers[int(position)]
            if barrier.destination is not None:
                result = {"popc": values.sum(), "and": values.all(), "or": values.any()}
                barrier.destination[chosen] = result[barrier.reduction]
            self._go(chosen, self.program.block_at(position).next)

    # -- when nobody can run -----------------------------------------------------------------------

    def _resolve_deadlock(self) -> None:
        """Reports why nobody can run; if faults are collected, lets the waiting go on, or end where
        some sleep. Lanes that wait for others of their warp, of which none sleeps, come first:
        sleepers may wait for what these are to do."""
        asleep = np.flatnonzero(self.status == _ASLEEP)
        at_sync = np.flatnonzero(self.status == _AT_SYNC)
        at_sync = at_sync[~np.isin(at_sync // WARP, asleep // WARP)]
        if asleep.size and not at_sync.size:
            self._end_cluster(asleep)
            return
        if at_sync.size:
            position = int(self.pc[at_sync].min())
            lanes = at_sync[self.pc[at_sync] == position]
            self._report_missing(position, lanes)
            # Go on without the missing lanes, past the instruction.
            if self.program.instructions[position].name not in WHOLE_WARP:
                self.actions[position].some(lanes)
            self._step_past(position, lanes)
            return
        waiting = np.flatnonzero(self.status == _AT_BARRIER)
        geometry, log = self.machine.geometry, self.machine.log
        owners = geometry.block_of(waiting)
        owner = int(owners[0])
        mine = waiting[owners == owner]
        position = int(self.pc[mine].min())
        first = mine[self.pc[mine] == position][0]
        keys = sorted(key for key in self.arrivals if key[0] == owner)
        told = [self._barrier_state(*key) for key in keys]
        told += [
            f"others wait at {log.site(other)}"
            for other in np.unique(self.pc[mine]).tolist()
            if other != position
        ]
        log.report(BarrierError, "\n    ".join(told), position, geometry.thread(first))
        for key in keys:
            del self.arrivals[key]
        self._release(mine)

    def _barrier_state(self, owner: int, name: int) -> str:
        """How a barrier of a block stands, at which threads wait or have arrived."""
        arrivals = self.arrivals[owner, name]
        came = sum(arrival.lanes.size for arrival in arrivals)
        waiting = sum(arrival.lanes.size for arrival in arrivals if arrival.barrier.waits)
        due = self._expected(arrivals[-1].barrier, arrivals[-1].lanes)
        arrived = f", {came - waiting} have arrived" if came > waiting else ""
        ended = self._ended(owner).size
        return f"barrier {name}: {waiting} of {due} threads wait{arrived}, {ended} have ended"

    def _end_cluster(self, asleep: np.ndarray) -> None:
        """Reports who waits for what in the first cluster with lanes that sleep, and ends it."""
        geometry, log = self.machine.geometry, self.machine.log
        cluster = geometry.cluster_of(asleep[0])
        stuck = np.flatnonzero(self.status != _DONE)
        stuck = stuck[geometry.cluster_of(stuck) == cluster]
        owners = range(cluster * geometry.cluster, (cluster + 1) * geometry.cluster)
        keys = sorted(key for key in self.arrivals if key[0] in owners)
        names = np.zeros(geometry.lanes, np.int64)
        for key in keys:
            for arrival in self.arrivals[key]:
                if arrival.barrier.waits:
                    names[arrival.lanes] = key[1]
        groups = np.stack(
            [geometry.block_of(stuck), self.pc[stuck], self.status[stuck], names[stuck]]
        )
        told = []
        for group in np.unique(groups, axis=1).T:
            owner, position, status, name = group.tolist()
            lanes = stuck[(groups == group[:, None]).all(axis=0)]
            if status == _ASLEEP:
                reason = self.sleeps[position].reason(lanes)
            elif status == _AT_SYNC:
                reason = "for the other lanes of the warp"
            else:
                reason = f"for {self._barrier_state(owner, name)}"
            warps = np.unique(geometry.warp_of(lanes)).tolist()
            named = f"warp {warps[0]}" if len(warps) == 1 else f"warps {', '.join(map(str, warps))}"
            told.append(
                f"{_threads(lanes.size)} ({named} of block {geometry.blocks[owner]}) "
                f"{'waits' if lanes.size == 1 else 'wait'}\n"
                f"      {reason}\n      at {log.site(position)}"
            )
        told += [
            f"nobody waits at a barrier of block {geometry.blocks[key[0]]}\n"
            f"      {self._barrier_state(*key)}"
            for key in keys
            if not any(arrival.barrier.waits for arrival in self.arrivals[key])
        ]
        ended = sum(self._ended(owner).size for owner in owners)
        detail = "\n    ".join(
            [
                "nobody can go on",
                *told,
                f"{_threads(ended)} {'has' if ended == 1 else 'have'} ended",
            ]
        )
        first = int(asleep[0])
        log.report(DeadlockError, detail, int(self.pc[first]), geometry.thread(first))
        for key in keys:
            del self.arrivals[key]
        self.status[stuck] = _DONE

    def _report_missing(self, position: int, lanes: np.ndarray) -> None:
        needed = int(_for_each(self.members[position], lanes)[0])
        missing = needed & ~int(self.machine.masks(lanes)[lanes[0]])
        ended = int(warp_masks(self.status == _DONE)[lanes[0]]) & missing
        detail = f"the lanes {needed:#010x} must execute it together, {missing:#010x} do not come"
        if ended:
            detail += f" ({ended:#010x} have ended)"
        self.machine.log.report(
            MissingLanesError, detail, position, self.machine.geometry.thread(lanes[0])
        )


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def _nothing(selection: Selection | None = None) -> None:
    """Branches, exits and barriers are run by the scheduler itself."""


def _as_selection(lanes: np.ndarray) -> Selection:
    """A slice where the lanes are contiguous: views are cheaper than copies."""
    first, last = int(lanes[0]), int(lanes[-1])
    return slice(first, last + 1) if last - first + 1 == lanes.size else lanes


def _for_each(array: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """One value for each of the lanes, of an array that may have one for all."""
    return np.broadcast_to(pick(array, lanes), lanes.shape)


def _whole_warps(lanes: np.ndarray) -> bool:
    if lanes.size % WARP:
        return False
    rows = lanes.reshape(-1, WARP)
    return bool((rows[:, 0] % WARP == 0).all() and (rows[:, -1] - rows[:, 0] == WARP - 1).all())


def _warps_of(lanes: np.ndarray) -> np.ndarray:
    """Their warps, numbered over the batch. lanes: ascending."""
    warps = lanes // WARP
    return warps[np.flatnonzero(np.r_[True, warps[1:] != warps[:-1]])]
