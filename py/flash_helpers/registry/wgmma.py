"""The common part of families on the units that only compute capability 9.0 has: TMA, `wgmma`, and
registers that move between warps by role. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, TypeVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.problems import counted_problem
from flash_helpers.operations.attention_forward.supports import (
    GROUPED_HEADS,
    MAX_LENGTH,
    RETURN_LSE,
    SOFTMAX_SCALE,
    TWO_LENGTHS,
    AttentionSupports,
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
    Kind,
    Launch,
    TensorMap,
)
from flash_helpers.registry.config import Config
from flash_helpers.registry.mma_sync import ELEMENT_BYTES, RAGGED, RUNS_PER_TILE
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.tile_order import TileOrder

Own = TypeVar("Own", bound="WgmmaConfig")

TARGET = "90a"
WARPGROUP = 128  # threads
WGMMA_M, WGMMA_K = 64, 16  # of wgmma.m64nNk16: rows of a warpgroup, depth
WARP_ROWS = WGMMA_M // 4
KEYS_OF_A_BLOCK = (64, 80, 96, 128, 160, 176)  # N of the wgmma that src/include/sm90 has names for
PIECE = 64  # columns of a tile in shared memory: the swizzle's 128 bytes
CHUNK_BYTES = 16  # TMA: addresses and strides are multiples of it
BARRIER_BYTES = 256  # of shared memory, for mbarriers
MAX_STRIDE = (2**40 - 1) // ELEMENT_BYTES  # of a tensor map, in bytes less than 2^40

NEXT_TILE = "next_tile"  # the buffer with the counter and, per tile, the block that took it

# Traits of steps.
P_IN_REGISTERS = "p_in_registers"  # P does not pass through shared memory
PRODUCER = "producer"  # a warpgroup of its own issues the copies
PERSISTENT = "persistent"  # a block takes one tile after the other
Q_TWICE = "q_twice"  # two slots of Q, since the next tile begins before this one ends
REPLAYS = "replays"  # m is that of a tile's first block; rows that do not fit are computed again
UNCHECKED = "unchecked"  # P of bf16 is never made smaller by raising m: l alone is looked at
ASKS_LATE = "asks_late"  # whether m of fp16 must grow is asked behind the wait for P @ V
CALL_OPTIONS = "call_options"  # softmax_scale, return_lse and grouped heads
DYNAMIC = "dynamic"  # blocks take the next causal tile from a counter
OWN_KEYS = "own_keys"  # a warpgroup leaves out causal blocks of keys that only others see
SHARED_LOADS = "shared_loads"  # K and V are loaded once for the thread blocks of a cluster
HEAD_PAIRS = "head_pairs"  # those take the same rows of two heads where these share K and V
PROGRAMMATIC = "programmatic"  # a launch may begin before the one before it has ended, and waits
HALF_BLOCKS = "half_blocks"  # warpgroups multiply with the half of a causal block that they see

# Where m is that of a tile's first block:
MAX_SUM = 2.0**15  # of a lane's P in one block; over that m is raised
MAX_RAISE = 100.0  # of m by one block, in powers of two; a row over that does not fit
MAX_L = 1e30  # of a row; one over that does not fit
NO_MAXIMUM = -1e30  # of scores that are all hidden, before they are scaled

MEMBERS: Mapping[str, Kind] = MappingProxyType(
    {
        **dict.fromkeys("QKVO", TENSOR_MAP),
        **{f"{name}_gmem": POINTER for name in "QKVO"},
        **{f"{name}_strides": STRIDES for name in "QKVO"},
        **dict.fromkeys(("len_k", "heads", "tiles", "len_q", "q_tiles", "heads_per_kv"), INT),
        "scale": FLOAT,
        **dict.fromkeys(("lse", "next_tile"), POINTER),
        **dict.fromkeys(("head_group", "last_heads"), INT),
    }
)
"""Members of the struct of the kernels' arguments, in order."""


class WgmmaConfig(Config):
    """A kernel of such a family; a subclass adds fields of its own to these.

    `B_r`, `B_c`: rows of a Q tile, 64 for each warpgroup that computes, and of a K or V tile.
    `K_slots`, `V_slots`: tiles of each in shared memory. `ping_pong`: one warpgroup at a time
    issues its products. `causal`: the kernel masks, and takes causal problems alone.
    """

    most_consumers: ClassVar[int] = 3
    """Most warpgroups that compute."""

    dtype: Element
    d_head: int
    B_r: int
    B_c: int
    K_slots: int
    V_slots: int
    ping_pong: bool
    causal: bool

    @property
    def v_columns(self) -> int:
        """Head size of V and O."""
        return self.d_head

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
    def tiles_of_Q(self) -> int:
        """Tiles of Q in shared memory."""
        return 2 if Q_TWICE in self.step.traits else 1

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: the slots of Q, K and V, in the first step a
        tile of P, and the barriers."""
        rows = self.tiles_of_Q * self.B_r + self.K_slots * self.B_c
        QK, V = rows * _in_pieces(self.d_head), self.V_slots * self.B_c * _in_pieces(self.v_columns)
        P = 0 if P_IN_REGISTERS in self.step.traits else self.B_r * self.B_c
        return (QK + V + P) * ELEMENT_BYTES + BARRIER_BYTES

    @property
    def folds_scale(self) -> bool:
        """Whether the softmax scale is part of the exponent, and S is not scaled before."""
        return True

    @property
    def mma_per_key_block(self) -> int:
        """`wgmma` of a warp for one block of keys: Q @ K^T and P @ V."""
        return self.d_head // WGMMA_K + self.B_c // WGMMA_K

    @property
    def loop_unit(self) -> tuple[str, int]:
        """A block of keys, and the tensor instructions of a warp for it."""
        return "block of K and V", self.mma_per_key_block

    def loop_runs(self, size: int) -> int:
        """Return the blocks of so many keys."""
        return len(self.key_blocks(size))

    def counted_on(self, size: int) -> AttentionForward:
        """Return a problem of one head."""
        return counted_problem(self.supports, size)

    def key_blocks(self, len_k: int) -> range:
        """The blocks of keys in the order in which the kernel walks them."""
        blocks = range(-(-len_k // self.B_c))
        return blocks[::-1] if RAGGED in self.step.traits else blocks

    def own_key_blocks(self, problem: AttentionForward, query: int) -> range:
        """Those that the warp of a query takes, which may be beyond len_q. A causal tile has one at
        least, though it may be hidden."""
        blocks = self.key_blocks(problem.len_k)
        if not self.moves:
            return blocks
        together = WGMMA_M if OWN_KEYS in self.step.traits else self.B_r
        last_query = min((query // together + 1) * together, problem.len_q) - 1
        seen = max(-(-problem.visible_keys(last_query).stop // self.B_c), 1)
        return blocks[-seen:]

    @property
    def moves(self) -> bool:
        """Whether the end of the keys that a query sees moves from query to query."""
        return self.causal

    @property
    def few_keys(self) -> int:
        """Keys of a block that a warpgroup which sees no more multiplies with; 0 if it always takes
        them all. Half a block of 128: the diagonal moves by 64 keys from warpgroup to warpgroup."""
        halves = HALF_BLOCKS in self.step.traits and self.moves
        return WGMMA_M if halves and self.B_c == 2 * WGMMA_M else 0

    def first_keys(self, problem: AttentionForward, query: int) -> int:
        """Keys that the warp of a query multiplies with of the first block that it takes."""
        first = self.own_key_blocks(problem, query)[0] * self.B_c
        seen = problem.visible_keys(query // WGMMA_M * WGMMA_M + WGMMA_M - 1).stop - first
        return self.few_keys if self.few_keys and seen <= self.few_keys else self.B_c

    def variants(self: Own) -> tuple[Own, ...]:
        """The config, and the causal one, or that without, where the step and the tile have it."""
        if "causal" not in self.step.tunable or not self.may_move:
            return (self,)
        return (self, self.replace(causal=not self.causal))

    @property
    def may_move(self) -> bool:
        """Whether the tile can be causal, or have a window."""
        return not self._refusal_of_causal

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
    def supports(self) -> AttentionSupports:
        """Whole blocks of queries and keys of one length, unless the step's traits say more."""
        traits = self.step.traits
        ragged = RAGGED in traits
        options = {SOFTMAX_SCALE, RETURN_LSE, GROUPED_HEADS} if CALL_OPTIONS in traits else set()
        return AttentionSupports(
            dtype=self.dtype,
            d_heads=(self.d_head,),
            blocks=MappingProxyType({} if ragged else {"B_r": self.B_r, "B_c": self.B_c}),
            alignment=CHUNK_BYTES,
            max_row_stride=MAX_STRIDE,
            max_stride=MAX_STRIDE,
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

    def order(self, problem: AttentionForward, device: Device) -> TileOrder:
        """Return the order in which the blocks of a device take the tiles."""
        traits = self.step.traits
        return TileOrder(
            problem=problem,
            B_r=self.B_r,
            sms=device.sms,
            persistent=PERSISTENT in traits,
            cluster=self.cluster_blocks,
            pairs_heads=HEAD_PAIRS in traits,
            causal=self.causal,
            dynamic=DYNAMIC in traits,
        )

    def work(self, problem: AttentionForward, device: Device) -> float:
        """Return the scores that are computed, idle blocks included."""
        tiles = self.order(problem, device).computed_tiles
        return tiles * self.B_r * -(-problem.len_k // self.B_c) * self.B_c

    def most_runs(self, problem: AttentionForward, device: Device) -> int:
        """Return the runs of all blocks of keys of a thread block's tiles; blocks that ask for
        tiles may get them all."""
        order = self.order(problem, device)
        tiles = problem.batch * problem.heads * (-(-problem.len_q // self.B_r) + problem.sequences)
        per_block = tiles if order.counts else -(-tiles // order.n_blocks)
        runs = _RUNS_PER_REPLAYED_TILE if REPLAYS in self.step.traits else RUNS_PER_TILE
        return runs * (len(self.key_blocks(problem.len_k)) + 2) * per_block

    def call(self, problem: AttentionForward, strides: Strides, device: Device) -> Call:
        """Return a block for each tile of queries, head and batch; or as many as run at a time,
        which take one tile after the other."""
        order = self.order(problem, device)
        rows = {"q": self.B_r, "k": self.B_c, "v": self.B_c, "o": WARP_ROWS}
        values: dict[str, tuple[float, ...]] = {
            "len_k": (problem.len_k,),
            "heads": (problem.heads,),
            "tiles": (order.n_tiles,),
            "len_q": (problem.len_q,),
            "q_tiles": (order.q_tiles,),
            "heads_per_kv": (problem.heads // problem.kv_heads,),
            "scale": (problem.softmax_scale * math.log2(math.e),),
            "head_group": (order.head_group,),
            "last_heads": (order.last_heads,),
            **self.arguments(problem),
        }
        values |= {f"{name.upper()}_strides": strides[name][:3] for name in "qkvo"}
        pointers = {f"{name.upper()}_gmem": name for name in "qkvo"}
        pointers |= {"lse": "lse"} if problem.return_lse else {}
        pointers |= {"sinks": "sinks"} if problem.sinks else {}
        if problem.sequences:
            pointers |= {name: name for name in ("cu_seqlens_q", "cu_seqlens_k")}
        buffers: tuple[Buffer, ...] = ()
        if order.counts:
            pointers["next_tile"] = NEXT_TILE
            buffers = (Buffer(NEXT_TILE, INT.size * (1 + order.n_tiles), zeroed=True),)
        (kernel,), (layout,) = self.kernels.values(), self.family.kernels.values()
        launch = Launch(
            kernel=kernel,
            grid=(order.n_blocks, 1, 1),
            cluster=(self.cluster_blocks, 1, 1),
            block=self.n_threads,
            shared_bytes=self.smem_bytes,
            layout=layout,
            values=values,
            addresses=tuple(
                Address(layout.offset(member), name) for member, name in pointers.items()
            ),
            tensor_maps=tuple(
                (
                    layout.offset(name.upper()),
                    tensor_map(
                        name, problem, strides[name], rows[name], pieces=1 if name == "o" else None
                    ),
                )
                for name in "qkvo"
            ),
            programmatic=PROGRAMMATIC in self.step.traits,
        )
        return Call((launch,), buffers)

    def arguments(self, problem: AttentionForward) -> dict[str, tuple[float, ...]]:
        """Return members of the arguments that a family has beside the common ones, or instead."""
        return {}

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        rows = [n * WGMMA_M for n in range(1, self.most_consumers + 1)]
        if self.B_r not in rows:
            raise ValueError(
                f"B_r {self.B_r} is not {WGMMA_M} rows for each of 1 to {len(rows)} warpgroups: "
                f"choose one of {', '.join(map(str, rows))}"
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
        self._check_barriers()
        limit = gpu.LIMITS[gpu.capability_of(f"sm_{TARGET}")].smem_bytes
        if self.smem_bytes > limit:
            raise ValueError(
                f"B_r {self.B_r}, B_c {self.B_c}, {self.K_slots} slots of K and {self.V_slots} of "
                f"V need {self.smem_bytes} bytes of shared memory, over the limit {limit}: lower "
                "one of them"
            )
        if self.moves and self._refusal_of_causal:
            raise ValueError(self._refusal_of_causal)
        # O, S and P of a thread; P is what S becomes, so that both are there at times
        registers = (self.v_columns + self.B_c + self.B_c // 2) // 2
        most = {1: 255, 2: 240, 3: 160, 4: 112}[self.consumers]
        if registers + _OTHER_REGISTERS > most:
            raise ValueError(
                f"B_c {self.B_c} with {self.consumers} warpgroups needs {registers} registers per "
                f"thread for O, S and P, of {most}: lower B_c or B_r"
            )

    def _check_barriers(self) -> None:
        """Raises ValueError for more slots than the place of the barriers has room for: two of 8
        bytes for each slot, and 16 bytes for the place of a tile in each slot of Q."""
        slots = self.tiles_of_Q + self.K_slots + self.V_slots
        needed = CHUNK_BYTES * (slots + self.tiles_of_Q)
        if needed > BARRIER_BYTES:
            raise ValueError(
                f"{self.tiles_of_Q} slots of Q, {self.K_slots} of K and {self.V_slots} of V need "
                f"{needed} bytes for their barriers, over the limit {BARRIER_BYTES}: lower one of "
                "them"
            )


_OTHER_REGISTERS = 24  # of a thread that computes, beside O, S and P
# Runs of an instruction for a pass over a tile of K and V where rows may be computed again, in
# loops that are not unrolled.
_RUNS_PER_REPLAYED_TILE = 40


def _in_pieces(columns: int) -> int:
    """Return the columns of whole pieces that hold so many."""
    return -(-columns // PIECE) * PIECE


def tensor_map(
    name: str,
    problem: AttentionForward,
    strides: tuple[int, ...],
    rows: int,
    pieces: int | None = None,
    *,
    from_begins: bool = False,
) -> TensorMap:
    """Return boxes of some rows of one head, in so many pieces of 128-byte rows, all by default.
    Where the last piece is not whole, a box is one piece of a row that is clipped.

    Sequences of various lengths end as rows of a batch do. The map begins as many rows before the
    tensor as it has, and the next batch a row behind the one before. So in batch e the row behind
    the last is row e of the tensor: a sequence with its end at e has its rows before that.
    `from_begins`: the map begins with the tensor. So in batch b row 0 is row b of the tensor, and
    rows before a sequence that begins there are outside.

    A stride of 0 is that of a dimension of size 1, or of one tensor expanded along it.
    """
    (shape,) = (tensor.shape for tensor in problem.tensors if tensor.name == name)
    batch, length, heads, columns = shape
    width, in_row = (columns, 1) if columns % PIECE else (PIECE, columns // PIECE)
    of_batch, of_row, of_head, _ = strides
    before = 0
    if problem.sequences:
        batch, of_batch, before = length + 1, of_row, 0 if from_begins else length
    sizes = (width, length, in_row, heads, batch)
    in_elements = (of_row, PIECE, of_head, of_batch)
    return TensorMap(
        name,
        problem.dtype,
        dims=sizes,
        strides=tuple(stride * ELEMENT_BYTES for stride in in_elements),
        box=(PIECE, rows, pieces or in_row, 1, 1),
        swizzle=PIECE * ELEMENT_BYTES,
        offset=-before * of_row * ELEMENT_BYTES,
    )
