"""Mistakes that the steps of add_norm invite, as edits of a kernel's PTX, and where they show."""

from __future__ import annotations

from flash_helpers.check.faults import Fault, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.ptx import OutOfBoundsError, Phase

FAULTS = {
    "an1: a chunk of residual behind the last row is loaded": Fault(
        "an1", Element.BF16, Phase.PROLOGUE, r"@exists ld\.global", swap("@exists ", ""), nth(-1),
        OutOfBoundsError, '"l"(src_gmem)',
    ),
}  # fmt: skip


def problem_of(config: Config) -> AddNorm:
    """Return the problem on which faults of a config show: rows of whole chunks, fewer than a
    block's threads hold."""
    problem = AddNorm(2, 1000, config.dtype, weight=True, bias=True)
    adapted: AddNorm = config.supports.adapted(problem)
    return adapted


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for norms."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts, and the mean is not 0."""
    return "normal"
