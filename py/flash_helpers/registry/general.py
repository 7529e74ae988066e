"""The general family: attention on Hopper's own units for the problems of real models.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.supports import AttentionSupports
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
    """One kernel of the general family. Fields that `WgmmaConfig` does not have:

    `cluster`: thread blocks that share the tiles of K and V which are loaded, 1 or 2. `d_v`: head
    size of V and O, 0 for that of Q and K.

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
    cluster: int = number("cl", "thread blocks that share the loads of K and V", default=2)
    d_v: int = number("dv", "head size of V and O; 0 for that of Q and K", default=0)

    @property
    def v_columns(self) -> int:
        """Head size of V and O."""
        return self.d_v or self.d_head

    @property
    def cluster_blocks(self) -> int:
        """Thread blocks of a cluster."""
        return self.cluster

    most_consumers: ClassVar[int] = 4

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster {self.cluster} is neither 1 nor 2 thread blocks: choose one")
        if (self.d_head, self.d_v) not in TILES:
            known = ", ".join(f"{d_head} with {d_v or d_head}" for d_head, d_v in TILES)
            raise ValueError(
                f"d_head {self.d_head} with d_v {self.v_columns} of V is not built: choose one of "
                f"{known}, and pad with zeros"
            )
        super().check()

    @property
    def supports(self) -> AttentionSupports:
        """Any lengths, with one head size."""
        return replace(super().supports, d_v=self.d_v or None)

    def variants(self) -> tuple[GeneralKernelConfig, ...]:
        """The config with and without a mask, then the other head sizes' tiles."""
        own = super().variants()
        if "d_head" not in self.step.tunable:
            return own
        others = (size for size in TILES if size != (self.d_head, self.d_v))
        return (*own, *(v for size in others for v in WgmmaConfig.variants(self.of_size(*size))))

    def of_size(self, d_head: int, d_v: int = 0) -> GeneralKernelConfig:
        """Return the config of the same step and dtype with the usual tile of head sizes."""
        return self.replace(d_head=d_head, d_v=d_v, causal=False, **TILES[d_head, d_v])

    @property
    def family(self) -> Family[Any]:
        """The general family."""
        return GENERAL


def _file(number: int) -> str:
    return f"kernels/general/g{number}.cuh"


_BASE: Mapping[str, Any] = MappingProxyType({**_PARENT.options, "cluster": 2, "d_v": 0})


def _tile(
    B_r: int, B_c: int, K_slots: int, V_slots: int, *, ping_pong: bool = True, cluster: int = 1
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            **{"B_r": B_r, "B_c": B_c, "K_slots": K_slots, "V_slots": V_slots},
            **{"ping_pong": ping_pong, "cluster": cluster},
        }
    )


# Usual tiles by d_head and d_v. Where Q is wide, two slots of it leave room for few of K and V.
TILES: Mapping[tuple[int, int], Mapping[str, Any]] = MappingProxyType(
    {
        (128, 0): _tile(128, 128, 3, 2, cluster=2),
        (64, 0): _tile(256, 64, 6, 6),
        (96, 0): _tile(128, 128, 3, 2, cluster=2),
        (192, 0): _tile(128, 80, 2, 2),
        (192, 128): _tile(128, 80, 3, 2),
        (256, 0): _tile(128, 64, 2, 1, ping_pong=False),
    }
)
# Of the other head sizes these are listed: each once, every dtype, and with and without a mask.
_LISTED = {
    (64, 0): (Element.FP16, True),
    (96, 0): (Element.BF16, False),
    (192, 0): (Element.BF16, True),
    (192, 128): (Element.FP16, False),
    (256, 0): (Element.BF16, False),
}


def _more_configs() -> list[GeneralKernelConfig]:
    """Return the causal configs of the steps' tiles; and of the last step the tile for short
    sequences with and without a mask, and tiles of other head sizes."""
    last = [*GENERAL.steps.values()][-1]
    short = [GENERAL.fixed_config(last, dtype).replace(cluster=1) for dtype in GENERAL.dtypes]
    shown = (*GENERAL.progression(), *short)
    fixed = {dtype: GENERAL.fixed_config(last, dtype) for dtype in GENERAL.dtypes}
    sizes = [
        fixed[dtype].of_size(*size).replace(causal=causal)
        for size, (dtype, causal) in _LISTED.items()
    ]
    causal = (config.replace(causal=True) for config in shown)
    return [*short, *causal, *sizes]


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
        StepEntry(
            "one_block",
            "clusters of one thread block, for short sequences",
            _file(2),
            opens={"cluster": (1, 2)},
        ),
        StepEntry(
            "head_sizes",
            "head sizes of 64 to 256, and one of V that differs",
            _file(3),
            opens={"d_head": (128,), "d_v": (0,)},
        ),
    ),
    targets=(TARGET,),
    kernels=MappingProxyType({"forward_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/general/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=14_000_000,
    matrix_budget=24_000_000,
    also_listed=_more_configs,
)
