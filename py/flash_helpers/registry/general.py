"""The general family: attention on Hopper's own units for the problems of real models.

Standard library only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.supports import (
    SINKS,
    SOFTCAP,
    VARLEN,
    WINDOW,
    AttentionSupports,
)
from flash_helpers.registry.call import FLOAT, INT, POINTER, TENSOR_MAP, StructLayout
from flash_helpers.registry.config import element, flag, number, with_flags
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.mma_sync import DTYPES, SINK_LOGITS
from flash_helpers.registry.problem import Element
from flash_helpers.registry.wgmma import MEMBERS, PROGRAMMATIC, TARGET, WgmmaConfig

FLAGS = ("causal", "window", "softcap", "varlen")  # of a config, for which kernels are compiled

# The first member behind a base class, which keeps the padding at its end.
_BEHIND_A_BASE = replace(INT, align=TENSOR_MAP.align)
ARGUMENTS = StructLayout(
    "GeneralKernelArgs",
    MappingProxyType(
        {
            **MEMBERS,
            "window_left": _BEHIND_A_BASE,
            "window_right": INT,
            "scale_in_cap": FLOAT,
            **dict.fromkeys(("sinks", "cu_seqlens_q", "cu_seqlens_k"), POINTER),
            "n_sequences": INT,
        }
    ),
)
_PARENT = HOPPER.steps["h30"]
ONE_Q = "one tile of Q"  # a trait: a config may have a single slot of Q


@dataclass(frozen=True)
class GeneralKernelConfig(WgmmaConfig):
    """One kernel of the general family. Fields that `WgmmaConfig` does not have:

    `cluster`: thread blocks that share the tiles of K and V which are loaded, 1 or 2. `d_v`: head
    size of V and O, 0 for that of Q and K. `window`: the kernel takes problems with a window alone.
    `softcap`: likewise of problems with a softcap. `varlen`: likewise of sequences of various
    lengths, by clusters of one thread block. `Q_slots`: tiles of Q in shared memory.

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
    window: bool = flag("window", "a query sees keys within a distance", default=False)
    softcap: bool = flag("softcap", "limits the logits by tanh", default=False)
    varlen: bool = flag(
        "varlen", "sequences of various lengths, one after the other", default=False
    )
    Q_slots: int = number("Q", "tiles of Q in shared memory, later of O", default=2)

    @property
    def v_columns(self) -> int:
        """Head size of V and O."""
        return self.d_v or self.d_head

    @property
    def cluster_blocks(self) -> int:
        """Thread blocks of a cluster."""
        return self.cluster

    @property
    def tiles_of_Q(self) -> int:
        """Tiles of Q in shared memory."""
        return self.Q_slots

    most_consumers: ClassVar[int] = 4

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        least = 1 if ONE_Q in self.step.traits and not self.ping_pong else 2
        if self.Q_slots < least:
            reason = (
                "the next tile begins before this one ends" if least > 1 else "there is no tile"
            )
            raise ValueError(f"Q_slots {self.Q_slots}: {reason}: use {least} or more")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster {self.cluster} is neither 1 nor 2 thread blocks: choose one")
        if self.varlen and self.cluster > 1:
            raise ValueError(
                f"varlen with cluster {self.cluster}: two thread blocks would often have tiles of "
                "two sequences, which share no keys: choose cluster 1"
            )
        if (self.d_head, self.d_v) not in TILES:
            known = ", ".join(f"{d_head} with {d_v or d_head}" for d_head, d_v in TILES)
            raise ValueError(
                f"d_head {self.d_head} with d_v {self.v_columns} of V is not built: choose one of "
                f"{known}, and pad with zeros"
            )
        super().check()

    @property
    def supports(self) -> AttentionSupports:
        """Any lengths, with one head size; flags of the config add to that."""
        base = super().supports
        flags = {WINDOW: self.window, SOFTCAP: self.softcap, VARLEN: self.varlen}
        compiled = frozenset(name for name, is_on in flags.items() if is_on)
        with_call = {SINKS} if SINK_LOGITS in self.step.traits else set()
        return replace(
            base,
            abilities=base.abilities | compiled | with_call,
            exact=compiled,
            d_v=self.d_v or None,
        )

    @property
    def moves(self) -> bool:
        """Whether the end of the keys that a query sees moves from query to query."""
        return self.causal or self.window

    def own_key_blocks(self, problem: AttentionForward, query: int) -> range:
        """Return the blocks up to the last key that the warpgroup of a query sees, from the first
        that the rows of its cluster see."""
        seen = super().own_key_blocks(problem, query)
        heads = 2 if problem.heads // problem.kv_heads % 2 == 0 else 1  # those of a pair of blocks
        rows = self.B_r if self.cluster == heads else self.cluster * self.B_r
        first = problem.visible_keys(query // rows * rows).start // self.B_c
        return range(seen.start, min(first, seen.start) - 1, -1)

    def arguments(self, problem: AttentionForward) -> dict[str, tuple[float, ...]]:
        """Return the window, the scales and the number of sequences."""
        scale = problem.softcap or problem.softmax_scale
        left, right = problem.window_left, problem.window_right
        return {
            "scale": (scale * math.log2(math.e),),
            "scale_in_cap": (problem.softmax_scale / scale,),
            "window_left": (problem.len_k + self.cluster * self.B_r if left is None else left,),
            "window_right": (0 if self.causal else problem.len_q if right is None else right,),
            "n_sequences": (problem.sequences,),
        }

    def variants(self) -> tuple[GeneralKernelConfig, ...]:
        """The config with other flags that its step has, then the other head sizes' tiles."""
        return _variants(self)

    def of_size(self, d_head: int, d_v: int = 0) -> GeneralKernelConfig:
        """Return the config of the same step and dtype with the usual tile of head sizes."""
        flags = dict.fromkeys(FLAGS, False)
        tiles = {**TILES, **ONE_Q_TILES} if ONE_Q in self.step.traits else TILES
        tile = tiles[d_head, d_v]
        return self.replace(d_head=d_head, d_v=d_v, **flags, **tile)

    @property
    def family(self) -> Family[Any]:
        """The general family."""
        return GENERAL


@functools.cache  # a choice asks for them at each call
def _variants(own: GeneralKernelConfig) -> tuple[GeneralKernelConfig, ...]:
    flags = [name for name in FLAGS if name in own.step.tunable and name != "varlen"]
    sizes = [own]
    if "d_head" in own.step.tunable:
        sizes += [own.of_size(*size) for size in TILES if size != (own.d_head, own.d_v)]
    if "varlen" in own.step.tunable:
        sizes += [size.replace(varlen=not size.varlen, cluster=1) for size in sizes]
    return tuple(
        found
        for config in sizes
        for found in (with_flags(config, flags) if config.may_move else (config,))
    )


def _file(number: int) -> str:
    return f"kernels/general/g{number}.cuh"


_BASE: Mapping[str, Any] = MappingProxyType(
    {
        **_PARENT.options,
        "cluster": 2,
        "d_v": 0,
        "window": False,
        "softcap": False,
        "varlen": False,
        "Q_slots": 2,
    }
)


def _tile(
    B_r: int,
    B_c: int,
    K_slots: int,
    V_slots: int,
    *,
    ping_pong: bool = True,
    cluster: int = 1,
    Q_slots: int = 2,
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            **{"B_r": B_r, "B_c": B_c, "K_slots": K_slots, "V_slots": V_slots},
            **{"ping_pong": ping_pong, "cluster": cluster, "Q_slots": Q_slots},
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
# The same of steps that may have one tile of Q.
ONE_Q_TILES: Mapping[tuple[int, int], Mapping[str, Any]] = MappingProxyType(
    {(256, 0): _tile(128, 80, 2, 2, ping_pong=False, Q_slots=1)}
)
# Of g9 these are listed too: the tile for short sequences and those of the other head sizes, each
# in one dtype, and with each flag somewhere. And of the last step those with one tile of Q.
_LISTED: tuple[tuple[Element, Mapping[str, Any]], ...] = (
    (Element.BF16, {"cluster": 1}),
    (Element.FP16, {"cluster": 1, "causal": True}),
    (Element.BF16, {"cluster": 1, "B_c": 80, "K_slots": 3, "V_slots": 3, "Q_slots": 3}),
    (Element.BF16, {"cluster": 1, "varlen": True}),
    (Element.FP16, {"cluster": 1, "causal": True, "varlen": True}),
    (Element.BF16, {"cluster": 1, "window": True}),
    (Element.FP16, {"causal": True, "window": True, "softcap": True}),
    (Element.FP16, {"d_head": 64, "causal": True}),
    (Element.BF16, {"d_head": 64, "window": True}),
    (Element.BF16, {"d_head": 96}),
    (Element.BF16, {"d_head": 192, "causal": True}),
    (Element.FP16, {"d_head": 192, "d_v": 128}),
    (Element.BF16, {"d_head": 256}),
    (Element.FP16, {"d_head": 256, "causal": True, "window": True, "softcap": True}),
)
_LISTED_OF_ONE_Q: tuple[tuple[Element, Mapping[str, Any]], ...] = (
    (Element.BF16, {"d_head": 256}),
    (Element.BF16, {"d_head": 256, "causal": True, "varlen": True}),
    (Element.FP16, {"d_head": 256, "causal": True, "window": True, "softcap": True}),
)


def _more_configs() -> list[GeneralKernelConfig]:
    """Return the steps' causal configs, and more of the last step."""
    causal = [c.replace(causal=True) for c in GENERAL.progression() if c.dtype is Element.BF16]
    listed = [
        GENERAL.fixed_config(GENERAL.steps[step], dtype)
        .of_size(options.get("d_head", 128), options.get("d_v", 0))
        .replace(**options)
        for step, own in (("g9", _LISTED), ("g10", _LISTED_OF_ONE_Q))
        for dtype, options in own
    ]
    return [*causal, *listed]


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
        StepEntry(
            "window",
            "window: blocks of keys outside of what a cluster sees are never loaded",
            _file(4),
            opens={"window": (False,)},
        ),
        StepEntry(
            "softcap",
            "softcap: the logits are limited by tanh",
            _file(5),
            opens={"softcap": (False,)},
        ),
        StepEntry(
            "sinks",
            "sinks: one more logit per head, which only the row sums see",
            _file(6),
            traits=frozenset({SINK_LOGITS}),
        ),
        StepEntry(
            "variable_lengths",
            "variable lengths: a sequence ends where its tensor map does, and the host knows none",
            _file(7),
            opens={"varlen": (False,)},
        ),
        StepEntry(
            "programmatic_launches",
            "programmatic launches: a launch begins while the one before it ends",
            _file(8),
            traits=frozenset({PROGRAMMATIC}),
        ),
        StepEntry(
            "q_slots",
            "more tiles of Q: the next one need not wait until O is stored",
            _file(9),
            opens={"Q_slots": (2, 3)},
        ),
        StepEntry(
            "one_q",
            "one tile of Q: room for more of K and V, and O is stored from registers",
            _file(10),
            opens={"Q_slots": (1, 2, 3)},
            traits=frozenset({ONE_Q}),
        ),
    ),
    targets=(TARGET,),
    kernels=MappingProxyType({"forward_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/general/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=9_000_000,
    matrix_budget=40_000_000,
    also_listed=_more_configs,
)
