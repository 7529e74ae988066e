"""Hopper with steps that take general problems, and a kernel for them that is plain and slow: what
the registry and the runtime must be able to hold besides whole blocks.

The kernel is tests/runtime/kernels/plain_attention.cu; the steps are numbered on from hopper's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from flash_helpers.kernel_configs import Config, Element
from flash_helpers.registry.family import Family, Step, StepEntry
from flash_helpers.registry.hopper import HOPPER, HopperKernelConfig
from flash_helpers.registry.wgmma import (
    CALL_OPTIONS,
    DYNAMIC,
    HEAD_PAIRS,
    OWN_KEYS,
    RAGGED,
    SHARED_LOADS,
)

_PTX = Path(__file__).parents[1] / "runtime/kernels/plain_attention.ptx"


class GeneralConfig(HopperKernelConfig):
    """A config of one of these steps."""

    @property
    def family(self) -> Family:
        return GENERAL


GENERAL = replace(
    HOPPER,
    config=GeneralConfig,
    entries=(
        *HOPPER.entries[:18],  # which take whole blocks
        StepEntry("ragged", "any lengths", "ragged.cuh", traits=frozenset({RAGGED})),
        StepEntry("call", "options of a call", "call.cuh", traits=frozenset({CALL_OPTIONS})),
        StepEntry("causal", "a mask", "causal.cuh", opens={"causal": (False,)}),
        StepEntry("dynamic", "a counter", "dynamic.cuh", traits=frozenset({DYNAMIC})),
        StepEntry("clusters", "clusters", "two.cuh", traits=frozenset({OWN_KEYS, SHARED_LOADS})),
        StepEntry("pairs", "two heads", "pairs.cuh", traits=frozenset({HEAD_PAIRS})),
    ),
)
(BEFORE, WITH_LENGTHS, WITH_OPTIONS, WITH_CAUSAL, WITH_COUNTER, WITH_CLUSTERS, WITH_PAIRS) = [
    *GENERAL.steps.values()
][-7:]


def general(step: Step, **changes: Any) -> Config:
    """The config that the family fixes for a step, with some fields changed."""
    return GENERAL.fixed_config(step, Element.BF16).replace(**changes)


def plain_ptx(config: Config) -> str:
    """The plain kernel under the symbol of the config's own."""
    own = "plain_causal" if config.causal else "plain"
    (function,) = config.kernels
    names = (config.step.namespace, function, config.short_form())
    namespace, function, argument = (f"{len(name)}{name}" for name in names)
    symbol = f"_ZN{namespace}{function}I{argument}EEvv"
    return _PTX.read_text().replace(f"entry {own}(", f"entry {symbol}(")
