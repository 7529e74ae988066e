"""Mistakes that the steps of joint_linear invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from flash_helpers.check.faults import MAIN_LOOP, Fault, drop, nth
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.ptx import RaceError

FAULTS = {
    "jl1: a piece is read before other warps have copied their part": Fault(
        "jl1", Element.BF16, MAIN_LOOP, r"bar\.sync", drop, nth(0), RaceError, "ldmatrix",
    ),
}  # fmt: skip


def problem_of(config: Config) -> JointLinear:
    """Return the problem on which faults of a config show: three pieces, tiles of both streams, and
    a norm."""
    return JointLinear(1, 20, 136, 128, config.dtype, context=5, bias=True, norm=True)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for joint_linear."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
