"""The problems of diagonal_backward that are checked and measured, and distributions of inputs by
name: those of diagonal, for a and B. Standard library only."""

from __future__ import annotations

from flash_helpers.operations.diagonal import problems as forward
from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward

MEASURED_WIDTHS = forward.MEASURED_WIDTHS
DISTRIBUTIONS = forward.DISTRIBUTIONS


def measured(width: int) -> DiagonalBackward:
    """Return the problem of one width that is measured, with the rows of that of diagonal. Raises
    ValueError as `DiagonalBackward` does."""
    return DiagonalBackward(forward.measured(width).rows, width, db=True)
