"""Shared memory of a batch of blocks, and the watcher over it.

For every granule the watcher keeps when, by which lane and by which instruction it was last
written, and for every warp when it last read it, and which of its lanes. Two accesses by different
lanes, one of them a write, race unless the earlier one is known to the lane that makes the later
one (`order`), or both are strong. That holds for every schedule of the threads, not only for the
one that the simulator happened to choose.

A granule is as wide as the narrowest shared access of the kernel, so no two accesses that touch
different bytes can be taken for a conflict.

What agents do (`order`) takes time: it begins, and touches the same granules until it ends. Bytes
that an agent is writing are nobody's to touch, and those that it is reading nobody's to write; then
it depends on who knows the agent. For reads by an agent there is one more row of granules, made
when it first reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import (
    MbarrierError,
    OutlivedError,
    PendingCopyError,
    ProxyError,
    RaceError,
    SimulatorError,
    Site,
)
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.regions import RANK_SHIFT, Region, Selection
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.order import WEAK, Knowledge, Order, Strength
from flash_helpers.ptx.run.watch.presence import Presence

# A code says when and where: time above, the instruction's position below.
_SITE_BITS = 20
_SITE_MASK = (1 << _SITE_BITS) - 1
_BY_AGENT = 1 << 60
_PENDING = 1 << 61
_UNWRITTEN = 1 << 62

_CONFLICTS = {
    ("read", False): ("strong write",),
    ("read", True): (),
    ("write", False): ("read", "matrix read", "strong read", "strong write"),
    ("write", True): ("read", "matrix read"),
}
"""With which accesses one conflicts, besides weak writes; whether it is strong (PTX ISA 9.0,
"Conflict and Data-races": two strong ones do not race)."""


class SharedMemory(Region):
    """Shared memory of all blocks of a batch, side by side. size: bytes of one block. granule:
    bytes of the narrowest access of the kernel."""

    def __init__(self, geometry: Geometry, size: int, granule: int, log: FaultLog) -> None:
        self.geometry = geometry
        self.log = log
        self.granule = granule
        self.stride = max(128, -(-size // 128) * 128)
        blocks, warps = len(geometry.blocks), geometry.warps_per_cluster
        self.lane_ids = np.arange(geometry.lanes)
        base = geometry.block_of(self.lane_ids) * self.stride
        super().__init__(np.zeros(blocks * self.stride, np.uint8), size, base, "shared memory")
        granules = blocks * self.stride // granule
        self.order = Order(geometry)
        self.presence = Presence(geometry, self.order, log)
        self.place = geometry.place_of(self.lane_ids).astype(np.uint16)
        self.warp_place = self.place // WARP
        self._lane_bits = np.uint32(1) << (self.lane_ids % WARP).astype(np.uint32)
        self._written = np.full(granules, _UNWRITTEN, np.int64)
        self._writer = np.zeros(granules, np.uint16)
        self._histories = {
            name: _History(warps * granules, name)
            for name in ("read", "matrix read", "strong read", "strong write")
        }
        self._agent_reads: dict[int, np.ndarray] = {}
        self._objects = -1
        """The agent that stands for mbarrier objects, once there is one."""
        # By agent and block: what has not ended, by its code, and what ended last, and when.
        self._open: defaultdict[tuple[int, int], dict[int, AgentAccess]] = defaultdict(dict)
        self._ended: dict[tuple[int, int], tuple[int, AgentAccess]] = {}
        self._views: dict[int, _Views] = {}
        self.explain: Callable[[int, int], str] = lambda agent, lane: ""
        """What a lane should know of an agent, in words that follow a complaint about its bytes."""
        self.touched: Callable[[str, int, np.ndarray, int, np.ndarray], None] | None = None
        """Told of each access by lanes, if lints are collected (`Lints.touch`)."""

    # -- addresses ---------------------------------------------------------------------------------

    def resolve(self, addresses: np.ndarray, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where shared::cluster addresses (n,) of lanes of the batch are: the blocks of the batch,
        and the addresses in these. Of an address whose rank no block of the cluster has, the block
        is -1."""
        own, size = self.geometry.block_of(lanes), self.geometry.cluster
        rank = (addresses >> RANK_SHIFT) - 1
        blocks = np.where(rank < 0, own, np.where(rank < size, own - own % size + rank, -1))
        return blocks, np.where(rank < 0, addresses, addresses & ((1 << RANK_SHIFT) - 1))

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of the batch, and addresses in them, of places in `data`."""
        return np.divmod(places, self.stride)

    def is_remote(self, addresses: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """For each address, whether it is of another block than the lane's."""
        return self.resolve(addresses, lanes)[0] != self.geometry.block_of(lanes)

    def beyond(self, address: int, size: int) -> str:
        """What is said of an access to another block by what cannot reach it."""
        rank, at = divmod(address, 1 << RANK_SHIFT)
        return (
            f"{size} bytes at shared address {at} of the block of rank {rank - 1}, and only "
            "shared::cluster and generic addresses reach other blocks"
        )

    def inside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """For each address, whether `size` bytes from it are inside a block of the cluster."""
        blocks, at = self.resolve(addresses, np.zeros(1, np.int64))
        return (blocks >= 0) & (at >= 0) & (at + size <= self.size)

    def offsets(self, addresses: np.ndarray, selection: Selection) -> np.ndarray:
        """Where in `words` the selected lanes' addresses are, in bytes."""
        if self.geometry.cluster > 1 and int(addresses.max(initial=0)) >> RANK_SHIFT:
            blocks, at = self.resolve(addresses, self.lane_ids[selection])
            return blocks * self.stride + at
        return super().offsets(addresses, selection)

    def outside(self, address: int, size: int) -> str:
        """What is said of an access outside."""
        rank, at = divmod(address, 1 << RANK_SHIFT)
        if rank > self.geometry.cluster:
            return (
                f"{size} bytes of shared memory of another block, but the cluster has "
                f"{self.geometry.cluster} of them, and mapa was not given the rank of one"
            )
        if rank > 0:
            return (
                f"{size} bytes at shared address {at} of the block of rank {rank - 1}, "
                f"but a block has {self.size} bytes of shared memory"
            )
        return (
            f"{size} bytes at shared address {address}, "
            f"but the block has {self.size} bytes of shared memory"
        )

    def misaligned(self, address: int, size: int) -> str:
        """What is said of an access at an address that is not a multiple of its size."""
        return (
            f"{size} bytes at shared address {address % (1 << RANK_SHIFT)}, "
            f"which is not a multiple of {size}"
        )

    # -- the watcher -------------------------------------------------------------------------------

    def note(
        self,
        action: str,
        position: int,
        rows: np.ndarray,
        size: int,
        selection: Selection,
        value: np.ndarray | None = None,
        strength: Strength = WEAK,
    ) -> np.ndarray | None:
        """Checks and records what lanes do, or are about to do, to words of `size` bytes.

        action: "read"; "matrix read", which all lanes of a warp make; "write", of `value`;
        "copy", a write of words that are pending until `end_copy`, where lanes that name one word
        must have one `value`; "atomic access". rows: index of each lane's word in `words(size)`.
        Returns which granules of each word the lanes get to see, but nothing has written, (words,
        granules), or None.
        """
        view = self._view(size)
        if self.touched is not None:
            self.touched(action, position, rows, view.width, self.lane_ids[selection])
        told = {"copy": "write", "matrix read": "read"}.get(action, action)
        access = _Access(told, position, rows, view, selection, action == "matrix read")
        written = view.written[rows]
        # Memory that nobody wrote may be written: only codes of writes and copies matter then.
        is_first = written >= _UNWRITTEN if action in ("write", "copy") else None
        unwritten = self._check_written(
            access,
            written if is_first is None else np.where(is_first, 0, written),
            value if action == "write" else None,
        )
        kind = "read" if action in ("read", "matrix read") else "write"
        for name in _CONFLICTS[kind, strength.is_strong]:
            self._check_history(access, self._histories[name])
        if kind == "write":
            self._check_reads_by_agents(access)
        if strength.is_strong:
            self._order_flags(access, strength, kind)
            if is_first is not None and is_first.any():
                # Not in `_written`: what is strong does not race with its like.
                view.written[rows] = np.where(is_first, 0, written)
            self._mark(access, self._histories[f"strong {kind}"])
        elif kind == "read":
            self._mark(access, self._histories[action])
        else:
            self.order.weak_write(rows, view.width)
            view.written[rows] = _PENDING | position if action == "copy" else self._code(position)
            self._check_simultaneous(access, value)
        if is_first is not None and strength.observes and is_first.any():
            unwritten = is_first.reshape(rows.size, -1)
        return unwritten

    def is_written(self, granules: np.ndarray) -> np.ndarray:
        """Whether granules of `data` were written, or are being copied to."""
        return self._written[granules] < _UNWRITTEN

    def initialise(self, start: int, size: int) -> None:
        """Marks zeros in the shared memory of every block as written before the launch."""
        granules = self._written.reshape(-1, self.stride // self.granule)
        granules[:, start // self.granule : (start + size) // self.granule] = 0

    def end_copy(
        self, position: int, rows: np.ndarray, size: int, agent: int | None = None
    ) -> None:
        """Marks words as written now by the copy that was issued at a position: by the lanes that
        have issued it, or by an agent."""
        view = self._view(size)
        view.written[rows] = self._code(position)
        if agent is not None:
            view.written[rows] |= _BY_AGENT
            view.writer[rows] = agent

    # -- mbarrier objects --------------------------------------------------------------------------

    def hold(self, position: int, lanes: np.ndarray, rows: np.ndarray) -> None:
        """Lanes make mbarrier objects: from now on nothing else may touch their bytes. rows: of 8
        bytes."""
        self.note("write", position, rows, 8, lanes, np.arange(rows.size))
        if self._objects < 0:
            self._objects = self.order.agent(0, "mbarrier object")
        view = self._view(8)
        view.written[rows] = _PENDING | _BY_AGENT | position
        view.writer[rows] = self._objects

    def let_go(self, position: int, lanes: np.ndarray, rows: np.ndarray) -> None:
        """Lanes end mbarrier objects; what their bytes hold then nobody knows."""
        view = self._view(8)
        view.written[rows] = _UNWRITTEN
        self.note("write", position, rows, 8, lanes, np.arange(rows.size))

    # -- agents ------------------------------------------------------------------------------------

    def granules_at(self, blocks: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """Granules of `size` bytes at each of several addresses: (n, all of a row), of addresses
        (n, k) in blocks (n,) of the batch."""
        first = (blocks[:, None] * self.stride + addresses) // self.granule
        count = -(-size // self.granule)
        return (first[:, :, None] + np.arange(count)).reshape(len(first), -1)

    def begin_write(
        self,
        position: int,
        agents: np.ndarray,
        lanes: np.ndarray,
        issued: Sequence[Knowledge],
        granules: np.ndarray,
    ) -> list[AgentAccess]:
        """Checks and records n writes that agents begin; until they `end` their bytes are pending.

        agents: (n,), columns of `order`. lanes: (n,), for whom they work. issued: what each knows
        of what was before: what those know who issue it. granules: (n, m), from `granules_at`, of
        one block each.
        """
        access = self._agent_access("write", position, agents, lanes, issued, granules)
        self._check_agent_writes(access)
        for name in _CONFLICTS["write", False]:
            self._check_agent_history(access, self._histories[name])
        self._check_agent_reads(access)
        codes = self._pending_codes(access)
        self.order.weak_write(granules.reshape(-1), 1)
        self._written[granules] = codes[:, None]
        self._writer[granules] = agents[:, None]
        twice = self._written[granules] != codes[:, None]
        if twice.any():
            first, column = np.argwhere(twice)[0]
            text = " twice\n    in the same instruction: which of the two stays is undefined"
            self._report_agent(RaceError, access, first, column, int(twice.any(1).sum()), text)
        return self._begun(access, codes)

    def begin_read(
        self,
        position: int,
        agents: np.ndarray,
        lanes: np.ndarray,
        issued: Sequence[Knowledge],
        granules: np.ndarray,
    ) -> tuple[list[AgentAccess], np.ndarray | None]:
        """As `begin_write`, of reads: until they `end`, nobody may write the bytes. Also returns
        which granules nothing has written, (n, m), or None."""
        access = self._agent_access("read", position, agents, lanes, issued, granules)
        self._check_agent_writes(access)
        for name in _CONFLICTS["read", False]:
            self._check_agent_history(access, self._histories[name])
        codes = self._pending_codes(access)
        for agent, mine, code in zip(agents.tolist(), granules, codes.tolist(), strict=True):
            if agent not in self._agent_reads:
                self._agent_reads[agent] = np.zeros_like(self._written)
            self._agent_reads[agent][mine] = code
        unwritten = self._written[granules] == _UNWRITTEN
        return self._begun(access, codes), unwritten if unwritten.any() else None

    def end(self, access: AgentAccess) -> Knowledge:
        """An agent has done what it began; what those know who have waited for it."""
        code, flag = self._code(access.position), 0
        codes = self._written
        if access.action == "read":
            codes = self._agent_reads[access.agent]
        else:
            flag = _BY_AGENT
        # A later access may have taken some of them.
        codes[access.granules[codes[access.granules] == access.code]] = code | flag
        self.forget(access)
        self._ended[access.agent, access.block] = self.order.now, access
        return self.order.agent_knowledge(access.agent, access.issued)

    def forget(self, access: AgentAccess) -> None:
        """It has been told that nobody waits for an access."""
        self._open[access.agent, access.block].pop(access.code, None)

    def end_blocks(self, blocks: Sequence[int]) -> None:
        """Blocks of the batch have ended. Reports what agents may still do to their memory."""
        for block in blocks:
            own = self.geometry.lanes_of(block)[: self.geometry.threads]
            left = [a for (_, b), some in self._open.items() if b == block for a in some.values()]
            left += [
                access
                for (agent, b), (time, access) in self._ended.items()
                if b == block and time > self.order.agent_known_to_any(own, agent)
            ]
            for access in left:
                place, address = self._place(int(access.granules.min()), access.lane)
                name = self.order.agent_name(access.agent)
                detail = (
                    f"{access.action} by {name} of {place}, whose block has ended:\n"
                    "    none of its threads has waited for it"
                )
                thread = self.geometry.thread(access.lane)
                self.log.report(OutlivedError, detail, access.position, thread, address)

    def _agent_access(
        self,
        action: str,
        position: int,
        agents: np.ndarray,
        lanes: np.ndarray,
        issued: Sequence[Knowledge],
        granules: np.ndarray,
    ) -> _AgentAccesses:
        where = self.at(granules.min(axis=1) * self.granule)
        self.presence.check(action, position, lanes, *where)
        known, visible = self.order.stacked(issued)
        return _AgentAccesses(action, position, agents, lanes, issued, granules, known, visible)

    def _pending_codes(self, access: _AgentAccesses) -> np.ndarray:
        """One for each access, unlike all others."""
        times = self.order.now + np.arange(len(access.agents))
        self.order.now += len(times)
        flags = _PENDING | (_BY_AGENT if access.action == "write" else 0)
        return times << _SITE_BITS | access.position | flags

    def _begun(self, a: _AgentAccesses, codes: np.ndarray) -> list[AgentAccess]:
        blocks = a.granules[:, 0] * self.granule // self.stride
        whose = (a.agents.tolist(), a.lanes.tolist(), blocks.tolist())
        rows = zip(*whose, a.issued, a.granules, codes.tolist(), strict=True)
        accesses = [AgentAccess(a.action, a.position, *row) for row in rows]
        for access in accesses:
            self._open[access.agent, access.block][access.code] = access
        return accesses

    def _check_agent_writes(self, access: _AgentAccesses) -> None:
        """Checks accesses by agents against the last weak writes."""
        codes = self._written[access.granules]
        codes[codes == _UNWRITTEN] = 0
        if not codes.any():
            return
        by_agent = codes & _BY_AGENT != 0
        codes &= ~_BY_AGENT
        times = codes >> _SITE_BITS
        writers = self._writer[access.granules]
        places = np.where(by_agent, 0, writers)
        known = self.order.lanes_in(access.known, places)
        if by_agent.any():
            agents = np.where(by_agent, writers, 0)
            of_agents = np.take_along_axis(access.known, agents.astype(np.int64), axis=1)
            known = np.where(by_agent, of_agents, known)
        bad, pending = times > known, codes >= _PENDING
        hidden = ~bad & ~by_agent & (times > self.order.lanes_in(access.visible, places))
        for kind, chosen in (
            (PendingCopyError, pending),
            (RaceError, bad & ~pending),
            (ProxyError, hidden),
        ):
            hit = chosen.any(axis=1)
            if not hit.any():
                continue
            i = int(hit.argmax())
            j = int(chosen[i].argmax())
            site, writer = self.log.site(int(codes[i, j]) & _SITE_MASK), int(writers[i, j])
            who = self._warp_name(writer // WARP, access.lanes[i])
            if by_agent[i, j]:
                who = self.order.agent_name(writer)
            if by_agent[i, j] and writer == self._objects:
                kind, text = MbarrierError, _object_made_at(site)
            elif kind is PendingCopyError:
                text = _will_write(who if by_agent[i, j] else None, site)
            else:
                text = f" and write by {who} at {site}\n    " + _between(kind, by_agent[i, j])
            if by_agent[i, j]:
                text += self.explain(writer, int(access.lanes[i]))
            self._report_agent(kind, access, i, j, int(hit.sum()), text)

    def _check_agent_history(self, access: _AgentAccesses, history: _History) -> None:
        """Checks accesses by agents against those of one kind by lanes."""
        if not history.newest:
            return
        for warp in range(self.geometry.warps_per_cluster):
            index = warp * self._written.size + access.granules
            codes = history.codes[index]
            if not codes.any():
                continue
            masks = None if history.masks is None else history.masks[index]
            times = codes >> _SITE_BITS
            unknown = self.order.unknown_in
            bad = unknown(access.known, warp, times, masks)
            kind = RaceError
            if not bad.any() and history.action == "write":
                bad, kind = unknown(access.visible, warp, times, masks), ProxyError
            hit = bad.any(axis=1)
            if not hit.any():
                continue
            i = int(hit.argmax())
            j = int(bad[i].argmax())
            site = self.log.site(int(codes[i, j]) & _SITE_MASK)
            who = self._warp_name(warp, access.lanes[i])
            text = f" and {history.action} by {who} at {site}\n    {_between(kind, False)}"
            self._report_agent(kind, access, i, j, int(hit.sum()), text)

    def _check_agent_reads(self, access: _AgentAccesses) -> None:
        """Checks writes by agents against reads by agents."""
        for agent, reads in self._agent_reads.items():
            codes = reads[access.granules]
            bad = codes >> _SITE_BITS > access.known[:, agent][:, None]
            if bad.any():
                i, j, count, text = self._read_by_agent(agent, codes, bad)
                self._report_agent(RaceError, access, i, j, count, text)

    def _check_reads_by_agents(self, access: _Access) -> None:
        """Checks writes by lanes against reads by agents."""
        lanes = self.lane_ids[access.selection]
        for agent, reads in self._agent_reads.items():
            codes = reads.reshape(-1, access.view.width)[access.rows]
            if not codes.any():
                continue
            known = self.order.known_of_agents(lanes, np.full((lanes.size, 1), agent))
            bad = codes >> _SITE_BITS > known
            if bad.any():
                i, j, count, text = self._read_by_agent(agent, codes, bad)
                self._report(RaceError, access, i, j, count, text)

    def _read_by_agent(
        self, agent: int, codes: np.ndarray, bad: np.ndarray
    ) -> tuple[int, int, int, str]:
        """The first of reads by an agent that nobody waited for: row and column, how many rows
        there are, and what is said of it."""
        hit = bad.any(axis=1)
        i = int(hit.argmax())
        j = int(bad[i].argmax())
        code = int(codes[i, j])
        how = "which may still be going on" if code >= _PENDING else _between(RaceError, True)
        site, name = self.log.site(code & _SITE_MASK), self.order.agent_name(agent)
        return i, j, int(hit.sum()), f" and read by {name} at {site}\n    {how}"

    def _report_agent(
        self,
        kind: type[SimulatorError],
        access: _AgentAccesses,
        first: int,
        column: int,
        count: int,
        text: str,
    ) -> None:
        """As `_report`."""
        lane = access.lanes[first]
        place, address = self._place(int(access.granules[first, column]), lane)
        name = self.order.agent_name(int(access.agents[first]))
        detail = f"{access.action} by {name} of {place}{text}"
        thread = self.geometry.thread(lane)
        self.log.report(kind, detail, access.position, thread, address, count)

    # -- lanes -------------------------------------------------------------------------------------

    def _order_flags(self, access: _Access, strength: Strength, kind: str) -> None:
        lanes, words = self.lane_ids[access.selection], access.rows * access.view.width
        if kind == "read":
            self.order.strong_read(lanes, words, acquires=strength.acquires)
        else:
            self.order.strong_write(lanes, words, strength)

    def _code(self, position: int) -> int:
        return self.order.now << _SITE_BITS | position

    @property
    def _floor(self) -> int:
        """No code up to this one is unknown to anybody."""
        return self.order.floor << _SITE_BITS | _SITE_MASK

    def _view(self, size: int) -> _Views:
        if size not in self._views:
            self._views[size] = _Views(self, size // self.granule)
        return self._views[size]

    def _check_simultaneous(self, access: _Access, value: np.ndarray) -> None:
        """Records the writer; two lanes in one instruction race, unless they write one value: which
        of them performs the final write is undefined (CUDA Programming Guide, "SIMT
        Architecture")."""
        view, rows = access.view, access.rows
        lanes = self.place[access.selection]
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

    def _check_written(
        self, access: _Access, codes: np.ndarray, value: np.ndarray | None
    ) -> np.ndarray | None:
        """Checks an access against the last weak writes; which granules there is none of, or
        None."""
        if int(codes.max()) <= self._floor:
            return None
        # Some granule was not written before the last barrier of all warps.
        n = access.rows.size
        codes = codes.reshape(n, -1)
        writer = access.view.writer[access.rows].reshape(n, -1)
        known_to = self.order.known_to_all if access.is_of_warp else self.order.known
        lanes = self.lane_ids[access.selection]
        by_agent = codes & _BY_AGENT != 0
        known = known_to(lanes, np.where(by_agent, 0, writer) if by_agent.any() else writer)
        if by_agent.any():
            agents = np.where(by_agent, writer, 0)
            of_agents = self.order.known_of_agents(lanes, agents, is_of_warp=access.is_of_warp)
            known = np.where(by_agent, of_agents, known)
            codes = codes & ~_BY_AGENT
        bad = (codes >> _SITE_BITS) > known
        if value is not None and bad.any():
            # As in `_check_simultaneous`, where the lanes came at different times.
            words = self.words(access.view.width * self.granule)[access.rows]
            same = (words == value).reshape(n, -1).all(axis=1)
            bad &= ~(same[:, None] & (codes & _SITE_MASK == access.position) & (codes < _PENDING))
        for kind, chosen in (
            (PendingCopyError, bad & (codes >= _PENDING) & (codes < _UNWRITTEN)),
            (RaceError, bad & (codes < _PENDING)),
        ):
            hit = chosen.any(axis=1)
            if not hit.any():
                continue
            first = int(np.flatnonzero(hit)[0])
            column = int(np.flatnonzero(chosen[first])[0])
            site = int(codes[first, column]) & _SITE_MASK
            count, who = int(hit.sum()), int(writer[first, column])
            agent, story = None, ""
            if by_agent[first, column]:
                agent, story = self.order.agent_name(who), self.explain(who, int(lanes[first]))
            if agent and who == self._objects:
                text = _object_made_at(self.log.site(site))
                self._report(MbarrierError, access, first, column, count, text)
            elif kind is RaceError:
                other = f"write by {agent or self._name(access, first, who)}"
                self._report_race(access, first, column, other, site, count, agent, story)
            else:
                text = _will_write(agent, self.log.site(site)) + story
                self._report(kind, access, first, column, count, text)
        unwritten = codes >= _UNWRITTEN
        return unwritten if unwritten.any() else None

    def _check_history(self, access: _Access, history: _History) -> None:
        """Checks an access against those of one kind by other lanes of the block."""
        if history.newest <= self._floor:
            return
        all_codes, all_masks = access.view.of(history)
        for warp in range(self.geometry.warps_per_cluster):
            index = access.view.warp_rows[warp] + access.rows
            codes = all_codes[index]
            if int(codes.max()) <= self._floor:
                continue
            codes = codes.reshape(access.rows.size, -1)
            masks = None if all_masks is None else all_masks[index].reshape(codes.shape)
            lanes = self.lane_ids[access.selection]
            bad = self.order.unknown(lanes, warp, codes >> _SITE_BITS, masks)
            hit = bad.any(axis=1)
            if not hit.any():
                continue
            # A race between warps tells more than one within a warp.
            apart = hit & (self.warp_place[lanes] != warp)
            first = int((apart if apart.any() else hit).argmax())
            column = int(bad[first].argmax())
            code = int(codes[first, column])
            own = warp == self.warp_place[lanes[first]]
            who = "all lanes of the same warp" if own else self._warp_name(warp, lanes[first])
            if own and masks is not None:
                each = masks[first, column] & self._lane_bits[:WARP, None]
                times = np.full(each.shape, code >> _SITE_BITS)
                other = self.order.unknown(lanes[first].repeat(WARP), warp, times, each).argmax()
                who = f"lane {other} of the same warp"
            site, count = code & _SITE_MASK, int(hit.sum())
            self._report_race(access, first, column, f"{history.action} by {who}", site, count)

    def _mark(self, access: _Access, history: _History) -> None:
        """Records an access by one or more lanes of each warp."""
        code = self._code(access.position)
        codes, masks = access.view.of(history)
        index = access.view.lane_rows[access.selection] + access.rows
        if masks is None:
            codes[index] = history.newest = code
            return
        bits = self._lane_bits[access.selection]
        bits = bits[:, None] if access.view.width > 1 else bits
        before = None
        if history.newest > self._floor:
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
        """Adds to what was recorded the earlier accesses by other lanes of the warp that the new
        ones do not know: who knows the new ones need not know those. The time is then the first."""
        lanes, shape = self.lane_ids[access.selection], (access.rows.size, -1)
        old_masks = old_masks & ~masks[index]
        times = np.where(old_masks != 0, old_codes >> _SITE_BITS, 0).reshape(shape)
        if int(times.max()) <= self.order.floor:
            return
        keep = np.zeros(times.shape, bool)
        for warp in np.unique(self.warp_place[lanes]).tolist():
            mine = np.flatnonzero(self.warp_place[lanes] == warp)
            others = old_masks.reshape(shape)[mine]
            keep[mine] = self.order.unknown(lanes[mine], warp, times[mine], others)
        if keep.any():
            i, j = np.nonzero(keep)
            flat = (index.reshape(-1)[i] * access.view.width) + j
            codes.reshape(-1)[flat] = old_codes.reshape(shape)[i, j]
            masks.reshape(-1)[flat] |= old_masks.reshape(shape)[i, j]

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
        """other: the earlier access, in words. agent: who made it, if not a lane. story: what else
        is to be said."""
        how = _between(RaceError, agent is not None)
        if "same warp" in other:
            how = "with no __syncwarp between them"
        text = f" and {other} at {self.log.site(site)}\n    {how}{story}"
        self._report(RaceError, access, first, column, count, text)

    def _name(self, access: _Access, first: int, other: int) -> str:
        """A place of the cluster, as seen from the lane that makes an access."""
        viewer = self.lane_ids[access.selection][first]
        if other // WARP == self.warp_place[viewer]:
            return f"lane {other % WARP} of the same warp"
        return self._warp_name(other // WARP, viewer)

    def _warp_name(self, warp: int, viewer: int | np.integer) -> str:
        """A warp of the cluster, as seen from a lane of the batch."""
        rank, number = divmod(warp, self.geometry.warps_per_block)
        if rank == self.geometry.rank_of(viewer):
            return f"warp {number}"
        return f"warp {number} of the block of rank {rank}"

    def _place(self, granule: int, viewer: int | np.integer) -> tuple[str, int]:
        """What a granule is called, as seen from a lane of the batch, and its address."""
        block, address = divmod(granule * self.granule, self.stride)
        if block == self.geometry.block_of(viewer):
            return f"shared address {address}", address
        rank = block % self.geometry.cluster
        return f"shared address {address} of the block of rank {rank}", address

    def _report(
        self,
        kind: type[SimulatorError],
        access: _Access,
        first: int,
        column: int,
        count: int,
        text: str,
    ) -> None:
        """first: of the rows. column: of the granules of its word."""
        lane = self.lane_ids[access.selection][first]
        granule = int(access.rows[first]) * access.view.width + column
        place, address = self._place(granule, lane)
        detail = f"{access.action} of {place}{text}"
        thread = self.geometry.thread(lane)
        self.log.report(kind, detail, access.position, thread, address, count)


class _History:
    """When and where granules were last accessed in one way, a row of them for every warp, and by
    which of its lanes. Matrix reads are made by all lanes."""

    def __init__(self, size: int, name: str) -> None:
        self.action = "read" if name != "strong write" else "write"
        self.codes = np.zeros(size, np.int64)
        self.masks = None if name == "matrix read" else np.zeros(size, np.uint32)
        self.newest = 0


class _Views:
    """The watcher's arrays seen as rows of the granules of one access width."""

    def __init__(self, shared: SharedMemory, width: int) -> None:
        def rows(array: np.ndarray) -> np.ndarray:
            return array if width == 1 else array.reshape(-1, width)

        self.width = width
        self.written = rows(shared._written)
        self.writer = rows(shared._writer)
        self._histories = {
            history: (rows(history.codes), None if history.masks is None else rows(history.masks))
            for history in shared._histories.values()
        }
        per_warp = len(self.written)
        self.lane_rows = shared.warp_place.astype(np.int64) * per_warp
        self.warp_rows = np.arange(shared.geometry.warps_per_cluster) * per_warp

    def of(self, history: _History) -> tuple[np.ndarray, np.ndarray | None]:
        """Codes and masks."""
        return self._histories[history]


@dataclass(frozen=True)
class _Access:
    """What some lanes do to words of one width. rows: index of each lane's word. is_of_warp: all
    lanes of each warp do it, whichever of them gives the address."""

    action: str
    position: int
    rows: np.ndarray
    view: _Views
    selection: Selection
    is_of_warp: bool


@dataclass(frozen=True)
class AgentAccess:
    """What an agent has begun to do to granules (m,) and not ended. action: "read" or "write".
    lane: for whom it works. block: whose granules they are. issued: what was known to it. code:
    marks its granules until it ends."""

    action: str
    position: int
    agent: int
    lane: int
    block: int
    issued: Knowledge
    granules: np.ndarray
    code: int


@dataclass(frozen=True)
class _AgentAccesses:
    """n accesses that begin together, as `begin_write` has them. known, visible: what was issued
    with them, (n, columns)."""

    action: str
    position: int
    agents: np.ndarray
    lanes: np.ndarray
    issued: Sequence[Knowledge]
    granules: np.ndarray
    known: np.ndarray
    visible: np.ndarray


def _will_write(agent: str | None, site: Site) -> str:
    """What is said of bytes that an agent, or a cp.async if none, has not written yet."""
    if agent is None:
        return f", which the cp.async at {site}\n    will write: its thread has not waited for it"
    return f", which {agent} at {site}\n    will write: nobody has waited for it"


def _object_made_at(site: Site) -> str:
    """What is said of the bytes of an mbarrier object."""
    return f", where the mbarrier object lives that was made at {site}"


def _between(kind: type[SimulatorError], by_agent: bool) -> str:
    """What is missing after an access, by an agent or a lane."""
    if kind is ProxyError:
        return "with no fence.proxy.async between them"
    return f"with no {'wait for it' if by_agent else 'barrier'} between them"
