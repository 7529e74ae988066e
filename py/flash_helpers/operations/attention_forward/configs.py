"""The configs of attention's families. Standard library only."""

from __future__ import annotations

from flash_helpers.registry.mma_sync import MmaSyncConfig
from flash_helpers.registry.wgmma import WgmmaConfig

# Each has tiles of B_r queries and of B_c keys, and AttentionSupports.
AttentionConfig = MmaSyncConfig | WgmmaConfig
