"""A family that no kernel stands behind: what the registry must be able to hold besides ampere.

Its kernel takes tensor maps, a cluster and a zeroed counter, and needs one architecture's own
instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import ClassVar

from flash_helpers.registry.config import Config, element, flag, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.launch import (
    INT,
    POINTER,
    TENSOR_MAP,
    WORKSPACE,
    Address,
    Launch,
    StructLayout,
    TensorMap,
)
from flash_helpers.registry.problem import ELEMENT_BYTES, AttentionForward, DType, Strides
from flash_helpers.registry.supports import Supports

TILE = 128
ARGUMENTS = StructLayout(
    "OtherArgs",
    MappingProxyType({"n": INT, "Q": TENSOR_MAP, "O": POINTER, "counter": POINTER}),
)


@dataclass(frozen=True)
class OtherConfig(Config):
    """A kernel of the other family."""

    example: ClassVar[str] = "x1_bf16_B128"

    ordinal: int = number("x")
    dtype: DType = element()
    tile: int = number("B", "rows")
    stages: int = number("st", default=2)
    lazy: bool = flag("lazy", default=False)

    @property
    def family(self) -> Family:
        return OTHER

    @property
    def n_threads(self) -> int:
        return 384

    @property
    def smem_bytes(self) -> int:
        return self.tile * 128 * ELEMENT_BYTES * self.stages

    @property
    def supports(self) -> Supports:
        return Supports(self.dtype, (128,), MappingProxyType({"tile": self.tile}), 16, 2**20)

    def check(self) -> None:
        if self.tile % 64:
            raise ValueError(f"tile {self.tile} is not a multiple of 64: choose 64 or 128")

    def launch(
        self, problem: AttentionForward, strides: Mapping[str, Strides]
    ) -> tuple[Launch, ...]:
        q_map = TensorMap(
            tensor="q",
            dtype=self.dtype.short,
            dims=(problem.d_head, problem.len_q),
            strides=(problem.row_stride * ELEMENT_BYTES,),
            box=(64, self.tile),
            swizzle=128,
        )
        return (
            Launch(
                config=self,
                grid=(132, 1, 1),
                block=self.n_threads,
                shared_bytes=self.smem_bytes,
                arguments=ARGUMENTS.pack({"n": (problem.len_q // self.tile,)}),
                addresses=(
                    Address(ARGUMENTS.offset("O"), "o"),
                    Address(ARGUMENTS.offset("counter"), WORKSPACE),
                ),
                outputs=("o",),
                cluster=(2, 1, 1),
                tensor_maps=((ARGUMENTS.offset("Q"), q_map),),
                workspace_bytes=4,
            ),
        )


OTHER = Family(
    name="other",
    title="what comes after mma.sync",
    prefix="x",
    rank=9,
    config=OtherConfig,
    base=MappingProxyType({"tile": 128, "stages": 2, "lazy": False}),
    entries=(
        StepEntry("first", "the first of them", "kernels/other/x1.cuh", parent="v16"),
        StepEntry("lazy", "lazier", "kernels/other/x2.cuh", sets={"lazy": True}),
        StepEntry(
            "tuned",
            "tile by sweep",
            "kernels/other/x3.cuh",
            opens={"tile": (64, 96, 128), "stages": (2, 3)},
        ),
    ),
    targets=("90a",),
    arguments=ARGUMENTS,
    map_header=PurePosixPath("src/include/other_kernels.cuh"),
)
