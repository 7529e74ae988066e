"""Mistakes that the steps of the backward pass invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from typing import Any

from flash_helpers.check.faults import Fault
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.attention_backward.problem import AttentionBackward

FAULTS: dict[str, Fault] = {}


def problem_of(config: Any) -> AttentionBackward:
    """Return the problem on which faults of a config show: three blocks of queries and of keys, and
    where the kernel takes any length, a few more."""
    supports = config.supports
    whole = 3 * max(supports.B_r, supports.B_c)
    length = whole + 3 if not supports.blocks else -(-whole // supports.whole) * supports.whole
    return supports.problem(1, 1, length, length)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
