"""The backward family: gradients of attention on the units that only compute capability 9.0 has.

Standard library only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.attention_backward import OPERATION
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_backward.supports import AttentionBackwardSupports
from flash_helpers.operations.attention_forward.supports import (
    GROUPED_HEADS,
    MAX_LENGTH,
    SOFTCAP,
    SOFTMAX_SCALE,
    TWO_LENGTHS,
    VARLEN,
    WINDOW,
)
from flash_helpers.registry.call import (
    FLOAT,
    INT,
    POINTER,
    STRIDES,
    TENSOR_MAP,
    Address,
    Buffer,
    Call,
    Launch,
    StructLayout,
)
from flash_helpers.registry.config import (
    Config,
    differing_fields,
    element,
    flag,
    number,
    with_flags,
)
from flash_helpers.registry.family import HELD_BACK, UNORDERED_SUMS, Family, StepEntry
from flash_helpers.registry.mma_sync import DTYPES, ELEMENT_BYTES, RUNS_PER_TILE
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.wgmma import (
    BARRIER_BYTES,
    CHUNK_BYTES,
    MAX_STRIDE,
    NEXT_TILE,
    PERSISTENT,
    PRODUCER,
    PROGRAMMATIC,
    TARGET,
    WARP_ROWS,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
    tensor_map,
)

DELTA, DQ, DKDV = "delta_kernel", "dq_kernel", "dkdv_kernel"
GRADIENTS, CONVERT = "gradients_kernel", "convert_kernel"
_WRITTEN = {
    **dict.fromkeys((DQ, CONVERT), ("dq",)),
    DKDV: ("dk", "dv"),
}
DELTA_THREADS = 256  # of a thread block of delta_kernel, each of which has 8 columns of a row

# Buffers of float32, beside the counter of tiles: delta; sums of dQ; what S and dP of each query
# begin with.
DELTAS, DQ_SUMS, STATISTICS = "delta", "dQ_sums", "statistics"

SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k")  # where sequences of various lengths begin

TURNS = "turns"  # another: for each warp that adds to a block of queries, the turns that have ended
TURNS_BYTES = 16

# Traits of steps.
SCORES_IN_REGISTERS = "scores_in_registers"  # P and dS do not pass through shared memory
ONE_KERNEL = "one_kernel"  # for dQ, dK and dV: dS passes through shared memory for dQ alone
DS_SLOTS = 2  # of that dS
THIRD_WARPGROUP = "third_warpgroup"  # computes dQ, and loads
STATISTICS_FIRST = "statistics_first"  # sums of S and dP begin with LSE and delta
GROUP_BYTES = 16 << 20  # of the tensors of heads whose causal tiles are taken together
TURN_BLOCKS = 3  # of queries, by which a tile is behind the tile whose turns it waits for
LAST_ROUNDS = 3  # tiles of a thread block of the last of these heads, at least
# Of a config, for which kernels are compiled.
FLAGS = ("causal", "window", "softcap", "in_turn", "varlen")
ANY_LENGTHS = "any_lengths"  # not of whole blocks alone
WHOLE_BLOCKS = "whole_blocks"  # a thread block of delta_kernel has a block of queries
MIN_SCALE = 2.0**-100  # by which the LSE of any length of small logits can be divided

# Names of tensors by the members of the arguments that hold their tensor maps.
_LOADED = MappingProxyType({"Q": "q", "K": "k", "V": "v", "dO": "do"})
_STORED = MappingProxyType({"dQ": "dq", "dK": "dk", "dV": "dv"})

ARGUMENTS = StructLayout(
    "BackwardKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys((*_LOADED, *_STORED), TENSOR_MAP),
            **dict.fromkeys(("dO_gmem", "O_gmem"), POINTER),
            **dict.fromkeys(("dO_strides", "O_strides"), STRIDES),
            **dict.fromkeys(("lse", "delta"), POINTER),
            **dict.fromkeys(("len_q", "len_k", "heads", "heads_per_kv"), INT),
            **dict.fromkeys(("scale", "softmax_scale"), FLOAT),
            **dict.fromkeys((DQ_SUMS, STATISTICS), POINTER),
            **dict.fromkeys(("dK_gmem", "dV_gmem"), POINTER),
            **dict.fromkeys(("dK_strides", "dV_strides"), STRIDES),
            NEXT_TILE: POINTER,
            TURNS: POINTER,
            **dict.fromkeys(("tiles", "head_group", "last_heads"), INT),
            "dQ_gmem": POINTER,
            "dQ_strides": STRIDES,
            **dict.fromkeys(("window_left", "window_right"), INT),
            "scale_in_cap": FLOAT,
            **dict.fromkeys(SEQUENCES, POINTER),
            "n_sequences": INT,
        }
    ),
)


@dataclass(frozen=True)
class BackwardKernelConfig(Config):
    """The kernels of one step of the backward family.

    `B_r`: queries of a tile of Q and dO, those of a warpgroup of `dq_kernel`. `B_c`: keys of a tile
    of K and V, 64 for each warpgroup of the main kernel that computes. `slots`: tiles of each
    tensor that a loop walks which shared memory holds. `causal`: the kernels mask, and take causal
    problems alone. `window`, `softcap`: likewise of problems with a window, and with a softcap.
    `in_turn`: tiles of keys add dQ in one order, for the same bits in every call.
    `varlen`: the kernels take sequences of various lengths, which lie one after the other.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "b1_bf16_d128_Br64_Bc64"

    backward: int = number("b", "the step")
    dtype: Element = element()
    d_head: int = number("d")
    B_r: int = number("Br", "queries of a tile of Q and dO")
    B_c: int = number("Bc", "keys of a tile of K and V, 64 for each warpgroup that computes")
    slots: int = number("sl", "tiles of each tensor that the loops walk", default=1)
    causal: bool = flag("causal", "a causal mask, aligned to the bottom right", default=False)
    window: bool = flag("window", "a query sees keys within a distance", default=False)
    softcap: bool = flag("softcap", "limits the logits by tanh", default=False)
    in_turn: bool = flag(
        "in_turn", "adds dQ in one order: each call gives the same bits", default=False
    )
    varlen: bool = flag(
        "varlen", "sequences of various lengths, one after the other", default=False
    )

    @property
    def family(self) -> Family[Any]:
        """The backward family."""
        return BACKWARD

    def variants(self) -> tuple[BackwardKernelConfig, ...]:
        """Return the config, those with other flags that its step has, and then those of its other
        head sizes."""
        return _variants(self)

    def of_size(self, d_head: int) -> BackwardKernelConfig:
        """Return the config with another head size and the usual tile of that."""
        three = d_head == 64 and not self._needs_registers
        B_c, slots = (192, 4) if three else (128, 3)
        return self.replace(d_head=d_head, B_c=B_c, slots=slots)

    @property
    def _needs_registers(self) -> str:
        """The flags for which the registers of three warpgroups that compute do not suffice."""
        return " and ".join(name for name in (WINDOW, SOFTCAP, VARLEN) if getattr(self, name))

    @property
    def is_deterministic(self) -> bool:
        """As the step's configs are, and if dQ is added in turn."""
        return self.in_turn or super().is_deterministic

    @property
    def rows_at_once(self) -> int:
        """Queries of which the threads of delta_kernel have a chunk each."""
        return DELTA_THREADS * CHUNK_BYTES // ELEMENT_BYTES // self.d_head

    @property
    def delta_rows(self) -> int:
        """Queries of a thread block of delta_kernel."""
        return self.B_r if WHOLE_BLOCKS in self.step.traits else self.rows_at_once

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.B_c // WGMMA_M

    @property
    def n_threads(self) -> int:
        """Threads of a block of the kernels that multiply: the producer's warpgroup too."""
        return (self.warpgroups + (PRODUCER in self.step.traits)) * WARPGROUP

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block of the main kernel in bytes."""
        return self.block(self.main_kernel)[1]

    @property
    def functions(self) -> tuple[str, ...]:
        """delta_kernel and two others."""
        if ONE_KERNEL in self.step.traits:
            return (DELTA, GRADIENTS, CONVERT)
        return (DELTA, DQ, DKDV)

    @property
    def main_kernel(self) -> str:
        """The kernel for dK and dV, and from one step on for dQ."""
        return GRADIENTS if GRADIENTS in self.functions else DKDV

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel: its
        own rows of two tensors, slots for two others and their statistics, slots of dS and for keys
        P, and the barriers. convert_kernel has its rows of dQ alone."""
        own, walked = self.tiles(kernel)
        if kernel == DELTA:
            return DELTA_THREADS, 0
        if kernel == CONVERT:
            through_smem = ANY_LENGTHS not in self.step.traits
            return WARPGROUP, own * self.d_head * ELEMENT_BYTES * through_smem
        n_own = 3 if self.is_persistent(kernel) else 2  # K has two slots
        tiles = (n_own * own + 2 * self.slots * walked) * self.d_head
        statistics = 0
        if kernel == GRADIENTS:
            n_scores = DS_SLOTS
            statistics = self.floats_per_query.get(STATISTICS, 0) * self.slots * self.B_r
        else:
            n_scores = 0 if SCORES_IN_REGISTERS in self.step.traits else 1 if kernel == DQ else 2
        scores = n_scores * self.B_r * self.B_c
        tile_bytes = (tiles + scores) * ELEMENT_BYTES
        return self.n_threads, tile_bytes + statistics * FLOAT.size + BARRIER_BYTES

    def is_persistent(self, kernel: str) -> bool:
        """Whether each thread block of a kernel takes one tile after the other from a counter."""
        return kernel == GRADIENTS and PERSISTENT in self.step.traits

    @property
    def floats_per_query(self) -> Mapping[str, int]:
        """Numbers of a query in each buffer."""
        traits = self.step.traits
        statistics = {STATISTICS: 2} if STATISTICS_FIRST in traits else {DELTAS: 1}
        return statistics | ({DQ_SUMS: self.d_head} if ONE_KERNEL in traits else {})

    @property
    def loop_unit(self) -> tuple[str, int]:
        """A block of queries, and the `wgmma` in the loop of a warp of the main kernel: S, dP, dV,
        dK and dQ, of which warps that take turns run half. Those of a third warpgroup, in a loop
        of its own, do not count."""
        takes_turns = self.main_kernel == GRADIENTS and THIRD_WARPGROUP not in self.step.traits
        dQ = self.B_c if takes_turns else 0
        return "block of Q and dO", (2 * (self.d_head + self.B_r) + dQ) // WGMMA_K

    def loop_runs(self, size: int) -> int:
        """Return the blocks of so many queries."""
        return -(-size // self.B_r)

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows of a thread block by kernel: queries, or keys of the kernel for dK and dV."""
        keys = dict.fromkeys((DKDV, GRADIENTS), self.B_c)
        return {DELTA: self.delta_rows, DQ: self.warpgroups * self.B_r, CONVERT: self.B_r} | keys

    def tiles(self, kernel: str) -> tuple[int, int]:
        """Return the rows of a thread block of a kernel that multiplies, and the rows of the blocks
        that it walks."""
        return self.rows[kernel], self.B_c if kernel == DQ else self.B_r

    @property
    def _max_length(self) -> int:
        """Most queries and most keys: rows of the last blocks are numbered beyond the end, and with
        a window sums of two lengths and both bounds are an int."""
        most = MAX_LENGTH // 4 if self.window else MAX_LENGTH
        return most - self.B_r - self.B_c if ANY_LENGTHS in self.step.traits else most

    @property
    def supports(self) -> AttentionBackwardSupports:
        """Whole blocks of queries and of keys, until a step takes any lengths."""
        any_length = ANY_LENGTHS in self.step.traits
        flags = {WINDOW: self.window, SOFTCAP: self.softcap, VARLEN: self.varlen}
        compiled = frozenset(name for name, is_on in flags.items() if is_on)
        return AttentionBackwardSupports(
            dtype=self.dtype,
            d_heads=(self.d_head,),
            blocks=MappingProxyType({} if any_length else {"B_r": self.B_r, "B_c": self.B_c}),
            alignment=CHUNK_BYTES,
            max_row_stride=MAX_STRIDE,
            max_stride=MAX_STRIDE,
            max_heads=gpu.MAX_GRID[0],
            # a head's queries may take a block more than they fill
            max_tiles=gpu.MAX_GRID[0] // (self.B_r // self.rows_at_once) // (1 + any_length),
            max_length=self._max_length,
            B_r=self.B_r,
            B_c=self.B_c,
            causal=self.causal,
            min_scale=MIN_SCALE if STATISTICS_FIRST in self.step.traits else 0.0,
            deterministic=self.is_deterministic,
            abilities=compiled | {TWO_LENGTHS, GROUPED_HEADS, SOFTMAX_SCALE},
            exact=compiled,
        )

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if "d_head" not in self.step.tunable:
            return
        if self.d_head not in HEAD_SIZES:
            known = " or ".join(map(str, HEAD_SIZES))
            raise ValueError(f"d_head {self.d_head} is not built: choose {known}")
        tiles = (128, 192) if self.d_head == 64 else (128,)
        if self.B_c not in tiles:
            known = " or ".join(map(str, tiles))
            raise ValueError(f"B_c {self.B_c} at d_head {self.d_head} is not built: choose {known}")
        if self.warpgroups > 2 and self._needs_registers:
            raise ValueError(
                f"B_c {self.B_c} leaves no registers for {self._needs_registers}: choose 128"
            )
        # a warpgroup passes on blocks that only others see, keeps one, and waits for the next
        least = self.warpgroups + 1
        if self.slots < least:
            raise ValueError(
                f"{self.slots} slots with B_c {self.B_c}: a warpgroup keeps one block of queries, "
                f"passes on up to {least - 2} and waits for the next: use {least} or more"
            )
        limit = gpu.LIMITS[gpu.capability_of(f"sm_{TARGET}")].smem_bytes
        if self.smem_bytes > limit:
            raise ValueError(
                f"B_c {self.B_c} and {self.slots} slots need {self.smem_bytes} bytes of shared "
                f"memory at d_head {self.d_head}, over the limit {limit}: lower one of them"
            )

    def most_runs(self, problem: AttentionBackward, device: Device) -> int:
        """Return the runs of all blocks that a thread block of the longest kernel takes; one that
        asks for tiles may get them all."""
        shared = problem.heads // problem.kv_heads
        blocks = max(-(-problem.len_k // self.B_c), shared * (-(-problem.len_q // self.B_r) + 1))
        tiles = self._k_tiles(problem) if self.is_persistent(self.main_kernel) else 1
        return RUNS_PER_TILE * (blocks + 2 + problem.sequences.bit_length()) * tiles

    def _q_tiles(self, problem: AttentionBackward) -> int:
        """Return the blocks of queries of all heads. Causal ones begin on the diagonal, before the
        first query, so that a head may have a block more than its queries fill."""
        if self.varlen:
            return (problem.len_q // self.B_r + problem.sequences) * problem.heads
        tiles = -(-problem.len_q // self.B_r) * problem.heads * problem.batch
        if not (self.causal and ANY_LENGTHS in self.step.traits):
            return tiles
        # (len_k - len_q) % B_r, whose sign in C is that of the difference
        before = (problem.len_k + (self.B_r - 1) * problem.len_q) % self.B_r
        more = (before + (problem.len_q - 1) % self.B_r) // self.B_r
        return tiles + more * problem.heads * problem.batch

    def _k_tiles(self, problem: AttentionBackward) -> int:
        """Return the tiles of keys of all heads that have keys: of sequences of various lengths so
        many at most."""
        return self._head_tiles(problem) * problem.kv_heads * problem.batch

    def _head_tiles(self, problem: AttentionBackward) -> int:
        """Return the tiles of keys of a head."""
        if self.varlen:
            return problem.len_k // self.B_c + problem.sequences
        return -(-problem.len_k // self.B_c)

    def _order(self, problem: AttentionBackward, device: Device) -> dict[str, tuple[int]]:
        """Return the heads of K and V whose causal tiles are taken together, longest first: their
        K, V, Q, dO and sums of dQ stay in the L2 cache. And those of the last group, of which each
        thread block takes some tiles: the more there are, the shorter the last ones of all are. In
        turn it also has the heads that fill no other group: tiles of few heads would wait.
        Sequences of various lengths count as if all were alike: a tile meets those of its own."""
        heads = problem.kv_heads * problem.batch
        per_query = (2 * ELEMENT_BYTES + FLOAT.size) * problem.heads // problem.kv_heads
        several = problem.sequences if self.varlen else 1  # as if all had the same length
        len_q, len_k = -(-problem.len_q // several), -(-problem.len_k // several)
        head_bytes = self.d_head * (per_query * len_q + 2 * ELEMENT_BYTES * len_k)
        group = max(1, GROUP_BYTES // head_bytes)
        if self.in_turn:
            blocks = self._q_tiles(problem) // (problem.kv_heads * problem.batch * several)
            group = max(group, -(-TURN_BLOCKS * device.sms // blocks))
        group = min(heads, group)
        last = -(-LAST_ROUNDS * device.sms // self._head_tiles(problem))
        last = min(heads, max(group, last))
        if self.in_turn:
            last += (heads - last) % group
        return {"head_group": (group,), "last_heads": (last,)}

    def call(self, problem: AttentionBackward, strides: Strides, device: Device) -> Call:
        """Return the launches of the kernels in turn."""
        rows = {"q": self.B_r, "do": self.B_r, "k": self.B_c, "v": self.B_c}

        def of_tensor(name: str) -> tuple[int, ...]:
            """Return the strides of batches, rows and heads. A sequence is a batch that begins at
            a row."""
            of_batch, of_row, of_head, _ = strides[name]
            return of_row if problem.sequences else of_batch, of_row, of_head

        maps = {
            **{
                member: tensor_map(name, problem, strides[name], rows[name], from_begins=True)
                for member, name in _LOADED.items()
            },
            **{
                member: tensor_map(
                    name, problem, strides[name], WARP_ROWS, pieces=1, from_begins=True
                )
                for member, name in _STORED.items()
            },
        }
        scale = problem.softcap or problem.softmax_scale
        values: dict[str, tuple[float, ...]] = {
            "dO_strides": of_tensor("do"),
            "O_strides": of_tensor("o"),
            "len_q": (problem.len_q,),
            "len_k": (problem.len_k,),
            "heads": (problem.heads,),
            "heads_per_kv": (problem.heads // problem.kv_heads,),
            "scale": (scale * math.log2(math.e),),
            "softmax_scale": (problem.softmax_scale,),
        }
        if self.softcap:
            values |= {"scale_in_cap": (problem.softmax_scale / scale,)}
        if self.window:
            left, right = problem.window_left, problem.window_right
            values |= {
                "window_left": (problem.len_k if left is None else left,),
                "window_right": (0 if self.causal else problem.len_q if right is None else right,),
            }
        pointers = {"dO_gmem": "do", "O_gmem": "o", "lse": "lse"}
        pointers |= {name: name for name in self.floats_per_query}
        if problem.sequences:
            pointers |= {name: name for name in SEQUENCES}
            values["n_sequences"] = (problem.sequences,)
        q_tiles = self._q_tiles(problem)
        k_tiles = self._k_tiles(problem)
        buffers = {
            name: FLOAT.size * floats * self.B_r * q_tiles
            for name, floats in self.floats_per_query.items()
        }
        n_blocks = k_tiles
        if self.is_persistent(GRADIENTS):
            n_blocks = min(k_tiles, device.sms)
            values |= {f"{name}_strides": of_tensor(name.lower()) for name in ("dQ", "dK", "dV")}
            values |= {"tiles": (k_tiles,)} | self._order(problem, device)
            pointers |= {f"{name}_gmem": name.lower() for name in ("dQ", "dK", "dV")}
            pointers[NEXT_TILE] = NEXT_TILE
            buffers |= {NEXT_TILE: INT.size}  # which delta_kernel sets to 0
        if self.in_turn:
            pointers |= {TURNS: TURNS}
            buffers |= {TURNS: TURNS_BYTES * q_tiles}  # likewise
        blocks = {
            DELTA: q_tiles * (self.B_r // self.delta_rows),
            DQ: q_tiles // self.warpgroups,
            DKDV: k_tiles,
            GRADIENTS: n_blocks,
            CONVERT: q_tiles,
        }
        launches = tuple(
            Launch(
                kernel=name,
                grid=(blocks[kernel], 1, 1),
                block=self.block(kernel)[0],
                shared_bytes=self.block(kernel)[1],
                layout=ARGUMENTS,
                values=values,
                addresses=tuple(Address(ARGUMENTS.offset(x), y) for x, y in pointers.items()),
                tensor_maps=tuple((ARGUMENTS.offset(member), x) for member, x in maps.items()),
                outputs=_WRITTEN.get(kernel, ()),
                programmatic=PROGRAMMATIC in self.step.traits,
            )
            for kernel, name in self.kernels.items()
        )
        return Call(
            launches,
            tuple(Buffer(name, size, zeroed=False) for name, size in buffers.items()),
        )


HEAD_SIZES = (128, 64)  # of the steps that have several; with 128 columns all flags have one tile


@functools.cache  # a choice asks for them at each call
def _variants(own: BackwardKernelConfig) -> tuple[BackwardKernelConfig, ...]:
    flags = [name for name in FLAGS if name in own.step.tunable]
    if "d_head" not in own.step.tunable:
        return with_flags(own, flags)
    variants = with_flags(own.of_size(128), flags)
    sizes = sorted(HEAD_SIZES, key=lambda d_head: d_head != own.d_head)
    found = (config.of_size(d_head) for d_head in sizes for config in variants)
    return tuple(dict.fromkeys((own, *found)))


def _file(number: int) -> str:
    return f"kernels/backward/b{number}.cuh"


# Three warpgroups compute in the first three, two in the others.
_LISTED_AT_64: tuple[tuple[Element, tuple[str, ...]], ...] = (
    (Element.BF16, ()),
    (Element.BF16, ("causal",)),
    (Element.FP16, ("causal", "in_turn")),
    (Element.BF16, ("window",)),
    (Element.FP16, ("causal", "softcap", "varlen")),
)


def configs_with_flags() -> list[BackwardKernelConfig]:
    """Return the configs with one of the flags of their step, and with all of them; of steps with
    more than two flags the former in bf16 and the latter in fp16. And of the last step some of head
    size 64, with each flag somewhere."""
    found = []
    for step in BACKWARD.steps.values():
        n_flags = len([name for name in FLAGS if name in step.tunable])
        for dtype in BACKWARD.dtypes:
            numbers = {1, n_flags} if n_flags < 3 else {1 if dtype is Element.BF16 else n_flags}
            plain, *others = BACKWARD.fixed_config(step, dtype).variants()
            same_size = (x for x in others if x.d_head == plain.d_head)
            found += [x for x in same_size if len(differing_fields(x, plain)) in numbers]
    last = [*BACKWARD.steps.values()][-1]
    return found + [
        BACKWARD.fixed_config(last, dtype).replace(**dict.fromkeys(flags, True)).of_size(64)
        for dtype, flags in _LISTED_AT_64
    ]


BACKWARD = Family(
    name="backward",
    operation=OPERATION,
    title="gradients of attention, on Hopper's own units",
    prefix="b",
    rank=7,
    config=BackwardKernelConfig,
    base=MappingProxyType(
        {
            "d_head": 128,
            "B_r": 64,
            "B_c": 64,
            "slots": 1,
            "causal": False,
            "window": False,
            "softcap": False,
            "in_turn": False,
            "varlen": False,
        }
    ),
    entries=(
        StepEntry(
            "two_kernels",
            "one kernel for dQ, one for dK and dV: no sums in memory",
            _file(1),
            parent="p1",
        ),
        StepEntry(
            "scores_in_registers",
            "P and dS stay in registers, since dkdv_kernel computes S and dP transposed",
            _file(2),
            traits=frozenset({SCORES_IN_REGISTERS}),
        ),
        StepEntry(
            "producer",
            "a warpgroup of its own issues the copies, into rings of two slots",
            _file(3),
            sets={"slots": 2},
            traits=frozenset({PRODUCER}),
        ),
        StepEntry(
            "two_warpgroups",
            "two warpgroups share what is copied",
            _file(4),
            sets={"B_c": 128},
        ),
        StepEntry(
            "one_kernel",
            "dQ, dK and dV in one kernel, which adds dQ in memory: five products instead of seven",
            _file(5),
            traits=frozenset({ONE_KERNEL, UNORDERED_SUMS}),
        ),
        StepEntry(
            "third_warpgroup",
            "the producer's warpgroup multiplies dS by K, and the other two take no turns",
            _file(6),
            sets={"slots": 3},
            traits=frozenset({THIRD_WARPGROUP}),
        ),
        StepEntry(
            "statistics_first",
            "S and dP begin with LSE and delta in their accumulators, and no subtraction is left",
            _file(7),
            traits=frozenset({STATISTICS_FIRST}),
        ),
        StepEntry(
            "early_scores",
            "S of the next block is issued before dK, beside which its exponentials run",
            _file(8),
        ),
        StepEntry(
            "persistent",
            "a thread block takes tiles from a counter, and begins the next before it stores one",
            _file(9),
            traits=frozenset({PERSISTENT}),
        ),
        StepEntry(
            "causal",
            "causal: a tile begins at the diagonal, and the longest tiles come first",
            _file(10),
            opens={"causal": (False,)},
        ),
        StepEntry(
            "any_lengths",
            "any lengths: keys behind the end are hidden, and blocks begin on a causal diagonal",
            _file(11),
            traits=frozenset({ANY_LENGTHS}),
        ),
        StepEntry(
            "in_turn",
            "tiles of keys may add dQ in one order, so that each call gives the same bits",
            _file(12),
            opens={"in_turn": (False,)},
        ),
        StepEntry(
            "programmatic_launches",
            "programmatic launches: a launch begins while the one before it ends",
            _file(13),
            traits=frozenset({PROGRAMMATIC}),
        ),
        StepEntry(
            "window",
            "window: blocks of queries that see no key of a tile are never loaded",
            _file(14),
            opens={"window": (False,)},
        ),
        StepEntry(
            "softcap",
            "softcap: the logits are limited by tanh, whose derivative is a factor of dS",
            _file(15),
            opens={"softcap": (False,)},
        ),
        StepEntry(
            "variable_lengths",
            "variable lengths: blocks end with their sequence, which a tile finds by a search",
            _file(16),
            opens={"varlen": (False,)},
        ),
        StepEntry(
            "head_sizes",
            "head sizes: at d_head 64 a third warpgroup computes",
            _file(17),
            opens={"d_head": (128,), "B_c": (128,), "slots": (3,)},
        ),
        StepEntry(
            "walked_backwards",
            "walked backwards: the launches around the main one begin with what is in L2",
            _file(18),
            traits=frozenset({WHOLE_BLOCKS, HELD_BACK}),
        ),
        StepEntry(
            "late_turns",
            "late turns: a turn ends when the next dS is there, not right behind the additions",
            _file(19),
            traits=frozenset({HELD_BACK}),
        ),
    ),
    targets=(TARGET,),
    kernels=MappingProxyType(dict.fromkeys((DELTA, DQ, DKDV, GRADIENTS, CONVERT), ARGUMENTS)),
    header=PurePosixPath("kernels/backward/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=19_000_000,
    matrix_budget=170_000_000,
    also_listed=configs_with_flags,
)
