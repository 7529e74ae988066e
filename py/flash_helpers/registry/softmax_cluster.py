"""The softmax_cluster family of operation `rows`: persistent thread blocks, of which one or a
cluster has a row, on Hopper and later. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.operations.rows import OPERATION
from flash_helpers.operations.rows.supports import RowsSupports
from flash_helpers.registry.config import element, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_clusters import (
    LARGE_CHUNKS,
    ONE_BLOCK,
    ONE_BLOCK_CLUSTERS,
    ONE_BLOCK_WARPS,
    ONE_ROW,
    TARGETS,
    WARPS,
    RowClusterConfig,
)
from flash_helpers.registry.rows import ARGUMENTS


@dataclass(frozen=True)
class SoftmaxClusterKernelConfig(RowClusterConfig):
    """One kernel of the softmax_cluster family."""

    example: ClassVar[str] = "x1_bf16_w32_c8_k1"

    softmax_cluster: int = number("x", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of the row, which a thread keeps in registers")
    cluster_blocks: int = number("k", "thread blocks that have a row")

    @property
    def family(self) -> Family[Any]:
        """The softmax_cluster family."""
        return SOFTMAX_CLUSTER

    @property
    def sum_bytes(self) -> int:
        """Bytes of a maximum and a sum, of a warp or of a block."""
        return 2 * Element.FP32.bytes

    @property
    def choices(self) -> Mapping[str, Sequence[int]]:
        """Values that are built, by the name of a field."""
        return {**super().choices, "chunks": LARGE_CHUNKS}

    @property
    def supports(self) -> RowsSupports:
        """Rows of any length that the config's threads can have, at any element."""
        way_out = "use torch.softmax, or combine the softmax of parts by their maximum and sum"
        most = gpu.MAX_GRID[0]
        rows = most // self.cluster_blocks if ONE_ROW in self.step.traits else most
        return RowsSupports(self.dtype, *self.widest(way_out), max_rows=rows)


SOFTMAX_CLUSTER = Family(
    name="softmax_cluster",
    title="softmax along wide rows",
    operation=OPERATION,
    prefix="x",
    rank=5,
    config=SoftmaxClusterKernelConfig,
    base=MappingProxyType({"n_warps": 32, "chunks": 8, "cluster_blocks": 1}),
    entries=(
        StepEntry(
            "persistent_rows",
            "persistent blocks with the row in registers, and the next row on its way",
            "kernels/rows/x1.cuh",
            parent="s4",
            opens={
                "n_warps": ONE_BLOCK_WARPS,
                "chunks": LARGE_CHUNKS,
                "cluster_blocks": ONE_BLOCK_CLUSTERS,
            },
            traits=frozenset({ONE_BLOCK, HELD_BACK}),
        ),
        StepEntry(
            "asynchronous_m_and_l",
            "m and l sent by st.async, for which no thread waits for its stores",
            "kernels/rows/x2.cuh",
            sets={"n_warps": 16, "cluster_blocks": 2},
            traits=frozenset({ONE_BLOCK, HELD_BACK}),
        ),
        StepEntry(
            "cluster_of_a_row",
            "a cluster of small blocks for each row, of which an SM has blocks of several",
            "kernels/rows/x3.cuh",
            sets={"n_warps": 8, "cluster_blocks": 4},
            opens={"n_warps": WARPS},
            traits=frozenset({ONE_ROW, HELD_BACK}),
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType({"softmax_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/rows/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=12_700_000,
    matrix_budget=5_000_000,
)
