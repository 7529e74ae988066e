"""The problems of the backward pass of norms that are measured. Standard library only."""

from __future__ import annotations

from flash_helpers.operations.norm import problems as forward
from flash_helpers.operations.norm_backward.problem import NormBackward

DY_MEAN = 0.125  # away from zero; the sum of 300,000 rows is a number of fp16


def measured(width: int, rms: bool = False) -> NormBackward:
    """Return the problem of one width that is measured, with as many rows as that of the forward
    pass, and all gradients. Raises ValueError as `NormBackward` does."""
    rows = forward.measured(width, rms).rows
    return NormBackward(rows, width, rms=rms, weight=True, dweight=True, dbias=not rms)
