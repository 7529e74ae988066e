"""The backward_wide family: gradients of attention at d_head 256, on the units that only compute
capability 9.0 has.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.attention_backward import OPERATION
from flash_helpers.registry import backward
from flash_helpers.registry.backward import ARGUMENTS, CONVERT, DELTA, FLAGS, GRADIENTS
from flash_helpers.registry.call import FLOAT
from flash_helpers.registry.config import number
from flash_helpers.registry.family import UNORDERED_SUMS, Family, StepEntry
from flash_helpers.registry.mma_sync import DTYPES, ELEMENT_BYTES
from flash_helpers.registry.problem import Element
from flash_helpers.registry.wgmma import (
    BARRIER_BYTES,
    PERSISTENT,
    PRODUCER,
    PROGRAMMATIC,
    TARGET,
    WARPGROUP,
    WGMMA_K,
)

WARPGROUPS = 4  # of dV, of dK, of dQ, and the producer's
SCORE_SLOTS = 2  # of P and of dS


@dataclass(frozen=True)
class BackwardWideKernelConfig(backward.BackwardKernelConfig):
    """The kernels of one step of the backward_wide family, with the fields of family backward.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "m1_bf16_d256_Br64_Bc64_sl2"

    backward: int = number("m", "the step")

    @property
    def family(self) -> Family[Any]:
        """The backward_wide family."""
        return BACKWARD_WIDE

    @property
    def n_threads(self) -> int:
        """Threads of a block of the main kernel."""
        return WARPGROUPS * WARPGROUP

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel: K and V,
        slots of Q and dO and of their statistics, slots of P and dS, and the barriers."""
        if kernel != GRADIENTS:
            return super().block(kernel)
        tiles = 2 * (self.B_c + self.slots * self.B_r) * self.d_head
        scores = 2 * SCORE_SLOTS * self.B_r * self.B_c
        statistics = 2 * self.slots * self.B_r * FLOAT.size
        return self.n_threads, (tiles + scores) * ELEMENT_BYTES + statistics + BARRIER_BYTES

    @property
    def loop_unit(self) -> tuple[str, int]:
        """A block of queries, and the `wgmma` in the loop of a warp of the main kernel: S and dV,
        or dP and dK, of which the second is one of each half of the columns. Those of dQ, in a loop
        of its own, do not count."""
        return "block of Q and dO", (self.d_head + 2 * self.B_r) // WGMMA_K


def configs_with_flags() -> list[BackwardWideKernelConfig]:
    """Return the configs of each step with one flag in bf16, and with all in fp16."""
    listed = (
        (Element.BF16, {"causal": True}),
        (Element.BF16, {"in_turn": True}),
        (Element.FP16, {"causal": True, "in_turn": True}),
    )
    return [
        BACKWARD_WIDE.fixed_config(step, dtype).replace(**flags)
        for step in BACKWARD_WIDE.steps.values()
        for dtype, flags in listed
    ]


BACKWARD_WIDE = Family(
    name="backward_wide",
    operation=OPERATION,
    title="gradients of attention at head size 256, on Hopper's own units",
    prefix="m",
    rank=8,
    config=BackwardWideKernelConfig,
    base=MappingProxyType(
        {"d_head": 256, "B_r": 64, "B_c": 64, "slots": 2, **dict.fromkeys(FLAGS, False)}
    ),
    entries=(
        StepEntry(
            "gradient_per_warpgroup",
            "d_head 256: a warpgroup has dV, dK or dQ, instead of some of the keys",
            "kernels/backward_wide/m1.cuh",
            opens={"causal": (False,), "in_turn": (False,)},
            traits=frozenset(
                {
                    backward.SCORES_IN_REGISTERS,
                    backward.ONE_KERNEL,
                    backward.THIRD_WARPGROUP,
                    backward.STATISTICS_FIRST,
                    backward.ANY_LENGTHS,
                    PRODUCER,
                    PERSISTENT,
                    PROGRAMMATIC,
                    UNORDERED_SUMS,
                }
            ),
            parent="b13",
        ),
    ),
    targets=(TARGET,),
    kernels=MappingProxyType(dict.fromkeys((DELTA, GRADIENTS, CONVERT), ARGUMENTS)),
    header=PurePosixPath("kernels/backward_wide/arguments.cuh"),
    dtypes=DTYPES,
    simulated_budget=11_000_000,
    matrix_budget=4_200_000,
    also_listed=configs_with_flags,
)
