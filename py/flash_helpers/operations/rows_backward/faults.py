"""Mistakes that the steps of rows_backward invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from flash_helpers.check.faults import Fault, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.rows_backward.problem import RowsBackward
from flash_helpers.ptx import Phase, RaceError

FAULTS = {
    "f1: the lanes of a row do not add up all of the sum": Fault(
        "f1", Element.BF16, Phase.MAIN_LOOP, r"shfl\.sync\.bfly",
        swap(r"(shfl\S+\s+\S+ \S+) \S+,", r"\1 1,"), nth(2), quantity="dx",
    ),
    "t1: sums are sent to other blocks without a release": Fault(
        "t1", Element.BF16, Phase.MAIN_LOOP, r"mbarrier\.arrive\.release",
        swap("release", "relaxed"), nth(0), RaceError, "sums_smem[",
    ),
}  # fmt: skip


def problem_of(config: Config) -> RowsBackward:
    """Return the problem on which faults of a config show. Its width is odd, so that the second row
    begins between two multiples of 16 bytes, and its two rows are fewer than those of a block."""
    return RowsBackward(2, 1001, config.dtype)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for rows_backward."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
