"""The overlap family: v16 at the large tile, then steps that overlap its softmax and its copies
with `mma.sync`. Standard library only.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.supports import (
    GROUPED_HEADS,
    RETURN_LSE,
    SINKS,
    SOFTCAP,
    SOFTMAX_SCALE,
    VARLEN,
    WINDOW,
    AttentionSupports,
)
from flash_helpers.registry.call import FLOAT, INT, POINTER, STRIDES, StructLayout
from flash_helpers.registry.config import differing_fields, element, flag, number, with_flags
from flash_helpers.registry.family import CORE, Family, StepEntry
from flash_helpers.registry.mma_sync import (
    CALL_OPTIONS,
    DTYPES,
    KEYS_BACKWARDS,
    LAZY_RESCALE,
    MMA_ROW_SUM,
    PIECES,
    PROGRESSION_ROW_STRIDE,
    RAGGED,
    SINK_LOGITS,
    TARGETS,
    TWO_BUFFERS,
    MmaSyncConfig,
)
from flash_helpers.registry.problem import Element

FLAGS = (
    "lse",
    "causal",
    "softcap",
    "window",
    "varlen",
)  # of a config, for which kernels are compiled

ARGUMENTS = StructLayout(
    "OverlapKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys("QKVO", POINTER),
            **{f"{name}_strides": STRIDES for name in "QKVO"},
            **dict.fromkeys(("len_k", "len_q", "heads_per_kv"), INT),
            "scale": FLOAT,
            **dict.fromkeys(("lse", "sinks"), POINTER),
            "scale_in_cap": FLOAT,
            **dict.fromkeys(("window_left", "window_right"), INT),
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), POINTER),
            "n_sequences": INT,
        }
    ),
)


@dataclass(frozen=True)
class OverlapKernelConfig(MmaSyncConfig):
    """One kernel of the overlap family.

    `B_r`, `B_c`: rows of a Q tile and of a K or V tile. `d_head`, `static_row_stride`: elements.
    `static_row_stride`: distance of two rows of the sequence; 0 is read at run time. `lse`: the
    kernel can store an LSE, for which it adds up P before it is rounded. `causal`: the kernel
    masks, and takes causal problems alone. `softcap`: likewise of problems with a softcap.
    `window`: likewise of problems with a window. `varlen`: likewise of sequences of various
    lengths.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "o1_bf16_d128_Br128_Bc64_w4_rs2048"

    overlap: int = number("o", "the step")
    dtype: Element = element()
    d_head: int = number("d")
    B_r: int = number("Br", "query rows of a thread block")
    B_c: int = number("Bc", "keys of one step of its main loop")
    n_warps: int = number("w")
    static_row_stride: int = number("rs", "in elements; 0 = read from the arguments", default=0)
    lse: bool = flag("lse", "adds up P in fp32 for an LSE", default=False)
    causal: bool = flag("causal", "a causal mask, aligned to the bottom right", default=False)
    softcap: bool = flag("softcap", "limits the logits by tanh", default=False)
    window: bool = flag("window", "a query sees keys within a distance", default=False)
    varlen: bool = flag(
        "varlen", "sequences of various lengths, one after the other", default=False
    )

    @property
    def family(self) -> Family[Any]:
        """The overlap family."""
        return OVERLAP

    def variants(self) -> tuple[OverlapKernelConfig, ...]:
        """Return the config, and those with other flags that its step has, the most alike first;
        then the same of the other head sizes' tiles."""
        return _variants(self)

    def of_size(self, d_head: int) -> OverlapKernelConfig:
        """Return the config of the same step, dtype and flags with the usual tile of a head
        size."""
        return self.replace(d_head=d_head, **usual_tile(d_head, self.lse, self.softcap))

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if self.d_head not in TILES:
            raise ValueError(
                f"d_head {self.d_head} is not built: choose one of "
                f"{', '.join(map(str, TILES))}, and pad with zeros"
            )
        super().check()

    @property
    def supports(self) -> AttentionSupports:
        """As those of the base; flags of the config add to them."""
        found = {SOFTMAX_SCALE, GROUPED_HEADS} if CALL_OPTIONS in self.step.traits else set()
        found |= {RETURN_LSE} if self.lse else set()
        found |= {SOFTCAP} if self.softcap else set()
        found |= {WINDOW} if self.window else set()
        found |= {VARLEN} if self.varlen else set()
        found |= {SINKS} if SINK_LOGITS in self.step.traits else set()
        base = super().supports
        return replace(
            base,
            abilities=base.abilities | found,
            exact=frozenset(found & {SOFTCAP, WINDOW, VARLEN}),
            causal=self.causal,
        )

    def own_key_blocks(self, problem: AttentionForward, query: int) -> range:
        """Return the blocks of keys that the tile of a query takes. There is one at least, though
        all of it may be hidden."""
        first_query = query // self.B_r * self.B_r
        last_query = min(first_query + self.B_r, problem.len_q) - 1
        last = (max(problem.visible_keys(last_query).stop, 1) - 1) // self.B_c
        first = problem.visible_keys(first_query).start // self.B_c
        return range(last, min(first, last) - 1, -1)

    def query_tiles(self, problem: AttentionForward) -> int:
        """Return the tiles of a head's queries: of sequences of various lengths so many at most."""
        if problem.sequences:
            return problem.len_q // self.B_r + problem.sequences
        return super().query_tiles(problem)

    def arguments(self, problem: AttentionForward) -> dict[str, tuple[float, ...]]:
        """Return the lengths, the sharing of heads, the scales, the window and the number of
        sequences."""
        scale = problem.softcap or problem.softmax_scale
        left, right = problem.window_left, problem.window_right
        return {
            "len_k": (problem.len_k,),
            "len_q": (problem.len_q,),
            "heads_per_kv": (problem.heads // problem.kv_heads,),
            "scale": (scale * math.log2(math.e),),
            "scale_in_cap": (problem.softmax_scale / scale,),
            "window_left": (problem.len_k + self.B_r if left is None else left,),
            "window_right": (problem.len_q if right is None else right,),
            "n_sequences": (problem.sequences,),
        }


def _tile(B_r: int, B_c: int) -> Mapping[str, int]:
    return MappingProxyType({"B_r": B_r, "B_c": B_c, "n_warps": 4})


# Usual tiles by head size, of 96 KB of shared memory at most: sm_86 and sm_89 have 99 KB per block.
# From 192 on a warp has 16 rows, since 32 would take 192 registers or more for O.
TILES: Mapping[int, Mapping[str, int]] = MappingProxyType(
    {
        64: _tile(128, 64),
        96: _tile(128, 64),
        128: _tile(128, 64),
        192: _tile(64, 48),
        256: _tile(64, 32),
    }
)

# Fewer keys than in `TILES`, by head size and by whether a kernel adds up P and limits the logits:
# with 64 it would need more than the 255 registers of a thread, and spill.
_FEWER_KEYS: Mapping[tuple[int, bool, bool], int] = MappingProxyType(
    {(128, True, False): 48, (128, False, True): 32, (128, True, True): 32, (96, True, True): 32}
)


def usual_tile(d_head: int, lse: bool, softcap: bool) -> Mapping[str, int]:
    """Return the fields of the usual tile of a head size, for a kernel with these flags."""
    tile = TILES[d_head]
    return {**tile, "B_c": _FEWER_KEYS.get((d_head, lse, softcap), tile["B_c"])}


# Of the other head sizes these are listed: each once, in every dtype, and flags.
_LISTED: Mapping[int, tuple[Element, Mapping[str, bool]]] = MappingProxyType(
    {
        64: (Element.FP16, {"causal": True}),
        96: (Element.BF16, {}),
        192: (Element.FP16, {"window": True}),
        256: (Element.BF16, {"lse": True, "softcap": True}),
    }
)

_BASE: Mapping[str, Any] = MappingProxyType(
    {
        "d_head": 128,
        **TILES[128],
        "static_row_stride": PROGRESSION_ROW_STRIDE,
        "lse": False,
        "causal": False,
        "softcap": False,
        "window": False,
        "varlen": False,
    }
)


# Step 16 once had the ideas of o3 to o5 as options, at the end of its short form.
_OPTIONS_OF_16 = re.compile(
    r"v16_(?P<dtype>fp16|bf16)_d128_Br(?P<B_r>\d+)_Bc(?P<B_c>\d+)_w(?P<n_warps>\d+)_\w+?"
    r"(_rs(?P<stride>\d+))?_st2(?P<lazy>_lazy)?(?P<sums>_mmasum)?"
)


def successor(text: str) -> str:
    """The present name of a short form with the former options of step 16, in words; "" for any
    other text."""
    if (found := _OPTIONS_OF_16.fullmatch(text)) is None:
        return ""
    config = OverlapKernelConfig(
        5 if found["sums"] else 4,
        Element.from_name(found["dtype"]),
        128,
        int(found["B_r"]),
        int(found["B_c"]),
        int(found["n_warps"]),
        static_row_stride=int(found["stride"] or 0),
    )
    difference = "the same loop" if found["lazy"] else "the same loop, but for its lazy rescale"
    return f"two stages are steps of family overlap now: {config.short_form()} is {difference}"


@functools.cache  # a choice asks for them at each call
def _variants(own: OverlapKernelConfig) -> tuple[OverlapKernelConfig, ...]:
    flagged = with_flags(own, [name for name in FLAGS if name in own.step.tunable])
    if own == own.of_size(own.d_head):  # a tile of the caller's stays as it is
        flagged = tuple(config.of_size(own.d_head) for config in flagged)
    sizes = [d_head for d_head in TILES if d_head != own.d_head and "d_head" in own.step.tunable]
    others = (config.of_size(d_head) for d_head in sizes for config in flagged)
    return (*flagged, *others)


def _file(number: int) -> str:
    return f"kernels/overlap/o{number}.cuh"


def last_variants() -> list[OverlapKernelConfig]:
    """Return the last step's config in bf16 with each flag alone, and with all; and one config of
    each other head size."""
    last = [*OVERLAP.steps.values()][-1]
    own = OVERLAP.fixed_config(last, Element.BF16)
    *fewer, every = (config for config in own.variants() if config.d_head == own.d_head)
    alone = (config for config in fewer if len({*differing_fields(config, own)} & {*FLAGS}) < 2)
    others = (
        OVERLAP.fixed_config(last, dtype).replace(**flags).of_size(d_head)
        for d_head, (dtype, flags) in _LISTED.items()
    )
    return [*alone, every, *others]


OVERLAP = Family(
    name="overlap",
    title="the same instructions at the large tile, overlapped",
    operation=OPERATION,
    prefix="o",
    rank=1,
    config=OverlapKernelConfig,
    base=_BASE,
    entries=(
        StepEntry(
            "large_tile",
            "v16 cut down to the large tile",
            _file(1),
            parent="v16",
            traits=frozenset({KEYS_BACKWARDS, PIECES}),
            opens={"static_row_stride": (PROGRESSION_ROW_STRIDE,)},
        ),
        StepEntry(
            "lazy_rescale",
            "O rescaled only if a row's maximum has grown much",
            _file(2),
            traits=frozenset({LAZY_RESCALE}),
            place=CORE,
        ),
        StepEntry(
            "two_buffers",
            "two buffers each for K and V, one barrier per block",
            _file(3),
            traits=frozenset({TWO_BUFFERS}),
        ),
        StepEntry("fragment_ring", "fragments through a ring, across products", _file(4)),
        StepEntry(
            "mma_row_sum",
            "row sums by mma",
            _file(5),
            traits=frozenset({MMA_ROW_SUM}),
            opens={"B_r": (64, 128, 256), "B_c": (32, 64, 128), "n_warps": (4, 8)},
            place=CORE,
        ),
        StepEntry(
            "any_length",
            "any number of queries and of keys: the block that has too few keys comes first",
            _file(6),
            sets={"static_row_stride": 0},
            opens={"static_row_stride": (0,)},
            traits=frozenset({RAGGED}),
        ),
        StepEntry(
            "call_options",
            "scale and grouped heads come with the call, an LSE with a kernel of its own",
            _file(7),
            opens={"lse": (False,)},
            traits=frozenset({CALL_OPTIONS}),
        ),
        StepEntry(
            "causal",
            "causal: a tile begins at the diagonal, and blocks behind it are never loaded",
            _file(8),
            opens={"causal": (False,)},
        ),
        StepEntry(
            "sinks",
            "sinks: one more logit per head, which only the row sums see",
            _file(9),
            traits=frozenset({SINK_LOGITS}),
        ),
        StepEntry(
            "softcap",
            "softcap: the logits are limited by tanh",
            _file(10),
            opens={"softcap": (False,)},
        ),
        StepEntry(
            "window",
            "window: blocks of keys outside of what a tile sees are never loaded",
            _file(11),
            opens={"window": (False,)},
        ),
        StepEntry(
            "head_sizes",
            "head sizes of 64 to 256, each with a tile of its own",
            _file(12),
            opens={"d_head": (128,)},
        ),
        StepEntry(
            "variable_lengths",
            "variable lengths: a thread block looks for its sequence, and the host knows none",
            _file(13),
            opens={"varlen": (False,)},
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType({"forward_kernel": ARGUMENTS}),
    header=PurePosixPath("kernels/overlap/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset({LAZY_RESCALE, MMA_ROW_SUM, RAGGED}),
    successor=successor,
    # A test whose cache two workers fill counts twice.
    in_library=True,
    simulated_budget=13_000_000,
    matrix_budget=40_000_000,
    also_listed=last_variants,
)
