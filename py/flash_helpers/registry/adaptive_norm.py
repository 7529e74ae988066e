"""The adaptive_norm family of operation `adaptive_norm`. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.gpu import Device
from flash_helpers.operations.adaptive_norm import OPERATION
from flash_helpers.operations.adaptive_norm.problem import CONTEXT, VECTORS, AdaptiveNorm
from flash_helpers.operations.adaptive_norm.supports import AdaptiveNormSupports
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
from flash_helpers.registry.config import element, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.row_threads import (
    CHUNK_BYTES,
    CHUNK_REGISTERS,
    ROW_IN_REGISTERS,
    ROW_THREADS,
    VECTOR_LOADS,
    RowConfig,
)

# Of a thread per chunk: x, change and gate, or the sum, scale and shift.
GATED_REGISTERS = 3 * CHUNK_REGISTERS
MOST_CHUNKS = 8

_MATRICES = ("x", "change", "y", "sum")
_IN, _OUT = ("x", "change", *VECTORS), ("y", "sum")


def _strides(stream: str) -> list[str]:
    return [
        *(f"{stream}{name}_batch_stride" for name in _MATRICES),
        *(f"{stream}{name}_row_stride" for name in _MATRICES),
        *(f"{stream}{name}_batch_stride" for name in VECTORS),
    ]


_STREAMS = ("", CONTEXT)
_SIZES = ("rows", "length", "width")
ARGUMENTS = StructLayout(
    "AdaptiveNormKernelArgs",
    MappingProxyType(
        {
            **{stream + name: POINTER for stream in _STREAMS for name in _IN},
            **{stream + name: POINTER for stream in _STREAMS for name in _OUT},
            **{name: LONG for stream in _STREAMS for name in _strides(stream)},
            **{stream + name: INT for stream in _STREAMS for name in _SIZES},
            "blocks": INT,
            "eps": FLOAT,
        }
    ),
)


@dataclass(frozen=True)
class AdaptiveNormKernelConfig(RowConfig):
    """One kernel of the adaptive_norm family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "ad1_bf16_w4_c1_t16"

    adaptive_norm: int = number("ad", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = number("c", "of 16 bytes of the sum, which a thread keeps in registers")
    row_threads: int = number("t", "that have a row")

    @property
    def family(self) -> Family[Any]:
        """The adaptive_norm family."""
        return ADAPTIVE_NORM

    @property
    def chunk_registers(self) -> int:
        """Registers of a thread per chunk."""
        return GATED_REGISTERS

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: two numbers for each warp."""
        return 2 * self.n_warps * Element.FP32.bytes

    @property
    def supports(self) -> AdaptiveNormSupports:
        """Rows of whole chunks that the row's threads hold."""
        return AdaptiveNormSupports(
            *(self.dtype, CHUNK_BYTES, self.block_rows, self.pass_elements),
            "choose a config with more row_threads or chunks, or let PyTorch compute it",
        )

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        super().check()
        if self.chunks > MOST_CHUNKS:
            raise ValueError(f"chunks {self.chunks} is over {MOST_CHUNKS}: choose 4 or 8")

    def variants(self) -> tuple[AdaptiveNormKernelConfig, ...]:
        """Return the config, and those for longer rows."""
        wider = (self.replace(**shape) for shape in _LONGER)
        return self, *(config for config in wider if config.pass_elements > self.pass_elements)

    def call(self, problem: AdaptiveNorm, strides: Strides, device: Device) -> Call:
        """Return one launch, in which thread blocks have rows of one of the two streams."""
        given = [*problem.inputs, *problem.outputs]
        own, of_context = (
            -(-rows // self.block_rows) for rows in (problem.rows, problem.context_rows)
        )
        values: dict[str, tuple[float, ...]] = {}
        for tensor in given:
            values[f"{tensor.name}_batch_stride"] = (strides[tensor.name][0],)
            if len(tensor.axes) > 2:
                values[f"{tensor.name}_row_stride"] = (strides[tensor.name][1],)
        values |= {name: (getattr(problem, name),) for name in ("rows", "length", "width")}
        values |= {
            "context_rows": (problem.context_rows,),
            "context_length": (problem.context,),
            "context_width": (problem.context_width,),
            "blocks": (own,),
            "eps": (problem.eps,),
        }
        launch = Launch(
            kernel=self.kernels[self.main_kernel],
            grid=(own + of_context, 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values=values,
            addresses=tuple(Address(ARGUMENTS.offset(x.name), x.name) for x in given),
        )
        return Call((launch,))

    def most_runs(self, problem: AdaptiveNorm, device: Device) -> int:
        """Return the chunks of a thread, for loops that nvcc does not unroll, and more."""
        return 64 * self.chunks


# For rows of up to 4096 elements, and of up to 16384.
_LONGER = (
    MappingProxyType({"n_warps": 4, "chunks": 4, "row_threads": 128}),
    MappingProxyType({"n_warps": 8, "chunks": 8, "row_threads": 256}),
)


def _of_longer_rows() -> Iterator[AdaptiveNormKernelConfig]:
    """Yield a kernel of rows that warps share."""
    for config in ADAPTIVE_NORM.progression():
        yield config.replace(**_LONGER[0])


ADAPTIVE_NORM = Family(
    name="adaptive_norm",
    title="adaptive layer norm of gated sums",
    operation=OPERATION,
    prefix="ad",
    rank=30,
    config=AdaptiveNormKernelConfig,
    base=MappingProxyType({"n_warps": 4, "chunks": 1, "row_threads": 16}),
    entries=(
        StepEntry(
            "gated_sum",
            "the gated sum of two streams stays in registers for layer norm, scale and shift",
            "kernels/adaptive_norm/ad1.cuh",
            opens={
                "n_warps": (4, 8, 16, 32),
                "chunks": (1, 2, 4, 8),
                "row_threads": (8, 16, 32, 64, 128, 256, 512, 1024),
            },
            traits=frozenset({VECTOR_LOADS, ROW_IN_REGISTERS, ROW_THREADS, HELD_BACK}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType({"adaptive_norm_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/adaptive_norm/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16),
    computing=frozenset(),
    simulated_budget=2_900_000,
    matrix_budget=1_000_000,
    also_listed=_of_longer_rows,
)
