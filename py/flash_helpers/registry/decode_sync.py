"""The decode_sync family: few queries on a cache with `mma.sync`, on every GPU from sm_80 on.

Standard library only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
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
    Address,
    Buffer,
    Call,
    Launch,
    StructLayout,
)
from flash_helpers.registry.config import Config, buildable_sizes, element, number
from flash_helpers.registry.decode_arguments import (
    GIVEN,
    MAX_LENGTH,
    given_names,
    most_pieces,
    option_values,
)
from flash_helpers.registry.family import LAST_RESORT, Family, Step, StepEntry
from flash_helpers.registry.mma_sync import (
    CHUNK_BYTES,
    DTYPES,
    ELEMENT_BYTES,
    MAX_WARPS,
    MMA_K,
    MMA_M,
    MMA_N,
    TARGETS,
)
from flash_helpers.registry.problem import Element, Strides

# Traits of steps.
RING = "ring"  # blocks are copied while one is multiplied
PAGED = "paged"  # the cache may lie in pages
PIECES = "pieces"  # of a sequence's keys have thread blocks of their own
FIXED_SIZE = "fixed_size"  # of pieces, which begin at the same keys in every sequence
FP8 = "fp8"  # the cache is in e4m3, with scales

SCALES = ("k_scale", "v_scale")
# Buffers: of each piece m and l, and O in float32.
STATISTICS, O_PARTS = "statistics", "O_parts"
STATISTICS_BYTES = 8
BLOCKS_PER_SM = 2  # that pieces are to give
LEAST_PIECE = 256  # keys
FP8_PIECE = 64  # columns of which rows of 64 or 128 bytes of fp8 are made

DECODE, COMBINE = "decode_kernel", "combine_kernel"
_POINTERS = {name.upper(): name for name in "qkvo"}

ARGUMENTS = StructLayout(
    "DecodeSyncKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(_POINTERS, POINTER),
            **{f"{name}_strides": STRIDES for name in _POINTERS},
            **dict.fromkeys(GIVEN[:-1], POINTER),
            **dict.fromkeys(("len_q", "len_k", "kv_heads", "heads_per_kv"), INT),
            **dict.fromkeys(("scale", "scale_in_cap"), FLOAT),
            **dict.fromkeys(("window_left", "window_right"), INT),
            "block_table": POINTER,
            **dict.fromkeys(("table_blocks", "page_size", "pieces", "keys_per_piece"), INT),
            **dict.fromkeys((STATISTICS, O_PARTS, *SCALES), POINTER),
        }
    ),
)


@dataclass(frozen=True)
class DecodeSyncKernelConfig(Config):
    """A kernel of the decode_sync family.

    A tile has MMA_M queries that share keys. Raises ValueError, with the reason and a way out, for
    a config that no kernel can be built for.
    """

    example: ClassVar[str] = "c1_bf16_d128_Bc16_w4"

    decode_sync: int = number("c", "the step")
    dtype: Element = element()
    d_head: int = number("d")
    B_c: int = number("Bc", "keys of a warp's block")
    n_warps: int = number("w")
    stages: int = number("st", "blocks of a warp in shared memory; 1 before c2", default=1)

    @property
    def family(self) -> Family[Any]:
        """The decode_sync family."""
        return DECODE_SYNC

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: Q and each warp's blocks of K and V; at
        the end O of each warp in fp32, with m and l."""
        blocks = 2 * self.n_warps * self.stages * self.B_c * self.cache_bytes
        sums = self.n_warps * MMA_M * (self.d_head + 2) * FLOAT.size
        return max((MMA_M * ELEMENT_BYTES + blocks) * self.d_head, sums)

    @property
    def cache_bytes(self) -> int:
        """Bytes of an element of K and V."""
        return (Element.FP8 if FP8 in self.step.traits else self.dtype).bytes

    def variants(self) -> tuple[DecodeSyncKernelConfig, ...]:
        """Return the config, and those of the other head sizes."""
        return _variants(self)

    def of_size(self, d_head: int) -> DecodeSyncKernelConfig:
        """Return the config of the same step and dtype with the usual warps of a head size."""
        return self.replace(d_head=d_head, n_warps=WARPS[d_head])

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        if self.d_head not in WARPS:
            raise ValueError(
                f"d_head {self.d_head} is not built: choose one of "
                f"{', '.join(map(str, WARPS))}, and pad with zeros"
            )
        if FP8 in self.step.traits and self.d_head % FP8_PIECE:
            sizes = ", ".join(str(size) for size in WARPS if size % FP8_PIECE == 0)
            raise ValueError(
                f"d_head {self.d_head} is not built for a cache in fp8: choose one of {sizes}, and "
                "pad with zeros"
            )
        if self.B_c not in (16, 32):
            raise ValueError(f"B_c {self.B_c} is not 16 or 32: choose one of these")
        if not 1 <= self.n_warps <= MAX_WARPS:
            raise ValueError(f"n_warps {self.n_warps} is not from 1 to {MAX_WARPS}: choose 4")
        if RING in self.step.traits and self.stages < 2:
            raise ValueError(f"stages {self.stages}: a ring has 2 at least: choose 2")
        most = {target: gpu.LIMITS[int(target)].smem_bytes for target in TARGETS}
        if self.smem_bytes > max(most.values()):
            limits = ", ".join(f"sm_{target} {limit}" for target, limit in most.items())
            raise ValueError(
                f"B_c {self.B_c}, n_warps {self.n_warps} and stages {self.stages} need "
                f"{self.smem_bytes} bytes of shared memory, over every limit ({limits}): lower one "
                "of them"
            )

    @property
    def supports(self) -> DecodeSupports:
        """Caches of any lengths, with one head size."""
        return DecodeSupports(
            dtype=self.dtype,
            d_heads=(self.d_head,),
            blocks=MappingProxyType({}),
            alignment=CHUNK_BYTES,
            max_row_stride=2**63 - 1,
            max_length=MAX_LENGTH,
            B_r=MMA_M,
            B_c=self.n_warps * self.B_c,
            abilities=ALWAYS,
            pages=PAGED in self.step.traits,
            max_pieces=self._max_pieces,
            keys_per_piece=FIXED_SIZE in self.step.traits,
            fp8_cache=FP8 in self.step.traits,
        )

    @property
    def _max_pieces(self) -> int:
        """The most pieces of a sequence's keys that a call may ask for."""
        if FIXED_SIZE in self.step.traits:
            return 0
        return gpu.MAX_GRID[2] if PIECES in self.step.traits else 1

    def _values(self, problem: Decode, strides: Strides) -> dict[str, tuple[float, ...]]:
        """Return the members of the arguments that are no addresses."""
        return {
            **{f"{member}_strides": strides[name][:3] for member, name in _POINTERS.items()},
            **option_values(problem),
        }

    @property
    def functions(self) -> tuple[str, ...]:
        """decode_kernel, and with pieces combine_kernel."""
        return (DECODE, COMBINE) if PIECES in self.step.traits else (DECODE,)

    def block(self, kernel: str) -> tuple[int, int]:
        """Return the threads and the bytes of dynamic shared memory per block of a kernel."""
        return self.n_threads, self.smem_bytes if kernel == DECODE else 0

    def pieces(self, problem: Decode, device: Device) -> int:
        """Return the pieces of each sequence's keys; if they have a fixed size, the most that its
        queries see a key of."""
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
        """Return the equal pieces of each sequence's keys, as many as the problem asks for.

        Else they are as many as give each SM BLOCKS_PER_SM thread blocks or up to twice as many, of
        LEAST_PIECE keys or more if a sequence has all that it may.
        """
        if PIECES not in self.step.traits:
            return 1
        if problem.pieces:  # a sequence has no more blocks of all warps
            return min(problem.pieces, -(-problem.len_k // self.supports.B_c))
        blocks = problem.batch * self.supports.tiles(problem)
        # rounded up, in a form whose range an export can tell
        wanted = 1 + (BLOCKS_PER_SM * device.sms - 1) // blocks
        return min(wanted, -(-problem.len_k // LEAST_PIECE))

    def call(self, problem: Decode, strides: Strides, device: Device) -> Call:
        """Return the launch, with one block per sequence, head of K, tile of queries and piece; and
        the one that adds up several pieces."""
        names = {**_POINTERS, **given_names(problem)}
        names |= {name: name for name in SCALES if getattr(problem, name)}
        pieces = self.pieces(problem, device)
        functions: tuple[str, ...] = (DECODE,)
        buffers: tuple[Buffer, ...] = ()
        tiles = self.supports.tiles(problem)
        if pieces > 1:
            functions = self.functions
            rows = pieces * tiles * problem.batch * MMA_M
            sizes = {STATISTICS: STATISTICS_BYTES, O_PARTS: self.d_head * FLOAT.size}
            names |= {name: name for name in sizes}
            buffers = tuple(Buffer(name, rows * size, zeroed=False) for name, size in sizes.items())
        launches = tuple(
            Launch(
                kernel=self.kernels[function],
                grid=(problem.batch, tiles, pieces if function == DECODE else 1),
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
            )
            for function in functions
        )
        return Call(launches, buffers)

    def work(self, problem: Decode, device: Device) -> float:
        """Return the keys that thread blocks read, in whole blocks, as many on each SM as on the
        busiest."""
        pieces = self.pieces(problem, device)
        blocks = problem.batch * self.supports.tiles(problem) * pieces
        per_warp = -(-problem.len_k // (self.n_warps * self.B_c * pieces))
        return -(-blocks // device.sms) * device.sms * per_warp * self.n_warps * self.B_c

    def most_runs(self, problem: Decode, device: Device) -> int:
        """Return twice the blocks of keys of a warp, and as much as the loops before and behind
        them take."""
        outputs = MMA_M * self.d_head * ELEMENT_BYTES // CHUNK_BYTES // self.n_threads
        pieces = self.pieces(problem, device)
        return 2 * (-(-problem.len_k // self.B_c) + outputs * (pieces + 1) + 8)

    @property
    def loop_unit(self) -> tuple[str, int]:
        """A block of keys of a warp, and the tensor instructions for both of its products."""
        return "block of K and V", 2 * (self.B_c // MMA_N) * (self.d_head // MMA_K)

    def loop_runs(self, size: int) -> int:
        """Return the number of blocks of a warp."""
        return -(-size // (self.n_warps * self.B_c))


# Warps of a thread block by head size: two blocks of each fit into 99 KB, which sm_86 has.
WARPS: Mapping[int, int] = MappingProxyType({64: 4, 96: 4, 128: 4, 192: 2, 256: 2})

_BASE: Mapping[str, Any] = MappingProxyType({"d_head": 128, "B_c": 16, "n_warps": 4, "stages": 1})


@functools.cache  # a choice asks for them at each call
def _variants(own: DecodeSyncKernelConfig) -> tuple[DecodeSyncKernelConfig, ...]:
    return buildable_sizes(own, WARPS)


def listed_variants() -> list[DecodeSyncKernelConfig]:
    """Return the configs of the other head sizes of the steps that calls take, each in one
    dtype."""
    return [
        DECODE_SYNC.fixed_config(step, DTYPES[n % 2]).of_size(size)
        for step in DECODE_SYNC.preferred
        for n, size in enumerate(_other_sizes(step))
    ]


def _other_sizes(step: Step) -> list[int]:
    """Return the head sizes besides the step's own; of a cache in fp8 the most usual one alone."""
    sizes = (64,) if FP8 in step.traits else WARPS
    return [size for size in sizes if size != _BASE["d_head"]]


def _file(number: int) -> str:
    return f"kernels/decode_sync/c{number}.cuh"


DECODE_SYNC = Family(
    name="decode_sync",
    operation=OPERATION,
    title="few queries on a cache of keys with `mma.sync`",
    prefix="c",
    rank=9,
    config=DecodeSyncKernelConfig,
    base=_BASE,
    entries=(
        StepEntry(
            "queries_of_a_group",
            "a thread block per sequence and head of K; the queries that share it are one tile",
            _file(1),
            opens={"d_head": (128,), "B_c": (16, 32), "n_warps": (2, 4, 8)},
        ),
        StepEntry(
            "next_blocks_in_flight",
            "the next blocks are copied while a block is multiplied",
            _file(2),
            sets={"stages": 2},
            opens={"stages": (2, 3, 4)},
            traits=frozenset({RING}),
        ),
        StepEntry(
            "pages",
            "the cache in pages of any size, looked up a block ahead",
            _file(3),
            traits=frozenset({PAGED}),
        ),
        StepEntry(
            "split_keys",
            "pieces of a sequence's keys have thread blocks, which a second kernel adds up",
            _file(4),
            traits=frozenset({PIECES}),
        ),
        StepEntry(
            "fixed_pieces",
            "pieces of one size in every sequence, so that no result depends on the others",
            _file(5),
            traits=frozenset({FIXED_SIZE, LAST_RESORT}),
        ),
        StepEntry(
            "fp8_cache",
            "a cache in fp8 with scales, converted in registers",
            _file(6),
            sets={"B_c": 32},
            traits=frozenset({FP8, LAST_RESORT}),
            drops=frozenset({FIXED_SIZE}),
            parent="c4",
        ),
    ),
    targets=TARGETS,
    kernels=MappingProxyType(dict.fromkeys((DECODE, COMBINE), ARGUMENTS)),
    header=PurePosixPath("kernels/decode_sync/arguments.cuh"),
    dtypes=DTYPES,
    computing=frozenset(),
    simulated_budget=11_500_000,
    matrix_budget=34_000_000,
    also_listed=listed_variants,
)
