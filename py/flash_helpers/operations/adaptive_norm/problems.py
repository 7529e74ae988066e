"""The problems of adaptive layer norms that are checked and measured. Standard library only."""

from __future__ import annotations

from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm

MEASURED_LENGTHS = (64, 128, 186, 256, 512)
MEASURED_BATCH, MEASURED_CONTEXT, MEASURED_WIDTH = 64, 64, 128


def measured(length: int) -> AdaptiveNorm:
    """Return the problem of one length that is measured: what stands between attention and the
    feed-forward of a sequence and its context. Raises ValueError as `AdaptiveNorm` does."""
    return AdaptiveNorm(
        *(MEASURED_BATCH, length, MEASURED_WIDTH), context=MEASURED_CONTEXT, change=True, sum=True
    )
