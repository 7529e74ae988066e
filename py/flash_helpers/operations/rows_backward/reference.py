"""Gradients of softmax in float64, and the largest errors allowed of an output.

The bound of dx is `computed_bound`, beside PyTorch's gradient, with the error that computing in
fp32 allows: a worst case to first order in u = 2^-24. A thread adds at most
n = max(width / 32, min(width, 128)) products, and 10 levels of trees follow, k = n + 10 in all.
With A = Σ |y dy| of a row, the errors are in units of u:

    Σ y dy   (k + 1) A: products and additions
    dx       |y| times that of the sum; 3 |dx| for the differences and the product
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.check.errors import Reference, computed_bound
from flash_helpers.operations.norm.reference import LEAST_THREADS, MOST_OF_FEW, TREES
from flash_helpers.operations.rows_backward.baselines import plain
from flash_helpers.operations.rows_backward.problem import RowsBackward

_U = 2.0**-24  # unit roundoff of fp32
_SMALLEST = 2.0**-126  # of fp32; smaller results may be flushed to zero


def most_additions(width: int) -> float:
    """Return the additions that a product of a row takes part in, at most."""
    return max(width / LEAST_THREADS, min(width, MOST_OF_FEW)) + TREES


def reference(problem: RowsBackward, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return dx of a problem and its bound."""
    y, dy = (inputs[name].double() for name in ("y", "dy"))
    products = y * dy
    expected = y * (dy - products.sum(-1, keepdim=True))
    of_sum = (most_additions(problem.width) + 1) * products.abs().sum(-1, keepdim=True)
    errors = _U * (y.abs() * of_sum + 3 * expected.abs()) + _SMALLEST
    own = plain(inputs["y"], inputs["dy"])
    return Reference({"dx": expected}, {"dx": computed_bound(expected, errors, own)})
