"""The barriers of blocks: their arrivals and their completion (PTX ISA 9.0, "bar", "barrier")."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import (
    BarrierError,
    BarrierOperandError,
    LeftArrivalsLint,
    MixedArrivalsError,
)
from flash_helpers.ptx.read.flow import Block
from flash_helpers.ptx.read.module import Immediate, Instruction
from flash_helpers.ptx.run.execute.threads import AT_BARRIER, DONE, RUNNING, Threads, for_each
from flash_helpers.ptx.run.machine import Machine
from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.run.watch.order import Knowledge

BARRIERS_OF_BLOCK = 16


@dataclass(frozen=True)
class Barrier:
    """A block-wide barrier instruction, decoded.

    `name`: its number, one element per lane or one for all. `count`: threads that take part; None
    for the whole block. `is_plain`: every thread of the block waits at it, under a number that
    exists. `waits`: False for `bar.arrive`. `reduction`, `predicate`, `destination`: operation
    (popc, and, or) and operands of `bar.red`.
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
    """Threads of one block that came to a barrier together. `position`: position of the
    instruction. `due`: threads for which they take the barrier to wait. `time`, `knowledge`: the
    time (`order`), and the threads' knowledge then."""

    lanes: np.ndarray
    position: int
    barrier: Barrier
    due: int
    time: int
    knowledge: Knowledge


def decode_barrier(machine: Machine, instruction: Instruction) -> Barrier:
    """The barrier of a block that an instruction of a kernel names."""
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
        is_constant and count is None and waits and reduction is None and instruction.guard is None
    )
    return Barrier(name, count, is_plain, waits, *result)


class BlockBarriers:
    """The barriers of all blocks of a batch. `at`: decoded, by the position of their instructions.
    `strict`: a barrier of the whole block waits for threads that have ended, too. `arrivals`:
    arrivals at barriers that are not complete, by block and number. `last`: the arrivals that
    have completed each barrier with a thread count last."""

    def __init__(
        self, machine: Machine, threads: Threads, at: Mapping[int, Barrier], *, strict: bool
    ) -> None:
        self.machine = machine
        self.program = machine.program
        self.threads = threads
        self.strict = strict
        self.at = at
        self.arrivals: dict[tuple[int, int], list[Arrival]] = defaultdict(list)
        self.last: dict[tuple[int, int], list[Arrival]] = {}
        self._predicate = np.zeros(machine.lanes, bool)
        threads.ended = WeakMethod(self.release_complete)

    def pass_together(self, position: int) -> bool:
        """Lets all lanes of the batch pass a barrier at once if they can; returns whether they
        did."""
        barrier = self.at.get(position)
        # None: it is refused, and its predicate holds nowhere
        if barrier is None or not barrier.is_plain or self.arrivals:
            return False
        self.machine.shared.order.barrier_all()
        return True

    def arrive(self, block: Block, lanes: np.ndarray) -> None:
        """Lanes come to the barrier that ends a block of the program."""
        barrier = self.at[block.end - 1]
        wrong = self._check_operands(barrier, block.end - 1, lanes)
        if wrong.any():
            # Where faults are collected, on without the barrier.
            self.threads.go(lanes[wrong], block.next)
            lanes = lanes[~wrong]
        names = for_each(barrier.name, lanes)
        if barrier.predicate is not None:
            self._predicate[lanes] = barrier.predicate(lanes)
        if barrier.waits:
            self.threads.status[lanes] = AT_BARRIER
            self.threads.pc[lanes] = block.end - 1
        else:
            self.threads.go(lanes, block.next)
        owners, order = self.machine.geometry.block_of(lanes), self.machine.shared.order
        dues = np.full(lanes.shape, self.machine.geometry.threads)
        if barrier.count is not None:
            dues = for_each(barrier.count, lanes)
        for owner in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == owner)
            for name, due in _pairs(names[mine], dues[mine]):
                chosen = lanes[mine[(names[mine] == name) & (dues[mine] == due)]]
                came = (chosen, block.end - 1, barrier, due, order.now)
                arrival = Arrival(*came, order.arrive(chosen))
                self._check_company(owner, name, arrival)
                self._check_last(owner, name, arrival)
                self.arrivals[owner, name].append(arrival)
                self._release_if_complete(owner, name)

    def release_complete(self) -> None:
        """Completes the barriers at which no thread is missing any more, since threads have
        ended."""
        for owner, name in list(self.arrivals):
            if (owner, name) in self.arrivals:
                self._release_if_complete(owner, name)

    def finish(self) -> None:
        """All threads have ended."""
        for owner, name in sorted(self.arrivals):
            self._tell_left(owner, name, self.arrivals.pop((owner, name)))

    def of_blocks(self, owners: Sequence[int]) -> list[tuple[int, int]]:
        """Keys of the arrivals in some blocks of the batch."""
        return sorted(key for key in self.arrivals if key[0] in owners)

    def give_up(self, waiting: np.ndarray) -> None:
        """Reports the barriers of the first block of which lanes wait, and lets these lanes go."""
        geometry, log = self.machine.geometry, self.machine.log
        owners = geometry.block_of(waiting)
        owner = int(owners[0])
        mine = waiting[owners == owner]
        (position, first), *others = self.threads.by_position(mine)
        keys = self.of_blocks([owner])
        told = [self.state(*key) for key in keys]
        told += [f"others wait at {log.site(other)}" for other, _ in others]
        log.report(BarrierError, "\n    ".join(told), position, geometry.thread(first[0]))
        for key in keys:
            del self.arrivals[key]
        self._release(mine)

    def state(self, owner: int, name: int) -> str:
        """The state of a barrier of a block at which threads wait or have arrived, in words."""
        arrivals = self.arrivals[owner, name]
        came = sum(arrival.lanes.size for arrival in arrivals)
        waiting = sum(arrival.lanes.size for arrival in arrivals if arrival.barrier.waits)
        due = arrivals[-1].due
        arrived = f", {came - waiting} have arrived" if came > waiting else ""
        ended = self.threads.ended_of(owner).size
        return f"barrier {name}: {waiting} of {due} threads wait{arrived}, {ended} have ended"

    # -- checks ------------------------------------------------------------------------------------

    def _check_operands(self, barrier: Barrier, position: int, lanes: np.ndarray) -> np.ndarray:
        """Reports barriers that do not exist and impossible thread counts (PTX ISA 9.0, "barrier");
        returns the lanes that name them."""
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
            values = for_each(operand, lanes)
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

    def _check_company(self, owner: int, name: int, new: Arrival) -> None:
        """Checks an arrival at a barrier against those that are there already."""
        for other in self.arrivals.get((owner, name), ()):
            if -(-other.due // WARP) != -(-new.due // WARP):
                text = (
                    f"barrier {name} waits for {new.due} threads here, and for {other.due} where\n"
                    f"    {self._place(other)}:\n"
                    "    threads that meet there must give the same number"
                )
                self._report_arrival(BarrierOperandError, new, text)
            # A thread may arrive and then wait: so it gives itself the first turn.
            elif not (new.barrier.waits or other.barrier.waits) and (
                np.isin(new.lanes, other.lanes).any()
            ):
                text = (
                    f"a second arrival at barrier {name}, where {self._place(other)}\n"
                    "    and the barrier is not complete: one thread counts for two"
                )
                self._report_arrival(BarrierOperandError, new, text)

    def _check_last(self, owner: int, name: int, new: Arrival) -> None:
        """Checks that an arrival at a barrier cannot come before those which have completed it
        last. A barrier of the whole block, at which all wait, is complete only with all of them; at
        one of a warp each waits only for itself."""
        if new.due <= WARP or (new.barrier.count is None and new.barrier.waits):
            return
        before = self.last.get((owner, name))
        if before is None:
            return
        known = self.machine.shared.order.warps_in(new.knowledge)
        for other in before:
            warps = self.machine.geometry.place_of(other.lanes) // WARP
            if (known[warps] < other.time).any():
                text = (
                    f"{self._warps(new)} may arrive at barrier {name} before {self._warps(other)} "
                    f"at {self.machine.log.site(other.position)},\n    since nothing orders the "
                    f"two: the {new.due} threads that complete the barrier may be of both groups"
                )
                self._report_arrival(MixedArrivalsError, new, text)
                return

    def _report_arrival(self, kind: type[BarrierError], new: Arrival, text: str) -> None:
        thread = self.machine.geometry.thread(new.lanes[0])
        self.machine.log.report(kind, text, new.position, thread)

    def _place(self, arrival: Arrival) -> str:
        """The warps that have arrived, and where, in words."""
        return f"{self._warps(arrival)} arrived at {self.machine.log.site(arrival.position)}"

    def _warps(self, arrival: Arrival) -> str:
        """The warps that have arrived, in words."""
        warps = np.unique(self.machine.geometry.warp_of(arrival.lanes)).tolist()
        return f"warp{'s' * (len(warps) > 1)} {', '.join(map(str, warps))}"

    def _check_arrived(self, owner: int, name: int, arrivals: Sequence[Arrival]) -> None:
        """Reports a barrier with a thread count at which more threads have come together: the ISA
        leaves undefined which of them it lets go."""
        newest = arrivals[-1]
        if newest.barrier.count is None:
            return
        came = sum(arrival.lanes.size for arrival in arrivals)
        due = newest.due
        if came > due > WARP:  # one of a warp lets each go by itself
            position = newest.position
            thread = self.machine.geometry.thread(newest.lanes[0])
            detail = (
                f"{came} threads of block {self.machine.geometry.blocks[owner]} come together to "
                f"barrier {name}, which waits for {due}"
            )
            self.machine.log.report(BarrierOperandError, detail, position, thread)

    def _check_aligned(self, released: np.ndarray) -> None:
        warps = released // WARP
        positions = self.threads.pc[released]
        if (positions == positions[0]).all():
            return
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

    def _tell_left(self, owner: int, name: int, arrivals: Sequence[Arrival]) -> None:
        """Lints arrivals without a wait, unless the barrier is for arrivals only."""
        newest = arrivals[-1]
        came = sum(arrival.lanes.size for arrival in arrivals)
        due = newest.due
        if self.machine.launch.lints and came < due:
            geometry = self.machine.geometry
            self.machine.log.lint(
                LeftArrivalsLint,
                f"{came} of {due} threads of block {geometry.blocks[owner]} have arrived at "
                f"barrier {name}, and no thread waits for them",
                newest.position,
                geometry.thread(newest.lanes[0]),
            )

    # -- letting go --------------------------------------------------------------------------------

    def _release_if_complete(self, owner: int, name: int) -> None:
        arrivals = self.arrivals[owner, name]
        if not self._is_complete(owner, arrivals):
            return
        del self.arrivals[owner, name]
        self._check_arrived(owner, name, arrivals)
        self.last[owner, name] = arrivals
        waiting = [a.lanes for a in arrivals if a.barrier.waits]
        if not waiting:
            self._tell_left(owner, name, arrivals)
        else:
            released = np.concatenate(waiting)
            self._check_aligned(released)
            order = self.machine.shared.order
            known = [arrival.knowledge for arrival in arrivals]
            if arrivals[-1].barrier.count is None and (ended := self.threads.ended_of(owner)).size:
                # For the other threads they have arrived.
                known.append(order.arrive(ended))
            order.release(known, released)
            self._release(released)

    def _is_complete(self, owner: int, arrivals: Sequence[Arrival]) -> bool:
        """Whether a barrier waits for no thread any more. A barrier of the whole block waits for
        the threads that have not ended. A barrier with a thread count waits for that many warps,
        and in each for the threads that have not ended (PTX ISA 9.0, "barrier", "exit")."""
        newest = arrivals[-1]
        came = sum(arrival.lanes.size for arrival in arrivals)
        if came >= newest.due:
            return True
        geometry = self.machine.geometry
        arrived = np.zeros(geometry.lanes_per_block, bool)
        for arrival in arrivals:
            arrived[geometry.thread_of(arrival.lanes)] = True
        gone = self.threads.status[geometry.lanes_of(owner)] == DONE
        if self.strict:
            gone = np.arange(gone.size) >= geometry.threads
        if newest.barrier.count is None:
            return bool((arrived | gone).all())
        warps = arrived.reshape(-1, WARP).any(axis=1)
        missing = (gone & ~arrived).reshape(-1, WARP)[warps].sum()
        return came + missing >= newest.due

    def _release(self, lanes: np.ndarray) -> None:
        values = self._predicate[lanes]
        self.threads.status[lanes] = RUNNING
        for position, chosen in self.threads.by_position(lanes):
            barrier = self.at[position]
            if barrier.destination is not None and barrier.reduction is not None:
                result = {"popc": values.sum(), "and": values.all(), "or": values.any()}
                barrier.destination[chosen] = result[barrier.reduction]
            self.threads.go(chosen, self.program.block_at(position).next)


def _pairs(names: np.ndarray, dues: np.ndarray) -> list[tuple[int, int]]:
    """The different pairs of a barrier's number and its thread count, in order."""
    first = int(names[0]), int(dues[0])
    if (names == first[0]).all() and (dues == first[1]).all():
        return [first]
    return sorted({*zip(names.tolist(), dues.tolist(), strict=True)})
