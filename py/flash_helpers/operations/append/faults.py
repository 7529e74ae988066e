"""Mistakes that the steps of append invite, as edits of a kernel's PTX, and where they show."""

from __future__ import annotations

from flash_helpers.check.faults import Fault, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.append.problem import Append
from flash_helpers.ptx import Phase

FAULTS = {
    "ka1: the second half of the columns is turned the other way": Fault(
        "ka1", Element.BF16, Phase.MAIN_LOOP, r"selp\.f32",
        swap(r"selp\.f32\s+(%f\d+), %f\d+, (%f\d+), .*;", r"mov.f32 \1, \2;"), quantity="k_cache",
    ),
}  # fmt: skip


def problem_of(config: Config) -> Append:
    """Return the problem on which faults of a config show: pages in which new keys cross from one
    to the next, and queries."""
    return Append(
        *(3, 1, 3, 12, 32, config.dtype),
        page_size=4,
        rotary_dim=32,
        len_q=2,
        heads=2,
    )


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for append."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
