"""Copies of TMA that are issued and not complete, and the time of their completion.

A copy may complete at any time after it was issued. By default it completes as late as possible. A
copy into shared memory completes when no thread can run and a sleeping thread needs its bytes. A
copy out of shared memory reads it, and writes global memory, when its thread waits for the read or
the write, or at the end.

With a generator of random numbers, pending work is also done at random between steps of the
threads. All of these orders are legal (PTX ISA 9.0, "Asynchronous operations": no order between two
operations unless a thread waited for one).
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

    `lane`, `position`: the lane that issued it, and the instruction. `where`: place of the mbarrier
    object that counts its bytes. `phase`: the phase of that object at the time of issue. `block`:
    the block whose memory it fills. `rows`: rows of `shared.words(unit)` that it writes. `read`:
    returns the data to write. `size`: its bytes.

    `accesses`: accesses of the copy to shared memory. `piece`: piece of global memory that it
    reads; None if it reads none. `source`: granules of shared memory that it reads, and which of
    them nothing has written; None if it reads none.
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
    """Arrivals of lanes at an mbarrier object when their copies by cp.async are complete. `before`:
    number of earlier executions of cp.async. `agents`: the agents that carry the copies out.
    `known`: the knowledge of the lanes."""

    lanes: np.ndarray
    position: int
    where: int
    before: int
    agents: Set[int]
    known: Knowledge


@dataclass
class Store:
    """A copy out of shared memory, or a reduction.

    `target`: its place in global memory. `dtype`, `reduction`: the operation that combines the
    elements there with the new ones; None for a copy. `data`: the data that it has read; None
    before that. `known`: knowledge of lanes that have waited for the read.
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
    """Stores of one lane: the stores not committed, and the stores of each group, the oldest group
    first."""

    open: list[Store] = field(default_factory=list)
    committed: list[list[Store]] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Transfers:
    """Copies of a batch by TMA that are on their way. `random`: decides the order in which they
    complete; with None they complete as late as possible."""

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
        """Begins a copy into shared memory, with the fields of `Load`. `issued`: the knowledge of
        its thread. `source`: rows that it reads, if they are in shared memory too. `piece`: piece
        of global memory that it reads."""
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
        """Begins a copy out of shared memory, with the fields of `Store`."""
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
        """cp.async.mbarrier.arrive by lanes. `adds`: whether the object waits for one more arrival
        per lane (without .noinc)."""
        for where in np.unique(places).tolist():
            mine = lanes[places == where]
            if adds:
                self.phases.add_pending(position, mine, where)
            agents = self.copies.assign(mine, self.phases.agent_of_threads(where))
            known = self.shared.order.knowledge(mine)
            arrival = Arrival(mine, position, where, self.copies.issued, agents, known)
            self.incoming.append(arrival)

    def _marks(self, piece: Box | Span) -> np.ndarray:
        """The marks of a piece of global memory, a view to be changed."""
        before, size = self._written, self.memory.words(1).size
        if before.size < size:
            self._written = np.zeros(size, np.uint8)
            self._written[: before.size] = before
        return piece.view(self._written, ARENA_BASE)

    def _check_load(self, position: int, lane: int, piece: Box | Span) -> None:
        """Reports a copy that reads bytes which a store may still write."""
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
        """Reports a store to bytes that a load may still read. Lints a store to bytes that another
        store may still write, unless both are reductions, which are atomic."""
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
                        "bytes of global memory, and no thread has waited for it: either may be "
                        "last",
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
            f"{self.log.site(other)}\n    no thread has waited for it",
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
        """cp.async.bulk.wait_group: completes all but the newest groups of each lane, or makes them
        read shared memory."""
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
        """Completes, in each cluster, the oldest copy for an mbarrier object at the wanted places;
        returns whether there was one. Clusters do not wait for each other, and clusters that go on
        at once stay together."""
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
        """Does pending work at random."""
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
        """Which of `size` bytes at addresses of global memory a thread may not access now, and the
        text of the error. A copy that no thread has waited for writes these bytes, or reads bytes
        that the access would write. `is_atomic`: whether the access is atomic, which reductions
        allow."""
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
        """Completes the copies that no thread has waited for, after all threads have ended."""
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
        # The knowledge of its thread at the time of issue is not handed on.
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
