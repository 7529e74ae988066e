"""The barrier of each cluster of a batch (PTX ISA 9.0, "barrier.cluster")."""

from __future__ import annotations

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import ClusterBarrierError
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.order import Knowledge, Order, join
from flash_helpers.ptx.run.watch.presence import Presence


class ClusterBarrier:
    """One barrier for each cluster. A phase ends when all threads of the cluster that still run
    have arrived. A thread may be at most one phase ahead of another: it has to wait between two
    arrivals."""

    def __init__(self, geometry: Geometry, order: Order, presence: Presence, log: FaultLog) -> None:
        self.geometry = geometry
        self.order = order
        self.presence = presence
        self.log = log
        clusters = len(geometry.blocks) // geometry.cluster
        self._lanes_of = geometry.lane_at(
            np.arange(clusters)[:, None], np.arange(geometry.lanes_per_cluster)
        )
        # Phases that each lane has arrived in and waited for, and that each cluster has completed.
        self._arrived = np.zeros(geometry.lanes, np.int64)
        self._waited = np.zeros(geometry.lanes, np.int64)
        self._phase = np.zeros(clusters, np.int64)
        # The knowledge of the lanes that arrived in the current phase, and of those of the last
        # one.
        self._told: list[list[Knowledge]] = [[] for _ in range(clusters)]
        self._complete: list[list[Knowledge]] = [[] for _ in range(clusters)]

    def arrive(self, position: int, lanes: np.ndarray, *, relaxed: bool) -> None:
        """barrier.cluster.arrive by lanes of the batch."""
        twice = self._arrived[lanes] > self._waited[lanes]
        text = "arrives twice without a barrier.cluster.wait between"
        lanes = self._without(position, lanes, twice, text)
        self._arrived[lanes] += 1
        if not relaxed:
            self.presence.release(lanes)
        tell = self.order.relaxed_knowledge if relaxed else self.order.knowledge
        for cluster, mine in self._by_cluster(lanes):
            self._told[cluster].append(tell(mine))
            self._end_phase(cluster)

    def wait(self, position: int, lanes: np.ndarray) -> None:
        """barrier.cluster.wait by lanes of the batch that are ready for it."""
        never = self._arrived[lanes] == self._waited[lanes]
        lanes = self._without(position, lanes, never, "waits without having arrived")
        self._waited[lanes] = self._arrived[lanes]
        for cluster, mine in self._by_cluster(lanes):
            self.order.acquire(mine, self._complete[cluster])

    def is_ready(self, lanes: np.ndarray) -> np.ndarray:
        """For each lane, whether it need not wait any more."""
        complete = self._phase[self.geometry.cluster_of(lanes)]
        return (complete >= self._arrived[lanes]) | (self._arrived[lanes] == self._waited[lanes])

    def reason(self, lanes: np.ndarray) -> str:
        """The threads that lanes of one block wait for, in words."""
        everybody = self._lanes_of[self.geometry.cluster_of(int(lanes[0]))]
        missing = everybody[self._is_missing(everybody)]
        warps = np.unique(self.geometry.place_of(missing) // WARP)
        rank, warp = divmod(int(warps[0]), self.geometry.warps_per_block)
        more = "" if warps.size == 1 else f" and {warps.size - 1} more"
        return (
            f"for {missing.size} threads of the cluster to arrive: "
            f"those of warp {warp} of the block of rank {rank}{more}"
        )

    def end(self, lanes: np.ndarray) -> None:
        """Records that threads have ended: the barrier no longer waits for them."""
        for cluster, _ in self._by_cluster(lanes):
            if self._told[cluster]:
                self._end_phase(cluster)

    def _end_phase(self, cluster: int) -> None:
        """Ends the current phase if no thread is missing."""
        lanes = self._lanes_of[cluster]
        if self._is_missing(lanes).any():
            return
        ended = lanes[self._arrived[lanes] == self._phase[cluster]]
        ended = ended[self.geometry.thread_of(ended) < self.geometry.threads]
        if ended.size:
            # For the other threads they have arrived.
            self._told[cluster].append(self.order.knowledge(ended))
        self._complete[cluster] = [join(self._told[cluster])]
        self._told[cluster] = []
        self._phase[cluster] += 1

    def _is_missing(self, lanes: np.ndarray) -> np.ndarray:
        """Whether the current phase of its cluster waits for each lane."""
        phase = self._phase[self.geometry.cluster_of(lanes)]
        return (self._arrived[lanes] == phase) & ~self.presence.is_gone[lanes]

    def _by_cluster(self, lanes: np.ndarray) -> list[tuple[int, np.ndarray]]:
        clusters = self.geometry.cluster_of(lanes)
        return [(c, lanes[clusters == c]) for c in np.unique(clusters).tolist()]

    def _without(
        self, position: int, lanes: np.ndarray, wrong: np.ndarray, text: str
    ) -> np.ndarray:
        """Reports lanes that break a rule; returns the other lanes."""
        if not wrong.any():
            return lanes
        thread = self.geometry.thread(lanes[wrong][0])
        self.log.report(
            ClusterBarrierError, f"a thread {text}", position, thread, count=int(wrong.sum())
        )
        return lanes[~wrong]
