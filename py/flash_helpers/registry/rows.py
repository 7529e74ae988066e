"""The softmax family of operation `rows`: a thread block has one row, or from s4 on several.
Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.rows import OPERATION
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows.supports import RowsSupports
from flash_helpers.registry.call import INT, LONG, POINTER, Address, Call, Launch, StructLayout
from flash_helpers.registry.config import Config, element, number
from flash_helpers.registry.family import CORE, HELD_BACK, Family, StepEntry
from flash_helpers.registry.problem import Element, Strides

MAX_WIDTH = 131072
MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
MAX_CHUNKS = 16
LEAST_ROW_THREADS = 8
MOST_OF_FEW = 128  # elements of a thread, where fewer threads than a warp have a row
CHUNK_BYTES = 16  # one load or store of a thread, four registers
CHUNK_REGISTERS = CHUNK_BYTES // 4
OTHER_REGISTERS = 48  # of a thread of s3, at most, beside its chunks
SM_REGISTERS = 65536

# Traits of steps.
VECTOR_LOADS = "vector_loads"  # chunks of 16 bytes per lane
ROW_IN_REGISTERS = "row_in_registers"  # `chunks` chunks of each thread are read once
ROW_THREADS = "row_threads"  # a row has `row_threads` threads, and a block several rows

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
class SoftmaxKernelConfig(Config):
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

    @property
    def family(self) -> Family[Any]:
        """The softmax family."""
        return SOFTMAX

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a maximum and a sum for each warp."""
        return 2 * self.n_warps * Element.FP32.bytes

    @property
    def threads_per_row(self) -> int:
        """Threads that share a row."""
        return self.row_threads or self.n_threads

    @property
    def block_rows(self) -> int:
        """Rows of one block."""
        return self.n_threads // self.threads_per_row

    @property
    def pass_elements(self) -> int:
        """Elements of a row that its threads take at once; from s3 on those in registers."""
        if VECTOR_LOADS not in self.step.traits:
            return self.n_threads
        return self.threads_per_row * max(1, self.chunks) * CHUNK_BYTES // self.dtype.bytes

    @property
    def supports(self) -> RowsSupports:
        """Rows of any length up to MAX_WIDTH, at any element; shorter ones where few threads add up
        a row, whose sums would have large errors."""
        most = MAX_WIDTH
        wider = "use torch.softmax, or combine the softmax of parts by their maximum and sum"
        if self.threads_per_row < gpu.WARP:
            most = self.threads_per_row * MOST_OF_FEW
            wider = f"choose a config with more row_threads than {self.row_threads}"
        return RowsSupports(self.dtype, most, wider, min(self.pass_elements, most // 2))

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        n_warps, chunks = self.n_warps, self.chunks
        if not 1 <= n_warps <= MAX_WARPS or n_warps & (n_warps - 1):
            raise ValueError(
                f"n_warps {n_warps} is not a power of two from 1 to {MAX_WARPS}: choose 4 or 8"
            )
        if ROW_IN_REGISTERS not in self.step.traits:
            return
        if not 1 <= chunks <= MAX_CHUNKS:
            raise ValueError(f"chunks {chunks} is not from 1 to {MAX_CHUNKS}: choose 4")
        available = SM_REGISTERS // self.n_threads
        if chunks * CHUNK_REGISTERS + OTHER_REGISTERS > available:
            most = (available - OTHER_REGISTERS) // CHUNK_REGISTERS
            raise ValueError(
                f"chunks {chunks} with n_warps {n_warps} need "
                f"{chunks * CHUNK_REGISTERS + OTHER_REGISTERS} registers per thread, of which "
                f"there are {available}: choose chunks {most}, or fewer warps"
            )
        if ROW_THREADS not in self.step.traits:
            return
        of_row = self.row_threads
        if not LEAST_ROW_THREADS <= of_row <= self.n_threads or of_row & (of_row - 1):
            raise ValueError(
                f"row_threads {of_row} is not a power of two from {LEAST_ROW_THREADS} to the "
                f"{self.n_threads} threads of the block: choose {min(32, self.n_threads)}"
            )

    def call(self, problem: Rows, strides: Strides, device: Device) -> Call:
        """Return one launch with as many blocks as the rows need."""
        values: dict[str, tuple[float, ...]] = {
            "x_stride": strides["x"][:1],
            "y_stride": strides["y"][:1],
            "rows": (problem.rows,),
            "width": (problem.width,),
        }
        (kernel,) = self.kernels.values()
        launch = Launch(
            kernel=kernel,
            grid=(-(-problem.rows // self.block_rows), 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values=values,
            addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in "xy"),
        )
        return Call((launch,))

    def most_runs(self, problem: Rows, device: Device) -> int:
        """Return the passes of a loop that handles one element per thread, and as many again for
        loops that nvcc unrolls."""
        return 2 * (-(-problem.width // self.threads_per_row) + 8)


def _file(number: int) -> str:
    return f"kernels/rows/s{number}.cuh"


SOFTMAX = Family(
    name="softmax",
    title="softmax along rows, a thread block for each",
    operation=OPERATION,
    prefix="s",
    rank=4,
    config=SoftmaxKernelConfig,
    base=MappingProxyType({"n_warps": 8, "chunks": 0, "row_threads": 0}),
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
            traits=frozenset({ROW_THREADS, HELD_BACK}),
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
