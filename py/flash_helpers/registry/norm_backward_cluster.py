"""The norm_backward_cluster family of operation `norm_backward`: a cluster has a row, on Hopper and
later. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.norm_backward import OPERATION
from flash_helpers.operations.norm_backward.supports import NormBackwardSupports
from flash_helpers.registry.call import FLOAT, Call
from flash_helpers.registry.config import element, flag, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.norm_backward import (
    ARGUMENTS,
    COMBINE,
    ONE_PASS,
    ROWS,
    WIDE_SUMS,
    NormBackwardKernels,
)
from flash_helpers.registry.norm_backward_staged import OTHERS, resident_blocks
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.row_clusters import (
    BARRIER_BYTES,
    CHUNKS,
    CLUSTERS,
    TARGETS,
    RowClusterConfig,
)
from flash_helpers.registry.row_threads import CHUNK_BYTES, Fields

WARPS = (8, 16)
ROWS_HELD = 3  # of x and dy, in shared memory
TURNS = 4  # rows whose sums have a place in shared memory


@dataclass(frozen=True)
class NormBackwardClusterKernelConfig(NormBackwardKernels, RowClusterConfig):
    """One kernel of the norm_backward_cluster family. `rms`: it computes gradients of RMS norm."""

    example: ClassVar[str] = "nc1_bf16_w16_c4_k4"

    norm_backward_cluster: int = number("nc", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of the row, of which a thread has the columns")
    cluster_blocks: int = number("k", "thread blocks that have a row")
    rms: bool = flag("rms", "RMS norm instead of layer norm", default=False)

    @property
    def family(self) -> Family[Any]:
        """The norm_backward_cluster family."""
        return NORM_BACKWARD_CLUSTER

    @property
    def sums(self) -> int:
        """Sums of a column, of dweight and of dbias; and of a row."""
        return 1 if self.rms else 2

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: its part of three rows of x and dy, and of
        weight; two sums of each warp for two rows; barriers and sums of each block for four."""
        chunks = (2 * ROWS_HELD + 1) * self.block_chunk_bytes
        sums = 2 * self.n_warps + TURNS * self.cluster_blocks
        return chunks + 2 * FLOAT.size * sums + TURNS * BARRIER_BYTES

    @property
    def choices(self) -> Mapping[str, Sequence[int]]:
        """Values that are built, by the name of a field."""
        return {**super().choices, "n_warps": WARPS}

    @property
    def supports(self) -> NormBackwardSupports:
        """Rows of any length that the config's threads can have, at any element."""
        widest = self.widest("split the rows, and combine their sums")
        return NormBackwardSupports(self.dtype, *widest, rms=self.rms)

    def variants(self) -> tuple[NormBackwardClusterKernelConfig, ...]:
        """Return the config, and that of the other function."""
        return self, self.replace(rms=not self.rms)

    def blocks_per_sm(self, device: Device) -> int:
        """Return the thread blocks of an SM."""
        registers = self.chunks * self.sums * self.chunk_elements + OTHERS
        return resident_blocks(device, self.n_threads, registers, self.smem_bytes)

    def clusters(self, device: Device) -> int:
        """Return the clusters of the grid, which run at the same time; at least one."""
        return device.resident_clusters(self.cluster_blocks, self.blocks_per_sm(device))

    def call(self, problem: Any, strides: Strides, device: Device) -> Call:
        """Return a launch for rows, and one for columns if their gradients are asked for."""
        parts = min(self.clusters(device), problem.rows)
        return self.call_of_parts(problem, strides, parts, self.cluster_blocks)

    def most_runs(self, problem: Any, device: Device) -> int:
        """Return the passes of loops that handle one element per thread, in all rows of a cluster,
        and as many again for loops that nvcc unrolls, and for waits."""
        rows = -(-problem.rows // self.clusters(device))
        return 1000 * rows * (-(-problem.width // self.n_threads) + 8)


def competing_clusters(width: int, dtype: Element) -> list[Fields]:
    """Return n_warps, chunks and cluster_blocks with which the blocks of a cluster have a row, and
    half of these would not."""
    found: list[Fields] = []
    for blocks in CLUSTERS:
        for n_warps in WARPS:
            shape = {"n_warps": n_warps, "chunks": CHUNKS[-1], "cluster_blocks": blocks}
            held = math.prod(shape.values()) * gpu.WARP * CHUNK_BYTES // dtype.bytes
            if held // 2 < width <= held:
                found.append(shape)
    return found


def _of_rms() -> Iterator[NormBackwardClusterKernelConfig]:
    """Yield a kernel of RMS norm: the mean, Σ g and the sums of dbias are left out."""
    for config in NORM_BACKWARD_CLUSTER.progression():
        if config.dtype is Element.BF16:
            yield config.replace(rms=True)


NORM_BACKWARD_CLUSTER = Family(
    name="norm_backward_cluster",
    title="the backward pass of layer norm and RMS norm along wide rows",
    operation=OPERATION,
    prefix="nc",
    rank=22,
    config=NormBackwardClusterKernelConfig,
    base=MappingProxyType({"n_warps": 16, "chunks": 4, "cluster_blocks": 2, "rms": False}),
    entries=(
        StepEntry(
            "cluster_per_row_backward",
            "a cluster per row, whose sums are exchanged beside the row before it",
            "kernels/norm_backward/nc1.cuh",
            parent="w1",
            opens={
                "n_warps": WARPS,
                "chunks": CHUNKS,
                "cluster_blocks": CLUSTERS,
                "rms": (False, True),
            },
            traits=frozenset({ONE_PASS, WIDE_SUMS, HELD_BACK}),
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType({ROWS: ARGUMENTS, COMBINE: ARGUMENTS}),
    header=PurePosixPath("kernels/norm_backward/cluster.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=12_500_000,
    matrix_budget=1_000_000,
    also_listed=_of_rms,
)
