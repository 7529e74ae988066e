"""The linear_rowsum_backward family of operation `linear_rowsum_backward`. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.linear_rowsum_backward import OPERATION
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.operations.linear_rowsum_backward.supports import LinearRowsumBackwardSupports
from flash_helpers.registry.call import (
    FLOAT,
    INT,
    LONG,
    POINTER,
    Address,
    Buffer,
    Call,
    Launch,
    StructLayout,
)
from flash_helpers.registry.config import Config, element, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.problem import Element, Strides

MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
MAX_ROWS = 1024  # of dx or dW that a thread block writes
CHUNK_BYTES = 16  # one load or store of a thread
PADDING = 8  # a row of sums ends at a multiple of as many elements, in any dtype
BLOCKS_PER_SM = 4  # thread blocks that sum columns of one matrix
LEAST_PIECE = 32  # rows of such a block
COMBINE_WARPS = 32  # of a thread block that adds pieces: each lane has a column

# Kernels, by their C++ functions.
COLUMNS, COMBINE, ROWS = "columns_kernel", "combine_kernel", "rows_kernel"

VECTOR_LOADS = "vector_loads"  # a trait of steps: chunks of 16 bytes per lane

# Members of the arguments that point into buffers.
PARTIAL, SUMS = "partial", "sums"
_GIVEN = ("dy", "x", "weight", "dx", "dweight", "dbias")
_GRADIENTS = _GIVEN[3:]
_SIZES = ("rows", "in_features", "out_features")
_PIECES = ("weight_piece", "x_piece")

ARGUMENTS = StructLayout(
    "LinearRowsumBackwardKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(_GIVEN, POINTER),
            **{f"{name}_stride": LONG for name in _GIVEN},
            **dict.fromkeys((*_SIZES, *_PIECES), INT),
            **dict.fromkeys((PARTIAL, SUMS), POINTER),
        }
    ),
)


@dataclass(frozen=True)
class LinearRowsumBackwardKernelConfig(Config):
    """One config of the linear_rowsum_backward family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "lb2_bf16_w8_r64"

    linear_rowsum_backward: int = number("lb", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of a thread block")
    rows: int = number("r", "of dx or dW that a thread block writes")

    @property
    def family(self) -> Family[Any]:
        """The linear_rowsum_backward family."""
        return LINEAR_ROWSUM_BACKWARD

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def columns(self) -> int:
        """Columns of a thread block: one per thread, from lb2 on a chunk per lane."""
        if VECTOR_LOADS not in self.step.traits:
            return self.n_threads
        return gpu.WARP * CHUNK_BYTES // self.dtype.bytes

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block that sums columns in bytes: from lb2 on a sum for each
        warp and column, and Σ dy for each warp."""
        if VECTOR_LOADS not in self.step.traits:
            return 0
        return FLOAT.size * self.n_warps * (self.columns + 1)

    @property
    def functions(self) -> tuple[str, ...]:
        """The C++ functions of the step's kernels."""
        return (COLUMNS, COMBINE, ROWS)

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel."""
        if kernel == COMBINE:
            threads = COMBINE_WARPS * gpu.WARP
            return threads, FLOAT.size * threads
        return self.n_threads, self.smem_bytes if kernel == COLUMNS else 0

    @property
    def supports(self) -> LinearRowsumBackwardSupports:
        """Sizes of any kind, at any element."""
        tile = (self.rows, self.columns)
        return LinearRowsumBackwardSupports(self.dtype, tile, LEAST_PIECE, gpu.MAX_GRID[0])

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if not 1 <= self.n_warps <= MAX_WARPS:
            raise ValueError(f"n_warps {self.n_warps} is not from 1 to {MAX_WARPS}: choose 8")
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"rows {self.rows} is not from 1 to {MAX_ROWS}: choose 64")

    def _tiles(self, problem: LinearRowsumBackward) -> int:
        """Return the thread blocks that have all columns."""
        return -(-problem.in_features // self.columns)

    def piece(self, problem: LinearRowsumBackward, device: Device, rows: int) -> int:
        """Return the rows of a matrix that a thread block sums: as many as give each SM
        BLOCKS_PER_SM blocks, or LEAST_PIECE.

        rows: of the matrix.
        """
        wanted = 1 + (BLOCKS_PER_SM * device.sms - 1) // self._tiles(problem)
        return max(LEAST_PIECE, -(-rows // wanted))

    def call(self, problem: LinearRowsumBackward, strides: Strides, device: Device) -> Call:
        """Return the launches: sums of columns by pieces, sums of the pieces, and the gradients."""
        rows, outs, tiles = problem.rows, problem.out_features, self._tiles(problem)
        weight_piece = self.piece(problem, device, outs)
        x_piece = self.piece(problem, device, rows)
        of_x = problem.dweight or problem.dbias  # whether sums of x, or of dy, are needed
        x_tiles = tiles if problem.dweight else 1
        weight_pieces = -(-outs // weight_piece) if problem.dx else 0
        x_pieces = -(-rows // x_piece) if of_x else 0
        pitch = -(-(problem.in_features + 1) // PADDING) * PADDING
        combined = -(-pitch // gpu.WARP)
        grids = {
            COLUMNS: tiles * weight_pieces + x_tiles * x_pieces,
            COMBINE: (combined if problem.dx else 0) + (combined if of_x else 0),
            ROWS: (tiles * -(-rows // self.rows) if problem.dx else 0)
            + (x_tiles * -(-outs // self.rows) if of_x else 0),
        }
        buffers = (
            Buffer(PARTIAL, (weight_pieces + x_pieces) * pitch * FLOAT.size, zeroed=False),
            Buffer(SUMS, 2 * pitch * FLOAT.size, zeroed=False),
        )
        given = [name for name in _GIVEN if name not in _GRADIENTS or getattr(problem, name)]
        sizes = {"dy": rows, "dbias": outs}
        names = [*given, *(buffer.name for buffer in buffers)]
        values: dict[str, tuple[float, ...]] = {
            **{f"{name}_stride": strides[name][:1] for name in given if name not in sizes},
            **{
                # 1 instead of 0 for a vector of one element, as exports have it
                f"{name}_stride": (max(strides[name][0], 2 - size),)
                for name, size in sizes.items()
                if name in given
            },
            **{name: (getattr(problem, name),) for name in _SIZES},
            "weight_piece": (weight_piece,),
            "x_piece": (x_piece,),
        }
        launches = tuple(
            Launch(
                kernel=self.kernels[function],
                grid=(grids[function], 1, 1),
                block=self.block(function)[0],
                shared_bytes=self.block(function)[1],
                layout=ARGUMENTS,
                values=values,
                addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in names),
            )
            for function in self.functions
        )
        return Call(launches, buffers)

    def most_runs(self, problem: LinearRowsumBackward, device: Device) -> int:
        """Return the turns of the longest loop, over rows, outputs or pieces, or over columns in
        shared memory, which nvcc may unroll by half."""
        return 2 * (max(problem.rows, problem.out_features) + self.rows + self.columns + 8)


def _file(number: int) -> str:
    return f"kernels/linear_rowsum_backward/lb{number}.cuh"


LINEAR_ROWSUM_BACKWARD = Family(
    name="linear_rowsum_backward",
    title="gradients of a linear layer, summed by row",
    operation=OPERATION,
    prefix="lb",
    rank=26,
    config=LinearRowsumBackwardKernelConfig,
    base=MappingProxyType({"n_warps": 8, "rows": 64}),
    entries=(
        StepEntry(
            "sums_of_columns",
            "sums of columns of W and x, written row by row",
            _file(1),
        ),
        StepEntry(
            "chunks_per_lane",
            "16 bytes per lane, of columns that are summed and of rows that are written",
            _file(2),
            opens={"n_warps": (4, 8, 16), "rows": (16, 32, 64, 128)},
            traits=frozenset({VECTOR_LOADS}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType(dict.fromkeys((COLUMNS, COMBINE, ROWS), ARGUMENTS)),
    header=PurePosixPath("kernels/linear_rowsum_backward/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=4_700_000,
    matrix_budget=820_000,
)
