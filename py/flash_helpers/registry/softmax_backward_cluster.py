"""The softmax_backward_cluster family of operation `rows_backward`: persistent thread blocks, of
which one or a cluster has a row, on Hopper and later. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.rows_backward import OPERATION
from flash_helpers.operations.rows_backward.supports import RowsBackwardSupports
from flash_helpers.registry.config import element, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_clusters import (
    CHUNKS,
    ONE_BLOCK,
    ONE_BLOCK_CLUSTERS,
    ONE_BLOCK_WARPS,
    RING,
    TARGETS,
    RowClusterConfig,
)
from flash_helpers.registry.rows_backward import ARGUMENTS


@dataclass(frozen=True)
class SoftmaxBackwardClusterKernelConfig(RowClusterConfig):
    """One kernel of the softmax_backward_cluster family."""

    example: ClassVar[str] = "t1_bf16_w32_c4_k2"

    softmax_backward_cluster: int = number("t", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of y and of dy, which a thread keeps in registers")
    cluster_blocks: int = number("k", "thread blocks that have a row")

    @property
    def family(self) -> Family[Any]:
        """The softmax_backward_cluster family."""
        return SOFTMAX_BACKWARD_CLUSTER

    @property
    def sum_bytes(self) -> int:
        """Bytes of a sum and what was rounded off, of a warp or of a block."""
        return 2 * Element.FP32.bytes

    @property
    def inputs(self) -> int:
        """Tensors whose rows are kept in registers and shared memory: y and dy."""
        return 2

    @property
    def supports(self) -> RowsBackwardSupports:
        """Rows of any length that the config's threads can have, at any element."""
        return RowsBackwardSupports(self.dtype, *self.widest("split the rows, and add their sums"))


SOFTMAX_BACKWARD_CLUSTER = Family(
    name="softmax_backward_cluster",
    title="gradients of softmax along wide rows",
    operation=OPERATION,
    prefix="t",
    rank=24,
    config=SoftmaxBackwardClusterKernelConfig,
    base=MappingProxyType({"n_warps": 32, "chunks": 4, "cluster_blocks": 2}),
    entries=(
        StepEntry(
            "persistent_gradients",
            "persistent blocks with the row in registers, and the next rows on their way",
            "kernels/rows_backward/t1.cuh",
            parent="f1",
            opens={
                "n_warps": ONE_BLOCK_WARPS,
                "chunks": CHUNKS,
                "cluster_blocks": ONE_BLOCK_CLUSTERS,
            },
            traits=frozenset({ONE_BLOCK, RING, HELD_BACK}),
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType({"softmax_backward_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/rows_backward/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=16_000_000,
    matrix_budget=5_000_000,
)
