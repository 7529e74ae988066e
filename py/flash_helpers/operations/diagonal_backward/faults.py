"""Mistakes that the steps of diagonal_backward invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from flash_helpers.check.faults import Fault, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward
from flash_helpers.ptx import Phase

FAULTS = {
    "i1: the lanes of a row do not add up all of da": Fault(
        "i1", Element.BF16, Phase.EPILOGUE, r"shfl\.sync\.bfly",
        swap(r"(shfl\S+\s+\S+ \S+) \S+,", r"\1 1,"), nth(1), quantity="da",
    ),
}  # fmt: skip


def problem_of(config: Config) -> DiagonalBackward:
    """Return the problem on which faults of a config show. Its width is odd, so that the second row
    begins between two multiples of 16 bytes, and its two rows are fewer than those of a block."""
    return DiagonalBackward(2, 1001, config.dtype, db=True)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for diagonal_backward."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
