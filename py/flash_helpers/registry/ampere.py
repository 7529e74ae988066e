"""The ampere family: one FlashAttention-2 forward kernel in sixteen steps, on the instructions of
compute capability 8.0: `mma.sync`, `ldmatrix`, `cp.async`. It is closed: later steps belong to
other families. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.registry.config import element, flag, number
from flash_helpers.registry.family import CORE, Family, StepEntry
from flash_helpers.registry.mma_sync import (
    DTYPES,
    HEADER,
    KERNELS,
    KEYS_BACKWARDS,
    MMA_K,
    PIECES,
    PROGRESSION_ROW_STRIDE,
    TARGETS,
    MmaSyncConfig,
)
from flash_helpers.registry.problem import Element

# Slices of Q, K and V, 16 deep as one mma is, that a warp loads into registers at once, from v4 on.
FRAGMENT_TILES: Mapping[str, int] = MappingProxyType(
    {"Q_mma_load_K_tiles": 1, "K_mma_load_K_tiles": 1, "V_mma_load_K_tiles": 1}
)

# The tile shape that pays best on a large GPU, and how it loads its fragments. 32 rows per warp
# leave no room for Q in registers.
LARGE_TILE: Mapping[str, Any] = MappingProxyType(
    {"B_r": 128, "B_c": 64, "n_warps": 4, **FRAGMENT_TILES, "mma_double_buffer_loads": True}
)
LARGE_TILE_FROM = "v7"  # the first step that takes it


@dataclass(frozen=True)
class FlashForwardKernelConfig(MmaSyncConfig):
    """One kernel of the ampere family.

    `B_r`, `B_c`: rows of a Q tile and of a K or V tile. `d_head`, `static_row_stride`: elements.
    Q/K/V_mma_load_K_tiles: slices of depth 16 loaded into registers at once; 0 is the whole tile
    (and for Q: loaded once and kept). `static_row_stride`: distance of two rows of the sequence; 0
    is read at run time.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    example: ClassVar[str] = "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0"

    version: int = number("v")
    dtype: Element = element()
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

    @property
    def family(self) -> Family[Any]:
        """The ampere family."""
        return AMPERE

    @property
    def folds_scale(self) -> bool:
        """Whether the softmax scale is part of the exponent: from v6 on."""
        return self.optimized_softmax

    def check(self) -> None:
        """Raises ValueError unless a kernel can be built."""
        super().check()
        _check_load_tiles(self)


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


def large_configs() -> list[FlashForwardKernelConfig]:
    """Return the large tile of each step that takes it."""
    first = AMPERE.steps[LARGE_TILE_FROM].number
    progression = AMPERE.progression()
    return [config.replace(**LARGE_TILE) for config in progression if config.version >= first]


AMPERE = Family(
    name="ampere",
    title="FlashAttention-2 on mma.sync, in sixteen steps",
    operation=OPERATION,
    prefix="v",
    rank=0,
    config=FlashForwardKernelConfig,
    base=_BASE,
    entries=(
        StepEntry(
            "base",
            "base: cp.async, ldmatrix, mma.m16n8k16, online softmax",
            _previous(1),
            place=CORE,
        ),
        StepEntry(
            "swizzle",
            "XOR swizzle of shared memory",
            _previous(2),
            sets={"swizzled": True},
            place=CORE,
        ),
        StepEntry(
            "eager_copies",
            "eager K and V copies",
            _previous(3),
            sets={"eager_load_blocks": True},
            place=CORE,
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
            place=CORE,
        ),
        StepEntry("integer_instructions", "swizzled offsets known at compile time", _previous(8)),
        StepEntry(
            "moves",
            "fragment order matches what mma reads",
            _previous(9),
            place=CORE,
        ),
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
            opens={"static_row_stride": (PROGRESSION_ROW_STRIDE,)},
        ),
    ),
    targets=TARGETS,
    kernels=KERNELS,
    header=HEADER,
    dtypes=DTYPES,
    in_library=True,
    # A test whose cache two workers fill counts twice.
    simulated_budget=18_000_000,
    matrix_budget=32_000_000,
    also_listed=large_configs,
)
