"""Mistakes that the steps of adaptive_norm invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from typing import Any

from flash_helpers.check.faults import MAIN_LOOP, Fault, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm
from flash_helpers.ptx import OutOfBoundsError

FAULTS = {
    "ad1: a chunk of change behind the last row is loaded": Fault(
        "ad1", Element.BF16, MAIN_LOOP, r"@exists ld\.global\.nc\.L1", swap("@exists ", ""),
        nth(-1), OutOfBoundsError, '"l"(src_gmem)',
    ),
}  # fmt: skip


def problem_of(config: Any) -> AdaptiveNorm:
    """Return the problem on which faults of a config show: rows a chunk shorter than a row's
    threads hold, fewer than a block has."""
    width = config.supports.max_width - config.supports.chunk
    return AdaptiveNorm(1, 2, width, config.dtype, change=True, sum=True)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for norms."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts, and the mean is not 0."""
    return "normal"
