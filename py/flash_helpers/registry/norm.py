"""The families of operation `norm`: layer norm and RMS norm along rows. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.norm import OPERATION
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.supports import NormSupports
from flash_helpers.registry.call import (
    FLOAT,
    INT,
    LONG,
    POINTER,
    Address,
    Call,
    Launch,
    StructLayout,
)
from flash_helpers.registry.config import Config, element, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.problem import Element, Strides

MAX_WIDTH = 131072
MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
MAX_CHUNKS = 16
LEAST_ROW_THREADS = 8
MOST_OF_FEW = 128  # elements of a thread, where fewer threads than a warp have a row
CHUNK_BYTES = 16  # one load or store of a thread, four registers
CHUNK_REGISTERS = CHUNK_BYTES // 4
OTHER_REGISTERS = 48  # of a thread, at most, beside its chunks
SM_REGISTERS = 65536

# Traits of steps.
VECTOR_LOADS = "vector_loads"  # chunks of 16 bytes per lane
ROW_IN_REGISTERS = "row_in_registers"  # `chunks` chunks of each thread are read once
ROW_THREADS = "row_threads"  # `row_threads` threads have a row, and a block has several rows

ARGUMENTS = StructLayout(
    "NormKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(("x", "weight", "bias", "y", "mean", "rstd"), POINTER),
            "x_stride": LONG,
            "y_stride": LONG,
            "rows": INT,
            "width": INT,
            "eps": FLOAT,
        }
    ),
)


class NormConfig(Config):
    """One kernel of a norm; a subclass has these fields, behind that of its step.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    rms: ClassVar[bool]

    dtype: Element
    n_warps: int
    chunks: int
    row_threads: int

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
        return self.n_threads // self.threads_per_row

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a number for each warp and each sum."""
        return (1 if self.rms else 2) * self.n_warps * Element.FP32.bytes

    @property
    def pass_elements(self) -> int:
        """Elements of a row that its threads take at once; from n3 on those in registers."""
        if VECTOR_LOADS not in self.step.traits:
            return self.n_threads
        return self.threads_per_row * max(1, self.chunks) * CHUNK_BYTES // self.dtype.bytes

    @property
    def supports(self) -> NormSupports:
        """Rows of any length up to MAX_WIDTH, at any element; shorter ones where few threads add up
        a row, whose sums would have large errors."""
        most = MAX_WIDTH
        wider = "split the rows, and combine their sums of x and of squares"
        if self.threads_per_row < gpu.WARP:
            most = self.threads_per_row * MOST_OF_FEW
            wider = f"choose a config with more row_threads than {self.row_threads}"
        held = min(self.pass_elements, most // 2)
        return NormSupports(self.dtype, self.rms, most, wider, held)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        n_warps, chunks, row_threads = self.n_warps, self.chunks, self.row_threads
        if not 1 <= n_warps <= MAX_WARPS or n_warps & (n_warps - 1):
            raise ValueError(
                f"n_warps {n_warps} is not a power of two from 1 to {MAX_WARPS}: choose 4 or 8"
            )
        if ROW_IN_REGISTERS in self.step.traits:
            self._check_registers(n_warps, chunks)
        fits = LEAST_ROW_THREADS <= row_threads <= self.n_threads
        if ROW_THREADS in self.step.traits and (not fits or row_threads & (row_threads - 1)):
            raise ValueError(
                f"row_threads {row_threads} is not a power of two from {LEAST_ROW_THREADS} to the "
                f"{self.n_threads} threads of n_warps {n_warps}: choose {gpu.WARP}"
            )

    def _check_registers(self, n_warps: int, chunks: int) -> None:
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

    def call(self, problem: Norm, strides: Strides, device: Device) -> Call:
        """Return one launch, in which each block has `block_rows` rows."""
        values: dict[str, tuple[float, ...]] = {
            "x_stride": strides["x"][:1],
            "y_stride": strides["y"][:1],
            "rows": (problem.rows,),
            "width": (problem.width,),
            "eps": (problem.eps,),
        }
        (kernel,) = self.kernels.values()
        given = [tensor.name for tensor in (*problem.inputs, *problem.outputs)]
        launch = Launch(
            kernel=kernel,
            grid=(-(-problem.rows // self.block_rows), 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values=values,
            addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in given),
        )
        return Call((launch,))

    def most_runs(self, problem: Norm, device: Device) -> int:
        """Return the passes of a loop that handles one element per thread, and as many again for
        loops that nvcc unrolls."""
        return 2 * (-(-problem.width // self.threads_per_row) + 8)


def _chunks() -> Any:
    text = "of 16 bytes of the row, which a thread keeps in registers; 0 before n3"
    return number("c", text, default=0)


def _row_threads() -> Any:
    return number("t", "that have a row; 0 before n4: all of the block", default=0)


@dataclass(frozen=True)
class LayerNormKernelConfig(NormConfig):
    """One kernel of the layer_norm family."""

    example: ClassVar[str] = "n3_bf16_w8_c4"
    rms: ClassVar[bool] = False

    layer_norm: int = number("n", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = _chunks()
    row_threads: int = _row_threads()

    @property
    def family(self) -> Family[Any]:
        """The layer_norm family."""
        return LAYER_NORM


@dataclass(frozen=True)
class RmsNormKernelConfig(NormConfig):
    """One kernel of the rms_norm family."""

    example: ClassVar[str] = "r1_bf16_w4_c16_t32"
    rms: ClassVar[bool] = True

    rms_norm: int = number("r", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = _chunks()
    row_threads: int = _row_threads()

    @property
    def family(self) -> Family[Any]:
        """The rms_norm family."""
        return RMS_NORM


def _file(name: str) -> str:
    return f"kernels/norm/{name}.cuh"


_WARPS = (1, 2, 4, 8, 16, 32)
_CHUNKS = (1, 2, 4, 8, 16)
_ROW_THREADS = (8, 16, 32, 64, 128, 256, 512, 1024)
_BY_WIDTH: Mapping[str, int] = MappingProxyType({"n_warps": 4, "chunks": 16, "row_threads": 32})
_TARGETS = ("80", "86", "89", "90")
_DTYPES = (Element.FP16, Element.BF16, Element.FP32)
_HEADER = PurePosixPath("kernels/norm/arguments.cuh")

LAYER_NORM = Family(
    name="layer_norm",
    title="layer norm along rows",
    operation=OPERATION,
    prefix="n",
    rank=15,
    config=LayerNormKernelConfig,
    base=MappingProxyType({"n_warps": 8, "chunks": 0, "row_threads": 0}),
    entries=(
        StepEntry("block_per_row", "a thread block per row, three reads", _file("n1")),
        StepEntry(
            "16_bytes_per_lane",
            "16 bytes per lane",
            _file("n2"),
            traits=frozenset({VECTOR_LOADS}),
        ),
        StepEntry(
            "row_in_registers",
            "the row in registers, read once",
            _file("n3"),
            sets={"chunks": 4},
            opens={"n_warps": _WARPS, "chunks": _CHUNKS},
            traits=frozenset({ROW_IN_REGISTERS}),
        ),
        StepEntry(
            "threads_per_row",
            "as many threads per row as its width needs, and several rows per thread block",
            _file("n4"),
            sets=_BY_WIDTH,
            opens={"n_warps": (4, 8, 16, 32), "row_threads": _ROW_THREADS},
            traits=frozenset({ROW_THREADS}),
        ),
    ),
    targets=_TARGETS,
    kernels=MappingProxyType({"layer_norm_kernel": ARGUMENTS}),
    header=_HEADER,
    dtypes=_DTYPES,
    computing=frozenset(),
    simulated_budget=1_500_000,
    matrix_budget=1_000_000,
)

RMS_NORM = Family(
    name="rms_norm",
    title="RMS norm along rows",
    operation=OPERATION,
    prefix="r",
    rank=16,
    config=RmsNormKernelConfig,
    base=_BY_WIDTH,
    entries=(
        StepEntry(
            "no_mean",
            "layer norm without the mean: one sum per row",
            _file("r1"),
            parent="n4",
            opens={"n_warps": (4, 8, 16, 32), "chunks": _CHUNKS, "row_threads": _ROW_THREADS},
            traits=frozenset({VECTOR_LOADS, ROW_IN_REGISTERS, ROW_THREADS}),
        ),
    ),
    targets=_TARGETS,
    kernels=MappingProxyType({"rms_norm_kernel": ARGUMENTS}),
    header=_HEADER,
    dtypes=_DTYPES,
    computing=frozenset(),
    simulated_budget=600_000,
    matrix_budget=200_000,
)
