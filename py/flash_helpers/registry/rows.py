"""The softmax family of operation `rows`: a thread block has one row, or from s4 on several.
Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.rows import OPERATION
from flash_helpers.operations.rows.supports import RowsSupports
from flash_helpers.registry.call import INT, LONG, POINTER, StructLayout
from flash_helpers.registry.config import element, number
from flash_helpers.registry.family import CORE, HELD_BACK, Family, StepEntry
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import (
    CHUNK_REGISTERS,
    ROW_IN_REGISTERS,
    ROW_THREADS,
    ROWS_IN_FLIGHT,
    ROWS_OF_A_THREAD,
    VECTOR_LOADS,
    RowConfig,
)

ARGUMENTS = StructLayout(
    "RowsKernelArgs",
    MappingProxyType(
        {
            "x": POINTER,
            "y": POINTER,
            "x_stride": LONG,
            "y_stride": LONG,
            "rows": INT,
            "width": INT,
        }
    ),
)


@dataclass(frozen=True)
class SoftmaxKernelConfig(RowConfig):
    """One kernel of the softmax family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "s3_bf16_w8_c4"

    softmax: int = number("s", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number(
        "c",
        "of 16 bytes of the row, which a thread keeps in registers; 0 before s3",
        default=0,
    )
    row_threads: int = number("t", "of a row; 0 before s4, where all of the block are", default=0)
    rows_in_flight: int = number("f", "rows of a thread at once; 0 before s5: one", default=0)

    @property
    def family(self) -> Family[Any]:
        """The softmax family."""
        return SOFTMAX

    @property
    def chunk_registers(self) -> int:
        """Registers of a thread per chunk: its words, or from s5 on its exponentials in fp32."""
        words = CHUNK_REGISTERS
        return 2 * words if ROWS_IN_FLIGHT in self.step.traits else words

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a maximum and a sum for each warp and
        each row of a thread."""
        return 2 * self.thread_rows * self.n_warps * Element.FP32.bytes

    @property
    def supports(self) -> RowsSupports:
        """Rows of any length that the config's threads can have, at any element."""
        way_out = "use torch.softmax, or combine the softmax of parts by their maximum and sum"
        return RowsSupports(self.dtype, *self.widest(way_out))


def _file(number: int) -> str:
    return f"kernels/rows/s{number}.cuh"


SOFTMAX = Family(
    name="softmax",
    title="softmax along rows, a thread block for each",
    operation=OPERATION,
    prefix="s",
    rank=4,
    config=SoftmaxKernelConfig,
    base=MappingProxyType({"n_warps": 8, "chunks": 0, "row_threads": 0, "rows_in_flight": 0}),
    entries=(
        StepEntry("block_per_row", "a thread block per row, three reads", _file(1)),
        StepEntry(
            "16_bytes_per_lane",
            "16 bytes per lane",
            _file(2),
            traits=frozenset({VECTOR_LOADS}),
        ),
        StepEntry(
            "row_in_registers",
            "the row in registers, read once",
            _file(3),
            sets={"chunks": 4},
            opens={"n_warps": (1, 2, 4, 8, 16, 32), "chunks": (1, 2, 4, 8, 16)},
            traits=frozenset({ROW_IN_REGISTERS}),
            place=CORE,
        ),
        StepEntry(
            "threads_by_width",
            "threads by width, several rows per block",
            _file(4),
            sets={"n_warps": 4, "row_threads": 32},
            opens={"n_warps": (4, 16), "row_threads": (8, 16, 32, 64, 128, 256, 512)},
            traits=frozenset({ROW_THREADS}),
        ),
        StepEntry(
            "rows_of_softmax_in_flight",
            "several rows of a thread at the same columns, and each exponential once",
            _file(5),
            sets={"n_warps": 4, "chunks": 2, "row_threads": 32, "rows_in_flight": 2},
            opens={"rows_in_flight": ROWS_OF_A_THREAD},
            traits=frozenset({ROWS_IN_FLIGHT, HELD_BACK}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType({"softmax_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/rows/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=2_500_000,
    matrix_budget=950_000,
)
