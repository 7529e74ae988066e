"""The ampere family: one FlashAttention-2 forward kernel in sixteen steps, on the instructions of
compute capability 8.0: `mma.sync`, `ldmatrix`, `cp.async`. It is closed: what comes next is another
family. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.registry.config import Config, element, flag, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.launch import (
    INT,
    POINTER,
    STRIDES,
    Address,
    Launch,
    StructLayout,
)
from flash_helpers.registry.problem import ELEMENT_BYTES, AttentionForward, DType, Strides
from flash_helpers.registry.supports import Supports

CHUNK_BYTES = 16  # one cp.async, one row of an 8x8 ldmatrix tile
PIECE = 64  # columns: tiles are copied in pieces of 128-byte rows from step 15 on
MMA_M, MMA_N, MMA_K = 16, 8, 16  # of mma.m16n8k16: C is (M, N), the reduction K deep
MAX_WARPS = gpu.MAX_THREADS // gpu.WARP
# 32 warps step through 128 rows at a time in 32-bit arithmetic.
MAX_ROW_STRIDE = (2**31 - 1) // 128

# Traits of steps.
KEYS_BACKWARDS = "keys_backwards"  # the blocks of keys are walked from the last to the first
PIECES = "pieces"  # tiles lie in shared memory in pieces of PIECE columns

# How many mma-deep (16) slices of Q, K and V a warp loads into registers at once, from v4 on.
FRAGMENT_TILES: Mapping[str, int] = MappingProxyType(
    {"Q_mma_load_K_tiles": 1, "K_mma_load_K_tiles": 1, "V_mma_load_K_tiles": 1}
)

# Row stride in elements of a (batch, seq, 16 heads, 128) tensor: the benchmark's shape.
PROGRESSION_ROW_STRIDE = 16 * 128

# The tile shape that pays best on a large GPU, and how it loads its fragments. 32 rows a warp leave
# no room for Q in registers.
LARGE_TILE: Mapping[str, Any] = MappingProxyType(
    {"B_r": 128, "B_c": 64, "n_warps": 4, **FRAGMENT_TILES, "mma_double_buffer_loads": True}
)
LARGE_TILE_STEPS = ("v7", "v16")
STAGES_STEP = "v16"

# What the final kernel can have beyond the sixteen steps (src/include/two_stage.cuh), at the large
# tile.
TWO_STAGES: Mapping[str, Any] = MappingProxyType(
    {**LARGE_TILE, "kv_stages": 2, "lazy_rescale": True, "mma_row_sum": True}
)

ARGUMENTS = StructLayout(
    "ForwardKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys("QKVO", POINTER),
            **{f"{name}_strides": STRIDES for name in "QKVO"},
            "seq_len": INT,
        }
    ),
)


@dataclass(frozen=True)
class FlashForwardKernelConfig(Config):
    """One kernel of the ampere family.

    B_r, B_c: rows of a Q tile and of a K or V tile. d_head, static_row_stride: elements.
    Q/K/V_mma_load_K_tiles: slices of depth 16 loaded into registers at once; 0 is the whole tile
        (and for Q: loaded once and kept).
    static_row_stride: distance of two rows of the sequence; 0 is read at run time.
    kv_stages: buffers each for K and V in shared memory. With 2, lazy_rescale rescales O only when
        a row's maximum has grown much, and mma_row_sum has the tensor cores sum the rows of P.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0"

    version: int = number("v")
    dtype: DType = element()
    d_head: int = number("d")
    B_r: int = number("Br", "query rows of a thread block")
    B_c: int = number("Bc", "keys of one step of its main loop")
    n_warps: int = number("w")
    async_copy: bool = flag("async")
    eager_load_blocks: bool = flag("eager")
    swizzled: bool = flag("swizzled")
    Q_mma_load_K_tiles: int = number(
        "Q", "k-tiles of 16 that are loaded at once; 0 = the whole tile"
    )
    K_mma_load_K_tiles: int = number("K")
    V_mma_load_K_tiles: int = number("V")
    mma_double_buffer_loads: bool = flag("db")
    optimized_softmax: bool = flag("ffma")
    static_row_stride: int = number("rs", "in elements; 0 = read from the arguments", default=0)
    kv_stages: int = number("st", "buffers each for K and V in shared memory", default=1)
    lazy_rescale: bool = flag("lazy", "with two stages only, as the next", default=False)
    mma_row_sum: bool = flag("mmasum", default=False)

    @property
    def family(self) -> Family:
        """The ampere family."""
        return AMPERE

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * gpu.WARP

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a tile of Q (later O), kv_stages tiles each
        of K and V."""
        return (self.B_r + 2 * self.kv_stages * self.B_c) * self.d_head * ELEMENT_BYTES

    @property
    def row_tiles(self) -> int:
        """Tiles of MMA_M rows that a warp has."""
        return self.B_r // self.n_warps // MMA_M

    @property
    def mma_per_product(self) -> int:
        """`mma`s of a warp for Q @ K^T of one block of keys, and as many for P @ V."""
        return self.row_tiles * (self.B_c // MMA_N) * (self.d_head // MMA_K)

    @property
    def mma_per_key_block(self) -> int:
        """`mma`s of a warp for one block of keys: both products, and the row sums as one column
        tile more of P @ V."""
        row_sums = self.row_tiles * (self.B_c // MMA_K) if self.mma_row_sum else 0
        return 2 * self.mma_per_product + row_sums

    def key_blocks(self, seq_len: int) -> range:
        """The blocks of keys in the order in which the kernel walks them."""
        blocks = range(-(-seq_len // self.B_c))
        return blocks[::-1] if KEYS_BACKWARDS in self.step.traits else blocks

    @property
    def supports(self) -> Supports:
        """Whole blocks of queries and keys, not causal."""
        return Supports(
            dtype=self.dtype,
            d_heads=(self.d_head,),
            blocks=MappingProxyType({"B_r": self.B_r, "B_c": self.B_c}),
            chunk_bytes=CHUNK_BYTES,
            max_row_stride=MAX_ROW_STRIDE,
        )

    def general(self) -> FlashForwardKernelConfig:
        """The config that takes over when a tensor's row stride is not the static one."""
        return self.replace(static_row_stride=0)

    def siblings(self) -> tuple[FlashForwardKernelConfig, ...]:
        """The config and its general one."""
        return (self, self.general()) if self.static_row_stride else (self,)

    def runs_as(self, strides: Mapping[str, Strides]) -> FlashForwardKernelConfig:
        """The config itself, or the general one where a tensor has another row stride."""
        rows = {found.row for found in strides.values()}
        return self if rows == {self.static_row_stride} else self.general()

    def own_row_stride(self, problem: AttentionForward) -> int:
        """The static row stride, where there is one."""
        return self.static_row_stride or problem.row_stride

    def launch(
        self, problem: AttentionForward, strides: Mapping[str, Strides]
    ) -> tuple[Launch, ...]:
        """A block for each tile of queries, head and batch; several launches for more batches than
        a grid has along z."""
        values = {"seq_len": (problem.seq_len,)}
        values |= {f"{name.upper()}_strides": astuple(strides[name]) for name in "qkvo"}
        arguments = ARGUMENTS.pack(values)
        most = gpu.MAX_GRID[2]
        config = self.runs_as(strides)
        return tuple(
            Launch(
                config=config,
                grid=(problem.seq_len // self.B_r, problem.heads, min(problem.batch - first, most)),
                block=self.n_threads,
                shared_bytes=self.smem_bytes,
                arguments=arguments,
                addresses=tuple(
                    Address(
                        ARGUMENTS.offset(name.upper()),
                        name,
                        first * strides[name].batch * ELEMENT_BYTES,
                    )
                    for name in "qkvo"
                ),
                outputs=("o",),
            )
            for first in range(0, problem.batch, most)
        )

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        _check_tile_shape(self)
        _check_load_tiles(self)
        _check_row_stride(self)
        _check_stages(self)


def _check_tile_shape(config: FlashForwardKernelConfig) -> None:
    B_r, B_c, n_warps = config.B_r, config.B_c, config.n_warps
    if not 1 <= n_warps <= MAX_WARPS or n_warps & (n_warps - 1):
        raise ValueError(
            f"n_warps {n_warps} is not a power of two from 1 to {MAX_WARPS}: choose 4 or 8"
        )
    if B_r < 1 or B_r % (MMA_M * n_warps):
        raise ValueError(
            f"B_r {B_r} is not a multiple of {MMA_M * n_warps} "
            f"({MMA_M} rows for each of {n_warps} warps): choose {_round_up(B_r, MMA_M * n_warps)}"
            " or another n_warps"
        )
    if B_c < 1 or B_c % MMA_K:
        raise ValueError(
            f"B_c {B_c} is not a multiple of {MMA_K}, the depth of one mma: "
            f"choose {_round_up(B_c, MMA_K)}"
        )
    for name, rows in (("B_r", B_r), ("B_c", B_c)):
        chunks = rows * PIECE * ELEMENT_BYTES // CHUNK_BYTES
        if chunks % config.n_threads:
            raise ValueError(
                f"{name} {rows}: {PIECE} columns of its tile are {chunks} chunks of "
                f"{CHUNK_BYTES} bytes, which "
                f"{config.n_threads} threads cannot share evenly: raise {name} or lower n_warps"
            )
    most = {target: gpu.LIMITS[int(target)].smem_bytes for target in TARGETS}
    if config.smem_bytes > max(most.values()):
        limits = ", ".join(f"sm_{target} {limit}" for target, limit in most.items())
        raise ValueError(
            f"B_r {B_r} and B_c {B_c} need {config.smem_bytes} bytes of shared memory, over every "
            f"limit ({limits}): lower B_r or B_c"
        )
    accumulators = B_r // n_warps * (config.d_head + B_c) // gpu.WARP
    if accumulators >= gpu.MAX_REGISTERS:
        raise ValueError(
            f"B_r {B_r}, B_c {B_c} and n_warps {n_warps} need {accumulators} accumulator registers "
            f"a thread for S and O, but a thread has {gpu.MAX_REGISTERS}: lower B_r or B_c, "
            "or raise n_warps"
        )


def _check_load_tiles(config: FlashForwardKernelConfig) -> None:
    Q_tiles, K_tiles = config.Q_mma_load_K_tiles, config.K_mma_load_K_tiles
    for name, depth_name, depth in (
        ("Q_mma_load_K_tiles", "d_head", config.d_head),
        ("K_mma_load_K_tiles", "d_head", config.d_head),
        ("V_mma_load_K_tiles", "B_c", config.B_c),
    ):
        tiles, whole = getattr(config, name), depth // MMA_K
        if tiles < 0 or (tiles and whole % tiles):
            raise ValueError(
                f"{name} {tiles} does not divide {whole} ({depth_name} {depth} in slices of "
                f"{MMA_K}): choose {_divisors_text(whole)}, or 0 for the whole tile"
            )
        if tiles == whole:
            raise ValueError(
                f"{name} {tiles} is the whole tile ({depth_name} {depth} in slices of {MMA_K}): "
                "write 0"
            )
    if Q_tiles not in (0, K_tiles):
        raise ValueError(
            f"Q_mma_load_K_tiles {Q_tiles} is neither 0 (Q stays in registers) nor "
            f"K_mma_load_K_tiles {K_tiles} (Q is loaded along with K): choose one of the two"
        )
    if config.mma_double_buffer_loads:
        for name in ("K_mma_load_K_tiles", "V_mma_load_K_tiles"):
            if getattr(config, name) == 0:
                raise ValueError(
                    f"mma_double_buffer_loads with {name} 0: the whole tile is loaded at once and "
                    f"nothing is left to buffer: set {name} or turn double buffering off"
                )


def _check_row_stride(config: FlashForwardKernelConfig) -> None:
    stride = config.static_row_stride
    if stride < 0 or stride % config.d_head:
        raise ValueError(
            f"static_row_stride {stride} is not a multiple of d_head {config.d_head}: use "
            "heads * d_head, or 0 to read the stride at run time"
        )


def _check_stages(config: FlashForwardKernelConfig) -> None:
    if config.kv_stages not in (1, 2):
        raise ValueError(f"kv_stages {config.kv_stages}: K and V have 1 buffer each, or 2")
    if config.kv_stages == 1:
        for name in ("lazy_rescale", "mma_row_sum"):
            if getattr(config, name):
                raise ValueError(f"{name} needs kv_stages 2: set it, or turn {name} off")
        return
    wanted = {**FRAGMENT_TILES, "mma_double_buffer_loads": True}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"kv_stages 2 with {name} {getattr(config, name)}: fragments come one ldmatrix at "
                f"a time, ahead of their use; set {name} to {value}"
            )


def _round_up(value: int, multiple: int) -> int:
    return max(multiple, -(-value // multiple) * multiple)


def _divisors_text(whole: int) -> str:
    divisors = [n for n in range(1, whole) if whole % n == 0]
    return ", ".join(map(str, divisors)) if divisors else "nothing else"


_BASE: Mapping[str, Any] = MappingProxyType(
    {
        "d_head": 128,
        "B_r": 64,
        "B_c": 64,
        "n_warps": 4,
        "async_copy": True,
        "eager_load_blocks": False,
        "swizzled": False,
        "Q_mma_load_K_tiles": 0,
        "K_mma_load_K_tiles": 0,
        "V_mma_load_K_tiles": 0,
        "mma_double_buffer_loads": False,
        "optimized_softmax": False,
        "static_row_stride": 0,
        "kv_stages": 1,
        "lazy_rescale": False,
        "mma_row_sum": False,
    }
)

_SWEPT: Mapping[str, tuple[Any, ...]] = {
    "B_r": (64, 128),
    "B_c": (32, 64, 128),
    "n_warps": (4, 8),
    "Q_mma_load_K_tiles": (0, 1, 2, 4),
    "K_mma_load_K_tiles": (0, 1, 2, 4),
    "V_mma_load_K_tiles": (0, 1, 2, 4),
    "mma_double_buffer_loads": (False, True),
}


def _previous(number: int) -> str:
    """The file of one of the first fifteen steps."""
    return f"previous_kernels/v{number}/forward_kernel.cuh"


TARGETS = ("80", "86", "89", "90")

AMPERE = Family(
    name="ampere",
    title="FlashAttention-2 on mma.sync, in sixteen steps",
    prefix="v",
    rank=0,
    config=FlashForwardKernelConfig,
    base=_BASE,
    entries=(
        StepEntry("base", "base: cp.async, ldmatrix, mma.m16n8k16, online softmax", _previous(1)),
        StepEntry("swizzle", "XOR swizzle of shared memory", _previous(2), sets={"swizzled": True}),
        StepEntry(
            "eager_copies",
            "eager K and V copies",
            _previous(3),
            sets={"eager_load_blocks": True},
        ),
        StepEntry(
            "interleaved_fragments",
            "fragment loads interleaved with mma",
            _previous(4),
            sets=FRAGMENT_TILES,
        ),
        StepEntry(
            "double_buffered_fragments",
            "double-buffered fragments",
            _previous(5),
            sets={"mma_double_buffer_loads": True},
        ),
        StepEntry(
            "fp32_throughput",
            "softmax scale folded into one FFMA",
            _previous(6),
            sets={"optimized_softmax": True},
        ),
        StepEntry(
            "autotuning",
            "auto-tuned tile shape, warps and load sizes",
            _previous(7),
            opens=_SWEPT,
        ),
        StepEntry("integer_instructions", "swizzled offsets known at compile time", _previous(8)),
        StepEntry("moves", "fragment order matches what mma reads", _previous(9)),
        StepEntry("first_block_peeled", "first softmax iteration peeled", _previous(10)),
        StepEntry("output_swizzle", "encoded swizzle for the O tile", _previous(11)),
        StepEntry("indexed_blocks", "blocks indexed, reciprocal normalisation", _previous(12)),
        StepEntry(
            "walked_backwards",
            "K and V walked backwards",
            _previous(13),
            traits=frozenset({KEYS_BACKWARDS}),
        ),
        StepEntry("cache_policy", "cache policy on global accesses", _previous(14)),
        StepEntry(
            "pieces",
            "tiles cut into 64-wide pieces along d_head",
            _previous(15),
            traits=frozenset({PIECES}),
        ),
        StepEntry(
            "static_stride",
            "row stride in global memory known at compile time",
            "src/include/forward_kernel.cuh",
            sets={"static_row_stride": PROGRESSION_ROW_STRIDE},
            opens={
                "static_row_stride": (PROGRESSION_ROW_STRIDE,),
                "kv_stages": (1, 2),
                "lazy_rescale": (False, True),
                "mma_row_sum": (False, True),
            },
        ),
    ),
    targets=TARGETS,
    arguments=ARGUMENTS,
    map_header=PurePosixPath("src/include/flash_kernels.cuh"),
    # 13.6 million on 2026-11-22; a test whose cache two workers fill counts twice.
    simulated_budget=18_000_000,
)
