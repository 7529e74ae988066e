"""The registry: every kernel version and every config that exists.

Code generation, build, dispatch, tests, tools and docs read this module. Adding a version is one
entry in `VERSIONS` (and its kernel file); adding a config is one edit to a `get_...` function.
Standard library only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from enum import IntEnum
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

ELEMENT_BYTES = 2  # fp16 and bf16
CHUNK_BYTES = 16  # one cp.async, one row of an 8x8 ldmatrix tile
PIECE = 64  # columns: tiles are copied in pieces of 128-byte rows from version 15 on
MMA_M = 16  # rows of A and C of mma.m16n8k16
MMA_K = 16  # its reduction depth
WARP_SIZE = 32
MAX_WARPS = 32  # 1024 threads a block
MAX_REGISTERS = 255  # per thread; the zero register takes the 256th name
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability":
# maximum shared memory per thread block.
MAX_SMEM_BYTES = MappingProxyType({80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024})


class DType(IntEnum):
    """Element type of Q, K, V and O. The values are those of the C++ enum."""

    FP16 = 0
    BF16 = 1

    @property
    def short(self) -> str:
        """The name in a config's short form: "fp16" or "bf16"."""
        return self.name.lower()

    @property
    def torch_name(self) -> str:
        """Name of the same type in torch: "float16" or "bfloat16"."""
        return {DType.FP16: "float16", DType.BF16: "bfloat16"}[self]

    @classmethod
    def from_name(cls, name: str) -> DType:
        """The type called `name` ("fp16", "float16", "bf16", "bfloat16", case ignored).

        Raises ValueError for any other name.
        """
        for dtype in cls:
            if name.lower() in (dtype.short, dtype.torch_name):
                return dtype
        accepted = ", ".join(f"{dtype.short} ({dtype.torch_name})" for dtype in cls)
        raise ValueError(f"dtype {name!r} is not one of {accepted}")


@dataclass(frozen=True)
class KernelVersion:
    """One step of the progression.

    fixed: config field to the only value that this version's kernel accepts.
    tunable: config field to the values that the autotuning sweep tries; the kernel accepts any
        value that `FlashForwardKernelConfig` lets through.
    """

    number: int
    idea: str
    parent: int | None
    fixed: Mapping[str, Any]
    tunable: Mapping[str, tuple[Any, ...]]

    @property
    def namespace(self) -> str:
        """C++ namespace of the kernel, e.g. "v7"."""
        return f"v{self.number}"

    @property
    def source(self) -> PurePosixPath:
        """The kernel's file, relative to the root of the repository."""
        if self.number == LAST_VERSION:
            return PurePosixPath("src/include/forward_kernel.cuh")
        return PurePosixPath(f"previous_kernels/{self.namespace}/forward_kernel.cuh")


# How many mma-deep (16) slices of Q, K and V a warp loads into registers at once, from v4 on.
FRAGMENT_TILES: Mapping[str, int] = MappingProxyType(
    {"Q_mma_load_K_tiles": 1, "K_mma_load_K_tiles": 1, "V_mma_load_K_tiles": 1}
)

# Row stride in elements of a (batch, seq, 16 heads, 128) tensor: the benchmark's shape.
PROGRESSION_ROW_STRIDE = 16 * 128

# The tile shape that pays best on a large GPU, and how it loads its fragments. 32 rows a warp leave
# no room for Q in registers.
LARGE_TILE: Mapping[str, Any] = MappingProxyType(
    {
        "B_r": 128,
        "B_c": 64,
        "n_warps": 4,
        **FRAGMENT_TILES,
        "mma_double_buffer_loads": True,
    }
)
LARGE_TILE_VERSIONS = (7, 16)

# What the final kernel can have beyond the sixteen steps (src/include/two_stage.cuh), at the large
# tile.
TWO_STAGES: Mapping[str, Any] = MappingProxyType(
    {**LARGE_TILE, "kv_stages": 2, "lazy_rescale": True, "mma_row_sum": True}
)

_BASE: Mapping[str, Any] = {
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

_SWEPT: Mapping[str, tuple[Any, ...]] = {
    "B_r": (64, 128),
    "B_c": (32, 64, 128),
    "n_warps": (4, 8),
    "Q_mma_load_K_tiles": (0, 1, 2, 4),
    "K_mma_load_K_tiles": (0, 1, 2, 4),
    "V_mma_load_K_tiles": (0, 1, 2, 4),
    "mma_double_buffer_loads": (False, True),
}

# (idea, the options that the step turns on, the options that it makes tunable)
_STEPS: tuple[tuple[str, Mapping[str, Any], Mapping[str, tuple[Any, ...]]], ...] = (
    ("base: cp.async, ldmatrix, mma.m16n8k16, online softmax", {}, {}),
    ("XOR swizzle of shared memory", {"swizzled": True}, {}),
    ("eager K and V copies", {"eager_load_blocks": True}, {}),
    ("fragment loads interleaved with mma", FRAGMENT_TILES, {}),
    ("double-buffered fragments", {"mma_double_buffer_loads": True}, {}),
    ("softmax scale folded into one FFMA", {"optimized_softmax": True}, {}),
    ("auto-tuned tile shape, warps and load sizes", {}, _SWEPT),
    ("swizzled offsets known at compile time", {}, {}),
    ("fragment order matches what mma reads", {}, {}),
    ("first softmax iteration peeled", {}, {}),
    ("encoded swizzle for the O tile", {}, {}),
    ("blocks indexed, reciprocal normalisation", {}, {}),
    ("K and V walked backwards", {}, {}),
    ("cache policy on global accesses", {}, {}),
    ("tiles cut into 64-wide pieces along d_head", {}, {}),
    (
        "row stride in global memory known at compile time",
        {"static_row_stride": PROGRESSION_ROW_STRIDE},
        {
            "static_row_stride": (PROGRESSION_ROW_STRIDE,),
            "kv_stages": (1, 2),
            "lazy_rescale": (False, True),
            "mma_row_sum": (False, True),
        },
    ),
)
LAST_VERSION = len(_STEPS)


def _options_until(number: int) -> dict[str, Any]:
    """The options of version `number` at the tile shape of the progression."""
    options = dict(_BASE)
    for _, turned_on, _ in _STEPS[:number]:
        options.update(turned_on)
    return options


def _version(number: int) -> KernelVersion:
    tunable = {name: values for step in _STEPS[:number] for name, values in step[2].items()}
    fixed = {name: v for name, v in _options_until(number).items() if name not in tunable}
    return KernelVersion(
        number=number,
        idea=_STEPS[number - 1][0],
        parent=number - 1 or None,
        fixed=MappingProxyType(fixed),
        tunable=MappingProxyType(tunable),
    )


VERSIONS: Mapping[int, KernelVersion] = MappingProxyType(
    {number: _version(number) for number in range(1, LAST_VERSION + 1)}
)


def _check_types(config: FlashForwardKernelConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        wanted = {"DType": DType, "int": int, "bool": bool}[str(field.type)]
        # bool is an int to isinstance, but True is no tile size
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ValueError(
                f"{field.name} {value!r} has type {type(value).__name__}: "
                f"it must be of type {field.type}"
            )


def _check_version(config: FlashForwardKernelConfig) -> None:
    version = VERSIONS.get(config.version)
    if version is None:
        raise ValueError(
            f"version {config.version} does not exist: choose one of 1 to {LAST_VERSION}"
        )
    for name, fixed in version.fixed.items():
        value = getattr(config, name)
        if value == fixed:
            continue
        others = [v.number for v in VERSIONS.values() if v.fixed.get(name, value) == value]
        way_out = f"choose {_ranges_text(others)}" if others else f"no version has {value}"
        raise ValueError(f"{name} {value}: {version.namespace} fixes {name} {fixed}; {way_out}")


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
    if config.smem_bytes > max(MAX_SMEM_BYTES.values()):
        limits = ", ".join(f"sm_{arch} {limit}" for arch, limit in MAX_SMEM_BYTES.items())
        raise ValueError(
            f"B_r {B_r} and B_c {B_c} need {config.smem_bytes} bytes of shared memory, over every "
            f"limit ({limits}): lower B_r or B_c"
        )
    rows_per_warp = B_r // n_warps
    accumulators = rows_per_warp * (config.d_head + B_c) // WARP_SIZE
    if accumulators >= MAX_REGISTERS:
        raise ValueError(
            f"B_r {B_r}, B_c {B_c} and n_warps {n_warps} need {accumulators} accumulator registers "
            f"a thread for S and O, but a thread has {MAX_REGISTERS}: lower B_r or B_c, "
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


def _ranges_text(numbers: list[int]) -> str:
    """[1, 2, 3, 7] as "v1 to v3 or v7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " or ".join(
        f"v{run[0]}" if len(run) == 1 else f"v{run[0]} to v{run[-1]}" for run in runs
    )


def _round_up(value: int, multiple: int) -> int:
    return max(multiple, -(-value // multiple) * multiple)


def _divisors_text(whole: int) -> str:
    divisors = [n for n in range(1, whole) if whole % n == 0]
    return ", ".join(map(str, divisors)) if divisors else "nothing else"


@dataclass(frozen=True, order=True)
class FlashForwardKernelConfig:
    """One kernel: a version and everything that is fixed when it is compiled.

    The fields, in this order, are those of the C++ struct of the same name; configs sort by them.

    B_r, B_c: rows of a Q tile and of a K or V tile. d_head, static_row_stride: elements.
    Q/K/V_mma_load_K_tiles: slices of depth 16 loaded into registers at once; 0 is the whole tile
        (and for Q: loaded once and kept).
    static_row_stride: distance of two rows of the sequence; 0 is read at run time.
    kv_stages: buffers each for K and V in shared memory. With 2, lazy_rescale rescales O only when
        a row's maximum has grown much, and mma_row_sum has the tensor cores sum the rows of P.

    Raises ValueError, with the reason and a way out, for a config that no kernel can be built for.
    """

    version: int
    dtype: DType
    d_head: int
    B_r: int
    B_c: int
    n_warps: int
    async_copy: bool
    eager_load_blocks: bool
    swizzled: bool
    Q_mma_load_K_tiles: int
    K_mma_load_K_tiles: int
    V_mma_load_K_tiles: int
    mma_double_buffer_loads: bool
    optimized_softmax: bool
    static_row_stride: int = 0
    kv_stages: int = 1
    lazy_rescale: bool = False
    mma_row_sum: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        _check_version(self)
        _check_tile_shape(self)
        _check_load_tiles(self)
        _check_row_stride(self)
        _check_stages(self)
        # Not a field, and made once: torch.compile reads a string attribute as a constant, but
        # cannot format a number that it has come to take for a variable.
        object.__setattr__(self, "_short_form", self._format())

    @property
    def n_threads(self) -> int:
        """Threads of one block."""
        return self.n_warps * WARP_SIZE

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a tile of Q (later O), kv_stages tiles each
        of K and V."""
        return (self.B_r + 2 * self.kv_stages * self.B_c) * self.d_head * ELEMENT_BYTES

    def replace(self, **changes: Any) -> FlashForwardKernelConfig:
        """The same config with some fields changed; checked again."""
        return replace(self, **changes)

    def general(self) -> FlashForwardKernelConfig:
        """The config that takes over when a tensor's row stride is not the static one."""
        return self.replace(static_row_stride=0)

    def short_form(self) -> str:
        """Readable id and C identifier, e.g. v2_fp16_d128_Br64_Bc64_w4_async_swizzled_Q0_K0_V0."""
        return self._short_form

    def _format(self) -> str:
        parts = [
            f"v{self.version}",
            self.dtype.short,
            f"d{self.d_head}",
            f"Br{self.B_r}",
            f"Bc{self.B_c}",
            f"w{self.n_warps}",
            *(flag for flag, name in _FLAGS_BEFORE_TILES if getattr(self, name)),
            f"Q{self.Q_mma_load_K_tiles}",
            f"K{self.K_mma_load_K_tiles}",
            f"V{self.V_mma_load_K_tiles}",
            *(flag for flag, name in _FLAGS_AFTER_TILES if getattr(self, name)),
        ]
        if self.static_row_stride:
            parts.append(f"rs{self.static_row_stride}")
        if self.kv_stages > 1:
            parts.append(f"st{self.kv_stages}")
        parts += (flag for flag, name in _FLAGS_AFTER_STAGES if getattr(self, name))
        return "_".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, ready for JSON; dtype by its short name."""
        return {**asdict(self), "dtype": self.dtype.short}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FlashForwardKernelConfig:
        """Inverse of `to_dict`. Raises ValueError for a missing or an unknown field."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"config has unknown fields {unknown}: the fields are {sorted(names)}")
        optional = {field.name for field in fields(cls) if field.default is not MISSING}
        if missing := sorted(names - optional - set(values)):
            raise ValueError(f"config lacks the fields {missing}")
        dtype = values["dtype"]
        return cls(
            **{**values, "dtype": DType.from_name(dtype) if isinstance(dtype, str) else dtype}
        )

    @classmethod
    def from_short_form(cls, text: str) -> FlashForwardKernelConfig:
        """Inverse of `short_form`.

        Raises ValueError for a text that is no short form, or whose config is impossible.
        """
        match = _SHORT_FORM.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a config's short form; an example of one is "
                f"{get_kernel_progression_configs()[0].short_form()}"
            )
        found = match.groupdict()
        return cls(
            version=int(found["version"]),
            dtype=DType.from_name(found["dtype"]),
            d_head=int(found["d_head"]),
            B_r=int(found["B_r"]),
            B_c=int(found["B_c"]),
            n_warps=int(found["n_warps"]),
            Q_mma_load_K_tiles=int(found["Q"]),
            K_mma_load_K_tiles=int(found["K"]),
            V_mma_load_K_tiles=int(found["V"]),
            static_row_stride=int(found["rs"] or 0),
            kv_stages=int(found["st"] or 1),
            **{
                name: found[flag] is not None
                for flag, name in (
                    *_FLAGS_BEFORE_TILES,
                    *_FLAGS_AFTER_TILES,
                    *_FLAGS_AFTER_STAGES,
                )
            },
        )


_FLAGS_BEFORE_TILES = (
    ("async", "async_copy"),
    ("eager", "eager_load_blocks"),
    ("swizzled", "swizzled"),
)
_FLAGS_AFTER_TILES = (("db", "mma_double_buffer_loads"), ("ffma", "optimized_softmax"))
_FLAGS_AFTER_STAGES = (("lazy", "lazy_rescale"), ("mmasum", "mma_row_sum"))


def _short_form_pattern() -> re.Pattern[str]:
    def flags(pairs: tuple[tuple[str, str], ...]) -> str:
        return "".join(f"(?:_(?P<{flag}>{flag}))?" for flag, _ in pairs)

    number = "(?:0|[1-9][0-9]*)"
    return re.compile(
        rf"v(?P<version>{number})_(?P<dtype>{'|'.join(d.short for d in DType)})"
        rf"_d(?P<d_head>{number})_Br(?P<B_r>{number})_Bc(?P<B_c>{number})_w(?P<n_warps>{number})"
        rf"{flags(_FLAGS_BEFORE_TILES)}"
        rf"_Q(?P<Q>{number})_K(?P<K>{number})_V(?P<V>{number})"
        rf"{flags(_FLAGS_AFTER_TILES)}(?:_rs(?P<rs>[1-9][0-9]*))?"
        rf"(?:_st(?P<st>[2-9]))?{flags(_FLAGS_AFTER_STAGES)}"
    )


_SHORT_FORM = _short_form_pattern()
_DEMANGLED = re.compile(r"\bv(?P<version>\d+)::forward_kernel<\s*(?P<short_form>\w+)\s*>")
_MANGLED = re.compile(r"_ZN\d+v(?P<version>\d+)14forward_kernelI(?P<length>\d+)(?P<rest>\w+)")


def config_from_symbol(symbol: str) -> FlashForwardKernelConfig:
    """The config of a kernel's symbol, demangled or as the object file has it.

    Raises ValueError for a symbol that is no forward kernel of this library.
    """
    if match := _DEMANGLED.search(symbol):
        short_form = match["short_form"]
    elif match := _MANGLED.search(symbol):
        short_form = match["rest"][: int(match["length"])]
    else:
        raise ValueError(
            f"{symbol!r} is not the symbol of a forward kernel (vN::forward_kernel<config>)"
        )
    config = FlashForwardKernelConfig.from_short_form(short_form)
    if config.version != int(match["version"]):
        raise ValueError(
            f"{symbol!r} instantiates a config of v{config.version} in namespace "
            f"v{match['version']}"
        )
    return config


def find_config(symbol: str) -> FlashForwardKernelConfig | None:
    """The config of a kernel's symbol; None if it is no forward kernel of this library."""
    try:
        return config_from_symbol(symbol)
    except ValueError:
        return None


def read_configs(document: object) -> list[FlashForwardKernelConfig]:
    """The configs of a parsed JSON document: a list, or {"configs": list}.

    An item is a short form or an object with the config's fields.
    Raises ValueError, naming the item, for anything else.
    """
    items = document.get("configs") if isinstance(document, dict) else document
    if not isinstance(items, list):
        raise ValueError('expected a list of configs, or an object with a list called "configs"')
    configs = []
    for index, item in enumerate(items):
        try:
            if isinstance(item, str):
                configs.append(FlashForwardKernelConfig.from_short_form(item))
            elif isinstance(item, dict):
                configs.append(FlashForwardKernelConfig.from_dict(item))
            else:
                raise ValueError(f"{item!r} is neither a short form nor an object of fields")
        except ValueError as error:
            raise ValueError(f"config {index}: {error}") from error
    return configs


def differing_fields(a: FlashForwardKernelConfig, b: FlashForwardKernelConfig) -> list[str]:
    """Names of the fields in which two configs differ, in declaration order."""
    return [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]


def nearest_config(
    config: FlashForwardKernelConfig, candidates: Iterable[FlashForwardKernelConfig]
) -> FlashForwardKernelConfig:
    """The candidate that differs from `config` in the fewest fields.

    Among equals, the one of the same dtype, then of the nearest version, then the first in order.
    Raises ValueError without candidates.
    """
    return min(
        candidates,
        key=lambda c: (
            len(differing_fields(config, c)),
            c.dtype != config.dtype,
            abs(c.version - config.version),
            c,
        ),
    )


def get_kernel_progression_configs() -> list[FlashForwardKernelConfig]:
    """Every version at the one fixed config of the progression, in both dtypes, in order."""
    return [
        FlashForwardKernelConfig(version=number, dtype=dtype, **_options_until(number))
        for number in VERSIONS
        for dtype in DType
    ]


def _large_tile_configs() -> list[FlashForwardKernelConfig]:
    return [
        config.replace(**LARGE_TILE)
        for config in get_kernel_progression_configs()
        if config.version in LARGE_TILE_VERSIONS
    ]


def _two_stage_configs() -> list[FlashForwardKernelConfig]:
    return [
        config.replace(**TWO_STAGES)
        for config in get_kernel_progression_configs()
        if config.version == LAST_VERSION
    ]


def _sweep(version: KernelVersion, dtype: DType) -> Iterator[FlashForwardKernelConfig]:
    for values in itertools.product(*version.tunable.values()):
        options = dict(zip(version.tunable, values, strict=True))
        try:
            yield FlashForwardKernelConfig(
                version=version.number, dtype=dtype, **version.fixed, **options
            )
        except ValueError:
            continue  # this combination of values is impossible


def get_autotuning_kernel_configs() -> list[FlashForwardKernelConfig]:
    """Every possible config of the sweep, for every version that has something to tune."""
    return sorted(
        config
        for version in VERSIONS.values()
        if version.tunable
        for dtype in DType
        for config in _sweep(version, dtype)
    )


def with_general_siblings(
    configs: Iterable[FlashForwardKernelConfig],
) -> list[FlashForwardKernelConfig]:
    """The configs and, for each with a static row stride, its general sibling; sorted, unique."""
    return sorted({sibling for config in configs for sibling in (config, config.general())})


def get_kernels_to_build() -> list[FlashForwardKernelConfig]:
    """The configs that the library holds, sorted."""
    return with_general_siblings(
        [*get_kernel_progression_configs(), *_large_tile_configs(), *_two_stage_configs()]
    )
