"""Configs of kernels in which the threads of a row keep it in registers: softmax, norms and
gradients of softmax. Standard library only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.registry.call import Address, Call, Launch
from flash_helpers.registry.config import Config
from flash_helpers.registry.problem import Element, Strides

Fields = Mapping[str, int]

MAX_WIDTH = 131072
MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
MAX_CHUNKS = 16
HALF_CHUNKS = 8  # of a thread with 64 registers
MOST_IN_FLIGHT = 8  # chunks of a thread that has several rows
LEAST_ROW_THREADS = 8
ROWS_OF_A_THREAD = (1, 2, 4, 8)  # that a sweep tries
MOST_OF_FEW = 128  # elements of a thread, where fewer threads than a warp have a row
CHUNK_BYTES = 16  # one load or store of a thread, four registers
CHUNK_REGISTERS = CHUNK_BYTES // 4
OTHER_REGISTERS = 48  # of a thread, at most, beside its chunks
SM_REGISTERS = 65536
THREAD_REGISTERS = 255  # at most

# Traits of steps.
VECTOR_LOADS = "vector_loads"  # chunks of 16 bytes per lane
ROW_IN_REGISTERS = "row_in_registers"  # `chunks` chunks of each thread are read once
ROW_THREADS = "row_threads"  # `row_threads` threads have a row, and a block has several rows
HALF_OF_AN_SM = "half_of_an_sm"  # 64 registers per thread, at least two blocks per SM
ROWS_IN_FLIGHT = "rows_in_flight"  # a thread has `rows_in_flight` rows at once


def most_chunks(
    n_warps: int, chunk_registers: int = CHUNK_REGISTERS, others: int = OTHER_REGISTERS
) -> int:
    """Return the chunks that the registers of each thread of a block have room for.
    chunk_registers: registers of a thread per chunk. others: beside its chunks."""
    available = min(SM_REGISTERS // (n_warps * gpu.WARP), THREAD_REGISTERS)
    return (available - others) // chunk_registers


class RowConfig(Config):
    """One kernel on rows; a subclass has these fields, behind that of its step.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    dtype: Element
    n_warps: int
    chunks: int
    row_threads: int
    rows_in_flight: int = 0

    @property
    def chunk_registers(self) -> int:
        """Registers of a thread per chunk, of all that it keeps of it."""
        return CHUNK_REGISTERS

    @property
    def other_registers(self) -> int:
        """Registers of a thread, at most, beside its chunks."""
        return OTHER_REGISTERS

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def threads_per_row(self) -> int:
        """Threads that have a row: those of the block before the step that says how many."""
        return self.row_threads or self.n_threads

    @property
    def block_rows(self) -> int:
        """Rows of one block."""
        return self.n_threads // self.threads_per_row * self.thread_rows

    @property
    def thread_rows(self) -> int:
        """Rows of each thread: one before the step that says how many."""
        return self.rows_in_flight or 1

    @property
    def pass_elements(self) -> int:
        """Elements of a row that its threads take at once; those in registers, where they are."""
        if VECTOR_LOADS not in self.step.traits:
            return self.n_threads
        return self.threads_per_row * max(1, self.chunks) * CHUNK_BYTES // self.dtype.bytes

    def widest(self, way_out: str) -> tuple[int, str, int]:
        """Return the longest row, the way out for a longer one, and the elements that one pass
        holds, at most half of it. Few threads take short rows, since their sums of long ones would
        have large errors. `way_out`: for rows over MAX_WIDTH."""
        most = MAX_WIDTH
        if self.threads_per_row < gpu.WARP:
            most = self.threads_per_row * MOST_OF_FEW
            way_out = f"choose a config with more row_threads than {self.row_threads}"
        return most, way_out, min(self.pass_elements, most // 2)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        n_warps, row_threads = self.n_warps, self.row_threads
        if not 1 <= n_warps <= MAX_WARPS or n_warps & (n_warps - 1):
            raise ValueError(
                f"n_warps {n_warps} is not a power of two from 1 to {MAX_WARPS}: choose 4 or 8"
            )
        if ROW_IN_REGISTERS in self.step.traits:
            self._check_registers()
        fits = LEAST_ROW_THREADS <= row_threads <= self.n_threads
        if ROW_THREADS in self.step.traits and (not fits or row_threads & (row_threads - 1)):
            raise ValueError(
                f"row_threads {row_threads} is not a power of two from {LEAST_ROW_THREADS} to the "
                f"{self.n_threads} threads of n_warps {n_warps}: choose {gpu.WARP}"
            )
        if ROWS_IN_FLIGHT in self.step.traits and self.rows_in_flight < 1:
            raise ValueError(f"rows_in_flight {self.rows_in_flight} is not positive: choose 1")

    def _check_registers(self) -> None:
        chunks, rows = self.chunks, self.thread_rows
        allowed = HALF_CHUNKS if HALF_OF_AN_SM in self.step.traits else MAX_CHUNKS
        if not 1 <= chunks <= allowed:
            raise ValueError(f"chunks {chunks} is not from 1 to {allowed}: choose 4")
        most = most_chunks(self.n_warps, self.chunk_registers, self.other_registers)
        if rows > 1 and chunks * rows > (held := min(most, MOST_IN_FLIGHT)):
            raise ValueError(
                f"rows_in_flight {rows} with chunks {chunks} have {chunks * rows} chunks per "
                f"thread, and with n_warps {self.n_warps} there is room for {held}: choose "
                f"rows_in_flight {held // chunks or 1}, or fewer chunks"
            )
        if chunks > most:
            needed = chunks * self.chunk_registers + self.other_registers
            raise ValueError(
                f"chunks {chunks} with n_warps {self.n_warps} need {needed} registers per thread, "
                f"of which there are {min(SM_REGISTERS // self.n_threads, THREAD_REGISTERS)}: "
                f"choose chunks {most}, or fewer warps"
            )

    def call(self, problem: Any, strides: Strides, device: Device) -> Call:
        """Return one launch, in which each block has `block_rows` rows."""
        given = (*problem.inputs, *problem.outputs)
        matrices = (tensor.name for tensor in given if len(tensor.axes) > 1)
        values: dict[str, tuple[float, ...]] = {
            **{f"{name}_stride": strides[name][:1] for name in matrices},
            "rows": (problem.rows,),
            "width": (problem.width,),
            **{name: (value,) for name, value in problem.call_options().items()},
        }
        ((function, layout),) = self.family.kernels.items()
        launch = Launch(
            kernel=self.kernels[function],
            grid=(-(-problem.rows // self.block_rows), 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=layout,
            values=values,
            addresses=tuple(Address(layout.offset(x.name), x.name) for x in given),
        )
        return Call((launch,))

    def most_runs(self, problem: Any, device: Device) -> int:
        """Return the passes of a loop that handles one element per thread, and as many again for
        loops that nvcc unrolls."""
        return 2 * (-(-problem.width // self.threads_per_row) + 8)


# -- the choice by width ---------------------------------------------------------------------------

GRID_WIDTHS = tuple(2**n for n in range(6, 18))
WIDE_WIDTHS = (2**15, 2**16)  # measured with twice the rows as well
TWICE = "_twice"  # the end of the names of groups of these
_WARPS = (4, 8)  # of blocks with several rows
_LEAST_IN_FLIGHT = 4  # chunks of a thread that hide the latency of memory
_USUAL_CHUNKS = (2, 4, 8)  # the fastest for rows up to _USUAL_BYTES, measured for all of 1 to 16
_USUAL_BYTES = 32768
_FEW = 2  # shapes, to which those for long rows are added
# Of rows that no threads of a block hold in registers: a part of such a row is read three times.
_LONG: Sequence[Fields] = (
    {"n_warps": 8, "chunks": 16, "row_threads": 256},
    {"n_warps": 16, "chunks": 16, "row_threads": 512},
    {"n_warps": 32, "chunks": 4, "row_threads": 1024},
)


def competing_shapes(
    width: int, dtype: Element, most_threads: int, chunk_registers: int = CHUNK_REGISTERS
) -> list[Fields]:
    """Return n_warps, chunks and row_threads with which threads hold a row in registers; where no
    block does, shapes for long rows. most_threads: of a row. chunk_registers: registers of a thread
    per chunk."""
    found: list[Fields] = []
    for row_threads in _powers(LEAST_ROW_THREADS, most_threads):
        chunks = _power_from(width * dtype.bytes / (row_threads * CHUNK_BYTES))
        if chunks > MAX_CHUNKS or (row_threads < gpu.WARP and width > row_threads * MOST_OF_FEW):
            continue
        is_narrow = row_threads <= gpu.WARP * min(_WARPS)
        for n_warps in _WARPS if is_narrow else (row_threads // gpu.WARP,):
            if chunks <= most_chunks(n_warps, chunk_registers):
                found.append({"n_warps": n_warps, "chunks": chunks, "row_threads": row_threads})
        if chunks == 1:
            break
    usual = [shape for shape in found if shape["chunks"] in _USUAL_CHUNKS]
    if len(usual) >= _FEW and width * dtype.bytes <= _USUAL_BYTES:
        return usual
    if len(found) < _FEW:
        for shape in (s for s in _LONG if s["row_threads"] <= most_threads):
            most = most_chunks(shape["n_warps"], chunk_registers)
            shape = {**shape, "chunks": min(shape["chunks"], (1 << most.bit_length()) >> 1)}
            if shape["chunks"] and shape not in found:
                found.append(shape)
    return found


def shapes_in_flight(shapes: Iterable[Fields]) -> Iterator[Fields]:
    """Yield shapes of one row or several rows per thread, with which a thread has 4 chunks or more
    in flight. shapes: those of one row."""
    for shape in shapes:
        chunks, row_threads, n_warps = shape["chunks"], shape["row_threads"], shape["n_warps"]
        if n_warps != max(min(_WARPS), row_threads // gpu.WARP):
            continue
        for rows in ROWS_OF_A_THREAD:
            most = min(MOST_IN_FLIGHT, most_chunks(n_warps))
            if _LEAST_IN_FLIGHT <= chunks * rows <= (most if rows > 1 else MAX_CHUNKS):
                yield {**shape, "rows_in_flight": rows}


def narrow_in_flight(width: int, dtype: Element) -> Iterator[Fields]:
    """Yield shapes with which lanes of a warp have a row, and a thread 4 chunks of one row or of
    several: more take registers that other warps need. And those of one row with fewer chunks,
    of which an SM has more warps in flight instead."""
    for chunks in _powers(1, _LEAST_IN_FLIGHT):
        row_threads = _power_from(width * dtype.bytes / (chunks * CHUNK_BYTES))
        if LEAST_ROW_THREADS <= row_threads <= gpu.WARP:
            shape = {"n_warps": min(_WARPS), "chunks": chunks, "row_threads": row_threads}
            for rows in sorted({1, _LEAST_IN_FLIGHT // chunks}):
                yield {**shape, "rows_in_flight": rows}


def beside_narrow(shapes: Sequence[Fields], narrow: Sequence[Fields]) -> Sequence[Fields]:
    """Return those of `shapes`, of one row, that compete beside the narrow ones: with 4 chunks of a
    thread or more, where there are such."""
    large = [shape for shape in shapes if shape["chunks"] >= _LEAST_IN_FLIGHT]
    return large if narrow and large else shapes


def in_dtype(problem: Any, dtype: Element) -> Any:
    """Return a problem in 16 bits in another dtype, with as many bytes per matrix."""
    rows = problem.rows * problem.dtype.bytes // dtype.bytes
    return replace(problem, rows=max(1, rows), dtype=dtype)


def with_twice_the_rows(groups: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Return groups of wide rows in bf16, twice as many as in the groups given: of 2048 rows the
    last two take 66 clusters as long as 64 do, 3% of the time."""
    return {
        f"{name}{TWICE}": tuple(
            replace(problem, rows=2 * problem.rows)
            for problem in problems
            if problem.width in WIDE_WIDTHS
        )
        for name, problems in groups.items()
        if problems[0].dtype is Element.BF16
    }


def octaves(one: Any, other: Any) -> float:
    """Return how far apart the rows of two problems are, in octaves of their bytes, a little of
    their number, and less of their dtype."""
    of_width, of_rows = (
        abs(math.log2(a / b))
        for a, b in (
            (one.width * one.dtype.bytes, other.width * other.dtype.bytes),
            (one.rows, other.rows),
        )
    )
    return of_width + of_rows / 64 + (one.dtype is not other.dtype) / 128


def _powers(first: int, last: int) -> Iterator[int]:
    return itertools.takewhile(lambda n: n <= last, (first << n for n in itertools.count()))


def _power_from(least: float) -> int:
    """Return the lowest power of two from `least` on."""
    return 1 << max(0, math.ceil(math.log2(least)))
