"""The append family of operation `append`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.append import OPERATION
from flash_helpers.operations.append.problem import Append
from flash_helpers.operations.append.supports import AppendSupports
from flash_helpers.registry.call import (
    INT,
    LONG,
    POINTER,
    STRIDES,
    Address,
    Call,
    Launch,
    StructLayout,
)
from flash_helpers.registry.config import Config, element, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.problem import Element, Strides

MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
CHUNK_BYTES = 16  # one load or store of a thread

_STRIDED = ("k", "v", "q", "k_cache", "v_cache", "q_rotated")
_TABLES = ("cos", "sin", "block_table")
_SIZES = ("len_new", "kv_heads", "len_q", "heads", "d_head", "rotary_dim", "positions", "room")
_FLAGS = ("interleaved", "in_order", "fp32_tables")

ARGUMENTS = StructLayout(
    "AppendKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(Append.axes, POINTER),
            **{f"{name}_strides": STRIDES for name in _STRIDED},
            **{f"{name}_stride": LONG for name in _TABLES},
            **dict.fromkeys((*_SIZES, "page_size", "rows", *_FLAGS), INT),
        }
    ),
)


@dataclass(frozen=True)
class AppendKernelConfig(Config):
    """One kernel of the append family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "ka1_bf16_w4"

    append: int = number("ka", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of a thread block")

    @property
    def family(self) -> Family[Any]:
        """The append family."""
        return APPEND

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory: none."""
        return 0

    @property
    def supports(self) -> AppendSupports:
        """Caches of any kind, and heads of whole chunks."""
        return AppendSupports(self.dtype, CHUNK_BYTES, self.n_threads)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if not 1 <= self.n_warps <= MAX_WARPS:
            raise ValueError(f"n_warps {self.n_warps} is not from 1 to {MAX_WARPS}: choose 4")

    def call(self, problem: Append, strides: Strides, device: Device) -> Call:
        """Return one launch, in which thread blocks have a token each."""
        given = dict.fromkeys(x.name for x in (*problem.inputs, *problem.outputs))
        values: dict[str, tuple[float, ...]] = {
            **{f"{name}_strides": strides[name][:3] for name in _STRIDED if name in given},
            **{f"{name}_stride": strides[name][:1] for name in _TABLES if name in given},
            **{name: (getattr(problem, name),) for name in (*_SIZES, "page_size", "rows", *_FLAGS)},
        }
        launch = Launch(
            kernel=self.kernels[self.main_kernel],
            grid=(*self.supports.blocks(problem), 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values=values,
            addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in given),
        )
        return Call((launch,))

    def most_runs(self, problem: Append, device: Device) -> int:
        """Return the runs of an instruction, of which none is in a loop that is not unrolled."""
        return 2


APPEND = Family(
    name="append",
    title="append of keys and values to a cache, with rotary embedding",
    operation=OPERATION,
    prefix="ka",
    rank=12,
    config=AppendKernelConfig,
    base=MappingProxyType({"n_warps": 4}),
    entries=(
        StepEntry(
            "one_launch",
            "rotation of K and Q, and append to pages, in one launch",
            "kernels/append/ka1.cuh",
            opens={"n_warps": (1, 2, 4, 8)},
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType({"append_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/append/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16),
    computing=frozenset(),
    simulated_budget=450_000,
    matrix_budget=200_000,
)
