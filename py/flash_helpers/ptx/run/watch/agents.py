"""Races with agents (`order`): units that read or write shared memory while threads go on.

An agent's access takes time: it begins, and touches the same granules until it ends. Bytes that an
agent is writing may not be touched, and bytes that it is reading may not be written. After the end,
only lanes that know the agent's access may touch them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import (
    MbarrierError,
    OutlivedError,
    PendingCopyError,
    ProxyError,
    RaceError,
    SimulatorError,
)
from flash_helpers.ptx.run.watch.marks import (
    BY_AGENT,
    CONFLICTS,
    PENDING,
    SITE_BITS,
    SITE_MASK,
    UNWRITTEN,
    History,
    Marks,
    missing_between,
    object_made_at,
)
from flash_helpers.ptx.run.watch.presence import Positions, Presence


@dataclass(frozen=True)
class AgentAccess:
    """Accesses that an agent has begun together, to rows of granules (k, m), and not ended.
    `action`: "read" or "write". `lane`: the lane that it works for. `block`: the owner of the
    granules. `codes`: marks of each row until it ends, (k, 1)."""

    action: str
    agent: int
    lane: int
    block: int
    granules: np.ndarray
    codes: np.ndarray

    @property
    def position(self) -> int:
        """The instruction of the first of them."""
        return int(self.codes[0, 0]) & SITE_MASK


@dataclass(frozen=True)
class _Accesses:
    """n accesses that begin together, as `begin_write` has them. `known`, `visible`: the knowledge
    that was issued with them, (n, columns)."""

    action: str
    position: Positions
    agents: np.ndarray
    lanes: np.ndarray
    granules: np.ndarray
    known: np.ndarray
    visible: np.ndarray


class AgentWatch:
    """The watcher over the accesses of agents to the shared memory of a batch."""

    def __init__(self, marks: Marks, presence: Presence) -> None:
        self.marks = marks
        self.geometry = marks.geometry
        self.order = marks.order
        self.log = marks.log
        self.presence = presence
        # By agent and block: the accesses that have not ended, by their first codes, and the last
        # one that ended, with its time.
        self._open: defaultdict[tuple[int, int], dict[int, AgentAccess]] = defaultdict(dict)
        self._ended: dict[tuple[int, int], tuple[int, AgentAccess]] = {}

    def begin_write(
        self,
        position: Positions,
        agents: np.ndarray,
        lanes: np.ndarray,
        issued: np.ndarray,
        granules: np.ndarray,
    ) -> list[AgentAccess]:
        """Checks and records n writes that agents begin; until they `end` their bytes are pending.

        `agents`: (n,), columns of `order`. `lanes`: (n,), the lanes that they work for. `issued`:
        each issuer's knowledge of earlier accesses, (planes, n, columns). `granules`: (n, m), from
        `granules_at`, of one block each.
        """
        access = self._accesses("write", position, agents, lanes, issued, granules)
        self._check_writes(access)
        for name in CONFLICTS["write", False]:
            self._check_history(access, self.marks.histories[name])
        self._check_reads(access)
        codes = self._pending_codes(access)
        self.order.weak_write(granules.reshape(-1), 1)
        self.marks.written[granules] = codes
        self.marks.writer[granules] = agents[:, None]
        twice = self.marks.written[granules] != codes
        if twice.any():
            first, column = np.argwhere(twice)[0]
            text = " twice\n    in the same instruction: which of the two stays is undefined"
            self._report(RaceError, access, first, column, int(twice.any(1).sum()), text)
        return self._begun(access, codes)

    def begin_read(
        self,
        position: Positions,
        agents: np.ndarray,
        lanes: np.ndarray,
        issued: np.ndarray,
        granules: np.ndarray,
        ends_with: np.ndarray | None = None,
    ) -> tuple[list[AgentAccess], np.ndarray | None]:
        """As `begin_write`, for reads: until they `end`, the bytes may not be written. Also returns
        which granules nothing has written, (n, m), or None. `ends_with`: for each read the number
        of the `AgentAccess` that it belongs to, since they end together; each is one by itself if
        None."""
        access = self._accesses("read", position, agents, lanes, issued, granules)
        self._check_writes(access)
        for name in CONFLICTS["read", False]:
            self._check_history(access, self.marks.histories[name])
        codes = self._pending_codes(access)
        for agent in dict.fromkeys(agents.tolist()):
            mine = agents == agent
            self._reads_of(agent)[granules[mine]] = codes[mine]
        unwritten = self.marks.written[granules] == UNWRITTEN
        return self._begun(access, codes, ends_with), unwritten if unwritten.any() else None

    def end(self, accesses: Sequence[AgentAccess]) -> int:
        """Ends accesses of agents; returns the time up to which lanes know the agents that have
        waited for them."""
        now = self.order.now
        for access in accesses:
            self._mark_end(access)
            self._ended[access.agent, access.block] = now, access
        self.order.now += 1
        return now

    def end_for_lanes(self, access: AgentAccess) -> None:
        """Ends the read of an agent of lanes, which have all waited for it."""
        self._mark_end(access)
        self.order.now += 1

    def share_out(self, access: AgentAccess, agents: Sequence[int]) -> list[AgentAccess]:
        """Makes of the read of an agent of lanes that of several agents of fewer lanes each."""
        self.forget(access)
        codes, code = self.marks.agent_reads[access.agent], int(access.codes[0, 0])
        mine = access.granules[codes[access.granules] == access.codes]
        codes[mine] = 0
        parts = [replace(access, agent=agent) for agent in agents]
        for part in parts:
            self._reads_of(part.agent)[mine] = code
            self._open[part.agent, part.block][code] = part
        return parts

    def _reads_of(self, agent: int) -> np.ndarray:
        """Codes of an agent's reads."""
        if agent not in self.marks.agent_reads:
            self.marks.agent_reads[agent] = np.zeros_like(self.marks.written)
        return self.marks.agent_reads[agent]

    def _mark_end(self, access: AgentAccess) -> None:
        codes, flag = self.marks.written, BY_AGENT
        if access.action == "read":
            codes, flag = self.marks.agent_reads[access.agent], 0
        ended = self.marks.code(0) | access.codes & SITE_MASK | flag
        # A later access may have marked some of the granules.
        mine = codes[access.granules] == access.codes
        if mine.all():
            codes[access.granules] = ended
        else:
            codes[access.granules[mine]] = np.broadcast_to(ended, mine.shape)[mine]
        self.forget(access)

    def forget(self, access: AgentAccess) -> None:
        """Forgets an access, after it was reported that no thread waits for it."""
        self._open[access.agent, access.block].pop(int(access.codes[0, 0]), None)

    def end_blocks(self, blocks: Sequence[int]) -> None:
        """Blocks of the batch have ended. Reports accesses of agents that may still touch their
        memory."""
        for block in blocks:
            own = self.geometry.lanes_of(block)[: self.geometry.threads]
            left = [a for (_, b), some in self._open.items() if b == block for a in some.values()]
            left += [
                access
                for (agent, b), (time, access) in self._ended.items()
                if b == block and time > self.order.agent_known_to_any(own, agent)
            ]
            for access in left:
                place, address = self.marks.name_of(int(access.granules.min()), access.lane)
                name = self.order.agent_name(access.agent)
                detail = (
                    f"{access.action} by {name} of {place}, whose block has ended:\n"
                    "    none of its threads has waited for it"
                    + self.marks.explain(access.agent, access.lane, access.position)
                )
                thread = self.geometry.thread(access.lane)
                self.log.report(OutlivedError, detail, access.position, thread, address)

    def _accesses(
        self,
        action: str,
        position: Positions,
        agents: np.ndarray,
        lanes: np.ndarray,
        issued: np.ndarray,
        granules: np.ndarray,
    ) -> _Accesses:
        where = np.divmod(granules.min(axis=1) * self.marks.granule, self.marks.stride)
        self.presence.check(action, position, lanes, *where)
        known, visible, *_ = self.order.fitted(issued)
        return _Accesses(action, position, agents, lanes, granules, known, visible)

    def _pending_codes(self, access: _Accesses) -> np.ndarray:
        """One code for each access, different from all others, (n, 1)."""
        times = self.order.now + np.arange(len(access.agents))
        self.order.now += len(times)
        flags = PENDING | (BY_AGENT if access.action == "write" else 0)
        return (times << SITE_BITS | access.position | flags)[:, None]

    def _begun(
        self, a: _Accesses, codes: np.ndarray, ends_with: np.ndarray | None = None
    ) -> list[AgentAccess]:
        if ends_with is None:
            ends_with = np.arange(len(codes))
        accesses = []
        for number in range(int(ends_with.max()) + 1):
            mine = np.flatnonzero(ends_with == number)
            first = int(mine[0])
            agent, block = int(a.agents[first]), self._block_of(a.granules[first])
            access = AgentAccess(
                a.action, agent, int(a.lanes[first]), block, a.granules[mine], codes[mine]
            )
            self._open[agent, block][int(access.codes[0, 0])] = access
            accesses.append(access)
        return accesses

    def _block_of(self, granules: np.ndarray) -> int:
        return int(granules[0]) * self.marks.granule // self.marks.stride

    # -- checks ------------------------------------------------------------------------------------

    def _check_writes(self, access: _Accesses) -> None:
        """Checks accesses by agents against the last weak writes."""
        codes = self.marks.written[access.granules]
        writers = self.marks.writer[access.granules]
        if (codes == codes[:, :1]).all() and (writers == writers[:, :1]).all():
            # Each access finds what one write left, as tiles are: one granule stands for all.
            codes, writers = codes[:, :1], writers[:, :1]
        codes[codes == UNWRITTEN] = 0
        if not codes.any():
            return
        by_agent = codes & BY_AGENT != 0
        codes &= ~BY_AGENT
        times = codes >> SITE_BITS
        bad, pending = times > self._known_of(writers, by_agent, access.known), codes >= PENDING
        is_generic = ~by_agent
        if self.order.generic_agents:
            is_generic |= np.isin(writers, list(self.order.generic_agents))
        hidden = ~bad & is_generic
        if hidden.any():
            hidden &= times > self._known_of(writers, by_agent, access.visible)
        kind: type[SimulatorError]
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
            site, writer = self.log.site(int(codes[i, j]) & SITE_MASK), int(writers[i, j])
            who = self.marks.warp_name(writer // WARP, access.lanes[i])
            if by_agent[i, j]:
                who = self.order.agent_name(writer)
            if by_agent[i, j] and writer == self.marks.objects:
                kind, text = MbarrierError, object_made_at(site)
            elif kind is PendingCopyError:
                text = self.marks.will_write(
                    who if by_agent[i, j] else None, writer, access.lanes[i], int(codes[i, j])
                )
            else:
                how = missing_between(kind, by_agent[i, j])
                text = f" and write by {who} at {site}\n    {how}"
            if by_agent[i, j] and kind is not ProxyError:
                text += self.marks.explain(writer, access.lanes[i], int(codes[i, j]))
            self._report(kind, access, i, j, int(hit.sum()), text)

    def _known_of(self, writers: np.ndarray, by_agent: np.ndarray, known: np.ndarray) -> np.ndarray:
        """The times up to which writers (n, k), which are agents or lanes, are known by one plane
        (n, columns) of knowledge."""
        if not by_agent.any():
            return self.order.lanes_in(known, writers)
        of_agents = known[np.arange(len(known))[:, None], np.where(by_agent, writers, 0)]
        if by_agent.all():
            return of_agents
        return np.where(
            by_agent, of_agents, self.order.lanes_in(known, np.where(by_agent, 0, writers))
        )

    def _check_history(self, access: _Accesses, history: History) -> None:
        """Checks accesses by agents against those of one kind by lanes."""
        # What all lanes know is no race; whether agents see it is another question.
        if history.newest <= (self.marks.floor if history.action == "read" else 0):
            return
        for warp in range(self.geometry.warps_per_cluster):
            index = warp * self.marks.written.size + access.granules
            codes = history.codes[index]
            if not codes.any():
                continue
            masks = None if history.masks is None else history.masks[index]
            times = codes >> SITE_BITS
            unknown = self.order.unknown_in
            bad = unknown(access.known, warp, times, masks)
            kind: type[SimulatorError] = RaceError
            if not bad.any() and history.action == "write":
                bad, kind = unknown(access.visible, warp, times, masks), ProxyError
            hit = bad.any(axis=1)
            if not hit.any():
                continue
            i = int(hit.argmax())
            j = int(bad[i].argmax())
            site = self.log.site(int(codes[i, j]) & SITE_MASK)
            who = self.marks.warp_name(warp, access.lanes[i])
            text = f" and {history.action} by {who} at {site}\n    {missing_between(kind, False)}"
            self._report(kind, access, i, j, int(hit.sum()), text)

    def _check_reads(self, access: _Accesses) -> None:
        """Checks writes by agents against reads by agents."""
        for agent, reads in self.marks.agent_reads.items():
            codes = reads[access.granules]
            if not codes.any():
                continue
            bad = codes >> SITE_BITS > self.order.known_reads_in(access.known, agent)
            if bad.any():
                i, j, count, text = self.marks.read_by_agent(agent, codes, bad, access.lanes)
                self._report(RaceError, access, i, j, count, text)

    def _report(
        self,
        kind: type[SimulatorError],
        access: _Accesses,
        first: int,
        column: int,
        count: int,
        text: str,
    ) -> None:
        """`first`, `column`: indices of the access and granule that are reported. `count`: number
        of such accesses."""
        lane = access.lanes[first]
        place, address = self.marks.name_of(int(access.granules[first, column]), lane)
        name = self.order.agent_name(int(access.agents[first]))
        detail = f"{access.action} by {name} of {place}{text}"
        thread = self.geometry.thread(lane)
        position = int(np.broadcast_to(access.position, access.lanes.shape)[first])
        self.log.report(kind, detail, position, thread, address, count)
