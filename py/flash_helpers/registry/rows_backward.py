"""The softmax_backward family of operation `rows_backward`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.rows_backward import OPERATION
from flash_helpers.operations.rows_backward.supports import RowsBackwardSupports
from flash_helpers.registry.call import INT, LONG, POINTER, StructLayout
from flash_helpers.registry.config import element, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import (
    CHUNK_REGISTERS,
    ROW_IN_REGISTERS,
    ROW_THREADS,
    VECTOR_LOADS,
    RowConfig,
)

ARGUMENTS = StructLayout(
    "RowsBackwardKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(("y", "dy", "dx"), POINTER),
            **dict.fromkeys(("y_stride", "dy_stride", "dx_stride"), LONG),
            **dict.fromkeys(("rows", "width"), INT),
        }
    ),
)


@dataclass(frozen=True)
class SoftmaxBackwardKernelConfig(RowConfig):
    """One kernel of the softmax_backward family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "f1_bf16_w4_c4_t32"
    chunk_registers: ClassVar[int] = 2 * CHUNK_REGISTERS  # of y and of dy

    softmax_backward: int = number("f", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of y and of dy, which a thread keeps in registers")
    row_threads: int = number("t", "of a row")

    @property
    def family(self) -> Family[Any]:
        """The softmax_backward family."""
        return SOFTMAX_BACKWARD

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: two numbers for each warp."""
        return 2 * self.n_warps * Element.FP32.bytes

    @property
    def supports(self) -> RowsBackwardSupports:
        """Rows of any length that the config's threads can have, at any element."""
        return RowsBackwardSupports(self.dtype, *self.widest("split the rows, and add their sums"))


SOFTMAX_BACKWARD = Family(
    name="softmax_backward",
    title="gradients of softmax along rows",
    operation=OPERATION,
    prefix="f",
    rank=23,
    config=SoftmaxBackwardKernelConfig,
    base=MappingProxyType({"n_warps": 4, "chunks": 4, "row_threads": 32}),
    entries=(
        StepEntry(
            "one_read",
            "y and dy in registers, read once; threads by width",
            "kernels/rows_backward/f1.cuh",
            opens={
                "n_warps": (4, 8, 16),
                "chunks": (1, 2, 4, 8, 16),
                "row_threads": (8, 16, 32, 64, 128, 256, 512),
            },
            traits=frozenset({VECTOR_LOADS, ROW_IN_REGISTERS, ROW_THREADS}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType({"softmax_backward_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/rows_backward/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=600_000,
    matrix_budget=200_000,
)
