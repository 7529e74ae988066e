"""Races between lanes: each access to shared memory is checked against those before it.

Two accesses by different lanes, one of them a write, race unless the earlier one is known to the
lane that makes the later one (`order`), or both are strong. That holds for every schedule of the
threads, not only for the one that the simulator happened to choose.

Each lane of a warp takes part in its `ldmatrix` and `stmatrix`, whichever lane gives an address
(PTX ISA 9.0: they "collectively" load and store, and are `.sync.aligned`). So two of them are in
the program order of every lane, and do not race within the warp. An access by single lanes races
with either of them, and with an access by another lane: `.sync` promises no order of memory
("bar.warp.sync" alone does), and ptxas 13.0 does exchange `st.shared` and a later `ld.shared`
where the addresses of each lane differ. It exchanges no `ldmatrix` and `stmatrix`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import MbarrierError, PendingCopyError, RaceError, SimulatorError
from flash_helpers.ptx.run.memory.regions import Selection, word_view
from flash_helpers.ptx.run.memory.shared import SharedMemory
from flash_helpers.ptx.run.watch.marks import (
    BY_AGENT,
    CONFLICTS,
    PENDING,
    SITE_BITS,
    SITE_MASK,
    UNWRITTEN,
    History,
    Marks,
    Views,
    missing_between,
    object_made_at,
)
from flash_helpers.ptx.run.watch.order import WEAK, Strength


@dataclass(frozen=True)
class _Access:
    """An access by some lanes to words of one width. `rows`: index of each lane's word.
    `is_of_warp`: all lanes of each warp make it, whichever lane gives the address."""

    action: str
    position: int
    rows: np.ndarray
    view: Views
    selection: Selection
    is_of_warp: bool


class LaneWatch:
    """The watcher over the accesses of lanes to the shared memory of a batch. `touched`: called
    with each access, if lints are collected (`Lints.touch`)."""

    def __init__(self, memory: SharedMemory, marks: Marks) -> None:
        self.marks = marks
        self.geometry = marks.geometry
        self.order = marks.order
        self.log = marks.log
        self.lane_ids = memory.lane_ids
        self.touched: Callable[[str, int, np.ndarray, int, np.ndarray, bool], None] | None = None
        self._matrix_writes: set[int] = set()
        """Indices of the instructions that have written matrices."""
        self._data = memory.data
        self._lane_bits = np.uint32(1) << (self.lane_ids % WARP).astype(np.uint32)

    def note(
        self,
        action: str,
        position: int,
        rows: np.ndarray,
        size: int,
        selection: Selection,
        value: np.ndarray | None = None,
        strength: Strength = WEAK,
        *,
        is_of_warp: bool = False,
    ) -> np.ndarray | None:
        """Checks and records an access by lanes, done or about to be done, to words of `size`
        bytes.

        `action`: "read"; "write", of `value`; "copy", a write of words that are pending until
        `end_copy`, where lanes that name one word must have one `value`; "atomic access". `rows`:
        index of each lane's word in `words(size)`. `is_of_warp`: all lanes of each warp make it.
        Returns which granules of each word the lanes see although nothing has written them, (words,
        granules), or None.
        """
        view = self.marks.view(size)
        if self.touched is not None:
            lanes = self.lane_ids[selection]
            self.touched(action, position, rows, view.width, lanes, is_of_warp)
        told = "write" if action == "copy" else action
        access = _Access(told, position, rows, view, selection, is_of_warp)
        written = view.written[rows]
        # Memory that was never written may be written: only codes of writes and copies matter then.
        is_first = written >= UNWRITTEN if action in ("write", "copy") else None
        unwritten = self._check_written(
            access,
            written if is_first is None else np.where(is_first, 0, written),
            value if action == "write" else None,
        )
        kind = "read" if action == "read" else "write"
        for name in CONFLICTS[kind, strength.is_strong]:
            self._check_history(access, self.marks.histories[name])
        if kind == "write":
            self._check_reads_by_agents(access)
        if strength.is_strong:
            self._order_flags(access, strength, kind)
            if is_first is not None and is_first.any():
                # Not in `_written`: strong accesses do not race with each other.
                view.written[rows] = np.where(is_first, 0, written)
            self._mark(access, self.marks.histories[f"strong {kind}"])
        elif kind == "read":
            self._mark(access, self.marks.histories["matrix read" if is_of_warp else "read"])
        else:
            if is_of_warp:
                self._matrix_writes.add(position)
            self.order.weak_write(rows, view.width)
            view.written[rows] = (
                PENDING | position if action == "copy" else self.marks.code(position)
            )
            assert value is not None  # only atomics have none, and they are strong
            self._check_simultaneous(access, value)
        if is_first is not None and strength.observes and is_first.any():
            unwritten = is_first.reshape(rows.size, -1)
        return unwritten

    def hold(self, position: int, lanes: np.ndarray, rows: np.ndarray) -> None:
        """Lanes make mbarrier objects: from now on nothing else may touch their bytes. `rows`:
        indices of the words of 8 bytes."""
        self.note("write", position, rows, 8, lanes, np.arange(rows.size))
        if self.marks.objects < 0:
            self.marks.objects = self.order.agent(0, "mbarrier object")
        view = self.marks.view(8)
        view.written[rows] = PENDING | BY_AGENT | position
        view.writer[rows] = self.marks.objects

    def let_go(self, position: int, lanes: np.ndarray, rows: np.ndarray) -> None:
        """Lanes end mbarrier objects; the contents of their bytes are unknown from then on."""
        view = self.marks.view(8)
        view.written[rows] = UNWRITTEN
        self.note("write", position, rows, 8, lanes, np.arange(rows.size))

    # -- checks ------------------------------------------------------------------------------------

    def _check_written(
        self, access: _Access, codes: np.ndarray, value: np.ndarray | None
    ) -> np.ndarray | None:
        """Checks an access against the last weak writes; returns the granules that have none, or
        None."""
        if int(codes.max()) <= self.marks.floor:
            return None
        # Some granule was not written before the last barrier of all warps.
        n = access.rows.size
        codes = codes.reshape(n, -1)
        writer = access.view.writer[access.rows].reshape(n, -1)
        is_read_by_all = access.is_of_warp and access.action == "read"
        known_to = self.order.known_to_all if is_read_by_all else self.order.known
        lanes = self.lane_ids[access.selection]
        by_agent = codes & BY_AGENT != 0
        known = known_to(lanes, np.where(by_agent, 0, writer) if by_agent.any() else writer)
        if by_agent.any():
            agents = np.where(by_agent, writer, 0)
            of_agents = self.order.known_of_agents(lanes, agents, is_of_warp=is_read_by_all)
            known = np.where(by_agent, of_agents, known)
            codes = codes & ~BY_AGENT
        bad = (codes >> SITE_BITS) > known
        if access.is_of_warp and bad.any():
            own = ~by_agent & (writer // WARP == self.marks.warp_place[lanes][:, None])
            sites = np.where(codes < PENDING, codes & SITE_MASK, -1)
            bad &= ~(own & np.isin(sites, list(self._matrix_writes)))
        if value is not None and bad.any():
            # As in `_check_simultaneous`, where the lanes came at different times.
            words = word_view(self._data, access.view.width * self.marks.granule)[access.rows]
            same = (words == value).reshape(n, -1).all(axis=1)
            bad &= ~(same[:, None] & (codes & SITE_MASK == access.position) & (codes < PENDING))
        for kind, chosen in (
            (PendingCopyError, bad & (codes >= PENDING) & (codes < UNWRITTEN)),
            (RaceError, bad & (codes < PENDING)),
        ):
            hit = chosen.any(axis=1)
            if not hit.any():
                continue
            first = int(np.flatnonzero(hit)[0])
            column = int(np.flatnonzero(chosen[first])[0])
            site = int(codes[first, column]) & SITE_MASK
            count, who = int(hit.sum()), int(writer[first, column])
            agent, story = None, ""
            if by_agent[first, column]:
                agent, story = (
                    self.order.agent_name(who),
                    self.marks.explain(who, lanes[first], site),
                )
            if agent and who == self.marks.objects:
                text = object_made_at(self.log.site(site))
                self._report(MbarrierError, access, first, column, count, text)
            elif kind is RaceError:
                other = f"write by {agent or self._name(access, first, who)}"
                self._report_race(access, first, column, other, site, count, agent, story)
            else:
                text = self.marks.will_write(agent, who, lanes[first], site) + story
                self._report(kind, access, first, column, count, text)
        unwritten = codes >= UNWRITTEN
        return unwritten if unwritten.any() else None

    def _check_history(self, access: _Access, history: History) -> None:
        """Checks an access against those of one kind by other lanes of the block."""
        if history.newest <= self.marks.floor:
            return
        all_codes, all_masks = access.view.of(history)
        for warp in range(self.geometry.warps_per_cluster):
            index = access.view.warp_rows[warp] + access.rows
            codes = all_codes[index]
            if int(codes.max()) <= self.marks.floor:
                continue
            codes = codes.reshape(access.rows.size, -1)
            masks = None if all_masks is None else all_masks[index].reshape(codes.shape)
            lanes = self.lane_ids[access.selection]
            bad = self.order.unknown(lanes, warp, codes >> SITE_BITS, masks)
            if access.is_of_warp and masks is None:
                bad &= (self.marks.warp_place[lanes] != warp)[:, None]
            hit = bad.any(axis=1)
            if not hit.any():
                continue
            # A race between warps tells more than one within a warp.
            apart = hit & (self.marks.warp_place[lanes] != warp)
            first = int((apart if apart.any() else hit).argmax())
            column = int(bad[first].argmax())
            code = int(codes[first, column])
            own = warp == self.marks.warp_place[lanes[first]]
            who = "all lanes of the same warp" if own else self.marks.warp_name(warp, lanes[first])
            if own and masks is not None:
                each = masks[first, column] & self._lane_bits[:WARP, None]
                times = np.full(each.shape, code >> SITE_BITS)
                other = self.order.unknown(lanes[first].repeat(WARP), warp, times, each).argmax()
                who = f"lane {other} of the same warp"
            site, count = code & SITE_MASK, int(hit.sum())
            self._report_race(access, first, column, f"{history.action} by {who}", site, count)

    def _check_reads_by_agents(self, access: _Access) -> None:
        """Checks writes by lanes against reads by agents."""
        lanes = self.lane_ids[access.selection]
        for agent, reads in self.marks.agent_reads.items():
            codes = reads.reshape(-1, access.view.width)[access.rows]
            if not codes.any():
                continue
            bad = codes >> SITE_BITS > self.order.known_reads(lanes, agent)
            if bad.any():
                i, j, count, text = self.marks.read_by_agent(agent, codes, bad, lanes)
                self._report(RaceError, access, i, j, count, text)

    def _check_simultaneous(self, access: _Access, value: np.ndarray) -> None:
        """Records the writer; two lanes in one instruction race, unless they write one value: which
        of them performs the final write is undefined (CUDA Programming Guide, "SIMT
        Architecture")."""
        view, rows = access.view, access.rows
        lanes = self.marks.place[access.selection]
        lanes = lanes[:, None] if view.width > 1 else lanes
        view.writer[rows] = lanes
        lost = np.flatnonzero((view.writer[rows] != lanes).reshape(rows.size, -1).any(axis=1))
        if not lost.size:
            return
        winners = view.writer[rows[lost]].reshape(lost.size, -1)[:, 0]
        chosen = self.lane_ids[access.selection]
        index_of = np.zeros(self.lane_ids.size, np.int64)
        index_of[chosen] = np.arange(chosen.size)
        clusters = self.geometry.cluster_of(chosen[lost])
        won = index_of[self.geometry.lane_at(clusters, winners.astype(np.int64))]
        differ = np.flatnonzero((value[lost] != value[won]).reshape(lost.size, -1).any(axis=1))
        if differ.size:
            first = int(lost[differ[0]])
            who = self._name(access, first, int(winners[differ[0]]))
            text = (
                f" and write of another value by {who}\n    in the same instruction: which of the "
                "two stays is undefined"
            )
            self._report(RaceError, access, first, 0, int(differ.size), text)

    # -- marks -------------------------------------------------------------------------------------

    def _order_flags(self, access: _Access, strength: Strength, kind: str) -> None:
        lanes, words = self.lane_ids[access.selection], access.rows * access.view.width
        if kind == "read":
            self.order.strong_read(lanes, words, acquires=strength.acquires)
        else:
            self.order.strong_write(lanes, words, strength)

    def _mark(self, access: _Access, history: History) -> None:
        """Records an access by one or more lanes of each warp."""
        code = self.marks.code(access.position)
        codes, masks = access.view.of(history)
        index = access.view.lane_rows[access.selection] + access.rows
        if masks is None:
            codes[index] = history.newest = code
            return
        bits = self._lane_bits[access.selection]
        bits = bits[:, None] if access.view.width > 1 else bits
        before = None
        if history.newest > self.marks.floor:
            before = codes[index], masks[index]
        codes[index] = history.newest = code
        masks[index] = bits
        if (masks[index] != bits).any():
            # Lanes that read one granule together.
            masks[index] = 0
            np.bitwise_or.at(masks, index, bits)
        if before is not None:
            self._keep_unknown(access, index, *before, codes, masks)

    def _keep_unknown(
        self,
        access: _Access,
        index: np.ndarray,
        old_codes: np.ndarray,
        old_masks: np.ndarray,
        codes: np.ndarray,
        masks: np.ndarray,
    ) -> None:
        """Adds to the record the earlier accesses by other lanes of the warp that the new lanes do
        not know, since a lane that knows the new accesses need not know those. The time is then the
        first one."""
        lanes, shape = self.lane_ids[access.selection], (access.rows.size, -1)
        old_masks = old_masks & ~masks[index]
        times = np.where(old_masks != 0, old_codes >> SITE_BITS, 0).reshape(shape)
        if int(times.max()) <= self.order.floor:
            return
        keep = np.zeros(times.shape, bool)
        for warp in np.unique(self.marks.warp_place[lanes]).tolist():
            mine = np.flatnonzero(self.marks.warp_place[lanes] == warp)
            others = old_masks.reshape(shape)[mine]
            keep[mine] = self.order.unknown(lanes[mine], warp, times[mine], others)
        if keep.any():
            i, j = np.nonzero(keep)
            flat = (index.reshape(-1)[i] * access.view.width) + j
            codes.reshape(-1)[flat] = old_codes.reshape(shape)[i, j]
            masks.reshape(-1)[flat] |= old_masks.reshape(shape)[i, j]

    # -- what is said of it ------------------------------------------------------------------------

    def _report_race(
        self,
        access: _Access,
        first: int,
        column: int,
        other: str,
        site: int,
        count: int,
        agent: str | None = None,
        story: str = "",
    ) -> None:
        """`other`: the earlier access, in words. `agent`: the agent that made it, if it was no
        lane. `story`: text to be added."""
        how = missing_between(RaceError, agent is not None)
        if "same warp" in other:
            how = "with no __syncwarp between them"
        text = f" and {other} at {self.log.site(site)}\n    {how}{story}"
        self._report(RaceError, access, first, column, count, text)

    def _name(self, access: _Access, first: int, other: int) -> str:
        """A place of the cluster, as seen from the lane that makes an access."""
        viewer = self.lane_ids[access.selection][first]
        if other // WARP == self.marks.warp_place[viewer]:
            return f"lane {other % WARP} of the same warp"
        return self.marks.warp_name(other // WARP, viewer)

    def _report(
        self,
        kind: type[SimulatorError],
        access: _Access,
        first: int,
        column: int,
        count: int,
        text: str,
    ) -> None:
        """`first`: index of the first faulty row. `column`: index of the granule in its word."""
        lane = self.lane_ids[access.selection][first]
        granule = int(access.rows[first]) * access.view.width + column
        place, address = self.marks.name_of(granule, lane)
        detail = f"{access.action} of {place}{text}"
        thread = self.geometry.thread(lane)
        self.log.report(kind, detail, access.position, thread, address, count)
