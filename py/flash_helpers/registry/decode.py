"""The decode family: few queries on a cache with TMA and `wgmma`, for compute capability 9.0.

Standard library only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.gpu import Device
from flash_helpers.operations.decode import OPERATION
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.supports import ALWAYS, USUAL_PIECE, DecodeSupports
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
    TensorMap,
)
from flash_helpers.registry.config import Config, buildable_sizes, element, number
from flash_helpers.registry.decode_arguments import (
    GIVEN,
    MAX_LENGTH,
    given_names,
    most_pieces,
    option_values,
)
from flash_helpers.registry.family import HELD_BACK, LAST_RESORT, Family, StepEntry
from flash_helpers.registry.mma_sync import DTYPES, ELEMENT_BYTES
from flash_helpers.registry.problem import Element, Strides
from flash_helpers.registry.wgmma import (
    BARRIER_BYTES,
    CHUNK_BYTES,
    MAX_STRIDE,
    PRODUCER,
    PROGRAMMATIC,
    TARGET,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
    tensor_map,
)

DECODE, COMBINE = "decode_kernel", "combine_kernel"

ARRIVALS = "arrivals"  # the buffer of the counters of parts that are stored
PARTS = "parts"  # the buffer of m, l and O in float32 of each piece of each tile
LEAST_PIECE = 128  # keys
MAX_BLOCKS = 2**30  # of keys, where shares are equal: their number and that of a share are an int
GROUPS = 4  # warpgroups that add up the parts of a tile, where shares are equal
MOST_TURNS = 4  # of thread blocks that an SM takes, until pieces leave few SMs idle
LEAST_BUSY = (17, 20)  # of the SMs in all turns
STEP_BUSY = (19, 20)  # of the thread blocks that there is room for, where shares are in step

# Traits of steps.
PAGED = "paged"  # the cache may lie in pages
PIECES = "pieces"  # of a sequence's keys have thread blocks of their own
SHARES = "shares"  # of all sequences' keys, one for each SM
FIXED_SIZE = "fixed_size"  # of pieces, which begin at the same keys in every sequence
IN_STEP = "in_step"  # thread blocks of all tiles of a sequence have the same share of its keys
ONE_LAUNCH = "one_launch"  # the last thread block to store a part of a tile adds them up
TENSOR_CORES = "tensor_cores"  # TMA puts tiles into shared memory, where wgmma finds them

_POINTERS = MappingProxyType({"Q": "q", "K_gmem": "k", "V_gmem": "v", "O": "o"})
_STRIDES = MappingProxyType({f"{name.upper()}_strides": name for name in "qkvo"})
_MAPS = MappingProxyType({"K": "k", "V": "v"})

ARGUMENTS = StructLayout(
    "DecodeKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(_MAPS, TENSOR_MAP),
            **dict.fromkeys(_POINTERS, POINTER),
            **dict.fromkeys(_STRIDES, STRIDES),
            **dict.fromkeys(GIVEN[:-1], POINTER),
            **dict.fromkeys(("len_q", "len_k", "kv_heads", "heads_per_kv"), INT),
            **dict.fromkeys(("scale", "scale_in_cap"), FLOAT),
            **dict.fromkeys(("window_left", "window_right"), INT),
            "block_table": POINTER,
            **dict.fromkeys(("table_blocks", "page_size", "pages", "box", "pieces"), INT),
            "keys_per_piece": INT,
            PARTS: POINTER,
            "batch": INT,
            ARRIVALS: POINTER,
        }
    ),
)


@dataclass(frozen=True)
class DecodeKernelConfig(Config):
    """A kernel of the decode family.

    `B_r`: queries and heads of a tile, which share keys. `B_c`: keys of a block of K and V.
    `slots`: blocks of K and V in shared memory. `warpgroups`: those that compute, each with blocks
    of its own.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "d1_bf16_d128_Br4_Bc64"

    decode: int = number("d", "the step")
    dtype: Element = element()
    d_head: int = number("d")
    B_r: int = number("Br", "queries and heads of a tile, which share keys")
    B_c: int = number("Bc", "keys of a block of K and V")
    slots: int = number("sl", "blocks of K and V in shared memory", default=1)
    warpgroups: int = number("wg", "warpgroups that compute", default=1)

    @property
    def family(self) -> Family[Any]:
        """The decode family."""
        return DECODE_FAMILY

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.warpgroups * WARPGROUP + (PRODUCER in self.step.traits) * gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: in the first step the sums of the streams,
        with m and l; later the tiles, in whose place these come, 16 bytes per row that the warps
        of a warpgroup exchange, and barriers."""
        if TENSOR_CORES not in self.step.traits:
            streams = self.n_threads * CHUNK_BYTES // ELEMENT_BYTES // self.d_head
            return streams * self.B_r * (self.d_head + 2) * FLOAT.size
        tiles = (2 * self.slots * self.B_c + self.B_r) * self.d_head
        of_warpgroup = self.B_r * (self.B_c * ELEMENT_BYTES + CHUNK_BYTES)
        return tiles * ELEMENT_BYTES + self.warpgroups * of_warpgroup + BARRIER_BYTES

    def variants(self) -> tuple[DecodeKernelConfig, ...]:
        """Return the config, and those of the other head sizes."""
        return _variants(self)

    def of_size(self, d_head: int) -> DecodeKernelConfig:
        """Return the config with another head size, and as many bytes of K and V."""
        slots = max(1, self.slots * self.d_head // d_head) if self.slots > 1 else 1
        return self.replace(d_head=d_head, slots=slots)

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if TENSOR_CORES not in self.step.traits:
            return
        for name, known in (("d_head", HEAD_SIZES), ("B_r", TILE_ROWS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not built: choose one of "
                    f"{', '.join(map(str, known))}"
                )
        if not 1 <= self.warpgroups <= 2:
            raise ValueError(f"warpgroups {self.warpgroups} is not 1 or 2: choose one of these")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots {self.slots} is not from 1 to {MAX_SLOTS}: choose 6")
        limit = gpu.LIMITS[gpu.capability_of(f"sm_{TARGET}")].smem_bytes
        if self.smem_bytes > limit:
            raise ValueError(
                f"{self.slots} slots and B_r {self.B_r} need {self.smem_bytes} bytes of shared "
                f"memory at d_head {self.d_head}, over the limit {limit}: lower one of them"
            )

    @property
    def supports(self) -> DecodeSupports:
        """Caches of any lengths, with one head size."""
        return DecodeSupports(
            dtype=self.dtype,
            d_heads=(self.d_head,),
            blocks=MappingProxyType({}),
            alignment=CHUNK_BYTES,
            max_row_stride=MAX_STRIDE,
            max_stride=MAX_STRIDE,
            max_length=MAX_LENGTH,
            B_r=self.B_r,
            B_c=self.B_c,
            abilities=ALWAYS,
            pages=PAGED in self.step.traits,
            max_heads=gpu.MAX_GRID[1] // self._grid_share,
            max_blocks=MAX_BLOCKS if SHARES in self.step.traits else None,
            max_pieces=self._max_pieces,
            keys_per_piece=FIXED_SIZE in self.step.traits,
        )

    @property
    def _grid_share(self) -> int:
        """A call may have one of so many tiles that a grid has room for. Pieces of a fixed size may
        be as many as a grid has room for, and exported calls count their bytes in 64 bits."""
        return 4 if FIXED_SIZE in self.step.traits else 1

    @property
    def _max_pieces(self) -> int:
        """The most pieces of a sequence's keys that a call may ask for."""
        if self.step.traits & {SHARES, FIXED_SIZE}:
            return 0
        return gpu.MAX_GRID[2] if PIECES in self.step.traits else 1

    def _values(self, problem: Decode, strides: Strides) -> dict[str, tuple[float, ...]]:
        """Return the members of the arguments that are neither addresses nor tensor maps."""
        return {
            **{member: strides[name][:3] for member, name in _STRIDES.items()},
            **option_values(problem),
            "pages": (problem.kv_shape[0],),
            "box": (self._box_keys(problem),),
            "batch": (problem.batch,),
        }

    @property
    def functions(self) -> tuple[str, ...]:
        """decode_kernel, and with pieces combine_kernel."""
        has_parts = PIECES in self.step.traits and ONE_LAUNCH not in self.step.traits
        return (DECODE, COMBINE) if has_parts else (DECODE,)

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel."""
        if kernel == COMBINE:
            return WARPGROUP * (GROUPS if SHARES in self.step.traits else 1), 0
        return self.n_threads, self.smem_bytes

    def pieces(self, problem: Decode, device: Device) -> int:
        """Return the pieces of the keys of a tile; if they have a fixed size, the most that it sees
        a key of."""
        if FIXED_SIZE in self.step.traits:
            return most_pieces(problem, self.keys_per_piece(problem))
        return self._equal_pieces(problem, device)

    def keys_per_piece(self, problem: Decode) -> int:
        """Return the keys of a piece that have a fixed size, 0 of those that have not: as many as
        the problem asks for, or USUAL_PIECE, and no more than there is room for."""
        if FIXED_SIZE not in self.step.traits:
            return 0
        step = self.supports.B_c
        room = -(-problem.len_k // step) * step
        return min(problem.keys_per_piece or USUAL_PIECE, room)

    def _equal_pieces(self, problem: Decode, device: Device) -> int:
        """Return the equal pieces of the keys of a tile, as many as the problem asks for.

        Else they are as many as the SMs take in one turn, or in as few turns as keep LEAST_BUSY of
        them busy; of LEAST_PIECE keys or more if a sequence has as many as it may.
        """
        if PIECES not in self.step.traits or SHARES in self.step.traits:
            return 1
        if problem.pieces:  # a sequence has no more blocks
            return min(problem.pieces, -(-problem.len_k // self.B_c))
        tiles = problem.batch * self.supports.tiles(problem)
        busy, of_all = LEAST_BUSY
        for turns in range(1, MOST_TURNS + 1):
            room = turns * device.sms
            if of_all * (room % tiles) <= (of_all - busy) * room:
                break
        most = min(-(-problem.len_k // LEAST_PIECE), gpu.MAX_GRID[2])
        return max(1, min(room // tiles, most))

    def shares(self, problem: Decode, device: Device) -> int:
        """Return the thread blocks that have an equal share of the work each: as many as an SM has
        shared memory for."""
        limit = gpu.LIMITS[gpu.capability_of(f"sm_{TARGET}")].smem_bytes
        reserved = gpu.RESERVED_SMEM_BYTES
        per_sm = (limit + reserved) // (self.smem_bytes + reserved)
        return min(device.sms * per_sm, self._divisible(problem))

    def _share_grid(self, problem: Decode, device: Device) -> tuple[int, int, int]:
        """Return the grid of shares: in step, of a thread block for each tile of a sequence and of
        as many shares, if few SMs are idle then."""
        shares, tiles = self.shares(problem, device), self.supports.tiles(problem)
        busy, of_all = STEP_BUSY
        if IN_STEP not in self.step.traits:
            return shares, 1, 1
        if of_all * (shares % tiles) <= (of_all - busy) * shares and tiles <= shares:
            return tiles, shares // tiles, 1
        return 1, shares, 1

    def _divisible(self, problem: Decode) -> int:
        """Return the pieces of a fixed size of all tiles, or their blocks of keys, of which shares
        are made."""
        if FIXED_SIZE in self.step.traits:
            most = most_pieces(problem, self.keys_per_piece(problem))
            return problem.batch * self.supports.tiles(problem) * most
        return self.supports.key_blocks(problem)

    def _box_keys(self, problem: Decode) -> int:
        """Return the keys that TMA copies at once: as many as divide a block and a page."""
        size = self.B_c
        while problem.page_size and size > 1 and problem.page_size % size:
            size //= 2
        return size

    def _tensor_map(self, name: str, problem: Decode, strides: Strides) -> TensorMap:
        """Return the boxes of K or V: blocks of keys, or as many keys as divide a page, in one
        piece of their columns. L2 gets the 128 bytes of a row of a box at once, as many as one
        piece has, and not the 256 that hold the second as well: that is copied right after it."""
        rows, pieces = self._box_keys(problem), 1 if PAGED in self.step.traits else None
        return replace(tensor_map(name, problem, strides[name], rows, pieces), l2_promotion=128)

    def call(self, problem: Decode, strides: Strides, device: Device) -> Call:
        """Return the launch, with one block per sequence, head of K, tile of queries and piece; and
        the one that adds up several pieces."""
        names = {**_POINTERS, **given_names(problem)}
        pieces = self.pieces(problem, device)
        functions: tuple[str, ...] = (DECODE,)
        buffers: tuple[Buffer, ...] = ()
        tiles = self.supports.tiles(problem)
        grid = (problem.batch, tiles, pieces)
        parts, counters = pieces * tiles * problem.batch, tiles * problem.batch
        has_parts = pieces > 1
        if SHARES in self.step.traits:
            grid = self._share_grid(problem, device)
            if FIXED_SIZE not in self.step.traits:
                counters = grid[0] * grid[1]
                parts = counters + tiles * problem.batch
                has_parts = True
        if has_parts:
            functions = self.functions
            part = self.B_r * (self.d_head + 2) * FLOAT.size
            names[PARTS] = PARTS
            buffers = (Buffer(PARTS, parts * part, zeroed=False),)
            if ONE_LAUNCH in self.step.traits:
                names[ARRIVALS] = ARRIVALS
                size = counters * INT.size
                buffers += (Buffer(ARRIVALS, size, zeroed=True, left_zeroed=True),)
        launches = tuple(
            Launch(
                kernel=self.kernels[function],
                grid=grid if function == DECODE else (*grid[:2], 1),
                block=self.block(function)[0],
                shared_bytes=self.block(function)[1],
                layout=ARGUMENTS,
                values=self._values(problem, strides)
                | {
                    "pieces": (pieces,),
                    "keys_per_piece": (self.keys_per_piece(problem),),
                },
                addresses=tuple(
                    Address(ARGUMENTS.offset(member), name) for member, name in names.items()
                ),
                tensor_maps=tuple(
                    (ARGUMENTS.offset(member), self._tensor_map(name, problem, strides))
                    for member, name in _MAPS.items()
                ),
                programmatic=function == COMBINE or PROGRAMMATIC in self.step.traits,
            )
            for function in functions
        )
        return Call(launches, buffers)

    def work(self, problem: Decode, device: Device) -> float:
        """Return the keys that thread blocks read, in whole blocks, as many on each SM as on the
        busiest."""
        if SHARES in self.step.traits:
            size = self.keys_per_piece(problem) or self.B_c
            return -(-self._divisible(problem) // device.sms) * device.sms * size
        pieces = self.pieces(problem, device)
        blocks = problem.batch * self.supports.tiles(problem) * pieces
        keys = -(-problem.len_k // (self.B_c * pieces)) * self.B_c
        return -(-blocks // device.sms) * device.sms * keys

    def most_runs(self, problem: Decode, device: Device) -> int:
        """Return twice the blocks of keys, and as much as the loops before and behind them take."""
        outputs = self.B_r * self.d_head * ELEMENT_BYTES // CHUNK_BYTES // self.n_threads
        pieces, blocks = self.pieces(problem, device), -(-problem.len_k // self.B_c)
        if SHARES in self.step.traits:
            size = max(1, self.keys_per_piece(problem) // self.B_c)  # of a part in blocks
            pieces = self.shares(problem, device)
            blocks = (self._divisible(problem) // pieces + 1) * size + problem.batch
        return 2 * (blocks + outputs * (pieces + 1) + 8)

    @property
    def loop_unit(self) -> tuple[str, int]:
        """A block of keys, and the tensor instructions of a warp for both of its products."""
        if TENSOR_CORES not in self.step.traits:
            return "block of K and V", 0
        tiles = self.d_head // WGMMA_M
        return "block of K and V", self.d_head // WGMMA_K + tiles * (WGMMA_M // WGMMA_K)

    def loop_runs(self, size: int) -> int:
        """Return the number of blocks of so many keys."""
        return -(-size // self.B_c)


HEAD_SIZES = (64, 128, 256)
TILE_ROWS = (8, 16, 32, 64)  # N of the wgmma that src/include/sm90/wgmma_narrow.cuh has names for

MAX_SLOTS = BARRIER_BYTES // 16  # two mbarriers each

_BASE: Mapping[str, Any] = MappingProxyType(
    {"d_head": 128, "B_r": 4, "B_c": 64, "slots": 1, "warpgroups": 1}
)


@functools.cache  # a choice asks for them at each call
def _variants(own: DecodeKernelConfig) -> tuple[DecodeKernelConfig, ...]:
    if "d_head" not in own.step.tunable:
        return (own,)
    return buildable_sizes(own, HEAD_SIZES)


def listed_variants() -> list[DecodeKernelConfig]:
    """Return the configs of the other head sizes of d12 and d13, each in one dtype and with other
    rows."""
    found = []
    for step in ("d12", "d13"):
        own = DECODE_FAMILY.fixed_config(DECODE_FAMILY.steps[step], Element.BF16)
        sizes = [own.of_size(size) for size in HEAD_SIZES if size != own.d_head]
        found += [
            config.replace(dtype=DTYPES[n % 2], B_r=TILE_ROWS[n + 1])
            for n, config in enumerate(sizes)
        ]
    return found


def _file(number: int) -> str:
    return f"kernels/decode/d{number}.cuh"


DECODE_FAMILY = Family(
    name="decode",
    operation=OPERATION,
    title="few queries on a cache of keys, on Hopper's own units",
    prefix="d",
    rank=10,
    config=DecodeKernelConfig,
    base=_BASE,
    entries=(
        StepEntry(
            "cuda_cores",
            "a thread block per sequence and head of K; 16 bytes per load, products in fp32",
            _file(1),
            parent="c1",
        ),
        StepEntry(
            "few_columns",
            "wgmma with the queries of a group as its few columns: S^T = K @ Q^T, O^T = V^T @ P^T",
            _file(2),
            sets={"B_r": 8},
            opens={"d_head": (128,), "B_r": TILE_ROWS},
            traits=frozenset({TENSOR_CORES}),
        ),
        StepEntry(
            "ring",
            "a warp loads K and V into a ring of slots, as many as shared memory has room for",
            _file(3),
            sets={"slots": 6},
            opens={"slots": (2, 3, 6), "warpgroups": (1, 2)},
            traits=frozenset({PRODUCER}),
        ),
        StepEntry(
            "pages",
            "the cache in pages of any size, which TMA copies in boxes that divide a page",
            _file(4),
            traits=frozenset({PAGED}),
        ),
        StepEntry(
            "pieces",
            "pieces of a sequence's keys have thread blocks, which a second kernel adds up",
            _file(5),
            traits=frozenset({PIECES, LAST_RESORT}),  # for calls that ask for `pieces`
        ),
        StepEntry(
            "shares",
            "equal shares of all sequences' keys for the SMs, planned on the device",
            _file(6),
            sets={"slots": 3},
            opens={"warpgroups": (1,)},
            traits=frozenset({SHARES}),
        ),
        StepEntry(
            "programmatic_launches",
            "a call begins while the one before ends, and waits for it on the device",
            _file(7),
            traits=frozenset({PROGRAMMATIC}),
        ),
        StepEntry(
            "fixed_pieces",
            "pieces of one size in every sequence, so that no result depends on the others",
            _file(8),
            sets={"slots": 6},
            opens={"warpgroups": (1, 2)},
            traits=frozenset({FIXED_SIZE, HELD_BACK}),
            drops=frozenset({SHARES, PROGRAMMATIC}),
            parent="d5",
        ),
        StepEntry(
            "one_launch",
            "the last thread block to store a part of a tile adds up all of them",
            _file(9),
            sets={"slots": 3},
            opens={"warpgroups": (1,)},
            traits=frozenset({SHARES, PROGRAMMATIC, ONE_LAUNCH, HELD_BACK}),
            drops=frozenset({FIXED_SIZE}),
            parent="d7",
        ),
        StepEntry(
            "heads_in_step",
            "thread blocks of all heads of K read the same keys at the same time",
            _file(10),
            traits=frozenset({IN_STEP, HELD_BACK}),
        ),
        StepEntry(
            "tile_bounds",
            "the keys that a tile sees are bounded once, and not for each block of keys",
            _file(11),
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "early_prefetch",
            "the first keys are on their way to L2 before the launch before has ended",
            _file(12),
            sets={"slots": 6},
        ),
        StepEntry(
            "shares_of_pieces",
            "thread blocks go from one piece of a fixed size to the next without a pause",
            _file(13),
            sets={"slots": 3},
            traits=frozenset({FIXED_SIZE, LAST_RESORT}),
        ),
    ),
    targets=(TARGET,),
    kernels=MappingProxyType(dict.fromkeys((DECODE, COMBINE), ARGUMENTS)),
    header=PurePosixPath("kernels/decode/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=7_200_000,
    matrix_budget=40_000_000,
    also_listed=listed_variants,
)
