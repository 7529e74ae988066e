"""Configs of kernels in which a cluster has a row, and each of its blocks a part of it: norms and
softmax of wide rows. Standard library only."""

from __future__ import annotations

from typing import ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.registry.call import Address, Call, Launch
from flash_helpers.registry.config import Config
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.row_threads import CHUNK_BYTES, MAX_WIDTH, Fields

TARGETS = ("90",)
WARPS = (8, 16, 32)
CHUNKS = (1, 2, 4)  # of a thread, which has 64 registers
CLUSTERS = (2, 4, 8)  # blocks
THREADS_PER_SM = 1024
LEAST_WIDE = 32 * 1024  # bytes of a row, from which clusters compete
GPC_SMS = 16  # a GPC, whose SMs the blocks of a cluster run on, has as many or a few more
BARRIER_BYTES = 8


class RowClusterConfig(Config):
    """One kernel in which a cluster has a row; a subclass has these fields, behind that of its
    step.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    kept: ClassVar[
        int
    ]  # vectors, beside the next row of x, whose part a block has in shared memory
    sum_bytes: ClassVar[int]  # of what is summed, of a warp or of a block

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
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: its part of the next row and of the vectors
        that it keeps; a barrier and sums of each warp and each block, twice."""
        sums = (self.n_warps + self.cluster_blocks) * self.sum_bytes
        return (1 + self.kept) * self.block_chunk_bytes + 2 * (BARRIER_BYTES + sums)

    def widest(self, way_out: str) -> tuple[int, str, int]:
        """Return the longest row, the way out for a longer one, and the elements that the registers
        of a cluster hold, at most half of it."""
        held = self.cluster_blocks * self.block_chunk_bytes // self.dtype.bytes
        return MAX_WIDTH, way_out, min(held, MAX_WIDTH // 2)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        for name, values in (
            ("n_warps", WARPS),
            ("chunks", CHUNKS),
            ("cluster_blocks", CLUSTERS),
        ):
            if (value := getattr(self, name)) not in values:
                choices = f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
                raise ValueError(f"{name} {value} is not built: choose {choices}")

    def clusters(self, device: Device) -> int:
        """Return the clusters that run at the same time, each on SMs of one GPC; at least one."""
        per_gpc = GPC_SMS * (THREADS_PER_SM // self.n_threads) // self.cluster_blocks
        return max(1, device.sms // GPC_SMS * per_gpc)

    def call(self, problem: Rows | Norm, strides: Strides, device: Device) -> Call:
        """Return one launch, in which each cluster has every so many-th row."""
        values: dict[str, tuple[float, ...]] = {
            "x_stride": strides["x"][:1],
            "y_stride": strides["y"][:1],
            "rows": (problem.rows,),
            "width": (problem.width,),
            **{name: (value,) for name, value in problem.call_options().items() if name != "rms"},
        }
        ((function, layout),) = self.family.kernels.items()
        given = [tensor.name for tensor in (*problem.inputs, *problem.outputs)]
        launch = Launch(
            kernel=self.kernels[function],
            grid=(self.cluster_blocks * min(self.clusters(device), problem.rows), 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=layout,
            values=values,
            addresses=tuple(Address(layout.offset(name), name) for name in given),
            cluster=(self.cluster_blocks, 1, 1),
        )
        return Call((launch,))

    def most_runs(self, problem: Rows | Norm, device: Device) -> int:
        """Return the passes of loops that handle one element per thread, in all rows of a cluster,
        and as many again for loops that nvcc unrolls, and for waits."""
        rows = -(-problem.rows // self.clusters(device))
        elements = -(-problem.width // (self.cluster_blocks * self.n_threads))
        return 1000 * rows * (elements + 8)


def competing_clusters(width: int, dtype: Element) -> list[Fields]:
    """Return n_warps, chunks and cluster_blocks with which a cluster holds a row in registers, and
    more than half of these hold it; none for rows below LEAST_WIDE."""
    found: list[Fields] = []
    for n_warps in WARPS:
        for blocks in CLUSTERS:
            held = blocks * CHUNKS[-1] * n_warps * gpu.WARP * CHUNK_BYTES // dtype.bytes
            if width * dtype.bytes >= LEAST_WIDE and held // 2 < width <= held:
                found.append({"n_warps": n_warps, "chunks": CHUNKS[-1], "cluster_blocks": blocks})
    return found
