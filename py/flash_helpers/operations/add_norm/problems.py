"""The problems of norms of a sum that are measured. Standard library only."""

from __future__ import annotations

from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.norm import problems as norm


def measured(width: int, rms: bool = False) -> AddNorm:
    """Return the problem of one width that is measured, with as many rows as that of a norm.
    Raises ValueError as `AddNorm` does."""
    rows = norm.measured(width, rms).rows
    return AddNorm(rows, width, rms=rms, weight=True, bias=not rms)
