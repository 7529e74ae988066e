"""Shared memory of a batch of blocks, and the addresses by which lanes reach it."""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.regions import RANK_SHIFT, Region, Selection


class SharedMemory(Region):
    """Shared memory of all blocks of a batch, side by side. `size`: bytes of one block. `granule`:
    bytes of the narrowest access of the kernel. `stride`: bytes from one block to the next."""

    def __init__(self, geometry: Geometry, size: int, granule: int) -> None:
        self.geometry = geometry
        self.granule = granule
        self.stride = max(128, -(-size // 128) * 128)
        self.lane_ids = np.arange(geometry.lanes)
        base = geometry.block_of(self.lane_ids) * self.stride
        data = np.zeros(len(geometry.blocks) * self.stride, np.uint8)
        super().__init__(data, size, base, "shared memory")

    def resolve(self, addresses: np.ndarray, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places of shared::cluster addresses (n,) of lanes of the batch: the blocks of the
        batch, and the addresses in these. The block is -1 for an address whose rank no block of the
        cluster has."""
        own, size = self.geometry.block_of(lanes), self.geometry.cluster
        rank = (addresses >> RANK_SHIFT) - 1
        blocks = np.where(rank < 0, own, np.where(rank < size, own - own % size + rank, -1))
        return blocks, np.where(rank < 0, addresses, addresses & ((1 << RANK_SHIFT) - 1))

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of the batch, and addresses in them, of places in `data`."""
        return np.divmod(places, self.stride)

    def is_remote(self, addresses: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """For each address, whether it belongs to another block than the lane's."""
        return self.resolve(addresses, lanes)[0] != self.geometry.block_of(lanes)

    def beyond(self, address: int, size: int) -> str:
        """Text for an access to another block by an address that cannot reach it."""
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
        """Offsets of the selected lanes' addresses in `words`, in bytes."""
        if self.geometry.cluster > 1 and int(addresses.max(initial=0)) >> RANK_SHIFT:
            blocks, at = self.resolve(addresses, self.lane_ids[selection])
            return blocks * self.stride + at
        return super().offsets(addresses, selection)

    def outside(self, address: int, size: int) -> str:
        """Text for an access outside."""
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
        """Text for an access at an address that is not a multiple of its size."""
        return (
            f"{size} bytes at shared address {address % (1 << RANK_SHIFT)}, "
            f"which is not a multiple of {size}"
        )

    def granules_at(self, blocks: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """Granules of `size` bytes at each of several addresses: (n, granules of a row), for
        addresses (n, k) in blocks (n,) of the batch."""
        first = (blocks[:, None] * self.stride + addresses) // self.granule
        count = -(-size // self.granule)
        return (first[:, :, None] + np.arange(count)).reshape(len(first), -1)
