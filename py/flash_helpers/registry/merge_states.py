"""The merge_states family of operation `merge`: attention on parts of the keys, merged. Standard
library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.merge import OPERATION
from flash_helpers.operations.merge.problem import Merge
from flash_helpers.operations.merge.supports import MergeSupports
from flash_helpers.registry.call import (
    FLOAT,
    INT,
    POINTER,
    STRIDES,
    Address,
    Call,
    Launch,
    StructLayout,
)
from flash_helpers.registry.config import Config, element, number
from flash_helpers.registry.family import LAST_RESORT, Family, StepEntry
from flash_helpers.registry.problem import Element, Strides

MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
CHUNK_BYTES = 16  # one load or store of a thread

MAX_PARTS_AT_ONCE = 16

# Traits of steps.
VECTOR_LOADS = "vector_loads"  # a thread has a chunk of 16 bytes of a row
PARTS_AT_ONCE = "parts_at_once"  # and loads those of `parts_at_once` parts before it uses one

_TENSORS = ("o_parts", "lse_parts", "o", "lse")

ARGUMENTS = StructLayout(
    "MergeKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(_TENSORS, POINTER),
            **{f"{name}_strides": STRIDES for name in _TENSORS},  # PartStrides has the same layout
            **dict.fromkeys(("parts", "rows", "heads", "d_head"), INT),
            "log2_base": FLOAT,
        }
    ),
)


@dataclass(frozen=True)
class MergeKernelConfig(Config):
    """One kernel of the merge_states family.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "u3_bf16_w8_p4"

    merge_states: int = number("u", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of a thread block")
    parts_at_once: int = number("p", "whose chunks a thread loads at once; 0 before u3", default=0)

    @property
    def family(self) -> Family[Any]:
        """The merge_states family."""
        return MERGE_STATES

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory: none."""
        return 0

    @property
    def supports(self) -> MergeSupports:
        """Any number of parts and rows, and head sizes of whole chunks."""
        is_chunked = VECTOR_LOADS in self.step.traits
        return MergeSupports(self.dtype, CHUNK_BYTES // self.dtype.bytes if is_chunked else 1)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if not 1 <= self.n_warps <= MAX_WARPS:
            raise ValueError(f"n_warps {self.n_warps} is not from 1 to {MAX_WARPS}: choose 8")
        parts, most = self.parts_at_once, MAX_PARTS_AT_ONCE
        if PARTS_AT_ONCE in self.step.traits and not 1 <= parts <= most:
            raise ValueError(f"parts_at_once {parts} is not from 1 to {most}: choose 4")

    def call(self, problem: Merge, strides: Strides, device: Device) -> Call:
        """Return one launch with enough threads for all rows."""
        # 1 instead of 0 for the heads of an lse with one head, as exports have it
        of_one = 2 - problem.heads
        of_parts, of_all = strides["lse_parts"], strides["lse"]
        values: dict[str, tuple[float, ...]] = {
            "o_parts_strides": strides["o_parts"][:3],
            "lse_parts_strides": (*of_parts[:2], max(of_parts[2], of_one)),
            "o_strides": (0, *strides["o"][:2]),
            "lse_strides": (0, of_all[0], max(of_all[1], of_one)),
            "parts": (problem.parts,),
            "rows": (problem.rows,),
            "heads": (problem.heads,),
            "d_head": (problem.d_head,),
            "log2_base": (problem.log2_base,),
        }
        (kernel,) = self.kernels.values()
        launch = Launch(
            kernel=kernel,
            grid=(-(-self.supports.threads(problem) // self.n_threads), 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=ARGUMENTS,
            values=values,
            addresses=tuple(Address(ARGUMENTS.offset(name), name) for name in _TENSORS),
        )
        return Call((launch,))

    def most_runs(self, problem: Merge, device: Device) -> int:
        """Return the products of a lane of u1, and as many again for loops that nvcc unrolls."""
        return 2 * (problem.parts * -(-problem.d_head // gpu.WARP) + 8)


def _file(number: int) -> str:
    return f"kernels/merge_states/u{number}.cuh"


MERGE_STATES = Family(
    name="merge_states",
    title="attention on parts of the keys, merged by their LSE",
    operation=OPERATION,
    prefix="u",
    rank=11,
    config=MergeKernelConfig,
    base=MappingProxyType({"n_warps": 8, "parts_at_once": 0}),
    entries=(
        StepEntry(
            "warp_per_row",
            "a warp per row, an element per lane",
            _file(1),
            traits=frozenset({LAST_RESORT}),  # for head sizes that are no whole chunks
        ),
        StepEntry(
            "rows_by_width",
            "16 bytes per lane, as many lanes per row as it has chunks",
            _file(2),
            traits=frozenset({VECTOR_LOADS}),
        ),
        StepEntry(
            "parts_in_flight",
            "several parts in flight per lane, before their weights are known",
            _file(3),
            sets={"parts_at_once": 4},
            opens={"n_warps": (2, 4, 8, 16), "parts_at_once": (1, 2, 4, 8)},
            traits=frozenset({PARTS_AT_ONCE}),
        ),
    ),
    targets=("80", "86", "89", "90"),
    kernels=MappingProxyType({"merge_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/merge_states/arguments.cuh"),
    dtypes=(Element.FP16, Element.BF16, Element.FP32),
    computing=frozenset(),
    simulated_budget=1_000_000,
    matrix_budget=200_000,
)
