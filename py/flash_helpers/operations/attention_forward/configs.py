"""The configs of attention's families. Standard library only."""

from __future__ import annotations

from flash_helpers.registry.hopper import HopperKernelConfig
from flash_helpers.registry.mma_sync import MmaSyncConfig

# Each has tiles of B_r queries and of B_c keys, and AttentionSupports.
AttentionConfig = MmaSyncConfig | HopperKernelConfig
