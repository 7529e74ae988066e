"""Which kernels a tool's `--kernel` and `--dtype` mean, among those that are built."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flash_helpers.kernel_configs import (
    VERSIONS,
    DType,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
    nearest_config,
)

if TYPE_CHECKING:  # it imports torch, which the tools that read machine code can do without
    from flash_helpers.check.inputs import AttentionShape

DTYPE_CHOICES = (*(dtype.short for dtype in DType), "both")
KERNEL_HELP = (
    "a version (7 or v7: every built config of it), a range of versions (7..16), the short form of "
    "a config, or all; several may be given"
)

_VERSIONS = re.compile(r"v?(\d+)(?:(?:\.\.|-)v?(\d+))?")


class UsageError(ValueError):
    """What was asked for does not exist or does not fit together."""


def add_kernel_arguments(
    parser: argparse.ArgumentParser,
    default: str = "the fixed config of every version",
    dtype: str = "both",
) -> None:
    """Add `--kernel` and `--dtype`. default: what is chosen without `--kernel`, in words."""
    parser.add_argument(
        "--kernel",
        nargs="+",
        action="extend",
        default=[],
        metavar="KERNEL",
        help=f"{KERNEL_HELP} (default: {default})",
    )
    parser.add_argument("--dtype", choices=DTYPE_CHOICES, default=dtype, help=f"(default: {dtype})")


def parse_dtypes(name: str) -> tuple[DType, ...]:
    """The dtypes of one of DTYPE_CHOICES. Raises ValueError for any other name."""
    return tuple(DType) if name == "both" else (DType.from_name(name),)


def _version_numbers(selector: str) -> range | None:
    match = _VERSIONS.fullmatch(selector)
    if match is None:
        return None
    first = int(match[1])
    last = int(match[2] or first)
    unknown = [number for number in (first, last) if number not in VERSIONS]
    if unknown or last < first:
        raise UsageError(
            f"kernel {selector!r}: versions go from v{min(VERSIONS)} to v{max(VERSIONS)}, and a "
            "range from the lower to the higher one"
        )
    return range(first, last + 1)


def parse_versions(selectors: Iterable[str]) -> list[int]:
    """The versions that "16", "v16" and "7..16" name, ascending.

    Raises UsageError for anything else, and for a version that does not exist.
    """
    found: set[int] = set()
    for selector in selectors:
        numbers = _version_numbers(selector)
        if numbers is None:
            raise UsageError(f"{selector!r} is not a version (7 or v7) or a range of them (7..16)")
        found.update(numbers)
    return sorted(found)


def _select(
    selector: str, built: Sequence[FlashForwardKernelConfig]
) -> list[FlashForwardKernelConfig]:
    if selector == "all":
        return list(built)
    versions = _version_numbers(selector)
    if versions is not None:
        missing = [f"v{n}" for n in versions if not any(c.version == n for c in built)]
        if missing:
            raise UsageError(f"kernel {selector!r}: no config of {', '.join(missing)} is built")
        return [config for config in built if config.version in versions]
    try:
        config = FlashForwardKernelConfig.from_short_form(selector)
    except ValueError as error:
        raise UsageError(f"kernel {selector!r} is not {KERNEL_HELP}: {error}") from error
    if config not in built:
        raise UsageError(
            f"kernel {selector} is not built; the nearest that is: "
            f"{nearest_config(config, built).short_form()}"
        )
    return [config]


def select_kernels(
    built: Sequence[FlashForwardKernelConfig],
    selectors: Iterable[str],
    dtypes: Iterable[DType],
    default: Iterable[FlashForwardKernelConfig],
) -> list[FlashForwardKernelConfig]:
    """The built configs that the selectors name (see KERNEL_HELP), of the given dtypes, sorted.

    built: the configs of the library.
    default: configs taken without any selector; those that are not built are left out.

    Raises UsageError if a selector names nothing that is built, or if no config is left.
    """
    if not built:
        raise UsageError("the library holds no kernel: generate the instantiations and build again")
    selectors = list(selectors)
    wanted = set(dtypes)
    named = (
        [config for selector in selectors for config in _select(selector, built)]
        if selectors
        else [config for config in default if config in set(built)]
    )
    chosen = sorted({config for config in named if config.dtype in wanted})
    if not chosen:
        raise UsageError(
            f"no built kernel is left for --kernel {' '.join(selectors) or '(default)'} and dtype "
            f"{', '.join(sorted(dtype.short for dtype in wanted))}: widen one of the two"
        )
    return chosen


def chosen_kernels(
    arguments: argparse.Namespace,
    built: Sequence[FlashForwardKernelConfig],
    default: Iterable[FlashForwardKernelConfig] | None = None,
) -> list[FlashForwardKernelConfig]:
    """`select_kernels` of what `add_kernel_arguments` read. default: None stands for the
    progression."""
    return select_kernels(
        built,
        arguments.kernel,
        parse_dtypes(arguments.dtype),
        get_kernel_progression_configs() if default is None else default,
    )


def require_whole_blocks(
    configs: Iterable[FlashForwardKernelConfig], shape: AttentionShape
) -> None:
    """Raise UsageError unless the sequence is whole blocks of every config."""
    for config in configs:
        for name, rows in (("B_r", config.B_r), ("B_c", config.B_c)):
            if shape.seq_len % rows:
                raise UsageError(
                    f"seq_len {shape.seq_len} is not a multiple of {name} {rows} "
                    f"({config.short_form()}): use {-(-shape.seq_len // rows) * rows}, or choose "
                    "other kernels"
                )


def config_that_runs(
    config: FlashForwardKernelConfig, shape: AttentionShape
) -> FlashForwardKernelConfig:
    """The config that the library launches when `config` is asked for and Q, K, V and O are
    contiguous tensors of `shape`: a static row stride that is not theirs gives way to its general
    sibling."""
    return config if config.static_row_stride in (0, shape.row_stride) else config.general()
