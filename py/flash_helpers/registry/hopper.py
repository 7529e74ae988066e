"""The hopper family: attention on the units that only compute capability 9.0 has, at d_head 128.
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
from flash_helpers.registry.family import CORE, LAB, LIBRARY, Family, StepEntry
from flash_helpers.registry.mma_sync import DTYPES, LAZY_RESCALE, RAGGED
from flash_helpers.registry.problem import Element
from flash_helpers.registry.wgmma import (
    ASKS_LATE,
    CALL_OPTIONS,
    DYNAMIC,
    HALF_BLOCKS,
    HEAD_PAIRS,
    MEMBERS,
    OWN_KEYS,
    P_IN_REGISTERS,
    PERSISTENT,
    PRODUCER,
    Q_TWICE,
    REPLAYS,
    SHARED_LOADS,
    TARGET,
    UNCHECKED,
    WgmmaConfig,
)

ARGUMENTS = StructLayout("HopperKernelArgs", MEMBERS)


@dataclass(frozen=True)
class HopperKernelConfig(WgmmaConfig):
    """One kernel of the hopper family.

    `B_r`, `B_c`: rows of a Q tile, 64 for each warpgroup that computes, and of a K or V tile.
    `K_slots`, `V_slots`: tiles of each in shared memory. `ping_pong`: one warpgroup at a time
    issues its products. `causal`: the kernel masks, and takes causal problems alone.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "h1_bf16_d128_Br64_Bc128_K1_V1"

    hopper: int = number("h", "the step")
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
        """The hopper family."""
        return HOPPER


_BASE: Mapping[str, Any] = MappingProxyType(
    {
        "d_head": 128,
        "B_r": 64,
        "B_c": 128,
        "K_slots": 1,
        "V_slots": 1,
        "ping_pong": False,
        "causal": False,
    }
)


def _file(number: int) -> str:
    return f"kernels/hopper/h{number}.cuh"


# The tile for long sequences, of three warpgroups, and the steps that are listed with it: the
# one that makes room for it, and that which lets it be causal.
LONG_TILE: Mapping[str, Any] = MappingProxyType({"B_r": 192, "B_c": 80, "K_slots": 3, "V_slots": 3})
_LONG_TILE_AT = ("h13", "h24")
# Causal kernels in fp16 of which h23's page shows what ptxas makes of them: bf16 has it otherwise.
_CAUSAL_IN_FP16 = ("h22", "h23")


def tuned_configs() -> list[HopperKernelConfig]:
    """Return the configs of the tile for long sequences, and the causal ones."""
    long = [
        HOPPER.fixed_config(step, dtype).replace(**LONG_TILE)
        for step in map(HOPPER.steps.__getitem__, _LONG_TILE_AT)
        for dtype in HOPPER.dtypes_of(step)
    ]
    both = (variant for config in (*HOPPER.progression(), *long) for variant in config.variants())
    shown = [
        HOPPER.fixed_config(HOPPER.steps[name], Element.FP16).replace(causal=True)
        for name in _CAUSAL_IN_FP16
    ]
    return [*long, *shown, *(config for config in both if config.causal)]


HOPPER = Family(
    name="hopper",
    operation=OPERATION,
    title="the same attention on Hopper's own units",
    prefix="h",
    rank=2,
    config=HopperKernelConfig,
    base=_BASE,
    entries=(
        StepEntry(
            "wgmma",
            "TMA and wgmma, all in order",
            _file(1),
            parent="v16",
            place=CORE,
        ),
        StepEntry(
            "p_in_registers",
            "P stays in registers",
            _file(2),
            traits=frozenset({P_IN_REGISTERS}),
            place=CORE,
        ),
        StepEntry("two_warpgroups", "two warpgroups share K and V", _file(3), sets={"B_r": 128}),
        StepEntry(
            "two_slots",
            "K and V are copied ahead",
            _file(4),
            sets={"K_slots": 2, "V_slots": 2},
        ),
        StepEntry(
            "producer",
            "a warpgroup of its own issues the copies",
            _file(5),
            traits=frozenset({PRODUCER}),
            place=CORE,
        ),
        StepEntry(
            "ping_pong",
            "one warpgroup's softmax beside the other's products",
            _file(6),
            sets={"ping_pong": True},
        ),
        StepEntry(
            "overlap",
            "softmax beside the own products",
            _file(7),
            opens={"ping_pong": (False, True)},
            place=CORE,
        ),
        StepEntry(
            "lazy_rescale",
            "O rescaled only if a row's maximum has grown much",
            _file(8),
            traits=frozenset({LAZY_RESCALE}),
        ),
        StepEntry("uniform_descriptors", "descriptors that ptxas knows to be uniform", _file(9)),
        StepEntry(
            "persistent",
            "blocks that stay take tile after tile",
            _file(10),
            traits=frozenset({PERSISTENT}),
        ),
        StepEntry(
            "flattened",
            "the next tile's first product beside this one's last",
            _file(11),
            traits=frozenset({Q_TWICE}),
            place=CORE,
        ),
        StepEntry(
            "optimistic_maximum",
            "the maximum of a tile's first block, checked afterwards",
            _file(12),
            traits=frozenset({REPLAYS}),
            place=CORE,
        ),
        StepEntry(
            "three_warpgroups",
            "room for three warpgroups of 64 rows",
            _file(13),
            opens={
                "B_r": (128, 192),
                "B_c": (64, 80, 96, 128),
                "K_slots": (2, 3),
                "V_slots": (2, 3),
            },
        ),
        StepEntry(
            "k_first",
            "K is loaded before the V of the block before, into three slots",
            _file(14),
            sets={"K_slots": 3},
        ),
        StepEntry("late_store", "O is stored beside the next tile's second product", _file(15)),
        StepEntry(
            "no_check",
            "bf16 has fp32's exponents: sums are looked at once per tile",
            _file(16),
            traits=frozenset({UNCHECKED}),
        ),
        StepEntry(
            "peeled_loop",
            "the second block of a tile, beside which O is stored, stands before the loop",
            _file(17),
        ),
        StepEntry(
            "ordered_exponentials",
            "exponentials stay before the wait for P @ V",
            _file(18),
            traits=frozenset({ASKS_LATE}),
        ),
        StepEntry(
            "any_length",
            "any number of queries and of keys: what K has not is hidden",
            _file(19),
            traits=frozenset({RAGGED}),
            place=LIBRARY,
        ),
        StepEntry(
            "call_options",
            "scale, LSE and grouped heads come with the call",
            _file(20),
            traits=frozenset({CALL_OPTIONS}),
            place=LIBRARY,
        ),
        StepEntry(
            "causal",
            "causal: a tile ends at the diagonal, which lies in its first two blocks",
            _file(21),
            opens={"causal": (False,)},
            place=LIBRARY,
        ),
        StepEntry(
            "tile_counter",
            "causal tiles are taken from a counter",
            _file(22),
            traits=frozenset({DYNAMIC}),
            place=LAB,
        ),
        StepEntry(
            "tile_place",
            "the producer hands over where a tile is, and others need not work it out",
            _file(23),
        ),
        StepEntry(
            "own_keys",
            "a warpgroup leaves out causal blocks of keys that only others see",
            _file(24),
            traits=frozenset({OWN_KEYS}),
        ),
        StepEntry(
            "shared_loads",
            "K and V are loaded once for the two thread blocks of a cluster",
            _file(25),
            traits=frozenset({SHARED_LOADS}),
            place=LAB,
        ),
        StepEntry(
            "head_pairs",
            "the blocks of a cluster take two heads that share K and V",
            _file(26),
            traits=frozenset({HEAD_PAIRS}),
        ),
        StepEntry(
            "half_blocks",
            "a warpgroup multiplies with the half of a causal block that it sees",
            _file(27),
            traits=frozenset({HALF_BLOCKS}),
            place=LAB,
        ),
        StepEntry(
            "early_slot",
            "Q's slot goes back before the softmax, as soon as O has been read from it",
            _file(28),
        ),
        StepEntry(
            "no_fence",
            "the blocks of a cluster meet and part without a fence",
            _file(29),
        ),
        StepEntry(
            "late_take",
            "the next tile is taken when all of this one has been asked for",
            _file(30),
        ),
    ),
    targets=(TARGET,),
    kernels=MappingProxyType({"forward_kernel": ARGUMENTS}),
    header=PurePosixPath("src/include/flash_attention.cuh"),
    dtypes=DTYPES,
    computing=frozenset({LAZY_RESCALE, REPLAYS, UNCHECKED, ASKS_LATE, RAGGED}),
    simulated_budget=16_000_000,
    matrix_budget=66_000_000,
    also_listed=tuned_configs,
)
