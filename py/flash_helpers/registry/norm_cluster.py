"""The norm_cluster family of operation `norm`: a cluster has a row, on Hopper and later. Standard
library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.norm import OPERATION
from flash_helpers.operations.norm.supports import NormSupports
from flash_helpers.registry.config import element, flag, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.norm import ARGUMENTS
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_clusters import (
    CHUNKS,
    CLUSTERS,
    LARGE_CHUNKS,
    ONE_BLOCK,
    ONE_BLOCK_CLUSTERS,
    ONE_BLOCK_WARPS,
    ONE_ROW,
    TARGETS,
    THREADS_PER_SM,
    WARPS,
    WEIGHTS_STAY,
    RowClusterConfig,
)

MOMENTS_BYTES = 16  # of a number, a mean and a sum, for one message


@dataclass(frozen=True)
class NormClusterKernelConfig(RowClusterConfig):
    """One kernel of the norm_cluster family. `rms`: it computes RMS norm."""

    example: ClassVar[str] = "a1_bf16_w16_c4_k4"

    norm_cluster: int = number("a", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of the row, which a thread keeps in registers")
    cluster_blocks: int = number("k", "thread blocks that have a row")
    rms: bool = flag("rms", "RMS norm instead of layer norm", default=False)

    @property
    def family(self) -> Family[Any]:
        """The norm_cluster family."""
        return NORM_CLUSTER

    @property
    def kept(self) -> int:
        """Weight and bias; from a2 on RMS norm, which seldom has a bias, keeps the weight alone. A
        block of one row keeps none."""
        if ONE_ROW in self.step.traits:
            return 0
        return 1 if self.rms and ONE_BLOCK in self.step.traits else 2

    @property
    def sum_bytes(self) -> int:
        """Bytes of a sum, of a warp or of a block; of a number, a mean and a sum, where these
        are exchanged."""
        of_moments = {ONE_ROW, WEIGHTS_STAY} & self.step.traits
        return MOMENTS_BYTES if of_moments else Element.FP32.bytes

    @property
    def slots(self) -> int:
        """Chunks of a thread in shared memory, of the next row, unless it comes to registers."""
        return 0 if WEIGHTS_STAY in self.step.traits else super().slots

    @property
    def choices(self) -> Mapping[str, Sequence[int]]:
        """Values that are built, by the name of a field."""
        if not {ONE_ROW, WEIGHTS_STAY} & self.step.traits:
            return super().choices
        return {**super().choices, "n_warps": WARPS, "chunks": LARGE_CHUNKS}

    def clusters(self, device: Device) -> int:
        """Return the clusters that run at the same time; at least one."""
        per_sm = THREADS_PER_SM // self.n_threads
        if WEIGHTS_STAY in self.step.traits:
            room = gpu.LIMITS[90].smem_bytes + gpu.RESERVED_SMEM_BYTES
            per_sm = max(1, min(per_sm, room // (self.smem_bytes + gpu.RESERVED_SMEM_BYTES)))
        return device.resident_clusters(self.cluster_blocks, per_sm)

    @property
    def supports(self) -> NormSupports:
        """Rows of any length that the config's threads can have, at any element."""
        widest = self.widest("split the rows, and combine their sums of x and of squares")
        most = gpu.MAX_GRID[0]
        rows = most // self.cluster_blocks if ONE_ROW in self.step.traits else most
        return NormSupports(self.dtype, *widest, max_rows=rows, rms=self.rms)

    def variants(self) -> tuple[NormClusterKernelConfig, ...]:
        """Return the config, and that of the other function."""
        return self, self.replace(rms=not self.rms)


def _of_rms() -> Iterator[NormClusterKernelConfig]:
    """Yield a kernel of RMS norm: only the sum of x is left out."""
    for config in NORM_CLUSTER.progression():
        if config.dtype is Element.BF16:
            yield config.replace(rms=True)


NORM_CLUSTER = Family(
    name="norm_cluster",
    title="layer norm and RMS norm along wide rows",
    operation=OPERATION,
    prefix="a",
    rank=17,
    config=NormClusterKernelConfig,
    base=MappingProxyType({"n_warps": 16, "chunks": 4, "cluster_blocks": 4, "rms": False}),
    entries=(
        StepEntry(
            "cluster_per_row",
            "a cluster per row, with fixed columns, and the next row on its way",
            "kernels/norm/a1.cuh",
            parent="n4",
            opens={
                "n_warps": WARPS,
                "chunks": CHUNKS,
                "cluster_blocks": CLUSTERS,
                "rms": (False, True),
            },
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "fewer_instructions",
            "fewer instructions per row, which may have one block",
            "kernels/norm/a2.cuh",
            opens={"n_warps": ONE_BLOCK_WARPS, "cluster_blocks": ONE_BLOCK_CLUSTERS},
            traits=frozenset({ONE_BLOCK, HELD_BACK}),
        ),
        StepEntry(
            "asynchronous_sums",
            "sums sent by st.async, for which no thread waits for its stores",
            "kernels/norm/a3.cuh",
            traits=frozenset({ONE_BLOCK, HELD_BACK}),
        ),
        StepEntry(
            "cluster_of_a_row",
            "n7 in a cluster of small blocks for each row, of which an SM has blocks of several",
            "kernels/norm/a4.cuh",
            parent="n7",
            sets={"n_warps": 8, "chunks": 8},
            opens={"n_warps": WARPS, "chunks": LARGE_CHUNKS},
            traits=frozenset({ONE_ROW, HELD_BACK}),
        ),
        StepEntry(
            "weights_stay",
            "persistent clusters, whose weight and bias stay in shared memory",
            "kernels/norm/a5.cuh",
            traits=frozenset({WEIGHTS_STAY, HELD_BACK}),
            drops=frozenset({ONE_ROW}),
        ),
        StepEntry(
            "next_row_to_l2",
            "the next row on its way to L2 while this one is in registers",
            "kernels/norm/a6.cuh",
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "y_of_clusters_leaves_l2",
            "y by streaming stores, and weight and bias loaded without predicates",
            "kernels/norm/a7.cuh",
            parent="a4",
            traits=frozenset({ONE_ROW, HELD_BACK}),
            drops=frozenset({WEIGHTS_STAY}),
        ),
        StepEntry(
            "row_fills_cluster",
            "rows that just fill the registers of a cluster, without shares and predicates",
            "kernels/norm/a8.cuh",
            sets={"chunks": 2},
            traits=frozenset({HELD_BACK}),
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType({"norm_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/norm/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=23_500_000,
    matrix_budget=40_000_000,
    also_listed=_of_rms,
)
