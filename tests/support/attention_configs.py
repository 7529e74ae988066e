"""Configs of attention, among those of all operations."""

from flash_helpers.kernel_configs import (
    FAMILIES,
    STEPS,
    Config,
    Element,
    get_kernel_progression_configs,
    get_listed_configs,
)
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.mma_sync import MmaSyncConfig
from flash_helpers.registry.overlap import OVERLAP

ATTENTION_STEPS = {
    name: step for name, step in STEPS.items() if FAMILIES[step.family].operation is OPERATION
}


def attention_progression() -> list[Config]:
    return [c for c in get_kernel_progression_configs() if c.family.operation is OPERATION]


def attention_kernels() -> list[Config]:
    return [c for c in get_listed_configs() if c.family.operation is OPERATION]


LARGE_TILES = [
    config
    for config in get_listed_configs()
    if config.family is AMPERE and config.B_r == 128 and not config.static_row_stride
]
TRACED = [*AMPERE.progression(), *LARGE_TILES, *OVERLAP.progression()]


def traced_config(step: str, dtype: Element = Element.BF16) -> MmaSyncConfig:
    return next(c for c in TRACED if (c.step.id, c.dtype) == (step, dtype))
