"""The diagonal family of operation `diagonal`: rows, scaled. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.diagonal import OPERATION
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.operations.diagonal.supports import DiagonalSupports
from flash_helpers.registry.call import INT, LONG, POINTER, Address, Call, Launch, StructLayout
from flash_helpers.registry.config import Config, element, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.problem import Element, Strides

MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
MAX_CHUNKS = 16
CHUNK_BYTES = 16  # one load or store of a thread

# Traits of steps.
VECTOR_LOADS = "vector_loads"  # a chunk of 16 bytes per lane
WARP_PIECES = "warp_pieces"  # a warp has a piece of a row, `chunks` chunks per lane
ONE_RANGE = "one_range"  # a thread block has a piece of the chunks of all rows

ARGUMENTS = StructLayout(
    "DiagonalKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys("abc", POINTER),
            **dict.fromkeys(("a_stride", "b_stride", "c_stride"), LONG),
            **dict.fromkeys(("rows", "width", "pieces"), INT),
        }
    ),
)


@dataclass(frozen=True)
class DiagonalKernelConfig(Config):
    """One kernel of the diagonal family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "k3_bf16_w8_c4"

    diagonal: int = number("k", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of a thread block")
    chunks: int = number("c", "of 16 bytes, which a lane loads at once; 0 before k3", default=0)

    @property
    def family(self) -> Family[Any]:
        """The diagonal family."""
        return DIAGONAL

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory: none."""
        return 0

    @property
    def supports(self) -> DiagonalSupports:
        """Rows of any length, at any element."""
        if ONE_RANGE in self.step.traits:
            chunk = CHUNK_BYTES // self.dtype.bytes
            return DiagonalSupports(self.dtype, chunk, self.n_threads * self.chunks)
        if WARP_PIECES in self.step.traits:
            chunk = CHUNK_BYTES // self.dtype.bytes
            return DiagonalSupports(self.dtype, gpu.WARP * self.chunks * chunk, self.n_warps)
        chunk = CHUNK_BYTES // self.dtype.bytes if VECTOR_LOADS in self.step.traits else 1
        return DiagonalSupports(self.dtype, self.n_threads * chunk)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if not 1 <= self.n_warps <= MAX_WARPS:
            raise ValueError(f"n_warps {self.n_warps} is not from 1 to {MAX_WARPS}: choose 8")
        if WARP_PIECES in self.step.traits and not 1 <= self.chunks <= MAX_CHUNKS:
            raise ValueError(f"chunks {self.chunks} is not from 1 to {MAX_CHUNKS}: choose 4")

    def call(self, problem: Diagonal, strides: Strides, device: Device) -> Call:
        """Return one launch with enough blocks for all pieces of all rows."""
        values: dict[str, tuple[float, ...]] = {
            # 1 instead of 0 for an a of one element, as exports have it
            "a_stride": (max(strides["a"][0], 2 - problem.rows),),
            **{f"{name}_stride": strides[name][:1] for name in "bc"},
            "rows": (problem.rows,),
            "width": (problem.width,),
            "pieces": (-(-problem.width // self.supports.piece),),
        }
        (kernel,) = self.kernels.values()
        launch = Launch(
            kernel=kernel,
            grid=(self.supports.blocks(problem), 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values=values,
            addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in "abc"),
        )
        return Call((launch,))

    def most_runs(self, problem: Diagonal, device: Device) -> int:
        """Return the elements of a lane, whose loop runs where rows of B and C begin at different
        offsets from a multiple of 16 bytes."""
        return 2 * (CHUNK_BYTES * max(1, self.chunks) + 8)


def _file(number: int) -> str:
    return f"kernels/diagonal/k{number}.cuh"


DIAGONAL = Family(
    name="diagonal",
    title="a diagonal matrix times a matrix, by scaling its rows",
    operation=OPERATION,
    prefix="k",
    rank=13,
    config=DiagonalKernelConfig,
    base=MappingProxyType({"n_warps": 8, "chunks": 0}),
    entries=(
        StepEntry("thread_per_element", "a scaling of rows, a thread per element", _file(1)),
        StepEntry(
            "16_bytes_per_lane",
            "16 bytes per lane",
            _file(2),
            traits=frozenset({VECTOR_LOADS}),
        ),
        StepEntry(
            "warp_per_piece",
            "a warp per piece of a row, several loads in flight per lane",
            _file(3),
            sets={"chunks": 4},
            opens={"n_warps": (4, 8, 16), "chunks": (1, 2, 4, 8)},
            traits=frozenset({WARP_PIECES}),
        ),
        StepEntry(
            "one_range",
            "the chunks of all rows as one range, each row by a product",
            _file(4),
            traits=frozenset({ONE_RANGE}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType({"diagonal_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/diagonal/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=1_000_000,
    matrix_budget=400_000,
)
