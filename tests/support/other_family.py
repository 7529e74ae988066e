"""A family that no kernel stands behind: what the registry must be able to hold besides ampere.

Its kernel takes tensor maps, a cluster and a zeroed counter, and needs one architecture's own
instructions.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import ClassVar

from flash_helpers.gpu import Device
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.supports import AttentionSupports
from flash_helpers.registry.call import (
    INT,
    POINTER,
    TENSOR_MAP,
    Address,
    Buffer,
    Call,
    Launch,
    StructLayout,
    TensorMap,
)
from flash_helpers.registry.config import Config, element, flag, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.problem import Element, Strides

TILE = 128
COUNTER = "counter"
ARGUMENTS = StructLayout(
    "OtherArgs", MappingProxyType({"n": INT, "Q": TENSOR_MAP, "O": POINTER, "counter": POINTER})
)


@dataclass(frozen=True)
class OtherConfig(Config):
    """A kernel of the other family."""

    example: ClassVar[str] = "w1_bf16_B128"

    ordinal: int = number("y")
    dtype: Element = element()
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
        return self.tile * 128 * 2 * self.stages

    @property
    def supports(self) -> AttentionSupports:
        return AttentionSupports(
            self.dtype, (128,), MappingProxyType({"tile": self.tile}), 16, 2**20
        )

    def check(self) -> None:
        if self.tile % 64:
            raise ValueError(f"tile {self.tile} is not a multiple of 64: choose 64 or 128")

    def most_runs(self, problem: AttentionForward, device: Device) -> int:
        return problem.len_k

    def call(self, problem: AttentionForward, strides: Strides, device: Device) -> Call:
        q_map = TensorMap(
            tensor="q",
            element=self.dtype,
            dims=(problem.d_head, problem.len_q),
            strides=(problem.row_stride * 2,),
            box=(64, self.tile),
            swizzle=128,
        )
        launch = Launch(
            kernel=self.short_form(),
            grid=(device.sms, 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values={"n": (problem.len_q // self.tile,)},
            addresses=(
                Address(ARGUMENTS.offset("O"), "o"),
                Address(ARGUMENTS.offset("counter"), COUNTER),
            ),
            cluster=(2, 1, 1),
            tensor_maps=((ARGUMENTS.offset("Q"), q_map),),
        )
        return Call((launch,), (Buffer(COUNTER, 4, zeroed=True),))


OTHER = Family(
    name="other",
    title="what comes after mma.sync",
    operation=OPERATION,
    prefix="y",
    rank=9,
    config=OtherConfig,
    base=MappingProxyType({"tile": 128, "stages": 2, "lazy": False}),
    entries=(
        StepEntry("first", "the first of them", "kernels/other/y1.cuh", parent="v16"),
        StepEntry("lazy", "lazier", "kernels/other/y2.cuh", sets={"lazy": True}),
        StepEntry(
            "tuned",
            "tile by sweep",
            "kernels/other/y3.cuh",
            opens={"tile": (64, 96, 128), "stages": (2, 3)},
        ),
    ),
    targets=("90a",),
    kernels=MappingProxyType({"forward_kernel": ARGUMENTS}),
    header=PurePosixPath("src/include/flash_attention.cuh"),
    dtypes=(Element.FP16, Element.BF16),
)
