"""The copies that TMA has been given and has not completed, and when it completes them.

A copy may complete at any time after it was issued. By default it completes as late as can be: one
into shared memory when nobody can run and somebody sleeps who needs its bytes; one out of shared
memory reads it, and writes global memory, when its thread waits for the one or the other, or at the
end. With a generator of random numbers, pending work is also done at random between steps of the
threads. All of these orders are legal (PTX ISA 9.0, "Asynchronous operations": no order between two
of them, unless one was waited for).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from flash_helpers.ptx.errors import OverlappingStoresLint, PendingCopyError
from flash_helpers.ptx.run.asynchronous.pending import AsyncCopies
from flash_helpers.ptx.run.asynchronous.phases import Phases
from flash_helpers.ptx.run.memory.boxes import CHUNK, Box, Span, first_common
from flash_helpers.ptx.run.memory.regions import ARENA_BASE, DeviceMemory
from flash_helpers.ptx.run.watch.agents import AgentAccess
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.lints import Lints
from flash_helpers.ptx.run.watch.order import Knowledge, join
from flash_helpers.ptx.run.watch.poison import Poison
from flash_helpers.ptx.run.watch.shared import WatchedMemory

CHANCE = 0.25
"""Probability that pending work is done after a step of the threads, where that is random."""

_STORED, _REDUCED = 1, 2
"""Mark on a byte of global memory: a copy, or a reduction, may still write it."""

Reduction = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Load:
    """A copy into shared memory.

    lane, position: who issued it, and where. where: place of the mbarrier object that counts its
    bytes, and phase: that was going on. block: whose memory it fills. rows: which of
    `shared.words(unit)`. read: gives what to write there. size: its bytes. accesses: of the copy to
    shared memory. piece: of global memory, that it reads; None if of none. source: granules of
    shared memory that it reads, and which of them nothing has written; None if none.
    """

    lane: int
    position: int
    where: int
    phase: int
    block: int
    unit: int
    rows: np.ndarray
    size: int
    read: Callable[[], np.ndarray]
    accesses: Sequence[AgentAccess]
    piece: Box | Span | None
    source: tuple[np.ndarray, np.ndarray | None] | None


@dataclass(frozen=True)
class Arrival:
    """Arrivals of lanes at an mbarrier object when their copies by cp.async are complete. before:
    how many executions of such had been. agents: who is said to carry them out. known: what the
    lanes knew."""

    lanes: np.ndarray
    position: int
    where: int
    before: int
    agents: Set[int]
    known: Knowledge


@dataclass
class Store:
    """A copy out of shared memory, or a reduction.

    target: where in global memory. dtype, reduction: how the elements there and the new ones are
    combined; None for a copy. data: what it has read; None before that. known: to those who have
    waited that it did.
    """

    lane: int
    position: int
    chunks: np.ndarray
    target: Box | Span
    dtype: np.dtype
    reduction: Reduction | None
    access: AgentAccess
    data: np.ndarray | None = None
    known: Knowledge | None = None
    is_written: bool = False


@dataclass
class _Groups:
    """Stores of one lane: those not committed, and those of each group, the oldest first."""

    open: list[Store] = field(default_factory=list)
    committed: list[list[Store]] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Transfers:
    """Copies of a batch by TMA that are on their way. random: of the order in which they complete;
    None for as late as can be."""

    shared: WatchedMemory
    memory: DeviceMemory
    phases: Phases
    poison: Poison
    copies: AsyncCopies
    log: FaultLog
    random: np.random.Generator | None = None
    lints: Lints | None = None

    def __post_init__(self) -> None:
        self.incoming: list[Load | Arrival] = []
        """For mbarrier objects, the oldest first."""
        self.groups: dict[int, _Groups] = defaultdict(_Groups)
        self._written = np.zeros(0, np.uint8)
        """For each byte of global memory, marks of the stores that were not waited for."""

    # -- issuing -----------------------------------------------------------------------------------

    def load(
        self,
        position: int,
        lane: int,
        where: int,
        unit: int,
        rows: np.ndarray,
        read: Callable[[], np.ndarray],
        issued: Knowledge,
        source: np.ndarray | None = None,
        piece: Box | Span | None = None,
    ) -> None:
        """Begins a copy into shared memory, as `Load` has it. issued: what its thread knows.
        source: rows that it reads, if those are in shared memory too. piece: of global memory."""
        if piece is not None:
            self._check_load(position, lane, piece)
        lanes, agents = np.array([lane]), np.array([self.phases.agent(where)])
        granules, lints, read_from = self._granules(rows, unit), self.lints, None
        accesses = self.shared.agents.begin_write(position, agents, lanes, [issued], granules[None])
        if lints is not None:
            lints.issue(position, lane, granules, issued)
        if source is not None:
            origin = self._granules(source, unit)
            reading, unwritten = self.shared.agents.begin_read(
                position, agents, lanes, [issued], origin[None]
            )
            accesses += reading
            read_from = origin, None if unwritten is None else unwritten[0]
            if lints is not None:
                lints.copy_out(origin)
        found = self.phases.find(position, lanes, where)
        phase = 0 if found is None else found.state.phase
        block, size = where // self.shared.stride, rows.size * unit
        begun = (lane, position, where, phase, block, unit, rows, size, read, accesses)
        self.incoming.append(Load(*begun, piece, read_from))

    def store(
        self,
        position: int,
        lane: int,
        chunks: np.ndarray,
        target: Box | Span,
        dtype: np.dtype,
        reduction: Reduction | None,
    ) -> None:
        """Begins a copy out of shared memory, as `Store` has it."""
        self._check_store(position, lane, target, is_reduction=reduction is not None)
        geometry, order = self.shared.geometry, self.shared.order
        lanes, granules = np.array([lane]), self._granules(chunks, CHUNK)
        thread = geometry.thread(lane)
        name = f"bulk stores of warp {thread.warp} lane {thread.lane}"
        agent = order.agent(geometry.block_of(lane), name)
        issued = order.knowledge(lanes)
        (access,), unwritten = self.shared.agents.begin_read(
            position, np.array([agent]), lanes, [issued], granules[None]
        )
        if self.lints is not None:
            self.lints.copy_out(granules)
        inside = np.ones(granules.size, bool)
        if isinstance(target, Box) and not target.is_whole:
            inside = np.logical_not(target.filled.reshape(granules.size, -1).all(axis=1))
        self.poison.copied_out(
            position,
            lane,
            granules[inside],
            granules[inside] * self.shared.granule % self.shared.stride,
            None if unwritten is None else unwritten[0][inside],
        )
        self.groups[lane].open.append(
            Store(lane, position, chunks, target, dtype, reduction, access)
        )

    def arrive(self, position: int, lanes: np.ndarray, places: np.ndarray, *, adds: bool) -> None:
        """cp.async.mbarrier.arrive by lanes. adds: the object waits for one more arrival of each
        (without .noinc)."""
        for where in np.unique(places).tolist():
            mine = lanes[places == where]
            if adds:
                self.phases.add_pending(position, mine, where)
            agents = self.copies.assign(mine, self.phases.agent(where, "cp.async"))
            known = self.shared.order.knowledge(mine)
            arrival = Arrival(mine, position, where, self.copies.issued, agents, known)
            self.incoming.append(arrival)

    def _marks(self, piece: Box | Span) -> np.ndarray:
        """Those of a piece of global memory, to be changed."""
        before, size = self._written, self.memory.words(1).size
        if before.size < size:
            self._written = np.zeros(size, np.uint8)
            self._written[: before.size] = before
        return piece.view(self._written, ARENA_BASE)

    def _check_load(self, position: int, lane: int, piece: Box | Span) -> None:
        """Reports a copy of what a store may still write."""
        if not self.groups or piece.is_outside or not self._marks(piece).any():
            return
        for store in self._stores():
            address = first_common(piece, store.target)
            if address is not None:
                self._report(position, lane, address, "read", "writes", store.position)
                return

    def _check_store(
        self, position: int, lane: int, target: Box | Span, *, is_reduction: bool
    ) -> None:
        """Reports a store to what a load may still read; lints one to what another store may still
        write, unless both are reductions, each of which is atomic."""
        if target.is_outside:
            return
        for load in self.incoming:
            if isinstance(load, Load) and load.piece is not None:
                address = first_common(target, load.piece)
                if address is not None:
                    self._report(position, lane, address, "write", "reads", load.position)
                    return
        marks = self._marks(target)
        if self.lints is not None and (marks & (_STORED if is_reduction else 0xFF)).any():
            for store in self._stores():
                address = first_common(target, store.target)
                if address is not None and not (is_reduction and store.reduction is not None):
                    self.log.lint(
                        OverlappingStoresLint,
                        f"the bulk copy at {self.log.site(store.position)}\n    writes the same "
                        "bytes of global memory, and nobody has waited for it: either may be last",
                        position,
                        self.shared.geometry.thread(lane),
                        address,
                    )
                    break
        marks |= _REDUCED if is_reduction else _STORED

    def _report(
        self, position: int, lane: int, address: int, action: str, does: str, other: int
    ) -> None:
        self.log.report(
            PendingCopyError,
            f"{action} of global memory, which a bulk copy {does}, issued at "
            f"{self.log.site(other)}\n    nobody has waited for it",
            position,
            self.shared.geometry.thread(lane),
            address,
        )

    def _granules(self, rows: np.ndarray, unit: int) -> np.ndarray:
        per_row = unit // self.shared.granule
        return (rows[:, None] * per_row + np.arange(per_row)).reshape(-1)

    # -- waiting -----------------------------------------------------------------------------------

    def commit(self, lanes: np.ndarray) -> None:
        """cp.async.bulk.commit_group by lanes."""
        for lane in lanes.tolist():
            groups = self.groups[lane]
            groups.committed.append(groups.open)
            groups.open = []

    def wait(self, lanes: np.ndarray, allowed: int, *, is_read_only: bool) -> None:
        """cp.async.bulk.wait_group: until all but the newest groups of each lane have completed, or
        have read shared memory."""
        for lane in lanes.tolist():
            if lane not in self.groups:
                continue
            groups = self.groups[lane].committed
            done = groups[: max(len(groups) - allowed, 0)]
            known = [self._read(store) for group in done for store in group]
            if known:
                self.shared.order.acquire(np.array([lane]), known)
            if not is_read_only:
                for group in done:
                    for store in group:
                        self._write(store)
                        if not store.target.is_outside:
                            self._marks(store.target)[...] = 0
            # Without the stores that nothing is left to wait for.
            kept = [[s for s in group if not s.is_written] for group in done]
            self.groups[lane].committed = kept + groups[len(done) :]

    @property
    def is_busy(self) -> bool:
        """Whether copies may be pending."""
        return bool(self.incoming or self.groups)

    # -- doing -------------------------------------------------------------------------------------

    def help(self, wanted: Set[int]) -> bool:
        """Completes of each cluster the oldest copy that an mbarrier object needs, one of those at
        the places that are wanted; whether there was one. Clusters do not wait for each other, and
        those that go on at once stay together."""
        cluster_bytes = self.shared.stride * self.shared.geometry.cluster
        oldest: dict[int, int] = {}
        for i, one in enumerate(self.incoming):
            if one.where in wanted:
                oldest.setdefault(one.where // cluster_bytes, i)
        done = [self.incoming[i] for i in oldest.values()]
        self.incoming = [one for i, one in enumerate(self.incoming) if i not in oldest.values()]
        for one in done:
            self._complete(one)
        return bool(done)

    def step(self) -> None:
        """Perhaps does something that is pending."""
        if self.random is None or self.random.random() > CHANCE:
            return
        stores = [s for s in self._stores() if not s.is_written]
        n = len(self.incoming) + len(stores)
        if not n:
            return
        i = int(self.random.integers(n))
        if i < len(self.incoming):
            self._complete(self.incoming.pop(i))
            return
        store = stores[i - len(self.incoming)]
        if store.data is None:
            self._read(store)
        else:
            self._write(store)

    def pending_at(
        self, addresses: np.ndarray, size: int, *, is_read: bool, is_atomic: bool
    ) -> tuple[np.ndarray, str]:
        """Which of `size` bytes at addresses of global memory a thread may not access now, since a
        copy that was not waited for writes them, or reads what is to be written; and what is said
        of it. is_atomic: reductions do not mind."""
        hit, text = np.zeros(addresses.shape, bool), ""
        start, end = int(addresses.min()), int(addresses.max()) + size

        def is_near(piece: Box | Span) -> bool:
            return not piece.is_outside and piece.address < end and start < piece.end

        if not is_read:
            for load in self.incoming:
                if isinstance(load, Load) and load.piece is not None and is_near(load.piece):
                    found = load.piece.holds(addresses, size)
                    if found.any():
                        site = self.log.site(load.position)
                        hit, text = hit | found, f"reads, issued at {site}\n    "
        for store in self._stores():
            if store.is_written or (is_atomic and store.reduction is not None):
                continue
            if not is_near(store.target):
                continue
            found = store.target.holds(addresses, size)
            if found.any():
                site = self.log.site(store.position)
                hit, text = hit | found, f"writes, issued at {site}\n    "
        return hit, text

    def finish(self) -> None:
        """Ends what no thread has waited for, when all have ended."""
        self.incoming.clear()
        for store in self._stores():
            self._read(store)
            self._write(store)
        self.groups.clear()
        if self.lints is not None:
            self.lints.finish()

    def _stores(self) -> Iterator[Store]:
        for groups in self.groups.values():
            for group in (*groups.committed, groups.open):
                yield from group

    def _complete(self, one: Load | Arrival) -> None:
        if isinstance(one, Load):
            self._fill(one)
            return
        order = self.shared.order
        self.copies.complete(one.lanes, one.before)
        known = join([one.known, *map(order.agent_knowledge, one.agents)])
        self.phases.arrive_for(one.position, one.lanes, one.where, known)

    def _fill(self, load: Load) -> None:
        words = self.shared.words(load.unit)
        words[load.rows] = load.read().view(words.dtype).reshape(load.rows.size, *words.shape[1:])
        granules = self._granules(load.rows, load.unit)
        self.poison.copied_in(load.position, granules, self.shared.stride, load.source)
        if self.lints is not None:
            self.lints.deliver(load.position, load.lane, granules, load.piece)
        for access in load.accesses:
            self.shared.agents.end(access)
        # What its thread knew when it issued the copy is not handed on.
        known = self.shared.order.agent_knowledge(load.accesses[0].agent)
        self.phases.complete(load.position, load.lane, load.where, load.size, known, load.phase)

    def _read(self, store: Store) -> Knowledge:
        if store.known is None:
            store.data = self.shared.words(CHUNK)[store.chunks].reshape(-1).view(np.uint8)
            store.known = self.shared.agents.end(store.access)
        return store.known

    def _write(self, store: Store) -> None:
        if store.is_written:
            return
        store.is_written = True
        if store.target.is_outside:
            return
        assert store.data is not None
        at = store.target.view(self.memory.words(1), ARENA_BASE, store.dtype)
        new = store.target.inside(store.data.view(store.dtype))
        at[...] = new if store.reduction is None else store.reduction(at, new)
