"""Mistakes that the steps of merge invite, as edits of a kernel's PTX, and where they show."""

from __future__ import annotations

from typing import Any

from flash_helpers.check.faults import Fault, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.merge.problem import Merge
from flash_helpers.ptx import OutOfBoundsError, Phase

BF16, MAIN_LOOP = Element.BF16, Phase.MAIN_LOOP
IS_ZERO = r"setp\.eq\.f32\s.*, 0f00000000;"

FAULTS = {
    "u1: a row without keys is divided by its sum, 0": Fault(
        "u1", BF16, MAIN_LOOP, IS_ZERO, swap(r"(%p\d+), .*", r"\1, 0f3F800000, 0f00000000;"),
        nth(0), quantity="o",
    ),
    "u2: threads behind the last row go on": Fault(
        "u2", BF16, Phase.PROLOGUE, r"setp\.ge\.s64", swap(r"(%p\d+), .*", r"\1, 0, 1;"), nth(0),
        OutOfBoundsError, "__ldg(lse_parts_gmem",
    ),
    "u3: parts without keys are multiplied by 0": Fault(
        "u3", BF16, MAIN_LOOP, r"selp\.b32\s.*, 0, %p",
        swap(r"selp\.b32(.*), 0, %p\d+", r"mov.b32\1"), quantity="o",
    ),
}  # fmt: skip


def problem_of(config: Any) -> Merge:
    """Return the problem on which faults of a config show. Rows of 3 chunks of 8 elements do not
    divide a warp, and the last thread block has threads too many."""
    return Merge(3, 5, 2, 24, config.dtype)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for merge."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which parts without keys hold NaN, and all parts of a row."""
    return "masked"
