"""The diagonal_backward family of operation `diagonal_backward`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.operations.diagonal_backward import OPERATION
from flash_helpers.operations.diagonal_backward.supports import DiagonalBackwardSupports
from flash_helpers.registry.call import INT, LONG, POINTER, StructLayout
from flash_helpers.registry.config import element, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import (
    CHUNK_REGISTERS,
    MAX_WIDTH,
    ROW_IN_REGISTERS,
    ROW_THREADS,
    VECTOR_LOADS,
    RowConfig,
)

ARGUMENTS = StructLayout(
    "DiagonalBackwardKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(("a", "b", "dc", "da", "db"), POINTER),
            **dict.fromkeys(("b_stride", "dc_stride", "db_stride"), LONG),
            **dict.fromkeys(("rows", "width"), INT),
        }
    ),
)


@dataclass(frozen=True)
class DiagonalBackwardKernelConfig(RowConfig):
    """One kernel of the diagonal_backward family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "i1_bf16_w4_c4_t32"

    diagonal_backward: int = number("i", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of B and of dC, which a thread loads at once")
    row_threads: int = number("t", "of a row")

    @property
    def family(self) -> Family[Any]:
        """The diagonal_backward family."""
        return DIAGONAL_BACKWARD

    @property
    def chunk_registers(self) -> int:
        """Registers of a thread per chunk, of B and of dC."""
        return 2 * CHUNK_REGISTERS

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a sum for each warp."""
        return self.n_warps * Element.FP32.bytes

    @property
    def supports(self) -> DiagonalBackwardSupports:
        """Rows of any length, at any element; few threads take short rows alone."""
        most, wider, held = self.widest("split the call by width, and add up da")
        most = gpu.MAX_GRID[0] if most == MAX_WIDTH else most
        return DiagonalBackwardSupports(self.dtype, most, wider, held)


DIAGONAL_BACKWARD = Family(
    name="diagonal_backward",
    title="gradients of a diagonal matrix times a matrix",
    operation=OPERATION,
    prefix="i",
    rank=25,
    config=DiagonalBackwardKernelConfig,
    base=MappingProxyType({"n_warps": 4, "chunks": 4, "row_threads": 32}),
    entries=(
        StepEntry(
            "both_gradients",
            "both gradients in one read of B and dC",
            "kernels/diagonal_backward/i1.cuh",
            opens={
                "n_warps": (4, 8),
                "chunks": (1, 2, 4, 8),
                "row_threads": (8, 16, 32, 128),
            },
            traits=frozenset({VECTOR_LOADS, ROW_IN_REGISTERS, ROW_THREADS}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType({"diagonal_backward_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/diagonal_backward/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=500_000,
    matrix_budget=200_000,
)
