"""The map from lanes of a batch to threads and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import Thread

Lanes = TypeVar("Lanes", np.ndarray, int)
"""Numbers of lanes in the batch, or a value for each of them."""


@dataclass(frozen=True)
class Geometry:
    """The thread of every lane of a batch: lane = (warp * blocks + block) * 32 + lane of the warp,
    so that one warp of all blocks is a slice of the lanes.

    `blocks`: `ctaid` of each block; the blocks of a cluster stand side by side in the order of
    their ranks. `threads`: threads per block. `cluster`: blocks per cluster.
    """

    blocks: tuple[tuple[int, int, int], ...]
    threads: int
    cluster: int = 1

    @property
    def warps_per_block(self) -> int:
        """Warps of a block, the last of which may be short."""
        return -(-self.threads // WARP)

    @property
    def lanes_per_block(self) -> int:
        """Lanes of a block's warps, those beyond its threads included."""
        return WARP * self.warps_per_block

    @property
    def lanes(self) -> int:
        """Lanes of all blocks."""
        return len(self.blocks) * self.lanes_per_block

    @property
    def warps(self) -> int:
        """Warps of all blocks."""
        return len(self.blocks) * self.warps_per_block

    @property
    def lanes_per_cluster(self) -> int:
        """Lanes of the blocks of a cluster."""
        return self.cluster * self.lanes_per_block

    @property
    def warps_per_cluster(self) -> int:
        """Warps of the blocks of a cluster."""
        return self.cluster * self.warps_per_block

    def block_of(self, lanes: Lanes) -> Lanes:
        """The block of each lane, as an index of `blocks`."""
        return lanes // WARP % len(self.blocks)

    def warp_of(self, lanes: Lanes) -> Lanes:
        """The warp of each lane, numbered within its block."""
        return lanes // (WARP * len(self.blocks))

    def thread_of(self, lanes: Lanes) -> Lanes:
        """Linear thread index of each lane in its block, also for lanes beyond its threads."""
        return self.warp_of(lanes) * WARP + lanes % WARP

    def cluster_of(self, lanes: Lanes) -> Lanes:
        """The cluster of each lane, numbered over the batch."""
        return self.block_of(lanes) // self.cluster

    def rank_of(self, lanes: Lanes) -> Lanes:
        """The rank of each lane's block in its cluster."""
        return self.block_of(lanes) % self.cluster

    def place_of(self, lanes: Lanes) -> Lanes:
        """Each lane's number within its cluster: by the rank of its block, then by thread."""
        return self.rank_of(lanes) * self.lanes_per_block + self.thread_of(lanes)

    def lane_of(self, block: Lanes | int, thread: Lanes) -> Lanes:
        """The lane of a thread of a block; the inverse of `block_of` and `thread_of`."""
        return (thread // WARP * len(self.blocks) + block) * WARP + thread % WARP

    def lane_at(self, cluster: Lanes | int, place: Lanes) -> Lanes:
        """The lane at a place of a cluster; the inverse of `cluster_of` and `place_of`."""
        rank, thread = place // self.lanes_per_block, place % self.lanes_per_block
        return self.lane_of(cluster * self.cluster + rank, thread)

    def lanes_of(self, block: int) -> np.ndarray:
        """All lanes of a block, in the order of its threads, lanes beyond its threads included."""
        return self.lane_of(block, np.arange(self.lanes_per_block))

    def thread(self, lane: int | np.integer) -> Thread:
        """The thread of a lane of the batch."""
        lane = int(lane)
        return Thread(self.blocks[self.block_of(lane)], self.warp_of(lane), lane % WARP)
