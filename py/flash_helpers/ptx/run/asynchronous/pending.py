"""Asynchronous copies, which stay pending until their thread waits for them.

A copy reads global memory when it is issued and writes shared memory when its thread waits for it:
the latest moment that the programming model allows. In between its bytes are poison: reading or
overwriting them is a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import proxy

import numpy as np

from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.run.watch.marks import NOT_WAITED, missed_by_wait
from flash_helpers.ptx.run.watch.shared import WatchedMemory


@dataclass(frozen=True)
class _Pending:
    """Copies issued by one execution of one instruction. Each has its lane, its commit group, the
    index of its word in shared memory, the word, and its source in global memory: first address and
    number of bytes.

    `number`: number of executions before this one. `agent`: the agent that writes the bytes, for
    lanes that learn of them through an mbarrier; None if only the issuing lanes wait."""

    number: int
    position: int
    size: int
    lanes: np.ndarray
    groups: np.ndarray
    rows: np.ndarray
    data: np.ndarray
    sources: np.ndarray
    lengths: np.ndarray
    agent: int | None = None

    def some(self, which: np.ndarray) -> _Pending:
        """The copies of some lanes."""
        if which.all():
            return self
        return replace(
            self,
            lanes=self.lanes[which],
            groups=self.groups[which],
            rows=self.rows[which],
            data=self.data[which],
            sources=self.sources[which],
            lengths=self.lengths[which],
        )


class AsyncCopies:
    """Pending copies of a batch, and the number of groups that each thread has committed."""

    def __init__(self, shared: WatchedMemory) -> None:
        self.shared = shared
        self.committed = np.zeros(shared.geometry.lanes, np.int64)
        self.pending: list[_Pending] = []
        self.issued = 0
        # Of each lane's last wait: position, groups left; groups committed, copies issued before.
        self._waits = np.full((4, shared.geometry.lanes), -1)
        weak = proxy(self)
        shared.marks.why_pending = lambda lane, position: weak.why_pending(lane, position)

    def issue(
        self,
        position: int,
        size: int,
        lanes: np.ndarray,
        rows: np.ndarray,
        data: np.ndarray,
        sources: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Begins copies."""
        groups = self.committed[lanes]
        columns = lanes, groups, rows, data, sources, lengths
        self.pending.append(_Pending(self.issued, position, size, *columns))
        self.issued += 1

    def sources_at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, str]:
        """Which of `size` bytes at addresses of global memory a pending copy reads, and text about
        one such copy; none if no copy reads any."""
        hit, text = np.zeros(addresses.shape, bool), ""
        for copy in self.pending:
            reading = np.flatnonzero(copy.lengths)
            if not reading.size:
                continue
            order = reading[np.argsort(copy.sources[reading])]
            starts = copy.sources[order]
            # How far those reach that begin no later.
            ends = np.maximum.accumulate(starts + copy.lengths[order])
            last = np.searchsorted(starts, addresses + size) - 1
            read = (last >= 0) & (ends[last] > addresses)
            if read.any():
                of = int(copy.lanes[order[last[read][0]]])
                site = self.shared.marks.log.site(copy.position)
                text = f"{site}\n    reads: {self.why_pending(of, copy.position)}"
                hit = hit | read
        return hit, text

    def commit(self, selection: Selection) -> None:
        """Closes the current group of each thread."""
        self.committed[selection] += 1

    def wait(self, position: int, selection: Selection, allowed: int | None) -> None:
        """Completes all but the newest `allowed` groups of each thread; None: everything."""
        waits = self._waits[:, selection]
        waits[0], waits[1], waits[3] = position, -1 if allowed is None else allowed, self.issued
        waits[2] = self.committed[selection]
        self._waits[:, selection] = waits
        limit = self.committed - (allowed if allowed is not None else -1)
        self._complete(selection, lambda copy: copy.groups < limit[copy.lanes])

    def why_pending(self, lane: int, position: int) -> str:
        """Text for a copy of a lane that is pending, which was issued at a position."""
        at, allowed, committed, before = self._waits[:, lane].tolist()
        for copy in self.pending:
            mine = np.flatnonzero(copy.lanes == lane)
            if copy.position == position and copy.number < before and mine.size:
                group, site = int(copy.groups[mine[0]]), self.shared.marks.log.site(at)
                return missed_by_wait("cp.async.commit_group", group, committed, allowed, site)
        return NOT_WAITED

    def complete(self, lanes: np.ndarray, before: int) -> None:
        """Completes the copies that lanes had issued before execution `before`."""
        self._complete(lanes, lambda copy: np.full(copy.lanes.shape, copy.number < before))

    def assign(self, lanes: np.ndarray, agent: int) -> set[int]:
        """Makes an agent the writer of the lanes' pending copies, unless they have one; returns all
        their agents."""
        chosen = np.zeros(self.committed.size, bool)
        chosen[lanes] = True
        split, agents = [], {agent}
        for copy in self.pending:
            mine = chosen[copy.lanes]
            if not mine.any():
                split.append(copy)
            elif copy.agent is None:
                split.append(replace(copy.some(mine), agent=agent))
                if not mine.all():
                    split.append(copy.some(~mine))
            else:
                split.append(copy)
                agents.add(copy.agent)
        self.pending = split
        return agents

    def _complete(self, selection: Selection, which: Callable[[_Pending], np.ndarray]) -> None:
        waiting = np.zeros(self.committed.size, bool)
        waiting[selection] = True
        left = []
        for copy in self.pending:
            done = waiting[copy.lanes] & which(copy)
            if not done.all():
                left.append(copy.some(~done))
            if done.any():
                ready = copy.some(done)
                self.shared.words(copy.size)[ready.rows] = ready.data
                self.shared.marks.end_copy(copy.position, ready.rows, copy.size, copy.agent)
                if copy.agent is not None:
                    order = self.shared.order
                    order.acquire(ready.lanes, [order.agent_knowledge(copy.agent)])
        self.pending = left
