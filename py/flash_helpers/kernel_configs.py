"""The registry's face: the configs that exist, and the lists of them.

`flash_helpers.registry` defines configs, steps and families; a new step takes one entry there and
its kernel's file. Standard library only.
"""

from __future__ import annotations

from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.registry.ampere import LARGE_TILE, FlashForwardKernelConfig
from flash_helpers.registry.config import Config, differing_fields
from flash_helpers.registry.families import (
    FAMILIES,
    OPERATIONS,
    STEPS,
    config_from_short_form,
    config_from_symbol,
    find_config,
    nearest_config,
    read_configs,
)
from flash_helpers.registry.families import listed_configs as get_listed_configs
from flash_helpers.registry.families import progression as get_kernel_progression_configs
from flash_helpers.registry.families import sweep as get_autotuning_kernel_configs
from flash_helpers.registry.overlap import OverlapKernelConfig
from flash_helpers.registry.problem import Element, Problem

__all__ = [
    "FAMILIES",
    "LARGE_TILE",
    "OPERATIONS",
    "STEPS",
    "AttentionForward",
    "Config",
    "Element",
    "FlashForwardKernelConfig",
    "OverlapKernelConfig",
    "Problem",
    "config_from_short_form",
    "config_from_symbol",
    "differing_fields",
    "find_config",
    "get_autotuning_kernel_configs",
    "get_kernel_progression_configs",
    "get_listed_configs",
    "nearest_config",
    "read_configs",
]
