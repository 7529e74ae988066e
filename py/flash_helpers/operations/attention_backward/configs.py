"""The configs of the operation's families. Standard library only."""

from __future__ import annotations

from flash_helpers.registry.backward import BackwardKernelConfig
from flash_helpers.registry.backward_sync import BackwardSyncKernelConfig

# Each names its tiles of queries and keys by kernel.
GradientConfig = BackwardKernelConfig | BackwardSyncKernelConfig
