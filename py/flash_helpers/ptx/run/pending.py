"""Asynchronous copies, which stay pending until their thread waits for them.

A copy reads global memory when it is issued and writes shared memory when its thread waits for it:
the latest moment that the programming model allows. In between its bytes are poison, and to read
or to overwrite them is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flash_helpers.ptx.run.shared import Selection, SharedMemory


@dataclass
class _Pending:
    """Copies issued by one execution of one instruction."""

    position: int
    size: int
    lanes: np.ndarray
    groups: np.ndarray
    """The commit group of each copy."""
    rows: np.ndarray
    """Index of each copy's word in shared memory."""
    data: np.ndarray


class AsyncCopies:
    """Pending copies of a batch, and the number of groups that each thread has committed."""

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared
        self.committed = np.zeros(shared.geometry.lanes, np.int64)
        self.pending: list[_Pending] = []

    def issue(
        self, position: int, size: int, lanes: np.ndarray, rows: np.ndarray, data: np.ndarray
    ) -> None:
        self.pending.append(_Pending(position, size, lanes, self.committed[lanes], rows, data))

    def commit(self, selection: Selection) -> None:
        self.committed[selection] += 1

    def wait(self, selection: Selection, allowed: int | None) -> None:
        """Completes all but the newest ``allowed`` groups of each thread; None: everything."""
        waiting = np.zeros(self.committed.size, bool)
        waiting[selection] = True
        limit = self.committed - (allowed if allowed is not None else -1)
        left = []
        for copy in self.pending:
            done = waiting[copy.lanes] & (copy.groups < limit[copy.lanes])
            if not done.any():
                left.append(copy)
                continue
            if done.all():
                rows, data = copy.rows, copy.data
            else:
                rows, data = copy.rows[done], copy.data[done]
                rest = ~done
                left.append(
                    _Pending(
                        copy.position,
                        copy.size,
                        copy.lanes[rest],
                        copy.groups[rest],
                        copy.rows[rest],
                        copy.data[rest],
                    )
                )
            self.shared.words(copy.size)[rows] = data
            self.shared.end_copy(copy.position, rows, copy.size)
        self.pending = left
