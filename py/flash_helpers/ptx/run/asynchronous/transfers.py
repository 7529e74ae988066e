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
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from weakref import proxy

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import OverlappingStoresLint, PendingCopyError, ProxyError
from flash_helpers.ptx.run.asynchronous.pending import AsyncCopies
from flash_helpers.ptx.run.asynchronous.phases import Phases
from flash_helpers.ptx.run.memory.boxes import CHUNK, Box, Span, first_common
from flash_helpers.ptx.run.memory.regions import ARENA_BASE, DeviceMemory
from flash_helpers.ptx.run.watch.agents import AgentAccess
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.lints import Lints
from flash_helpers.ptx.run.watch.marks import missed_by_wait
from flash_helpers.ptx.run.watch.order import Knowledge, join
from flash_helpers.ptx.run.watch.poison import Poison
from flash_helpers.ptx.run.watch.shared import WatchedMemory
from flash_helpers.ptx.run.watch.written import GlobalWrites

CHANCE = 0.25
"""Probability that pending work is done after a step of the threads, where that is random."""

_STORED, _REDUCED = 1, 2
"""Mark on a byte of global memory: a copy, or a reduction, may still write it."""

_NOT_WAITED = "no thread has waited for it"

Reduction = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Request:
    """A copy into shared memory that a lane asks for.

    `where`: place of the mbarrier object that counts its bytes. `rows`: rows of shared memory that
    it writes. `read`: returns the data to write. `source`: rows that it reads, if they are in
    shared memory too. `piece`: piece of global memory that it reads, if it reads any. `copies`:
    lanes that make the same copy.
    """

    lane: int
    where: int
    rows: np.ndarray
    read: Callable[[], np.ndarray]
    source: np.ndarray | None = None
    piece: Box | Span | None = None
    copies: int = 1


@dataclass(frozen=True)
class Load:
    """A copy into shared memory that has begun.

    `position`: the instruction that issued it. `unit`: bytes of the rows of `request`. `granules`:
    those that it writes. `phase`: the phase of its mbarrier object at the time of issue.
    `accesses`: its accesses to shared memory. `source`: granules of shared memory that it reads,
    and which of them nothing has written; None if it reads none.
    """

    request: Request
    position: int
    unit: int
    granules: np.ndarray
    phase: int
    accesses: Sequence[AgentAccess]
    source: tuple[np.ndarray, np.ndarray | None] | None

    @property
    def where(self) -> int:
        """As `Request.where`."""
        return self.request.where

    @property
    def piece(self) -> Box | Span | None:
        """As `Request.piece`."""
        return self.request.piece


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


@dataclass(eq=False)
class Store:
    """Equal copies out of shared memory, or reductions, that lanes of one warp have issued
    together.

    `number`: number of stores and waits before it. `target`: its place in global memory. `dtype`,
    `reduction`: the operation that combines the elements there with the new ones; None for a copy.
    `access`: its read of shared memory; None once the lanes have waited for that. `data`: the data
    that it has read; None before that.
    """

    lanes: np.ndarray
    position: int
    number: int
    chunks: np.ndarray
    target: Box | Span
    dtype: np.dtype
    reduction: Reduction | None
    access: AgentAccess | None
    data: np.ndarray | None = None
    is_written: bool = False


@dataclass
class _Groups:
    """Stores of one lane: those not committed, and those of each group that may be going on, the
    oldest group first. `total`: groups committed so far. `n_read`: how many of them, the oldest,
    have read shared memory. `waited`: of the last wait, its position, the groups that it left
    pending, `total`, and the number of stores and waits before it."""

    open: list[Store] = field(default_factory=list)
    committed: list[list[Store]] = field(default_factory=list)
    total: int = 0
    n_read: int = 0
    waited: tuple[int, int, int, int] = (0, 0, 0, -1)

    def due(self, allowed: int, *, is_read_only: bool) -> list[list[Store]]:
        """The groups that a wait completes; a wait for reads leaves out those that have read."""
        first = self.total - len(self.committed)
        begin = max(self.n_read - first, 0) if is_read_only else 0
        return self.committed[begin : max(len(self.committed) - allowed, 0)]

    def number_of(self, store: Store) -> int:
        """The group of a store, which may be the one that is not committed."""
        first = self.total - len(self.committed)
        of = (first + i for i, group in enumerate(self.committed) if store in group)
        return next(of, self.total)


@dataclass(eq=False, repr=False)
class Transfers:
    """Copies of a batch by TMA that are on their way. `random`: decides the order in which they
    complete; with None they complete as late as possible. `writes`: the writes of threads to global
    memory, in a kernel that has any."""

    shared: WatchedMemory
    memory: DeviceMemory
    phases: Phases
    poison: Poison
    copies: AsyncCopies
    log: FaultLog
    random: np.random.Generator | None = None
    lints: Lints | None = None
    writes: GlobalWrites | None = None

    def __post_init__(self) -> None:
        self.incoming: list[Load | Arrival] = []
        """For mbarrier objects, the oldest first."""
        self.outgoing: list[Store] = []
        """Copies out of shared memory that their lanes have not waited for, the oldest first."""
        self.groups: dict[int, _Groups] = defaultdict(_Groups)
        self._number = 0
        weak = proxy(self)
        stories = self.shared.marks.stories
        stories.append(lambda agent, lane, position: weak._explain(agent, position))
        self._written = np.zeros(0, np.uint8)
        """For each byte of global memory, marks of the stores that were not waited for."""

    # -- issuing -----------------------------------------------------------------------------------

    def load(self, position: int, unit: int, requests: Sequence[Request]) -> None:
        """Begins the copies into shared memory that lanes ask for by one instruction. `unit`: bytes
        of their rows."""
        for _, alike in groupby(requests, lambda request: request.rows.size):
            self._load(position, unit, list(alike))

    def _load(self, position: int, unit: int, requests: Sequence[Request]) -> None:
        """As `load`, for copies of one size."""
        shared, lints = self.shared, self.lints
        lanes = np.array([request.lane for request in requests])
        agents = np.array([self.phases.agent(request.where) for request in requests])
        known = shared.order.knowledge_alone(lanes)
        issued = [Knowledge(known[:, i]) for i in range(lanes.size)]
        for request, its in zip(requests, issued, strict=True):
            if request.piece is not None:
                self._check_load(position, request.lane, request.piece)
                self._check_fenced("read", position, request.lane, request.piece, its)
        granules = self._granules(np.stack([request.rows for request in requests]), unit)
        writing = shared.agents.begin_write(position, agents, lanes, known, granules)
        accesses, sources = [[each] for each in writing], self._sources(requests, unit)
        unwritten = None
        if sources is not None:
            reading, unwritten = shared.agents.begin_read(position, agents, lanes, known, sources)
            accesses = [[*each] for each in zip(writing, reading, strict=True)]
        for i, request in enumerate(requests):
            found = self.phases.find(position, lanes[i : i + 1], request.where)
            source = None
            if sources is not None:
                source = sources[i], None if unwritten is None else unwritten[i]
            if lints is not None:
                lints.issue(position, request.lane, granules[i], issued[i])
                if source is not None:
                    lints.copy_out(position, request.lane, source[0])
                if found is not None and (request.piece is not None or source is not None):
                    lints.count_at(position, request.lane, found.made, issued[i])
            phase = 0 if found is None else found.state.phase
            begun = (position, unit, granules[i], phase, accesses[i], source)
            self.incoming.append(Load(request, *begun))

    def _sources(self, requests: Sequence[Request], unit: int) -> np.ndarray | None:
        """Granules of shared memory that copies read, (n, m); None if they read none."""
        rows = [request.source for request in requests if request.source is not None]
        return self._granules(np.stack(rows), unit) if rows else None

    def store(
        self,
        position: int,
        lanes: np.ndarray,
        chunks: np.ndarray,
        target: Box | Span,
        dtype: np.dtype,
        reduction: Reduction | None,
    ) -> None:
        """Begins the same copy out of shared memory for lanes of one warp, with the fields of
        `Store`."""
        self._check_store(position, int(lanes[0]), target, is_reduction=reduction is not None)
        granules = self._granules(chunks[None], CHUNK)[0]
        issued = self.shared.order.knowledge_of_each(lanes)
        self._check_fenced("write", position, int(lanes[0]), target, issued)
        known = self.shared.order.stacked([issued])
        (access,), unwritten = self.shared.agents.begin_read(
            position, np.array([self._agent(lanes)]), lanes[:1], known, granules[None]
        )
        if self.lints is not None:
            self.lints.copy_out(position, int(lanes[0]), granules, target)
        inside = np.ones(granules.size, bool)
        if isinstance(target, Box) and not target.is_whole:
            inside = np.logical_not(target.filled.reshape(granules.size, -1).all(axis=1))
        self.poison.copied_out(
            position,
            lanes,
            granules[inside],
            granules[inside] * self.shared.granule % self.shared.stride,
            None if unwritten is None else unwritten[0][inside],
        )
        begun = (lanes, position, self._number, chunks, target, dtype, reduction, access)
        store = Store(*begun)
        self._number += 1
        self.outgoing.append(store)
        for lane in lanes.tolist():
            self.groups[lane].open.append(store)

    def _agent(self, lanes: np.ndarray) -> int:
        """The agent of the stores that lanes of one warp issue together."""
        threads = [self.shared.geometry.thread(lane) for lane in lanes.tolist()]
        of = f"lane {threads[0].lane}"
        if len(threads) == WARP:
            of = "all lanes"
        elif len(threads) > 1:
            of = f"lanes {', '.join(str(thread.lane) for thread in threads)}"
        name = f"bulk stores of warp {threads[0].warp} {of}"
        return self.shared.order.agent_of_lanes(lanes, name)

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

    def _check_fenced(
        self, action: str, position: int, lane: int, piece: Box | Span, issued: Knowledge
    ) -> None:
        """Reports a copy that does not see what a thread has written to global memory before."""
        found = None if self.writes is None else self.writes.hidden(lane, piece, issued)
        if found is not None:
            writer, written_at, address = found
            who = "its thread" if writer == lane else str(self.shared.geometry.thread(writer))
            self.log.report(
                ProxyError,
                f"{action} of global memory by a bulk copy, and write by {who} at "
                f"{self.log.site(written_at)}\n    with no fence.proxy.async between them that "
                "covers global memory",
                position,
                self.shared.geometry.thread(lane),
                address,
            )

    def _check_load(self, position: int, lane: int, piece: Box | Span) -> None:
        """Reports a copy that reads bytes which a store may still write."""
        if not self.outgoing or piece.is_outside or not self._marks(piece).any():
            return
        for store in self.outgoing:
            address = first_common(piece, store.target)
            if address is not None:
                what, why = ("read", "writes"), self._why_pending(store)
                self._report(position, lane, address, what, store.position, why)
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
                    what = ("write", "reads")
                    self._report(position, lane, address, what, load.position, _NOT_WAITED)
                    return
        marks = self._marks(target)
        if self.lints is not None and (marks & (_STORED if is_reduction else 0xFF)).any():
            for store in self.outgoing:
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
        self, position: int, lane: int, address: int, what: tuple[str, str], other: int, why: str
    ) -> None:
        action, does = what
        self.log.report(
            PendingCopyError,
            f"{action} of global memory, which a bulk copy {does}, issued at "
            f"{self.log.site(other)}\n    {why}",
            position,
            self.shared.geometry.thread(lane),
            address,
        )

    def _granules(self, rows: np.ndarray, unit: int) -> np.ndarray:
        """The granules of rows (n, k) of `unit` bytes, (n, granules)."""
        per_row = unit // self.shared.granule
        return (rows[:, :, None] * per_row + np.arange(per_row)).reshape(len(rows), -1)

    # -- waiting -----------------------------------------------------------------------------------

    def commit(self, lanes: np.ndarray) -> None:
        """cp.async.bulk.commit_group by lanes."""
        for lane in lanes.tolist():
            groups = self.groups[lane]
            groups.committed.append(groups.open)
            groups.total += 1
            groups.open = []

    def wait(self, position: int, lanes: np.ndarray, allowed: int, *, is_read_only: bool) -> None:
        """cp.async.bulk.wait_group: completes all but the newest groups of each lane, or makes them
        read shared memory."""
        due: dict[Store, list[int]] = {}
        for lane in lanes.tolist():
            if lane not in self.groups:
                continue
            groups = self.groups[lane]
            for group in groups.due(allowed, is_read_only=is_read_only):
                for store in group:
                    due.setdefault(store, []).append(lane)
        for store, waiting in due.items():
            if len(waiting) < store.lanes.size:
                store = self._part(store, np.array(waiting))
            self._read(store)
            if store.access is not None:
                self.shared.agents.end_for_lanes(store.access)
                store.access = None
            if not is_read_only:
                self._write(store)
                self.outgoing.remove(store)
                if not store.target.is_outside:
                    self._marks(store.target)[...] = 0
        for lane in lanes.tolist():
            if lane in self.groups:
                groups = self.groups[lane]
                groups.waited = position, allowed, groups.total, self._number
                groups.n_read = max(groups.n_read, groups.total - allowed)
                if not is_read_only:
                    del groups.committed[: max(len(groups.committed) - allowed, 0)]
        self._number += 1

    def _part(self, store: Store, lanes: np.ndarray) -> Store:
        """Makes a store of its own of the copies of some of a store's lanes, and returns it."""
        part = replace(store, lanes=lanes)
        store.lanes = np.setdiff1d(store.lanes, lanes)
        if store.access is not None:
            agents = [self._agent(store.lanes), self._agent(lanes)]
            store.access, part.access = self.shared.agents.share_out(store.access, agents)
        self.outgoing.append(part)
        for lane in lanes.tolist():
            for group in (*self.groups[lane].committed, self.groups[lane].open):
                group[:] = [part if each is store else each for each in group]
        return part

    def _why_pending(self, store: Store) -> str:
        """Text for a store that its lanes have not waited for, or not enough."""
        groups = self.groups[int(store.lanes[0])]
        position, allowed, total, number = groups.waited
        if number < store.number:
            return _NOT_WAITED
        site, group = self.log.site(position), groups.number_of(store)
        if group < total - allowed:
            return f"the wait at {site}\n    waits for its reads of shared memory only (.read)"
        return missed_by_wait("cp.async.bulk.commit_group", group, total, allowed, site)

    def _explain(self, agent: int, position: int) -> str:
        """Text for a lane that overwrites what a store reads, if a wait has missed the store."""
        for store in self.outgoing:
            access = store.access
            if access is not None and (access.agent, access.position) == (agent, position):
                why = self._why_pending(store)
                return "" if why == _NOT_WAITED else f"\n    {why}"
        return ""

    @property
    def is_busy(self) -> bool:
        """Whether copies may be pending."""
        return bool(self.incoming or self.outgoing)

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
        stores = [s for s in self.outgoing if not s.is_written]
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
                        hit, text = hit | found, f"reads, issued at {site}\n    {_NOT_WAITED}"
        for store in self.outgoing:
            if store.is_written or (is_atomic and store.reduction is not None):
                continue
            if not is_near(store.target):
                continue
            found = store.target.holds(addresses, size)
            if found.any():
                site = self.log.site(store.position)
                why = self._why_pending(store)
                hit, text = hit | found, f"writes, issued at {site}\n    {why}"
        return hit, text

    def finish(self) -> None:
        """Completes the copies that no thread has waited for, after all threads have ended."""
        self.incoming.clear()
        for store in self.outgoing:
            self._read(store)
            self._write(store)
        self.outgoing.clear()
        self.groups.clear()
        if self.lints is not None:
            self.lints.finish()

    def _complete(self, one: Load | Arrival) -> None:
        if isinstance(one, Load):
            self._fill(one)
            return
        order = self.shared.order
        self.copies.complete(one.lanes, one.before)
        known = join([one.known, *map(order.agent_knowledge, one.agents)])
        self.phases.arrive_for(one.position, one.lanes, one.where, known)

    def _fill(self, load: Load) -> None:
        words, request = self.shared.words(load.unit), load.request
        data = request.read().view(words.dtype)
        words[request.rows] = data.reshape(request.rows.size, *words.shape[1:])
        self.poison.copied_in(load.position, load.granules, self.shared.stride, load.source)
        if self.lints is not None:
            self.lints.deliver(load.position, request.lane, load.granules, request.piece)
        self.shared.agents.end(load.accesses)
        # The knowledge of its thread at the time of issue is not handed on.
        known = self.shared.order.agent_knowledge(load.accesses[0].agent)
        size = load.unit * request.rows.size * request.copies
        self.phases.complete(load.position, request.lane, load.where, size, known, load.phase)

    def _read(self, store: Store) -> None:
        if store.data is None:
            store.data = self.shared.words(CHUNK)[store.chunks].reshape(-1).view(np.uint8)

    def _write(self, store: Store) -> None:
        if store.is_written:
            return
        store.is_written = True
        if store.target.is_outside:
            return
        assert store.data is not None
        at = store.target.view(self.memory.words(1), ARENA_BASE, store.dtype)
        new = store.target.inside(store.data.view(store.dtype))
        if store.reduction is None:
            at[...] = new
        else:
            for _ in store.lanes:
                at[...] = store.reduction(at, new)
