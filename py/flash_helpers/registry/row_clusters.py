"""Configs of kernels in which a cluster has a row, and each of its blocks a part of it: norms and
softmax of wide rows. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.registry.call import Address, Call, Launch
from flash_helpers.registry.config import Config
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.row_threads import CHUNK_BYTES, MAX_WIDTH, Fields

TARGETS = ("90",)
WARPS = (8, 16, 32)
CHUNKS = (1, 2, 4)  # of a thread, which has 64 registers
LARGE_CHUNKS = (1, 2, 4, 8)  # of a thread that has a chunk and little beside it
CLUSTERS = (2, 4, 8)  # blocks
ONE_BLOCK_WARPS = (16, 32)
ONE_BLOCK_CLUSTERS = (1, *CLUSTERS)
RING_CHUNKS = 14  # of 1024 threads, in the shared memory of an SM
THREADS_PER_SM = 1024
LEAST_WIDE = 32 * 1024  # bytes of a row, from which clusters compete
BARRIER_BYTES = 8

# Traits of steps.
ONE_BLOCK = "one_block"  # a row may have one block of the warps that hold most
ONE_ROW = "one_row"  # a cluster has one row, and the grid a cluster for each
WEIGHTS_STAY = "weights_stay"  # blocks have several rows in registers, and keep their weights
RING = "ring"  # as many chunks of the next rows are on their way as shared memory has room for


class RowClusterConfig(Config):
    """One kernel in which a cluster has a row; a subclass has these fields, behind that of its
    step.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    dtype: Element
    n_warps: int
    chunks: int
    cluster_blocks: int

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def block_chunk_bytes(self) -> int:
        """Bytes of a row that a block keeps in registers."""
        return self.chunks * self.n_threads * CHUNK_BYTES

    @property
    def inputs(self) -> int:
        """Tensors whose rows are kept in registers and shared memory."""
        return 1

    @property
    def kept(self) -> int:
        """Vectors, beside those rows, whose part a block has in shared memory."""
        return 0

    @property
    def sum_bytes(self) -> int:
        """Bytes of what is summed, of a warp or of a block."""
        raise NotImplementedError

    @property
    def slots(self) -> int:
        """Chunks of a thread in shared memory, of the next rows of an input."""
        if ONE_ROW in self.step.traits:
            return 0
        if RING not in self.step.traits:
            return self.chunks
        return (RING_CHUNKS - self.kept * self.chunks) // self.inputs

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: its parts of the next rows and of the
        vectors that it keeps; a barrier and sums of each warp and each block, twice where a
        block has several rows."""
        sums = (self.n_warps + self.cluster_blocks) * self.sum_bytes
        chunks = self.inputs * self.slots + self.kept * self.chunks
        times = 1 if ONE_ROW in self.step.traits else 2
        return chunks * self.n_threads * CHUNK_BYTES + times * (BARRIER_BYTES + sums)

    @property
    def choices(self) -> Mapping[str, Sequence[int]]:
        """Values that are built, by the name of a field."""
        may_be_one = ONE_BLOCK in self.step.traits
        only_large = may_be_one and ONE_ROW not in self.step.traits
        return {
            "n_warps": ONE_BLOCK_WARPS if only_large else WARPS,
            "chunks": CHUNKS,
            "cluster_blocks": ONE_BLOCK_CLUSTERS if may_be_one else CLUSTERS,
        }

    def widest(self, way_out: str) -> tuple[int, str, int]:
        """Return the longest row, the way out for a longer one, and the elements that the registers
        of a cluster hold, at most half of it."""
        held = self.cluster_blocks * self.block_chunk_bytes // self.dtype.bytes
        return MAX_WIDTH, way_out, min(held, MAX_WIDTH // 2)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        for name, values in self.choices.items():
            if (value := getattr(self, name)) not in values:
                choices = f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
                raise ValueError(f"{name} {value} is not built: choose {choices}")

    def clusters(self, device: Device) -> int:
        """Return the clusters that run at the same time; at least one."""
        return device.resident_clusters(self.cluster_blocks, THREADS_PER_SM // self.n_threads)

    def call(self, problem: Any, strides: Strides, device: Device) -> Call:
        """Return one launch, in which each cluster has one row or every so many-th row."""
        clusters = problem.rows
        if ONE_ROW not in self.step.traits:
            clusters = min(self.clusters(device), clusters)
        given = (*problem.inputs, *problem.outputs)
        matrices = (tensor.name for tensor in given if len(tensor.axes) > 1)
        values: dict[str, tuple[float, ...]] = {
            **{f"{name}_stride": strides[name][:1] for name in matrices},
            "rows": (problem.rows,),
            "width": (problem.width,),
            **{name: (value,) for name, value in problem.call_options().items() if name != "rms"},
        }
        ((function, layout),) = self.family.kernels.items()
        launch = Launch(
            kernel=self.kernels[function],
            grid=(self.cluster_blocks * clusters, 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=layout,
            values=values,
            addresses=tuple(Address(layout.offset(x.name), x.name) for x in given),
            cluster=(self.cluster_blocks, 1, 1),
        )
        return Call((launch,))

    def most_runs(self, problem: Any, device: Device) -> int:
        """Return the passes of loops that handle one element per thread, in all rows of a cluster,
        and as many again for loops that nvcc unrolls, and for waits."""
        rows = -(-problem.rows // self.clusters(device))
        elements = -(-problem.width // (self.cluster_blocks * self.n_threads))
        return 1000 * rows * (elements + 8)


def competing_clusters(
    width: int,
    dtype: Element,
    most_chunks: int = CHUNKS[-1],
    warps: Sequence[int] = WARPS,
    clusters: Sequence[int] = CLUSTERS,
) -> list[Fields]:
    """Return n_warps, chunks and cluster_blocks with which a cluster holds a row in registers, and
    more than half of these hold it; none for rows below LEAST_WIDE. most_chunks: of a thread.
    warps, clusters: those that compete."""
    found: list[Fields] = []
    for n_warps in warps:
        for blocks in clusters:
            held = blocks * most_chunks * n_warps * gpu.WARP * CHUNK_BYTES // dtype.bytes
            if width * dtype.bytes >= LEAST_WIDE and held // 2 < width <= held:
                found.append({"n_warps": n_warps, "chunks": most_chunks, "cluster_blocks": blocks})
    return found
