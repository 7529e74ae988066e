"""Configs of attention, among those of all operations."""

from __future__ import annotations

from flash_helpers.kernel_configs import (
    FAMILIES,
    STEPS,
    Config,
    get_kernel_progression_configs,
    get_kernels_to_build,
)
from flash_helpers.operations.attention_forward import OPERATION

ATTENTION_STEPS = {
    name: step for name, step in STEPS.items() if FAMILIES[step.family].operation is OPERATION
}


def attention_progression() -> list[Config]:
    return [c for c in get_kernel_progression_configs() if c.family.operation is OPERATION]


def attention_kernels() -> list[Config]:
    return [c for c in get_kernels_to_build() if c.family.operation is OPERATION]
