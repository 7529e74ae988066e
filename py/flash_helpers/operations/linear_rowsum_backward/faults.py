"""Mistakes that the steps of linear_rowsum_backward invite, as edits of a kernel's PTX, and where
they show."""

from __future__ import annotations

from flash_helpers.check.faults import EPILOGUE, MAIN_LOOP, Fault, drop, nth
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.ptx import RaceError

BF16 = Element.BF16

FAULTS = {
    "lb1: sums of pieces are added before all are written": Fault(
        "lb1", BF16, EPILOGUE, r"bar\.sync", drop, nth(0), RaceError, "smem[w * 32 + lane]",
        kernel="combine_kernel",
    ),
    "lb2: sums of columns are added where other warps still write them": Fault(
        "lb2", BF16, MAIN_LOOP, r"bar\.sync", drop, nth(0), RaceError, "w * kSums + column",
        kernel="columns_kernel",
    ),
}  # fmt: skip


def problem_of(config: Config) -> LinearRowsumBackward:
    """Return the problem on which faults of a config show: no size is that of whole tiles, and
    there is more than one piece of W and of x."""
    asked = {"dx": True, "dweight": True, "dbias": True}
    return LinearRowsumBackward(70, 37, 70, config.dtype, **asked)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
