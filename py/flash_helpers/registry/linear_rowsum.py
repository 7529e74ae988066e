"""The linear_rowsum family of operation `linear_rowsum`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.linear_rowsum import OPERATION
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.operations.linear_rowsum.supports import LinearRowsumSupports
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
from flash_helpers.registry.family import CORE, Family, StepEntry
from flash_helpers.registry.problem import Element, Strides

TILE = 64  # rows of x and of W of a thread block that multiplies
DEPTH = 16  # input features that it takes at a time
TILE_PITCH = TILE + 4  # elements between rows of a tile in shared memory
TILE_WARPS = 8  # 256 threads, each with 4 x 4 elements of the tile
MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
MAX_ROWS = 8  # of x that share a chunk of ΣW: each has a sum in a register
CHUNK_BYTES = 16  # one load of a thread
PADDING = 8  # ΣW ends at a multiple of as many elements, in any dtype
BLOCKS_PER_SM = 4  # thread blocks that sum columns of W; in l6 all there are
LEAST_PIECE = 32  # rows of W of such a block

# Kernels, by their C++ functions.
PRODUCT, SUM = "product_kernel", "sum_kernel"
COLUMNS, COMBINE, ROWS = "columns_kernel", "combine_kernel", "rows_kernel"
ROWSUM = "rowsum_kernel"

# Traits of steps.
SUM_IN_EPILOGUE = "sum_in_epilogue"  # the product is not stored
ALGEBRA = "algebra"  # ΣW instead of a product
VECTOR_LOADS = "vector_loads"  # chunks of 16 bytes per lane
SHARED_SUMS = "shared_sums"  # `rows` rows of x share each chunk of ΣW
ONE_LAUNCH = "one_launch"  # thread blocks take units of work by a counter

# Members of the arguments that point into buffers.
PRODUCTS, PARTIAL, SUMS, COUNTERS = "products", "partial", "sums", "counters"
_GIVEN = ("x", "weight", "bias", "y")

ARGUMENTS = StructLayout(
    "LinearRowsumKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(_GIVEN, POINTER),
            **{f"{name}_stride": LONG for name in _GIVEN},
            **dict.fromkeys(("rows", "in_features", "out_features", "piece"), INT),
            **dict.fromkeys((PRODUCTS, PARTIAL, SUMS, COUNTERS), POINTER),
        }
    ),
)


@dataclass(frozen=True)
class LinearRowsumKernelConfig(Config):
    """One config of the linear_rowsum family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "l5_bf16_w8_r4"

    linear_rowsum: int = number("l", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of a thread block")
    rows: int = number("r", "of x that share each chunk of ΣW; 0 before l5", default=0)

    @property
    def family(self) -> Family[Any]:
        """The linear_rowsum family."""
        return LINEAR_ROWSUM

    @property
    def has_algebra(self) -> bool:
        """Whether the columns of W are summed instead of multiplied."""
        return ALGEBRA in self.step.traits

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def columns(self) -> int:
        """Columns of W of a thread block that sums them: one per thread, from l4 on a chunk per
        lane."""
        if VECTOR_LOADS not in self.step.traits:
            return self.n_threads
        return gpu.WARP * CHUNK_BYTES // self.dtype.bytes

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: tiles of x and W; in l3 a sum for each warp,
        from l4 on for each warp and column."""
        sums = self.n_warps * (self.columns if VECTOR_LOADS in self.step.traits else 1)
        return (sums if self.has_algebra else 2 * DEPTH * TILE_PITCH) * FLOAT.size

    @property
    def functions(self) -> tuple[str, ...]:
        """The C++ functions of the step's kernels."""
        if ONE_LAUNCH in self.step.traits:
            return (ROWSUM,)
        return (COLUMNS, COMBINE, ROWS) if self.has_algebra else (PRODUCT, SUM)

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel."""
        return self.n_threads, 0 if kernel == SUM else self.smem_bytes

    @property
    def supports(self) -> LinearRowsumSupports:
        """Sizes of any kind, at any element."""
        if self.has_algebra:
            return LinearRowsumSupports(self.dtype, (max(1, self.rows), self.columns, LEAST_PIECE))
        return LinearRowsumSupports(self.dtype, (TILE, DEPTH, TILE), max_tiles=gpu.MAX_GRID[0])

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if not self.has_algebra:
            if self.n_warps != TILE_WARPS:
                raise ValueError(
                    f"n_warps {self.n_warps}: a tile of {TILE} x {TILE} is made for {TILE_WARPS}: "
                    f"choose {TILE_WARPS}, or l3"
                )
            return
        if not 1 <= self.n_warps <= MAX_WARPS:
            raise ValueError(f"n_warps {self.n_warps} is not from 1 to {MAX_WARPS}: choose 8")
        if SHARED_SUMS in self.step.traits and not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"rows {self.rows} is not from 1 to {MAX_ROWS}: choose 4")

    def _tiles(self, problem: LinearRowsum) -> int:
        """Return the thread blocks that have all columns of W."""
        return -(-problem.in_features // self.columns)

    def piece(self, problem: LinearRowsum, device: Device) -> int:
        """Return the rows of W that a thread block sums: as many as give each SM BLOCKS_PER_SM
        blocks, or LEAST_PIECE."""
        wanted = 1 + (BLOCKS_PER_SM * device.sms - 1) // self._tiles(problem)
        return max(LEAST_PIECE, -(-problem.out_features // wanted))

    def _grids(self, problem: LinearRowsum, device: Device) -> dict[str, int]:
        """Return the thread blocks of each kernel."""
        rows, outs = problem.rows, problem.out_features
        if self.has_algebra:
            columns = self._tiles(problem) * -(-outs // self.piece(problem, device))
            padded = -(-problem.in_features // PADDING) * PADDING
            groups = -(-rows // max(1, self.rows))
            if ONE_LAUNCH in self.step.traits:
                return {ROWSUM: min(columns + 1 + groups, BLOCKS_PER_SM * device.sms)}
            return {COLUMNS: columns, COMBINE: -(-padded // self.n_threads) + 1, ROWS: groups}
        per_block = self.n_threads if SUM_IN_EPILOGUE in self.step.traits else self.n_warps
        return {PRODUCT: -(-rows // TILE) * -(-outs // TILE), SUM: -(-rows // per_block)}

    def _buffers(self, problem: LinearRowsum, device: Device) -> tuple[Buffer, ...]:
        """Return what one kernel writes and another reads."""
        if not self.has_algebra:
            if SUM_IN_EPILOGUE in self.step.traits:
                sums = problem.rows * -(-problem.out_features // TILE)
                return (Buffer(PARTIAL, sums * FLOAT.size, zeroed=False),)
            size = problem.rows * problem.out_features * self.dtype.bytes
            return (Buffer(PRODUCTS, size, zeroed=False),)
        padded = -(-problem.in_features // PADDING) * PADDING
        pieces = -(-problem.out_features // self.piece(problem, device))
        buffers: tuple[Buffer, ...] = (
            Buffer(PARTIAL, pieces * padded * FLOAT.size, zeroed=False),
            Buffer(SUMS, (padded + 1) * FLOAT.size, zeroed=False),
        )
        if ONE_LAUNCH in self.step.traits:
            counters = (2 + self._tiles(problem)) * INT.size
            buffers += (Buffer(COUNTERS, counters, zeroed=True, left_zeroed=True),)
        return buffers

    def call(self, problem: LinearRowsum, strides: Strides, device: Device) -> Call:
        """Return the launches: a product and its sums, or sums of W and a product with these."""
        given = [name for name in _GIVEN if name != "bias" or problem.bias]
        sizes = {"bias": problem.out_features, "y": problem.rows}
        values: dict[str, tuple[float, ...]] = {
            **{f"{name}_stride": strides[name][:1] for name in ("x", "weight")},
            **{
                # 1 instead of 0 for a vector of one element, as exports have it
                f"{name}_stride": (max(strides[name][0], 2 - sizes[name]),)
                for name in given[2:]
            },
            "rows": (problem.rows,),
            "in_features": (problem.in_features,),
            "out_features": (problem.out_features,),
            "piece": (self.piece(problem, device) if self.has_algebra else 0,),
        }
        buffers = self._buffers(problem, device)
        names = [*given, *(buffer.name for buffer in buffers)]
        launches = tuple(
            Launch(
                kernel=self.kernels[function],
                grid=(blocks, 1, 1),
                block=self.block(function)[0],
                shared_bytes=self.block(function)[1],
                layout=ARGUMENTS,
                values=values,
                addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in names),
            )
            for function, blocks in self._grids(problem, device).items()
        )
        return Call(launches, buffers)

    def most_runs(self, problem: LinearRowsum, device: Device) -> int:
        """Return the turns of the longest loop, over features, outputs or pieces, which nvcc may
        unroll by half."""
        sizes = problem.in_features, problem.out_features
        return 2 * (max(*sizes) + self.columns + 8)


def _file(number: int) -> str:
    return f"kernels/linear_rowsum/l{number}.cuh"


LINEAR_ROWSUM = Family(
    name="linear_rowsum",
    title="a linear layer, summed by row, as a product and by algebra",
    operation=OPERATION,
    prefix="l",
    rank=14,
    config=LinearRowsumKernelConfig,
    base=MappingProxyType({"n_warps": TILE_WARPS, "rows": 0}),
    entries=(
        StepEntry(
            "product_then_sum", "a matrix product, whose rows a second kernel sums", _file(1)
        ),
        StepEntry(
            "sum_in_epilogue",
            "rows of the product are summed in its epilogue, and it is not stored",
            _file(2),
            traits=frozenset({SUM_IN_EPILOGUE}),
        ),
        StepEntry(
            "algebra",
            "x · ΣW + Σb in two passes over memory",
            _file(3),
            traits=frozenset({ALGEBRA}),
            place=CORE,
        ),
        StepEntry(
            "16_bytes_per_lane",
            "16 bytes per lane, of W and of x",
            _file(4),
            traits=frozenset({VECTOR_LOADS}),
        ),
        StepEntry(
            "rows_share_sums",
            "several rows of x share each chunk of ΣW",
            _file(5),
            sets={"rows": 4},
            opens={"n_warps": (4, 8, 16), "rows": (1, 2, 4, 8)},
            traits=frozenset({SHARED_SUMS}),
        ),
        StepEntry(
            "one_launch",
            "one kernel, whose thread blocks take pieces of W, then rows of x",
            _file(6),
            traits=frozenset({ONE_LAUNCH}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType(
        dict.fromkeys((PRODUCT, SUM, COLUMNS, COMBINE, ROWS, ROWSUM), ARGUMENTS)
    ),
    header=PurePosixPath("kernels/linear_rowsum/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=6_000_000,
    matrix_budget=4_000_000,
)
