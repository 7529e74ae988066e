"""Asynchronous copies, which stay pending until their thread waits for them.

A copy reads global memory when it is issued and writes shared memory when its thread waits for it:
the latest moment that the programming model allows. In between its bytes are poison, and to read
or to overwrite them is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flash_helpers.ptx.run.memory import Selection
from flash_helpers.ptx.run.shared import SharedMemory


@dataclass(frozen=True)
class _Pending:
    """Copies issued by one execution of one instruction: the lane and the commit group of each, the
    index of its word in shared memory, the word, and where in global memory it is read: the first
    address and how many bytes."""

    position: int
    size: int
    lanes: np.ndarray
    groups: np.ndarray
    rows: np.ndarray
    data: np.ndarray
    sources: np.ndarray
    lengths: np.ndarray

    def some(self, which: np.ndarray) -> _Pending:
        """A part of them."""
        arrays = (self.lanes, self.groups, self.rows, self.data, self.sources, self.lengths)
        columns = (array[which] for array in arrays)
        return _Pending(self.position, self.size, *columns)


class AsyncCopies:
    """Pending copies of a batch, and the number of groups that each thread has committed."""

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared
        self.committed = np.zeros(shared.geometry.lanes, np.int64)
        self.pending: list[_Pending] = []

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
        self.pending.append(_Pending(position, size, lanes, groups, rows, data, sources, lengths))

    def sources_at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, int | None]:
        """Which of `size` bytes at addresses of global memory a pending copy reads, and the
        position of one that reads some; None if none does."""
        hit, position = np.zeros(addresses.shape, bool), None
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
                hit, position = hit | read, copy.position
        return hit, position

    def commit(self, selection: Selection) -> None:
        """Closes the current group of each thread."""
        self.committed[selection] += 1

    def wait(self, selection: Selection, allowed: int | None) -> None:
        """Completes all but the newest `allowed` groups of each thread; None: everything."""
        waiting = np.zeros(self.committed.size, bool)
        waiting[selection] = True
        limit = self.committed - (allowed if allowed is not None else -1)
        left = []
        for copy in self.pending:
            done = waiting[copy.lanes] & (copy.groups < limit[copy.lanes])
            ready = copy if done.all() else copy.some(done)
            if ready is not copy:
                left.append(copy.some(~done) if done.any() else copy)
            if done.any():
                self.shared.words(copy.size)[ready.rows] = ready.data
                self.shared.end_copy(copy.position, ready.rows, copy.size)
        self.pending = left
