"""The general family: attention on Hopper's own units for the problems of real models.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.registry.call import StructLayout
from flash_helpers.registry.config import element, flag, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.mma_sync import DTYPES
from flash_helpers.registry.problem import Element
from flash_helpers.registry.wgmma import MEMBERS, TARGET, WgmmaConfig

ARGUMENTS = StructLayout("GeneralKernelArgs", MEMBERS)
_PARENT = HOPPER.steps["h30"]


@dataclass(frozen=True)
class GeneralKernelConfig(WgmmaConfig):
    """One kernel of the general family; the fields are those of `WgmmaConfig`.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "g1_bf16_d128_Br128_Bc128_K3_V2_pp"

    general: int = number("g", "the step")
    dtype: Element = element()
    d_head: int = number("d")
    B_r: int = number("Br", "query rows of a thread block, 64 for each warpgroup that computes")
    B_c: int = number("Bc", "keys of one step of its main loop")
    K_slots: int = number("K", "tiles of K in shared memory")
    V_slots: int = number("V", "tiles of V in shared memory")
    ping_pong: bool = flag("pp", "one warpgroup at a time issues its products", default=False)
    causal: bool = flag("causal", "a causal mask, aligned to the bottom right", default=False)

    @property
    def family(self) -> Family[Any]:
        """The general family."""
        return GENERAL


def _file(number: int) -> str:
    return f"kernels/general/g{number}.cuh"


_BASE: Mapping[str, Any] = MappingProxyType({"d_head": 128, "B_c": 128, **_PARENT.options})


def _causal_configs() -> list[GeneralKernelConfig]:
    """Return the causal configs of the steps' tiles."""
    shown = GENERAL.progression()
    return [variant for config in shown for variant in config.variants() if variant.causal]


GENERAL = Family(
    name="general",
    operation=OPERATION,
    title="attention for real models, on Hopper's own units",
    prefix="g",
    rank=3,
    config=GeneralKernelConfig,
    base=_BASE,
    entries=(
        StepEntry(
            "roles",
            "the roles are structs, and one scheduler says which tiles they take",
            _file(1),
            parent="h30",
            opens={name: _PARENT.tunable[name] for name in _PARENT.tunable},
            traits=_PARENT.traits,
        ),
    ),
    targets=(TARGET,),
    kernels=MappingProxyType({"forward_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/general/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=10_000_000,
    matrix_budget=10_000_000,
    also_listed=_causal_configs,
)
