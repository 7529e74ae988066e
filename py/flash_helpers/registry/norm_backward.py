"""The families of operation `norm_backward`. Standard library only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.gpu import Device
from flash_helpers.operations.norm_backward import OPERATION
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.norm_backward.supports import NormBackwardSupports
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
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.row_threads import (
    CHUNK_BYTES,
    CHUNK_REGISTERS,
    OTHER_REGISTERS,
    ROW_IN_REGISTERS,
    ROW_THREADS,
    SM_REGISTERS,
    VECTOR_LOADS,
    RowConfig,
)

THREADS_PER_SM = 1536  # on all GPUs from sm_80 on
COLUMN_LANES = 32  # of a thread block that sums columns: each has a chunk, or a column
COMBINE_WARPS = 32  # of a thread block that adds partial sums
LANE_COLUMNS = 4
PADDING = 8  # a row of partial sums ends at a multiple of as many columns, in any dtype

# Kernels, by their C++ functions.
ROWS, COLUMNS, COMBINE = "rows_kernel", "columns_kernel", "combine_kernel"

# Traits of steps.
ONE_PASS = "one_pass"  # persistent blocks sum columns while they have their rows
NEXT_ROW = "next_row"  # the next row of a thread is loaded while it works on one
WIDE_SUMS = "wide_sums"  # a lane that adds partial sums has LANE_COLUMNS

# Members of the arguments that point into buffers.
PARTIAL, ROW_SUMS = "partial", "row_sums"
_GIVEN = ("dy", "x", "weight", "mean", "rstd", "dx", "dweight", "dbias")
_MATRICES = ("dy", "x", "dx")

ARGUMENTS = StructLayout(
    "NormBackwardKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys((*_GIVEN, PARTIAL, ROW_SUMS), POINTER),
            **{f"{name}_stride": LONG for name in _MATRICES},
            **dict.fromkeys(("rows", "width", "parts"), INT),
        }
    ),
)


class NormBackwardKernels(Config):
    """The kernels of one config of the backward pass of a norm: one on rows, which are persistent
    thread blocks or clusters where a second one adds partial sums."""

    dtype: Element
    n_warps: int

    @property
    @abstractmethod
    def sums(self) -> int:
        """Sums of a column, of dweight and of dbias; and of a row."""

    @property
    def is_rms(self) -> bool:
        """Whether the function is RMS norm, whose rows and columns have one sum."""
        return self.sums == 1

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES // self.dtype.bytes

    @property
    def lane_columns(self) -> int:
        """Columns of a lane that adds partial sums."""
        return LANE_COLUMNS if WIDE_SUMS in self.step.traits else 1

    @property
    def functions(self) -> tuple[str, ...]:
        """The C++ functions of the step's kernels."""
        return (ROWS, COMBINE if ONE_PASS in self.step.traits else COLUMNS)

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel."""
        if kernel == COLUMNS:
            columns = COLUMN_LANES * self.chunk_elements
            return self.n_threads, FLOAT.size * self.sums * self.n_warps * columns
        if kernel == COMBINE:
            threads = COMBINE_WARPS * COLUMN_LANES
            return threads, FLOAT.size * self.lane_columns * threads
        return self.n_threads, self.smem_bytes

    def call_of_parts(
        self, problem: NormBackward, strides: Strides, parts: int, cluster: int = 1
    ) -> Call:
        """Return a launch for rows, and one for columns if their gradients are asked for.

        parts: thread blocks or clusters of rows, of which each has partial sums. cluster: blocks.
        """
        padded = -(-problem.width // PADDING) * PADDING
        grids = {ROWS: parts * cluster}
        buffers: tuple[Buffer, ...] = ()
        if ONE_PASS in self.step.traits:
            size = problem.rows * self.sums * FLOAT.size
            buffers = (Buffer(ROW_SUMS, size, zeroed=False),)
        if problem.dweight or problem.dbias:
            grids[COLUMNS] = -(-problem.width // (COLUMN_LANES * self.chunk_elements))
            grids[COMBINE] = -(-self.sums * padded // (COLUMN_LANES * self.lane_columns))
            if ONE_PASS in self.step.traits:
                size = parts * self.sums * padded * FLOAT.size
                buffers += (Buffer(PARTIAL, size, zeroed=False),)
        names = [tensor.name for tensor in (*problem.inputs, *problem.outputs)]
        names += [buffer.name for buffer in buffers]
        values: dict[str, tuple[float, ...]] = {
            **{f"{name}_stride": strides[name][:1] for name in _MATRICES},
            "rows": (problem.rows,),
            "width": (problem.width,),
            "parts": (parts,),
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
                cluster=(cluster if function == ROWS else 1, 1, 1),
            )
            for function in self.functions
            if function in grids
        )
        return Call(launches, buffers)


class NormBackwardConfig(NormBackwardKernels, RowConfig):
    """One config of the backward pass of a norm; a subclass has the fields of `RowConfig`, behind
    that of its step."""

    rms: ClassVar[bool]

    @property
    def sums(self) -> int:
        """Sums of a column, of dweight and of dbias; and of a row."""
        return 1 if self.rms else 2

    @property
    def chunk_registers(self) -> int:
        """Registers of a thread per chunk: x, dy, as much of the next row if that is on its way,
        and the sums of its columns."""
        rows = 2 if NEXT_ROW in self.step.traits else 1
        return rows * 2 * CHUNK_REGISTERS + self.sums * self.chunk_elements

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks of an SM that walk rows."""
        registers = self.chunks * self.chunk_registers + OTHER_REGISTERS
        fitting = SM_REGISTERS // self.n_threads // registers
        return max(1, min(fitting, THREADS_PER_SM // self.n_threads))

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block of rows in bytes: sums of each warp, for two rows; sums
        of each column where several warps have rows of their own."""
        several = self.threads_per_row < self.n_threads and self.n_warps > 1
        columns = self.pass_elements if several else 0
        return FLOAT.size * self.sums * (2 * self.n_warps + columns)

    @property
    def supports(self) -> NormBackwardSupports:
        """Rows of any length that the config's threads can have, at any element."""
        widest = self.widest("split the rows, and combine their sums")
        return NormBackwardSupports(self.dtype, *widest, rms=self.rms)

    def _parts(self, problem: NormBackward, device: Device) -> int:
        """Return the thread blocks of rows: one per row, or what the SMs hold."""
        blocks = -(-problem.rows // self.block_rows)
        if ONE_PASS not in self.step.traits:
            return blocks
        return min(blocks, device.sms * self.blocks_per_sm)

    def call(self, problem: NormBackward, strides: Strides, device: Device) -> Call:
        """Return a launch for rows, and one for columns if their gradients are asked for."""
        return self.call_of_parts(problem, strides, self._parts(problem, device))

    def most_runs(self, problem: NormBackward, device: Device) -> int:
        """Return the turns of the longest loop, over the elements of a row, rows or parts, and as
        many again for loops that nvcc unrolls; those over rows are in one over tiles."""
        elements = -(-problem.width // self.threads_per_row) + 8
        return 2 * elements * (problem.rows + 8)


def _chunks() -> Any:
    text = "of 16 bytes of a row of x and of dy, of which a thread has the columns; 0 in e1"
    return number("c", text, default=0)


def _row_threads() -> Any:
    return number("t", "that have a row; 0 before e4: all of the block", default=0)


@dataclass(frozen=True)
class LayerNormBackwardKernelConfig(NormBackwardConfig):
    """One kernel of the layer_norm_backward family."""

    example: ClassVar[str] = "e3_bf16_w8_c2"
    rms: ClassVar[bool] = False

    layer_norm_backward: int = number("e", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = _chunks()
    row_threads: int = _row_threads()

    @property
    def family(self) -> Family[Any]:
        """The layer_norm_backward family."""
        return LAYER_NORM_BACKWARD


@dataclass(frozen=True)
class RmsNormBackwardKernelConfig(NormBackwardConfig):
    """One kernel of the rms_norm_backward family."""

    example: ClassVar[str] = "q1_bf16_w4_c4_t128"
    rms: ClassVar[bool] = True

    rms_norm_backward: int = number("q", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = _chunks()
    row_threads: int = _row_threads()

    @property
    def family(self) -> Family[Any]:
        """The rms_norm_backward family."""
        return RMS_NORM_BACKWARD


def _file(name: str) -> str:
    return f"kernels/norm_backward/{name}.cuh"


_WARPS = (4, 8, 16)
_CHUNKS = (1, 2, 3, 4)
_ROW_THREADS = (8, 16, 32, 64, 128, 256, 512)
_BY_WIDTH: Mapping[str, int] = MappingProxyType({"n_warps": 4, "chunks": 4, "row_threads": 128})
_TARGETS = ("80", "86", "89", "90")
_KERNELS = MappingProxyType(dict.fromkeys((ROWS, COLUMNS, COMBINE), ARGUMENTS))
_HEADER = PurePosixPath("kernels/norm_backward/arguments.cuh")
_DTYPES = (Element.FP16, Element.BF16, Element.FP32)

LAYER_NORM_BACKWARD = Family(
    name="layer_norm_backward",
    title="the backward pass of layer norm",
    operation=OPERATION,
    prefix="e",
    rank=19,
    config=LayerNormBackwardKernelConfig,
    base=MappingProxyType({"n_warps": 8, "chunks": 0, "row_threads": 0}),
    entries=(
        StepEntry(
            "two_kernels",
            "a kernel for rows, and one for columns that reads everything again",
            _file("e1"),
            traits=frozenset({VECTOR_LOADS}),
        ),
        StepEntry(
            "sums_of_columns",
            "persistent thread blocks sum the columns of their rows on the way",
            _file("e2"),
            sets={"chunks": 2},
            traits=frozenset({ONE_PASS, ROW_IN_REGISTERS}),
        ),
        StepEntry(
            "row_in_registers",
            "the row of x and of dy in registers, read once",
            _file("e3"),
            opens={"n_warps": _WARPS, "chunks": _CHUNKS},
        ),
        StepEntry(
            "threads_per_row",
            "as many threads per row as its width needs, and several rows per thread block",
            _file("e4"),
            sets=_BY_WIDTH,
            opens={"row_threads": _ROW_THREADS},
            traits=frozenset({ROW_THREADS}),
        ),
        StepEntry(
            "next_row",
            "the next row on its way while threads work on one",
            _file("e5"),
            traits=frozenset({NEXT_ROW, HELD_BACK}),
        ),
    ),
    targets=_TARGETS,
    kernels=_KERNELS,
    header=_HEADER,
    dtypes=_DTYPES,
    computing=frozenset(),
    simulated_budget=10_000_000,
    matrix_budget=16_000_000,
)

RMS_NORM_BACKWARD = Family(
    name="rms_norm_backward",
    title="the backward pass of RMS norm",
    operation=OPERATION,
    prefix="q",
    rank=20,
    config=RmsNormBackwardKernelConfig,
    base=_BY_WIDTH,
    entries=(
        StepEntry(
            "no_mean_backward",
            "the backward pass of layer norm without the mean: one sum per row, one per column",
            _file("q1"),
            parent="e4",
            opens={"n_warps": _WARPS, "chunks": _CHUNKS, "row_threads": _ROW_THREADS},
            traits=frozenset({VECTOR_LOADS, ONE_PASS, ROW_IN_REGISTERS, ROW_THREADS}),
        ),
        StepEntry(
            "next_row_of_rms",
            "the next row on its way while threads work on one",
            _file("q2"),
            traits=frozenset({NEXT_ROW, HELD_BACK}),
        ),
    ),
    targets=_TARGETS,
    kernels=_KERNELS,
    header=_HEADER,
    dtypes=_DTYPES,
    computing=frozenset(),
    simulated_budget=7_000_000,
    matrix_budget=5_000_000,
)
