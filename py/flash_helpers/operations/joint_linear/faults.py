"""Mistakes that the steps of joint_linear invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from typing import Any

from flash_helpers.check.faults import MAIN_LOOP, Fault, drop, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.ptx import OutOfBoundsError, RaceError

FAULTS = {
    "jl1: a piece is read before other warps have copied their part": Fault(
        "jl1", Element.BF16, MAIN_LOOP, r"bar\.sync", drop, nth(0), RaceError, "ldmatrix",
    ),
    "jl2: y is written while other warps read x": Fault(
        "jl2", Element.BF16, MAIN_LOOP, r"bar\.sync", drop, nth(2), RaceError, "st.shared",
    ),
    "jl3: rows behind the last are stored": Fault(
        "jl3", Element.BF16, MAIN_LOOP, r"@exists st\.global", swap("@exists ", ""), nth(-1),
        OutOfBoundsError, '"r"(int(exists))',
    ),
    "jl4: a warp reads x before others have applied SiLU": Fault(
        "jl4", Element.BF16, MAIN_LOOP, r"bar\.sync", drop, nth(1), RaceError, "ldmatrix",
    ),
}  # fmt: skip


def problem_of(config: Any) -> JointLinear:
    """Return the problem on which faults of a config show: two pieces and a part of a third, if the
    config takes these, and tiles of both streams; with a norm, whose barrier would stand for that
    behind x, where weights do not stay."""
    in_features = min(136, config.supports.most_in)
    return JointLinear(
        *(1, 20, in_features, 128, config.dtype),
        context=5,
        bias=True,
        norm=config.depth == 0,
        silu=config.supports.activations,
    )


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for joint_linear."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
