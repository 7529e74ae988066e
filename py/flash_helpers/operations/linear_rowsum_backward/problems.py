"""The problems of linear_rowsum_backward that are checked and measured, and distributions of inputs
by name: those of linear_rowsum, for x and W. Standard library only."""

from __future__ import annotations

from flash_helpers.operations.linear_rowsum import problems as forward
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward

MEASURED_FEATURES = forward.MEASURED_FEATURES
DISTRIBUTIONS = forward.DISTRIBUTIONS
DY_MEAN = 0.125  # away from zero; sums over thousands of rows are numbers of fp16


def measured(in_features: int) -> LinearRowsumBackward:
    """Return the problem of one number of input features that is measured, with the sizes of that
    of linear_rowsum and all gradients. Raises ValueError as `LinearRowsumBackward` does."""
    own = forward.measured(in_features)
    sizes = (own.rows, own.in_features, own.out_features)
    return LinearRowsumBackward(*sizes, dx=True, dweight=True, dbias=True)
