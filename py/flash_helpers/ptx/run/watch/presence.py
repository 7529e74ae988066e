"""A check that blocks of a batch exist while other blocks of their cluster touch their shared
memory.

"Accessing data in distributed shared memory requires all the thread blocks to exist" (CUDA C++
Programming Guide, "Distributed Shared Memory"): an access has to come after the block has begun and
before it ends. This holds in every order of the threads if the accessing thread knows something of
the block (`order`), and if some thread of the block knows of the access before the block ends.
"""

from __future__ import annotations

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import AbsentBlockError, BlockScopeLint
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.order import Order

Positions = np.ndarray | int
"""The instruction of each of several accesses, or of all."""


class Presence:
    """The threads and blocks of a batch that have ended, and accesses to other blocks."""

    def __init__(self, geometry: Geometry, order: Order, log: FaultLog) -> None:
        self.geometry = geometry
        self.order = order
        self.log = log
        lanes = np.arange(geometry.lanes)
        self.is_gone = geometry.thread_of(lanes) >= geometry.threads
        """Whether each lane has ended; lanes beyond the block's threads are included."""
        self._has_ended = np.zeros(len(geometry.blocks), bool)
        # Of each lane's last access to the block of each rank: time, position and address.
        self._last = np.zeros((3, geometry.lanes, geometry.cluster), np.int64)
        self._actions: dict[int, str] = {}
        # Behind the instruction by which each lane has written to another block since it last
        # released to the cluster; 0 for none.
        self._unreleased = np.zeros(geometry.lanes, np.int64)

    def check(
        self,
        action: str,
        position: Positions,
        lanes: np.ndarray,
        blocks: np.ndarray,
        addresses: np.ndarray,
    ) -> None:
        """Checks that blocks (n,) of the batch are there when lanes (n,), or agents for them, begin
        to touch addresses (n,) in them. Lanes of these blocks themselves are not checked."""
        if self.geometry.cluster == 1:
            return
        positions = np.broadcast_to(position, lanes.shape)
        lanes, blocks, addresses, positions = self._remote(lanes, blocks, addresses, positions)
        if not lanes.size:
            return
        ranks, ended = blocks % self.geometry.cluster, self._has_ended[blocks]
        unknown = ~self.order.has_begun(lanes, ranks) & ~ended
        for wrong, text in (
            (ended, "which has ended"),
            (unknown, "which may not have begun:\n    no barrier.cluster before"),
        ):
            if wrong.any():
                i, address = int(wrong.argmax()), int(addresses[wrong][0])
                detail = f"{action} of shared address {address} of the block of rank {ranks[i]}"
                count = int(wrong.sum())
                self._report(f"{detail}, {text}", int(positions[i]), int(lanes[i]), address, count)

    def record(
        self,
        action: str,
        position: int,
        lanes: np.ndarray,
        blocks: np.ndarray,
        addresses: np.ndarray,
    ) -> None:
        """As `check`, for accesses of lanes themselves: the blocks must not end before they know of
        them. Call it before anything that the instruction releases."""
        if self.geometry.cluster == 1:
            return
        lanes, blocks, addresses = self._remote(lanes, blocks, addresses)
        self._actions[position] = action
        if action in ("write", "atomic access"):
            self._unreleased[lanes] = position + 1
        times, positions, places = self._last
        at = lanes, blocks % self.geometry.cluster
        times[at], positions[at], places[at] = self.order.now, position, addresses

    def release(self, lanes: np.ndarray) -> None:
        """Lanes release what they have written to the cluster."""
        self._unreleased[lanes] = 0

    def lint_release(self, position: int, lanes: np.ndarray, blocks: np.ndarray) -> None:
        """Lints arrivals at mbarriers of other blocks that release to the own block only, by lanes
        that have written to other blocks."""
        wrong = (blocks != self.geometry.block_of(lanes)) & (self._unreleased[lanes] > 0)
        if wrong.any():
            lane = int(lanes[wrong.argmax()])
            written = self.log.site(int(self._unreleased[lane]) - 1)
            self.log.lint(
                BlockScopeLint,
                "an arrival at an mbarrier of another block without a scope, which is .cta:\n"
                f"    it does not release there what its thread has written at {written}\n"
                "    give it .release.cluster",
                position,
                self.geometry.thread(lane),
            )

    def _remote(self, lanes: np.ndarray, blocks: np.ndarray, *more: np.ndarray) -> list[np.ndarray]:
        """The accesses to blocks other than the lanes' own."""
        remote = blocks != self.geometry.block_of(lanes)
        return [array[remote] for array in (lanes, blocks, *more)]

    def end(self, lanes: np.ndarray) -> list[int]:
        """Records that threads end; returns the blocks that have ended with them."""
        self.is_gone[lanes] = True
        by_block = self.is_gone.reshape(-1, self._has_ended.size, WARP)
        ended = np.flatnonzero(by_block.all(axis=(0, 2)) & ~self._has_ended).tolist()
        self._has_ended[ended] = True
        if self.geometry.cluster > 1:
            for block in ended:
                self._check_end(block)
        return ended

    def _check_end(self, block: int) -> None:
        """Reports accesses by other blocks to a block that has ended, if that block did not know of
        them."""
        geometry = self.geometry
        cluster, rank = divmod(block, geometry.cluster)
        others = geometry.lane_at(cluster, np.arange(geometry.lanes_per_cluster))
        times, positions, addresses = self._last[:, others, rank]
        own = geometry.lanes_of(block)[: geometry.threads]
        unknown = times > self.order.known_to_any(own, geometry.place_of(others))
        for position in np.unique(positions[unknown]).tolist():
            these = np.flatnonzero(unknown & (positions == position))
            address = int(addresses[these[0]])
            self._report(
                f"{self._actions[position]} of shared address {address} of the block of rank "
                f"{rank}, which may have ended:\n    no barrier.cluster between this and its end",
                position,
                int(others[these[0]]),
                address,
                these.size,
            )

    def _report(self, detail: str, position: int, lane: int, address: int, count: int) -> None:
        thread = self.geometry.thread(lane)
        self.log.report(AbsentBlockError, detail, position, thread, address, count)
