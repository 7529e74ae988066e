"""The add_norm family of operation `add_norm`: layer norm and RMS norm of a sum of two matrices.
Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.add_norm import OPERATION
from flash_helpers.operations.add_norm.supports import AddNormSupports
from flash_helpers.registry.call import FLOAT, INT, LONG, POINTER, StructLayout
from flash_helpers.registry.config import element, flag, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import (
    CHUNK_REGISTERS,
    ROW_IN_REGISTERS,
    ROW_THREADS,
    VECTOR_LOADS,
    RowConfig,
)

# Of a thread per chunk: x, whose registers the sum takes, residual, and addresses.
SUM_REGISTERS = 3 * CHUNK_REGISTERS
MOST_CHUNKS = 8  # with more of them ptxas spills in 16 bits
MATRICES = ("x", "residual", "y", "sum")

ARGUMENTS = StructLayout(
    "AddNormKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(
                ("x", "residual", "weight", "bias", "y", "sum", "mean", "rstd"), POINTER
            ),
            **{f"{name}_stride": LONG for name in MATRICES},
            "rows": INT,
            "width": INT,
            "eps": FLOAT,
        }
    ),
)


@dataclass(frozen=True)
class AddNormKernelConfig(RowConfig):
    """One kernel of the add_norm family. `rms`: it computes RMS norm."""

    example: ClassVar[str] = "an1_bf16_w4_c4_t128"

    add_norm: int = number("an", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of the sum, which a thread keeps in registers")
    row_threads: int = number("t", "that have a row")
    rms: bool = flag("rms", "RMS norm instead of layer norm", default=False)

    @property
    def family(self) -> Family[Any]:
        """The add_norm family."""
        return ADD_NORM

    @property
    def chunk_registers(self) -> int:
        """Registers of a thread per chunk."""
        return SUM_REGISTERS

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a number for each warp and each sum."""
        return (1 if self.rms else 2) * self.n_warps * Element.FP32.bytes

    @property
    def supports(self) -> AddNormSupports:
        """Rows of any length that the config's threads can have, at any element."""
        widest = self.widest("split the rows, and combine their sums of x and of squares")
        return AddNormSupports(self.dtype, *widest, rms=self.rms)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        super().check()
        if self.chunks > MOST_CHUNKS:
            raise ValueError(f"chunks {self.chunks} is over {MOST_CHUNKS}: choose 4 or 8")

    def variants(self) -> tuple[AddNormKernelConfig, ...]:
        """Return the config, and that of the other function."""
        return self, self.replace(rms=not self.rms)


def _of_rms() -> Iterator[AddNormKernelConfig]:
    """Yield a kernel of RMS norm: only the mean is left out."""
    for config in ADD_NORM.progression():
        if config.dtype is Element.BF16:
            yield config.replace(rms=True)


ADD_NORM = Family(
    name="add_norm",
    title="layer norm and RMS norm of a sum",
    operation=OPERATION,
    prefix="an",
    rank=18,
    config=AddNormKernelConfig,
    base=MappingProxyType({"n_warps": 4, "chunks": 4, "row_threads": 128, "rms": False}),
    entries=(
        StepEntry(
            "sum_in_registers",
            "a residual is added on the way, and the sum stays in registers for the norm",
            "kernels/add_norm/an1.cuh",
            opens={
                "n_warps": (4, 8, 16, 32),
                "chunks": (1, 2, 4, 8),
                "row_threads": (8, 16, 32, 64, 128, 256, 512, 1024),
                "rms": (False, True),
            },
            traits=frozenset({VECTOR_LOADS, ROW_IN_REGISTERS, ROW_THREADS}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType({"add_norm_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/add_norm/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=2_000_000,
    matrix_budget=200_000,
    also_listed=_of_rms,
)
