"""Mistakes that the steps of qk_norm_rope invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from flash_helpers.check.faults import Fault, drop, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.qk_norm_rope.problem import QkNormRope
from flash_helpers.ptx import Phase, RaceError

FAULTS = {
    "qr1: a thread adds its own sum in place of its neighbour's": Fault(
        "qr1", Element.BF16, Phase.MAIN_LOOP, r"shfl\.sync\.bfly",
        swap(r"(, %r\d+), %r\d+(, %r\d+, %r\d+;)", r"\1, 0\2"), nth(0), quantity="joint_q",
    ),
    "qr2: sums of other warps are read before these are written": Fault(
        "qr2", Element.BF16, Phase.MAIN_LOOP, r"bar\.sync", drop, nth(0), RaceError, "smem[warp /",
    ),
}  # fmt: skip


def problem_of(config: Config) -> QkNormRope:
    """Return the problem on which faults of a config show: chunks for all threads of a row, and a
    context."""
    return QkNormRope(1, 17, 3, 64, config.dtype, context=2, rotary=True)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for norms."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
