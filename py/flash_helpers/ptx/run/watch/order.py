"""The order of events ("happened before") among the lanes of a cluster and the agents that work for
them.

Order is tracked with vector clocks (Lamport 1978; FastTrack, Flanagan and Freund 2009). Time is the
number of synchronising events so far. The accesses of a lane up to some time are known to another
lane if a chain of such events leads from the one to the other (PTX ISA 9.0, "Causality Order"):

- `bar` and `barrier` order the warps that take part, and the lanes of each;
- `barrier.cluster` orders the lanes that arrive before those that wait;
- `bar.warp.sync` orders the lanes of its mask;
- a release pattern on a word of shared memory orders its lane before the acquire pattern of a lane
  that reads the word, directly or through atomics of others ("Release and Acquire Patterns");
- an object that passes knowledge on, such as an mbarrier, takes it with `knowledge` and gives it
  with `acquire`.

Shuffles, votes and matrix instructions make lanes wait for each other but order no memory: "These
intrinsics do not imply a memory barrier" (CUDA Programming Guide, "Warp Shuffle Functions"), and
the PTX ISA calls `ldmatrix`, which all lanes make together, a weak memory operation.

An agent carries out asynchronous operations one after the other: it has a clock, as a lane has.
Lanes know the operations of an agent that they have waited for.

Agents access memory through the async proxy, lanes and cp.async through the generic one. A write
through the generic proxy is visible to an agent if a `fence.proxy.async` stands somewhere on the
chain between them (PTX ISA 9.0, "Async Proxy"; "membar/fence": it orders both proxies for the
thread that executes it, and composes with other synchronisation). So each lane has two sets of
times: those of accesses that it knows, and those of accesses that it knows to be visible to agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.run.geometry import Geometry

_OWN = 1 << 40
"""A time later than any other: a lane knows all of its own accesses."""

_FULL = 0xFFFF_FFFF
_MORE = 32
"""Columns that are made at once."""


@dataclass(frozen=True)
class Strength:
    """The part of an access in synchronisation (PTX ISA 9.0, "Operation Types"). `updates`: it
    reads and writes in one. `observes`: it returns the value that it reads; `red` does not."""

    is_strong: bool = False
    acquires: bool = False
    releases: bool = False
    updates: bool = False
    observes: bool = False


WEAK = Strength()


SHARED, GLOBAL = 1, 2
"""Planes of knowledge: the accesses to shared memory, and those to global memory, that are visible
to agents."""


@dataclass(frozen=True)
class Knowledge:
    """Knowledge at some moment in a cluster, (planes, columns) as in `Order`. The first plane has
    the times up to which accesses are known, the others those up to which they are known to be
    visible to agents. `fenced`: the same for knowledge that fences had released; None if there was
    none."""

    known: np.ndarray
    fenced: np.ndarray | None = None


def join(several: Sequence[Knowledge]) -> Knowledge:
    """The union of several pieces of knowledge, at least one."""
    fenced = [k.fenced for k in several if k.fenced is not None]
    return Knowledge(_latest([k.known for k in several]), _latest(fenced) if fenced else None)


class Order:
    """The knowledge that each lane of a batch has of the lanes and agents of its cluster.

    `_table[0, r, c]` is the time up to which row r knows all of column c; `_table[1]`, made by the
    first proxy fence, that up to which it knows that to be visible to agents; `_table[2]`, made
    where it matters, is the same for global memory. There is a row for
    each warp; a lane that knows more than its warp has one of its own. There is a column for each
    warp of a cluster: in a warp's row, that of the warp itself says up to when its lanes know each
    other. Behind these stand the columns of agents, and of lanes that have released something
    alone; the same for all clusters, by the rank of the block.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.now = 1
        self.floor = 0
        """Time up to which all lanes of every cluster know each other."""
        lanes = np.arange(geometry.lanes)
        self._place = geometry.place_of(lanes)
        self._own = (np.arange(geometry.warps), self._place[::WARP] // WARP)
        self._n_columns = geometry.warps_per_cluster
        self._table = np.zeros((1, geometry.warps, self._n_columns), np.int64)
        self._row_of = lanes // WARP
        self._rows_used: np.ndarray | None = self._own[0]
        # A place's own column, or that of its warp.
        self._column_of = np.arange(geometry.lanes_per_cluster) // WARP
        self._agents: dict[tuple[int, str], int] = {}
        self.generic_agents: set[int] = set()
        """Agents that write through the generic proxy: cp.async does, TMA and wgmma do not."""
        self._lanes_of: dict[int, np.ndarray] = {}
        self._has_lane_rows = self._has_lane_columns = False
        # Further knowledge of each lane about the lanes of its warp, by barriers of some of them.
        self._mates: np.ndarray | None = None
        # The knowledge of each lane at its last fence, and the knowledge that it observed by strong
        # reads.
        self._fenced: np.ndarray | None = None
        self._observed: np.ndarray | None = None
        # For words of shared memory, by the first granule: the lane that released it last, and its
        # knowledge.
        self._released: dict[int, tuple[int, np.ndarray]] = {}
        # By rank, columns that say that a block has begun: a lane that knows anything of the block
        # knows them.
        self._begun = self._new_columns(geometry.cluster if geometry.cluster > 1 else 0)
        if self._begun.size:
            self._table[0, self._own[0], self._begun[geometry.rank_of(lanes[::WARP])]] = 1

    # -- questions ---------------------------------------------------------------------------------

    def known(self, lanes: np.ndarray, others: np.ndarray) -> np.ndarray:
        """The times up to which lanes (n,) of the batch know other lanes (n, k), places of their
        cluster."""
        known = self._known(lanes[:, None], others)
        known[others == self._place[lanes][:, None]] = _OWN
        return known

    def known_to_all(self, lanes: np.ndarray, others: np.ndarray) -> np.ndarray:
        """As `known`, for all lanes of the lanes' warps, except for the other lanes themselves."""
        if not self._has_lane_rows and self._mates is None:
            return self._known(lanes[:, None], others)
        warp = _lanes_of_warps(lanes // WARP)[:, None, :]
        each = self._known(warp, others[:, :, None])
        each[self._place[warp] == others[:, :, None]] = _OWN
        return each.min(axis=2)

    def has_begun(self, lanes: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Whether lanes (n,) of the batch know that the blocks of ranks (n,) of their cluster, of
        several, have begun."""
        return self._table[0, self._row_of[lanes], self._begun[ranks]] > 0

    def known_to_any(self, lanes: np.ndarray, others: np.ndarray) -> np.ndarray:
        """The times up to which any of the lanes of one block knows other lanes (n,), places of
        other blocks."""
        return self._known(self._one_a_row(lanes)[:, None], others).max(axis=0)

    def agent_known_to_any(self, lanes: np.ndarray, agent: int) -> int:
        """The time up to which any of the lanes of the batch knows an agent."""
        return int(self._table[0, self._row_of[lanes], agent].max())

    def unknown(
        self, lanes: np.ndarray, warp: int, times: np.ndarray, masks: np.ndarray | None
    ) -> np.ndarray:
        """Whether accesses by lanes of one warp are unknown to lanes (n,) of the batch, except for
        the lanes that made them.

        `warp`: the warp's number in the cluster. `times`, `masks`: (n, k), the times, and the lanes
        that made the access; None if all lanes of the warp did.
        """
        unknown = times > self._table[0, self._row_of[lanes], warp][:, None]
        if not unknown.any():
            return unknown
        if masks is None:
            masks = np.full(times.shape, _FULL, np.uint32)
        own = self._place[lanes] // WARP == warp
        itself = np.where(own, np.uint32(1) << (lanes % WARP).astype(np.uint32), np.uint32(0))
        masks = masks & ~itself[:, None]
        unknown &= masks != 0
        if (self._has_lane_columns or self._mates is not None) and unknown.any():
            i, j = np.nonzero(unknown)
            known = self._known(lanes[i][:, None], warp * WARP + np.arange(WARP))
            unknown[i, j] = _is_missed(known, times[i, j], masks[i, j])
        return unknown

    def known_of_agents(
        self, lanes: np.ndarray, agents: np.ndarray, *, is_of_warp: bool = False
    ) -> np.ndarray:
        """The times up to which lanes (n,) of the batch know agents (n, k). `is_of_warp`: asks for
        all lanes of their warps."""
        if is_of_warp and self._has_lane_rows:
            warp = _lanes_of_warps(lanes // WARP)[:, None, :]
            return self._table[0, self._row_of[warp], agents[:, :, None]].min(axis=2)
        return self._table[0, self._row_of[lanes][:, None], agents]

    def _rows_of(self, lanes: np.ndarray) -> np.ndarray:
        """The rows of lanes, those of neighbours once."""
        rows = self._row_of[lanes]
        if rows.size > 1:
            rows = rows[np.concatenate([_FIRST, rows[1:] != rows[:-1]])]
        return rows

    def _one_a_row(self, lanes: np.ndarray) -> np.ndarray:
        return lanes[np.unique(self._row_of[lanes], return_index=True)[1]]

    def _known(self, lanes: np.ndarray, others: np.ndarray) -> np.ndarray:
        rows = self._row_of[lanes]
        known = self._table[0, rows, others // WARP]
        if self._has_lane_columns:
            known = np.maximum(known, self._table[0, rows, self._column_of[others]])
        if self._mates is not None:
            own = self._place[lanes] // WARP == others // WARP
            known = np.maximum(known, np.where(own, self._mates[lanes, others % WARP], 0))
        return known

    # -- what is taken along -----------------------------------------------------------------------

    def knowledge(self, lanes: np.ndarray) -> Knowledge:
        """The joint knowledge of lanes of one cluster now, with their own accesses: the content of
        a release by them."""
        warps, alone = _whole_warps(lanes)
        if alone.size:
            self._give_columns(self._place[alone])
            self._tell_of_mates(alone)
        columns = np.concatenate([self._own[1][warps], self._column_of[self._place[alone]]])
        return self._taken(lanes, columns)

    def knowledge_alone(self, lanes: np.ndarray) -> np.ndarray:
        """As `knowledge`, of each of some lanes by itself, (planes, n, columns)."""
        known = self._all_known(lanes)
        self.now += 1
        return known

    def relaxed_knowledge(self, lanes: np.ndarray) -> Knowledge:
        """As `knowledge`, for a relaxed arrival of lanes, which releases nothing itself: the
        content is what their last fences have released, and which blocks have begun."""
        known = np.zeros(self._table.shape[::2], np.int64)
        rows = self._rows_of(lanes)
        known[0, self._begun] = self._table[0, rows[:, None], self._begun].max(axis=0)
        if self._fenced is not None:
            known = np.maximum(known, self._of_lanes(self._fenced)[:, lanes].max(axis=1))
        return Knowledge(known)

    def knowledge_of_each(self, lanes: np.ndarray) -> Knowledge:
        """The knowledge that each one of some lanes of a warp has now: the part on which they can
        all rely."""
        if lanes.size == 1:
            return self.knowledge(lanes)
        self._tell_of_mates(lanes)
        known = self._table[:, self._rows_of(lanes)]
        if known.shape[1] > 1:
            self._spread_to_lanes(known)
        self.now += 1
        return Knowledge(known.min(axis=1))

    def common_knowledge(self, warps: np.ndarray) -> np.ndarray:
        """The common knowledge of all lanes of each whole warp now, with the warp's own accesses,
        (planes, n, columns). An instruction that they execute together may rely on it. The least
        times of several warps are their common knowledge."""
        rows = self._row_of[_lanes_of_warps(warps)]
        if (rows == rows[:, :1]).all():
            rows = rows[:, :1]
        known = self._table[:, rows]
        known[0, np.arange(warps.size), :, self._own[1][warps]] = self.now
        self._spread_to_lanes(known)
        self.now += 1
        return known[:, :, 0] if known.shape[2] == 1 else known.min(axis=2)

    def _spread_to_lanes(self, known: np.ndarray) -> None:
        """Raises the columns of lanes to those of their warps, (..., columns): a lane that knows a
        warp knows its lanes. The least value of each column is then known to all."""
        if self._has_lane_columns:
            places = np.flatnonzero(self._column_of >= self.geometry.warps_per_cluster)
            columns = self._column_of[places]
            known[..., columns] = np.maximum(known[..., columns], known[..., places // WARP])

    def acquire(self, lanes: np.ndarray, several: Sequence[Knowledge]) -> None:
        """Lanes of one cluster learn pieces of knowledge."""
        self.acquire_each([(lanes, several)])

    def acquire_each(self, several: Sequence[tuple[np.ndarray, Sequence[Knowledge]]]) -> None:
        """Lanes learn pieces of knowledge, each group of lanes its own. A group is of one
        cluster."""
        if several:
            _, alone = _whole_warps(np.concatenate([lanes for lanes, _ in several]))
            self._give_rows(alone)
            self._learn([(lanes, join(known)) for lanes, known in several])

    def arrive(self, lanes: np.ndarray) -> Knowledge:
        """The knowledge of the warps of one block whose lanes arrive at a barrier, with their own
        accesses."""
        warps = lanes // WARP
        return self._taken(lanes, self._own[1][warps])

    def release(self, arrived: Sequence[Knowledge], lanes: np.ndarray) -> None:
        """Lanes of a block leave a barrier with the knowledge of all lanes that arrived there."""
        if self._has_lane_rows:
            warps, _ = _whole_warps(lanes)
            self._share(warps)
        self._learn([(lanes, join(arrived))])

    def barrier_all(self) -> None:
        """All warps of every block pass a barrier of the block."""
        geometry = self.geometry
        if self._has_lane_rows or len(self._table) * self._n_columns > geometry.warps_per_block:
            self._share(self._own[0])
            shape = (len(self._table), -1, len(geometry.blocks), self._table.shape[2])
            of_warps = self._table[:, : geometry.warps].reshape(shape)
            of_warps[:] = of_warps.max(axis=1, keepdims=True)
            rank = np.arange(len(geometry.blocks)) % geometry.cluster
            columns = rank[:, None] * geometry.warps_per_block + np.arange(geometry.warps_per_block)
            of_warps[0, :, np.arange(len(rank))[:, None], columns] = self.now
            self._raise_floor()
        else:
            self._table[0] = self.floor = self.now
        self.now += 1

    def sync_warps(self, lanes: np.ndarray, masks: np.ndarray) -> None:
        """Lanes of the batch pass a barrier of their warp. `masks`: the lanes that it orders, one
        element per lane, or one for all. Lanes of a mask that have ended count as arrived."""
        if int(masks.min()) == _FULL:
            warps = self._own[0] if lanes.size == self.geometry.lanes else np.unique(lanes // WARP)
            if self._has_lane_rows:
                self._share(warps)
            self._table[0, warps, self._own[1][warps]] = self.now
            if self.geometry.warps_per_cluster == 1:
                self._raise_floor()
            if self._fenced is not None:
                together = _lanes_of_warps(warps)
                self._fenced[:, together] = self._fenced[:, together].max(axis=2, keepdims=True)
        else:
            all_masks = np.broadcast_to(masks, lanes.shape)
            for mask in np.unique(all_masks):
                warps = np.unique(lanes[all_masks == mask] // WARP)
                self._sync_some(_lanes_of_warps(warps), np.flatnonzero(int(mask) >> _BITS & 1))
        self.now += 1

    def _sync_some(self, warps: np.ndarray, members: np.ndarray) -> None:
        """`warps`: the lanes of each, (n, 32). `members`: which of them pass the barrier."""
        together = warps[:, members]
        if self._has_lane_rows:
            apart = (self._row_of[together] != self._row_of[together[:, :1]]).any(axis=1)
            self._give_rows(together[apart].reshape(-1))
            rows = self._row_of[together[apart]]
            self._table[:, rows] = self._table[:, rows].max(axis=2, keepdims=True)
        if self._mates is None:
            self._mates = np.zeros((self.geometry.lanes, WARP), np.int64)
        self._mates[together] = self._mates[together].max(axis=1, keepdims=True)
        self._mates[together[:, :, None], members] = self.now
        if self._fenced is not None:
            self._fenced[:, together] = self._fenced[:, together].max(axis=2, keepdims=True)

    def _taken(self, lanes: np.ndarray, columns: np.ndarray) -> Knowledge:
        """The knowledge that a release takes from lanes. `columns`: columns of the lanes' own
        accesses."""
        known = self._table[:, self._rows_of(lanes)].max(axis=1)
        known[0, columns] = self.now
        fenced = None if self._fenced is None else self._fenced[:, lanes].max(axis=1)
        # The accesses of a lane after it arrived without waiting are not part of its knowledge.
        self.now += 1
        return Knowledge(known, fenced)

    def _learn(self, several: Sequence[tuple[np.ndarray, Knowledge]]) -> None:
        for lanes, knowledge in several:
            self._table = _fit(self._table, (len(knowledge.known), 0, 0))
            _raise_to(self._table, self._rows_of(lanes), knowledge.known)
            if knowledge.fenced is not None:
                self._fenced = self._of_lanes(self._fenced)
                _raise_to(self._fenced, lanes, knowledge.fenced)
        self._raise_floor()
        self.now += 1

    # -- agents ------------------------------------------------------------------------------------

    def agent(self, block: int, name: str) -> int:
        """The column of an agent of a block of the batch. Agents of one name share a column in all
        clusters; errors show the name."""
        key = (block % self.geometry.cluster, name)
        if key not in self._agents:
            self._agents[key] = int(self._new_columns(1)[0])
        return self._agents[key]

    def agent_of_lanes(self, lanes: np.ndarray, name: str) -> int:
        """An agent for whose operations lanes of one warp wait, each for its own: another lane
        knows them as soon as it knows what each of these lanes has done since. It has no column,
        and a number below zero."""
        key = (int(self.geometry.rank_of(int(lanes[0]))), name)
        if key not in self._agents:
            self._agents[key] = -1 - len(self._lanes_of)
            self._lanes_of[self._agents[key]] = self._place[lanes]
        return self._agents[key]

    def known_reads(self, lanes: np.ndarray, agent: int) -> np.ndarray:
        """The times up to which lanes (n,) of the batch know the reads of any agent, (n, 1)."""
        if agent >= 0:
            return self.known_of_agents(lanes, np.full((lanes.size, 1), agent))
        places = self._lanes_of[agent]
        each = self.known(lanes, np.broadcast_to(places, (lanes.size, places.size)))
        return each.min(axis=1, keepdims=True)

    def known_reads_in(self, known: np.ndarray, agent: int) -> np.ndarray:
        """As `known_reads`, in one plane (n, columns) of `stacked`."""
        if agent >= 0:
            return known[:, agent, None]
        places = self._lanes_of[agent]
        each = self.lanes_in(known, np.broadcast_to(places, (len(known), places.size)))
        return each.min(axis=1, keepdims=True)

    def agent_name(self, agent: int) -> str:
        """Its name, with the rank of its block where there are several in a cluster."""
        rank, name = next(key for key, column in self._agents.items() if column == agent)
        return name if self.geometry.cluster == 1 else f"{name} of the block of rank {rank}"

    def agent_knowledge(self, agent: int) -> Knowledge:
        """The knowledge gained by a wait for all operations of an agent until now."""
        known = np.zeros((1, self._n_columns), np.int64)
        known[0, agent] = self.now
        self.now += 1
        return Knowledge(known)

    def fence_agent(self, lane: int, agent: int) -> None:
        """A fence of a lane releases what it knows of an agent, and nothing else. It is visible to
        other agents then."""
        self._table = _fit(self._table, (2, 0, 0))
        self._fenced = self._of_lanes(self._fenced)
        known = self._table[0, self._row_of[lane], agent]
        self._table[1, self._row_of[lane], agent] = known
        self._fenced[:2, lane, agent] = known

    def proxy_fence(self, lanes: np.ndarray, planes: Sequence[int] = (SHARED,)) -> None:
        """Lanes of the batch execute `fence.proxy.async`: their own and known accesses become
        visible to agents, for every lane that knows of the fence. `planes`: SHARED, GLOBAL, by the
        memory that it covers."""
        self._table = _fit(self._table, (max(planes) + 1, 0, 0))
        warps, alone = _whole_warps(lanes)
        if alone.size:
            self._give_columns(self._place[alone])
            self._give_rows(alone)
            self._tell_of_mates(alone)
        rows = self._rows_of(lanes)
        whole = _lanes_of_warps(warps)
        for plane in planes:
            table = self._table[plane]
            table[rows] = np.maximum(table[rows], self._table[0, rows])
            table[self._row_of[whole], self._place[whole] // WARP] = self.now
            table[self._row_of[alone], self._column_of[self._place[alone]]] = self.now
        self.now += 1

    def stacked(self, several: Sequence[Knowledge], planes: int = 2) -> np.ndarray:
        """Knowledge of several moments as one array, (planes, n, columns)."""
        shape = (planes, self._n_columns)
        return np.stack([_fit(knowledge.known, shape)[:planes] for knowledge in several], axis=1)

    def fitted(self, known: np.ndarray, planes: int = 2) -> np.ndarray:
        """Knowledge (planes, n, columns) of a moment, with the planes and columns that have come
        since, as `stacked`."""
        return _fit(known, (planes, 0, self._n_columns))

    def lanes_in(self, known: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Times of places (n, k) in one plane (n, columns) of `stacked`."""
        rows = np.arange(len(known))[:, None]
        return np.maximum(known[rows, places // WARP], known[rows, self._column_of[places]])

    def warps_in(self, knowledge: Knowledge) -> np.ndarray:
        """The times up to which each warp of the cluster is known, (warps,): for known accesses of
        single lanes, and for accesses of the whole warp."""
        known = self.stacked([knowledge])[0, 0]
        if not self._has_lane_columns:
            return known[: self.geometry.warps_per_cluster]
        each = known[self._column_of].reshape(-1, WARP).max(axis=1)
        return np.maximum(known[: each.size], each)

    def unknown_in(
        self, known: np.ndarray, warp: int, times: np.ndarray, masks: np.ndarray | None
    ) -> np.ndarray:
        """As `unknown`, in one plane (n, columns) of `stacked`."""
        unknown = times > known[:, warp][:, None]
        if masks is not None and self._has_lane_columns and unknown.any():
            i, j = np.nonzero(unknown)
            columns = self._column_of[warp * WARP + np.arange(WARP)]
            unknown[i, j] = _is_missed(known[i[:, None], columns], times[i, j], masks[i, j])
        return unknown

    # -- flags -------------------------------------------------------------------------------------

    def fence(self, lanes: np.ndarray, *, acquires: bool, releases: bool) -> None:
        """Lanes of the batch execute a fence. Values that they observed by strong reads before it
        bring knowledge after it, and a strong write after it releases the lanes' knowledge."""
        if acquires and self._observed is not None:
            self._learn_alone(lanes, self._observed[:, lanes])
        if releases:
            known = self._all_known(lanes)
            self._fenced = self._of_lanes(self._fenced)
            self._fenced[:, lanes] = known
            self.now += 1

    def strong_read(self, lanes: np.ndarray, words: np.ndarray, *, acquires: bool) -> None:
        """Strong reads by lanes of the batch. `words`: the first granule of each."""
        if self._released:
            for word in np.unique(words).tolist():
                if word in self._released:
                    self._observe(lanes[words == word], self._released[word][1], acquires)

    def strong_write(self, lanes: np.ndarray, words: np.ndarray, strength: Strength) -> None:
        """Strong writes by lanes of the batch, one after the other. `words`: the first granule of
        each. Knowledge that was released before an update stays released."""
        if not self._released and not strength.releases and self._fenced is None:
            return
        for lane, word in zip(lanes.tolist(), words.tolist(), strict=True):
            writer, before = self._released.pop(word, (None, None))
            if before is not None and strength.observes:
                self._observe(np.array([lane]), before, strength.acquires)
            known = None
            if strength.releases:
                known = self._all_known(np.array([lane]))[:, 0]
            elif self._fenced is not None:
                known = self._fenced[:, lane].copy()
            if before is not None and (strength.updates or writer == lane):
                known = before if known is None else _latest([known, before])
            if known is not None:
                self._released[word] = lane, known
        self.now += 1

    def weak_write(self, rows: np.ndarray, width: int) -> None:
        """Words of some granules are written by weak writes, so that reading them acquires
        nothing."""
        if self._released:
            words = np.array(list(self._released))
            for word in words[np.isin(words // width, rows)].tolist():
                del self._released[word]

    def _observe(self, lanes: np.ndarray, released: np.ndarray, acquires: bool) -> None:
        self._observed = self._of_lanes(self._observed)
        _raise_to(self._observed, lanes, released)
        if acquires:
            self._learn_alone(lanes, released[:, None])

    def _learn_alone(self, lanes: np.ndarray, known: np.ndarray) -> None:
        """Lanes learn knowledge, (planes, n or 1, columns), each for itself."""
        self._table = _fit(self._table, (len(known), 0, 0))
        self._give_rows(lanes)
        part = (slice(len(known)), self._row_of[lanes], slice(known.shape[2]))
        self._table[part] = np.maximum(self._table[part], known)

    def _all_known(self, lanes: np.ndarray) -> np.ndarray:
        """The knowledge and actions of lanes of the batch, (planes, n, columns)."""
        self._give_columns(self._place[lanes])
        self._tell_of_mates(lanes)
        known = self._table[:, self._row_of[lanes]]
        known[0, np.arange(lanes.size), self._column_of[self._place[lanes]]] = self.now
        return known

    # -- the table ---------------------------------------------------------------------------------

    def _of_lanes(self, array: np.ndarray | None) -> np.ndarray:
        """An array as large as the table, with a row for every lane."""
        shape = (len(self._table), self.geometry.lanes, self._table.shape[2])
        return np.zeros(shape, np.int64) if array is None else _fit(array, shape)

    def _new_columns(self, count: int) -> np.ndarray:
        first, self._n_columns = self._n_columns, self._n_columns + count
        if self._n_columns > self._table.shape[2]:
            self._table = _fit(self._table, (0, 0, self._n_columns + _MORE))
            if self._fenced is not None:
                self._fenced = self._of_lanes(self._fenced)
            if self._observed is not None:
                self._observed = self._of_lanes(self._observed)
        return np.arange(first, self._n_columns)

    def _give_columns(self, places: np.ndarray) -> None:
        """Gives places columns of their own."""
        new = np.unique(places[self._column_of[places] < self.geometry.warps_per_cluster])
        if new.size:
            self._column_of[new] = self._new_columns(new.size)
            self._has_lane_columns = True

    def _give_rows(self, lanes: np.ndarray) -> None:
        """Gives lanes rows of their own."""
        warps = self.geometry.warps
        new = lanes[self._row_of[lanes] < warps]
        if new.size:
            self._table = _fit(self._table, (0, warps + self.geometry.lanes, 0))
            self._table[:, warps + new] = self._table[:, self._row_of[new]]
            self._row_of[new] = warps + new
            self._rows_used = None
            self._has_lane_rows = True

    def _share(self, warps: np.ndarray) -> None:
        """Lets the lanes of each warp know what any of them knows."""
        lanes = _lanes_of_warps(warps)
        rows = self._row_of[lanes]
        apart = (rows != warps[:, None]).any(axis=1)
        if apart.any():
            self._table[:, warps[apart]] = self._table[:, rows[apart]].max(axis=2)
            self._row_of[lanes] = warps[:, None]
            self._rows_used = None
            self._has_lane_rows = bool((self._row_of >= self.geometry.warps).any())

    def _tell_of_mates(self, lanes: np.ndarray) -> None:
        """Moves the lanes' knowledge of single lanes of their warp to the table."""
        if self._mates is None:
            return
        own = self._place[lanes] // WARP
        known = self._table[0, self._row_of[lanes], own]
        i, j = np.nonzero(self._mates[lanes] > known[:, None])
        if i.size:
            places = own[i] * WARP + j
            self._give_columns(places)
            self._give_rows(lanes[i])
            part = (0, self._row_of[lanes[i]], self._column_of[places])
            self._table[part] = np.maximum(self._table[part], self._mates[lanes[i], j])

    def _raise_floor(self) -> None:
        if self._rows_used is None:
            self._rows_used = np.unique(self._row_of)
        self.floor = int(self._table[0, self._rows_used, : self.geometry.warps_per_cluster].min())


_BITS = np.arange(WARP)
_FIRST = np.ones(1, bool)


def _lanes_of_warps(warps: np.ndarray) -> np.ndarray:
    """The lanes of each warp, (warps, 32)."""
    return warps[:, None] * WARP + _BITS


def _whole_warps(lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The warps of which all lanes are given, and the lanes of the other warps."""
    return _whole_warps_in(lanes.tobytes())


@lru_cache(maxsize=1024)
def _whole_warps_in(of: bytes) -> tuple[np.ndarray, np.ndarray]:
    """As `_whole_warps`, of the bytes of the lanes: those that synchronise once do so again."""
    lanes = np.frombuffer(of, np.int64)
    if lanes.size % WARP == 0:
        warps = lanes[::WARP] // WARP
        if (lanes.reshape(-1, WARP) == _lanes_of_warps(warps)).all():
            return warps, lanes[:0]
    if lanes.size == 1:
        return lanes[:0], lanes
    warps, index, counts = np.unique(lanes // WARP, return_inverse=True, return_counts=True)
    whole = counts == WARP
    return warps[whole], lanes[~whole[index]]


def _is_missed(known: np.ndarray, times: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Whether lanes of masks (n,) acted at times (n,) that are not known, (n, 32)."""
    made = masks[:, None] >> _BITS.astype(np.uint32) & 1
    return ((known < times[:, None]) & (made != 0)).any(axis=1)


def _fit(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The array with zeros behind it so that it has at least this shape."""
    larger = tuple(map(max, array.shape, shape))
    if larger == array.shape:
        return array
    result = np.zeros(larger, array.dtype)
    result[tuple(map(slice, array.shape))] = array
    return result


def _latest(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The latest of times (planes, columns); missing columns count as 0."""
    if len(arrays) == 1:
        return arrays[0]
    shape = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    return np.max([_fit(array, shape) for array in arrays], axis=0)


def _raise_to(table: np.ndarray, rows: np.ndarray, known: np.ndarray) -> None:
    """Raises rows of a table to at least the known times, (planes, columns)."""
    planes, columns = known.shape
    part = (slice(planes), rows, slice(columns))
    table[part] = np.maximum(table[part], known[:, None])
