"""The hopper family: attention on the units that compute capability 9.0 alone has, TMA, `wgmma` and
warps by roles. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.registry.config import Config, element, flag, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.launch import (
    FLOAT,
    INT,
    POINTER,
    STRIDES,
    TENSOR_MAP,
    WORKSPACE,
    Address,
    Launch,
    StructLayout,
    TensorMap,
)
from flash_helpers.registry.mma_sync import LAZY_RESCALE
from flash_helpers.registry.problem import ELEMENT_BYTES, AttentionForward, DType, Strides
from flash_helpers.registry.supports import (
    GROUPED_HEADS,
    MAX_LENGTH,
    RETURN_LSE,
    SOFTMAX_SCALE,
    TWO_LENGTHS,
    Supports,
)

TARGET = "90a"
WARPGROUP = 128  # threads
WGMMA_M, WGMMA_K = 64, 16  # of wgmma.m64nNk16: rows of a warpgroup, depth
WARP_ROWS = WGMMA_M // 4
KEYS_OF_A_BLOCK = (64, 80, 96, 128, 160, 176)  # N of the wgmma that src/include/sm90 has names for
PIECE = 64  # columns of a tile in shared memory: the swizzle's 128 bytes
CHUNK_BYTES = 16  # TMA: addresses and strides are multiples of it
BARRIER_BYTES = 256  # of shared memory, for mbarriers
_MAX_STRIDE = (2**40 - 1) // ELEMENT_BYTES  # of a tensor map, in bytes less than 2^40
SMS = 132  # of an H100 or H200 (SXM): blocks of a grid that is there once

# Traits of steps.
P_IN_REGISTERS = "p_in_registers"  # P does not pass through shared memory
PRODUCER = "producer"  # a warpgroup of its own issues the copies
PERSISTENT = "persistent"  # a block takes one tile after the other
Q_TWICE = "q_twice"  # two slots of Q, since the next tile begins before this one ends
REPLAYS = "replays"  # m is that of a tile's first block; rows that do not fit are computed again
UNCHECKED = "unchecked"  # P of bf16 is never made smaller by raising m: l alone is looked at
RAGGED = "ragged"  # lengths are any, those of queries and keys differ; keys are walked backwards
CALL_OPTIONS = "call_options"  # softmax_scale, return_lse and grouped heads
DYNAMIC = "dynamic"  # blocks take the next causal tile from a counter
OWN_KEYS = "own_keys"  # a warpgroup leaves out causal blocks of keys that only others see
SHARED_LOADS = "shared_loads"  # K and V are loaded once for the thread blocks of a cluster
HEAD_PAIRS = "head_pairs"  # those take the same rows of two heads where these share K and V
HALF_BLOCKS = "half_blocks"  # warpgroups multiply with the half of a causal block that they see

# Where m is that of a tile's first block:
MAX_SUM = 2.0**15  # of a lane's P in one block; over that m is raised
MAX_RAISE = 100.0  # of m by one block, in powers of two; a row over that does not fit
MAX_L = 1e30  # of a row; one over that does not fit
NO_MAXIMUM = -1e30  # of scores that are all hidden, before they are scaled

ARGUMENTS = StructLayout(
    "HopperKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys("QKVO", TENSOR_MAP),
            **{f"{name}_gmem": POINTER for name in "QKVO"},
            **{f"{name}_strides": STRIDES for name in "QKVO"},
            **dict.fromkeys(("len_k", "heads", "tiles", "len_q", "q_tiles", "heads_per_kv"), INT),
            "scale": FLOAT,
            **dict.fromkeys(("lse", "next_tile"), POINTER),
            **dict.fromkeys(("head_group", "last_heads"), INT),
        }
    ),
)


@dataclass(frozen=True)
class HopperKernelConfig(Config):
    """One kernel of the hopper family.

    B_r, B_c: rows of a Q tile, 64 for each warpgroup that computes, and of a K or V tile. K_slots,
    V_slots: tiles of each in shared memory. ping_pong: one warpgroup at a time issues its products.
    causal: the kernel masks, and takes causal problems alone.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "h1_bf16_d128_Br64_Bc128_K1_V1"

    hopper: int = number("h", "the step")
    dtype: DType = element()
    d_head: int = number("d")
    B_r: int = number("Br", "query rows of a thread block, 64 for each warpgroup that computes")
    B_c: int = number("Bc", "keys of one step of its main loop")
    K_slots: int = number("K", "tiles of K in shared memory")
    V_slots: int = number("V", "tiles of V in shared memory")
    ping_pong: bool = flag("pp", "one warpgroup at a time issues its products", default=False)
    causal: bool = flag("causal", "a causal mask, aligned to the bottom right", default=False)

    @property
    def family(self) -> Family:
        """The hopper family."""
        return HOPPER

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.B_r // WGMMA_M

    @property
    def cluster_blocks(self) -> int:
        """Thread blocks of a cluster, which take tiles of one head that are neighbours."""
        return 2 if SHARED_LOADS in self.step.traits else 1

    @property
    def n_threads(self) -> int:
        """Threads of one block: the warpgroups that compute, and the producer's."""
        return (self.consumers + (PRODUCER in self.step.traits)) * WARPGROUP

    @property
    def n_warps(self) -> int:
        """Warps that share the rows of a Q tile."""
        return self.consumers * WARPGROUP // gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: the slots of Q, K and V, in the first step a
        tile of P, and the barriers."""
        rows = (2 if Q_TWICE in self.step.traits else 1) * self.B_r
        keys = (self.K_slots + self.V_slots) * self.B_c
        P = 0 if P_IN_REGISTERS in self.step.traits else self.B_r * self.B_c
        return ((rows + keys) * self.d_head + P) * ELEMENT_BYTES + BARRIER_BYTES

    @property
    def folds_scale(self) -> bool:
        """Whether the softmax scale is part of the exponent, and S is not scaled before."""
        return True

    @property
    def mma_per_key_block(self) -> int:
        """`wgmma` of a warp for one block of keys: Q @ K^T and P @ V."""
        return self.d_head // WGMMA_K + self.B_c // WGMMA_K

    def key_blocks(self, len_k: int) -> range:
        """The blocks of keys in the order in which the kernel walks them."""
        blocks = range(-(-len_k // self.B_c))
        return blocks[::-1] if RAGGED in self.step.traits else blocks

    def own_key_blocks(self, problem: AttentionForward, query: int) -> range:
        """Those that the warp of a query takes, which may be beyond len_q. A causal tile has one at
        least, though it may be hidden."""
        blocks = self.key_blocks(problem.len_k)
        if not self.causal:
            return blocks
        together = WGMMA_M if OWN_KEYS in self.step.traits else self.B_r
        last_query = min((query // together + 1) * together, problem.len_q) - 1
        seen = max(-(-problem.visible_keys(last_query) // self.B_c), 1)
        return blocks[-seen:]

    @property
    def few_keys(self) -> int:
        """Keys of a block that a warpgroup which sees no more multiplies with; 0 if it always takes
        them all. Half a block of 128: the diagonal moves by 64 keys from warpgroup to warpgroup."""
        halves = HALF_BLOCKS in self.step.traits and self.causal
        return WGMMA_M if halves and self.B_c == 2 * WGMMA_M else 0

    def first_keys(self, problem: AttentionForward, query: int) -> int:
        """Keys that the warp of a query multiplies with of the first block that it takes."""
        first = self.own_key_blocks(problem, query)[0] * self.B_c
        seen = problem.visible_keys(query // WGMMA_M * WGMMA_M + WGMMA_M - 1) - first
        return self.few_keys if self.few_keys and seen <= self.few_keys else self.B_c

    def variants(self) -> tuple[HopperKernelConfig, ...]:
        """The config, and the causal one, or that without, where the step and the tile have it."""
        if "causal" not in self.step.tunable or self._refusal_of_causal:
            return (self,)
        return (self, self.replace(causal=not self.causal))

    @property
    def _refusal_of_causal(self) -> str:
        """Why the tile cannot be causal and the way out, or nothing."""
        if OWN_KEYS not in self.step.traits:
            if self.B_r <= self.B_c:
                return ""
            return (
                f"causal with B_r {self.B_r} over B_c {self.B_c}: the diagonal of a tile would lie "
                "in more than two blocks of keys: lower B_r, raise B_c, or take a step whose "
                "warpgroups leave out what they do not see"
            )
        blocks = self.cluster_blocks
        unseen = -(-(blocks * self.B_r - WGMMA_M) // self.B_c)
        tiles = f"{blocks} tiles of B_r" if blocks > 1 else "B_r"
        for name, slots, least in (("K", self.K_slots, unseen + 1), ("V", self.V_slots, unseen)):
            if slots < least:
                return (
                    f"causal with {tiles} {self.B_r}, B_c {self.B_c} and {slots} slots of {name}: "
                    f"a warpgroup leaves out up to {unseen} blocks of keys, and would wait for the "
                    f"next one while others need these: lower B_r, raise B_c, or have {least} "
                    f"slots of {name}"
                )
        return ""

    @property
    def supports(self) -> Supports:
        """Whole blocks of queries and keys of one length, unless the step's traits say more."""
        traits = self.step.traits
        ragged = RAGGED in traits
        options = {SOFTMAX_SCALE, RETURN_LSE, GROUPED_HEADS} if CALL_OPTIONS in traits else set()
        return Supports(
            dtype=self.dtype,
            d_heads=(self.d_head,),
            blocks=MappingProxyType({} if ragged else {"B_r": self.B_r, "B_c": self.B_c}),
            chunk_bytes=CHUNK_BYTES,
            max_row_stride=_MAX_STRIDE,
            max_stride=_MAX_STRIDE,
            max_heads=gpu.MAX_GRID[0],
            max_tiles=gpu.MAX_GRID[0],
            # rows of the last tiles are numbered beyond the tensor's end
            max_length=MAX_LENGTH - max(self.cluster_blocks * self.B_r, self.B_c)
            if ragged
            else MAX_LENGTH,
            B_r=self.B_r,
            B_c=self.B_c,
            causal=self.causal,
            abilities=frozenset(options | ({TWO_LENGTHS} if ragged else set())),
        )

    def n_blocks(self, tiles: int) -> int:
        """Thread blocks for so many tiles of queries; block b takes tiles b, b + n_blocks, ..."""
        return min(tiles, SMS) if PERSISTENT in self.step.traits else tiles

    def computed_scores(self, problem: AttentionForward) -> int:
        """As of any config; where blocks stay and tiles are alike, as many of each block as of the
        busiest, for which the others wait."""
        blocks = self.cluster_blocks
        tiles = blocks * self._n_tiles(problem)
        if PERSISTENT in self.step.traits and not self.causal:
            at_a_time = SMS // blocks * blocks
            tiles = -(-tiles // at_a_time) * at_a_time
        return tiles * self.B_r * -(-problem.len_k // self.B_c) * self.B_c

    def counts(self, problem: AttentionForward) -> bool:
        """Whether blocks take the tiles behind their first from a counter. Where nobody has a third
        it decides nothing, since a block takes its second when it begins with its first."""
        q_tiles = -(-problem.len_q // self.B_r)
        is_long = q_tiles >= COUNTED_FROM and not self._has_two_tiles(problem)
        return DYNAMIC in self.step.traits and self.causal and is_long

    def _has_two_tiles(self, problem: AttentionForward) -> bool:
        """Whether no block, or cluster, has more."""
        return self._n_tiles(problem) <= 2 * (SMS // self.cluster_blocks)

    def _cluster_heads(self, problem: AttentionForward) -> int:
        """Heads whose rows the blocks of a cluster take: as many as they are, or one."""
        pairs = HEAD_PAIRS in self.step.traits
        pairs &= problem.heads // problem.kv_heads % self.cluster_blocks == 0
        return self.cluster_blocks if pairs else 1

    def _q_tiles(self, problem: AttentionForward) -> int:
        """Tiles of queries of one head, those that the blocks of a cluster take together as one."""
        rows = self.cluster_blocks // self._cluster_heads(problem) * self.B_r
        return -(-problem.len_q // rows)

    def _heads(self, problem: AttentionForward) -> int:
        """Heads of all batches, those that the blocks of a cluster take together as one."""
        return problem.batch * problem.heads // self._cluster_heads(problem)

    def _n_tiles(self, problem: AttentionForward) -> int:
        """Of all heads and batches, likewise."""
        return self._q_tiles(problem) * self._heads(problem)

    def _head_group(self, problem: AttentionForward) -> int:
        """Heads whose causal tiles are taken together, longest first.

        As many as have a tile for each block at a time, if blocks take theirs from a counter: the
        fewer K and V are in use, the less is fetched. Without one, all if blocks have two tiles at
        most, and of more what is fastest (measured): a quarter of that in short sequences, twice as
        many in long ones.
        """
        q_tiles, at_a_time = self._q_tiles(problem), SMS // self.cluster_blocks
        if self.counts(problem):
            return max(1, at_a_time // q_tiles)
        if DYNAMIC in self.step.traits and self._has_two_tiles(problem):
            return self._heads(problem)
        if q_tiles <= _SHORT:
            return max(1, at_a_time // (4 * q_tiles))
        return max(1, 2 * at_a_time // q_tiles)

    def _last_heads(self, problem: AttentionForward) -> int:
        """Heads of the last group. Without a counter, those that are left.

        With one, so many that each block takes several of their tiles. A block takes its next tile
        when it begins with one: who has taken a long one last ends up to two tiles behind the
        others, and the last group's are the shorter the more heads it has.
        """
        heads = self._heads(problem)
        group = self._head_group(problem)
        if not self.counts(problem):
            return (heads - 1) % group + 1
        at_a_time = SMS // self.cluster_blocks
        return min(heads, max(group, -(-_LAST_ROUNDS * at_a_time // self._q_tiles(problem))))

    def tiles(self, problem: AttentionForward) -> tuple[tuple[int, int], ...]:
        """Head, of all batches, and block of rows of each tile of queries, in the order of their
        numbers (`tile_place` in src/include/sm90/arguments.cuh). Those of a cluster follow one
        another; the last of a head may have no rows."""
        together = self._cluster_heads(problem)
        q_tiles, heads = self._q_tiles(problem), self._heads(problem)
        group = self._head_group(problem) if self.causal else 1
        before = heads - (self._last_heads(problem) if self.causal else 0)
        rows = range(q_tiles)[::-1] if self.causal else range(q_tiles)
        groups = [range(first, min(first + group, before)) for first in range(0, before, group)]
        groups.append(range(before, heads))
        taken = ((head, row) for heads_of in groups for row in rows for head in heads_of)
        in_rows = self.cluster_blocks // together
        return tuple(
            (head * together + i % together, row * in_rows + i // together)
            for head, row in taken
            for i in range(self.cluster_blocks)
        )

    def known_tiles(self, problem: AttentionForward, block: int) -> tuple[int, ...]:
        """Numbers of the tiles of a thread block, in its order; of those that come from a counter
        the first alone (`take_tile` in src/include/sm90/arguments.cuh)."""
        together, tiles = self.cluster_blocks, self._n_tiles(problem)
        lot = self.n_blocks(together * tiles) // together
        taker, rank = divmod(block, together)
        lots = range(1 if self.counts(problem) else -(-tiles // lot))
        turns = DYNAMIC in self.step.traits and self.causal
        taken = (n * lot + (lot - 1 - taker if turns and n % 2 else taker) for n in lots)
        return tuple(together * number + rank for number in taken if number < tiles)

    def launch(
        self, problem: AttentionForward, strides: Mapping[str, Strides]
    ) -> tuple[Launch, ...]:
        """A block for each tile of queries, head and batch; or as many as run at a time, which take
        one tile after the other."""
        tiles = self._n_tiles(problem)
        counts = self.counts(problem)
        rows = {"q": self.B_r, "k": self.B_c, "v": self.B_c, "o": WARP_ROWS}
        values: dict[str, tuple[float, ...]] = {
            "len_k": (problem.len_k,),
            "heads": (problem.heads,),
            "tiles": (tiles,),
            "len_q": (problem.len_q,),
            "q_tiles": (self._q_tiles(problem),),
            "heads_per_kv": (problem.heads // problem.kv_heads,),
            "scale": (problem.softmax_scale * math.log2(math.e),),
            "head_group": (self._head_group(problem),),
            "last_heads": (self._last_heads(problem),),
        }
        values |= {f"{name.upper()}_strides": astuple(strides[name]) for name in "qkvo"}
        pointers = {f"{name.upper()}_gmem": name for name in "qkvo"}
        if problem.return_lse:
            pointers["lse"] = "lse"
        if counts:
            pointers["next_tile"] = WORKSPACE
        return (
            Launch(
                config=self,
                grid=(self.n_blocks(self.cluster_blocks * tiles), 1, 1),
                cluster=(self.cluster_blocks, 1, 1),
                block=self.n_threads,
                shared_bytes=self.smem_bytes,
                arguments=ARGUMENTS.pack(values),
                addresses=tuple(
                    Address(ARGUMENTS.offset(member), name) for member, name in pointers.items()
                ),
                outputs=("o", "lse") if problem.return_lse else ("o",),
                tensor_maps=tuple(
                    (
                        ARGUMENTS.offset(name.upper()),
                        _tensor_map(name, problem, strides[name], rows[name]),
                    )
                    for name in "qkvo"
                ),
                workspace_bytes=INT.size * (1 + tiles) if counts else 0,
            ),
        )

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if self.B_r % WGMMA_M or not WGMMA_M <= self.B_r <= 3 * WGMMA_M:
            raise ValueError(
                f"B_r {self.B_r} is not {WGMMA_M} rows for each of 1 to 3 warpgroups: choose "
                f"{WGMMA_M}, {2 * WGMMA_M} or {3 * WGMMA_M}"
            )
        if self.B_c not in KEYS_OF_A_BLOCK:
            known = ", ".join(map(str, KEYS_OF_A_BLOCK))
            raise ValueError(f"B_c {self.B_c} has no wgmma here: choose one of {known}")
        if P_IN_REGISTERS not in self.step.traits and self.B_c % PIECE:
            raise ValueError(
                f"B_c {self.B_c}: {self.step.id} keeps P in shared memory in pieces of {PIECE} "
                f"columns: choose 64 or 128"
            )
        for name in ("K_slots", "V_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        limit = gpu.LIMITS[gpu.capability_of(f"sm_{TARGET}")].smem_bytes
        if self.smem_bytes > limit:
            raise ValueError(
                f"B_r {self.B_r}, B_c {self.B_c}, {self.K_slots} slots of K and {self.V_slots} of "
                f"V need {self.smem_bytes} bytes of shared memory, over the limit {limit}: lower "
                "one of them"
            )
        if self.causal and self._refusal_of_causal:
            raise ValueError(self._refusal_of_causal)
        # O, S and P of a thread; P is what S becomes, so that both are there at times
        registers = (self.d_head + self.B_c + self.B_c // 2) // 2
        most = {1: 255, 2: 240, 3: 160}[self.consumers]
        if registers + _OTHER_REGISTERS > most:
            raise ValueError(
                f"B_c {self.B_c} with {self.consumers} warpgroups needs {registers} registers per "
                f"thread for O, S and P, of {most}: lower B_c or B_r"
            )


_OTHER_REGISTERS = 24  # of a thread that computes, beside O, S and P
COUNTED_FROM = 5  # tiles of a head: below, to zero the counter takes as long as it saves
_SHORT = 8  # tiles of a head
_LAST_ROUNDS = 3  # tiles of a block of the last heads, at least


def _tensor_map(name: str, problem: AttentionForward, strides: Strides, rows: int) -> TensorMap:
    """Boxes of some rows of one head, in pieces of 128-byte rows; of O, one piece.

    A stride of 0 is that of a dimension of size 1, or of one tensor expanded along it.
    """
    batch, length, heads, d_head = problem.kv_shape if name in "kv" else problem.shape
    sizes = (PIECE, length, d_head // PIECE, heads, batch)
    in_elements = (strides.row, PIECE, strides.head, strides.batch)
    return TensorMap(
        name,
        problem.dtype.short,
        dims=sizes,
        strides=tuple(stride * ELEMENT_BYTES for stride in in_elements),
        box=(PIECE, rows, 1 if name == "o" else d_head // PIECE, 1, 1),
        swizzle=PIECE * ELEMENT_BYTES,
    )


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


HOPPER = Family(
    name="hopper",
    title="the same attention on Hopper's own units",
    prefix="h",
    rank=2,
    config=HopperKernelConfig,
    base=_BASE,
    entries=(
        StepEntry("wgmma", "TMA and wgmma, all in order", _file(1), parent="v16"),
        StepEntry(
            "p_in_registers",
            "P stays in registers",
            _file(2),
            traits=frozenset({P_IN_REGISTERS}),
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
        ),
        StepEntry(
            "optimistic_maximum",
            "the maximum of a tile's first block, checked afterwards",
            _file(12),
            traits=frozenset({REPLAYS}),
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
            "bf16 has fp32's exponents: sums are looked at once a tile",
            _file(16),
            traits=frozenset({UNCHECKED}),
        ),
        StepEntry(
            "peeled_loop",
            "the second block of a tile, beside which O is stored, stands before the loop",
            _file(17),
        ),
        StepEntry("ordered_exponentials", "exponentials stay before the wait for P @ V", _file(18)),
        StepEntry(
            "any_length",
            "any number of queries and of keys: what K has not is hidden",
            _file(19),
            traits=frozenset({RAGGED}),
        ),
        StepEntry(
            "call_options",
            "scale, LSE and grouped heads come with the call",
            _file(20),
            traits=frozenset({CALL_OPTIONS}),
        ),
        StepEntry(
            "causal",
            "causal: a tile ends at the diagonal, which lies in its first two blocks",
            _file(21),
            opens={"causal": (False,)},
        ),
        StepEntry(
            "tile_counter",
            "causal tiles are taken from a counter",
            _file(22),
            traits=frozenset({DYNAMIC}),
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
    arguments=ARGUMENTS,
    map_header=PurePosixPath("src/include/hopper_kernels.cuh"),
    simulated_budget=25_000_000,
)

# The tile for long sequences, of three warpgroups, and the steps that the library holds it of: the
# one that makes room for it, and that which lets it be causal.
LONG_TILE: Mapping[str, Any] = MappingProxyType({"B_r": 192, "B_c": 80, "K_slots": 3, "V_slots": 3})
_LONG_TILE_AT = ("h13", "h24")


def tuned_configs() -> list[Config]:
    """What the library holds beside the fixed configs: the tile for long sequences; what is
    causal."""
    long = [
        HOPPER.fixed_config(step, dtype).replace(**LONG_TILE)
        for step in map(HOPPER.steps.__getitem__, _LONG_TILE_AT)
        for dtype in DType
    ]
    both = (variant for config in (*HOPPER.progression(), *long) for variant in config.variants())
    return [*long, *(config for config in both if config.causal)]
