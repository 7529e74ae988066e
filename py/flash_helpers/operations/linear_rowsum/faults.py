"""Mistakes that the steps of linear_rowsum invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from typing import Any

from flash_helpers.check.faults import EPILOGUE, MAIN_LOOP, PROLOGUE, Fault, drop, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.ptx import OutOfBoundsError, RaceError

BF16 = Element.BF16

FAULTS = {
    "l1: tiles are written where other warps still read the last ones": Fault(
        "l1", BF16, MAIN_LOOP, r"bar\.sync", drop, nth(0), RaceError, "load_tile<kDType>",
        kernel="product_kernel",
    ),
    "l2: the tree over the lanes of a row mixes two rows": Fault(
        "l2", BF16, EPILOGUE, r"mov\.u32\s+%r\d+, 8;", swap(", 8;", ", 16;"), quantity="y",
        kernel="product_kernel",
    ),
    "l3: sums of warps are added before all are written": Fault(
        "l3", BF16, EPILOGUE, r"bar\.sync", drop, nth(0), RaceError, "value += smem[w]",
        kernel="rows_kernel",
    ),
    "l4: sums of columns are added where other warps still write them": Fault(
        "l4", BF16, MAIN_LOOP, r"bar\.sync", drop, nth(0), RaceError, "w * kColumns + column",
        kernel="columns_kernel",
    ),
    "l5: rows behind the last one are loaded": Fault(
        "l5", BF16, PROLOGUE, r"min\.s32", swap(r"min\.s32(.*), %r\d+;", r"mov.b32\1;"),
        error=OutOfBoundsError, source="load_elements<kDType>", kernel="rows_kernel",
    ),
    "l6: a thread takes a unit that it has not been told yet": Fault(
        "l6", BF16, MAIN_LOOP, r"bar\.sync", drop, nth(-1), error=RaceError,
        source="return told", kernel="rowsum_kernel",
    ),
}  # fmt: skip


def problem_of(config: Any) -> LinearRowsum:
    """Return the problem on which faults of a config show: no size is that of whole tiles, and
    there is more than one tile of W."""
    return LinearRowsum(10, 37, 70, config.dtype, bias=True)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for linear_rowsum."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
