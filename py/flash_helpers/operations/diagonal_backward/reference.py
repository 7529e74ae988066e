"""Gradients of diag(a) B in float64, and the largest errors allowed of an output.

dB is a product, rounded once: its bound is that of C (`rounding_bound`). The bound of da is
`computed_bound` over all of its elements, with the error that computing in fp32 allows, to first
order in u = 2^-24: (k + 1) u Σ |dC B| for products and at most k additions of each
(`most_additions`). An output beyond the range of the dtype is infinite.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.check.errors import Reference, computed_bound
from flash_helpers.operations.diagonal.reference import diagonal_float64, rounding_bound
from flash_helpers.operations.diagonal_backward.baselines import gradient_of_a
from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward
from flash_helpers.operations.rows_backward.reference import most_additions

_U = 2.0**-24  # unit roundoff of fp32
_SMALLEST = 2.0**-126  # of fp32; smaller results may be flushed to zero


def reference(problem: DiagonalBackward, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return da of a problem, db where it is asked for, and their bounds."""
    a, b, dc = (inputs[name] for name in ("a", "b", "dc"))
    products = dc.double() * b.double()
    sums = products.sum(-1)
    rounded = sums.to(b.dtype).double()
    sums = torch.where(rounded.isinf(), rounded, sums)
    errors = _U * (most_additions(problem.width) + 1) * products.abs().sum(-1) + _SMALLEST
    expected = {"da": sums}
    bounds = {"da": computed_bound(sums, errors, gradient_of_a(b, dc))}
    if problem.db:
        expected["db"] = diagonal_float64(a, dc)
        bounds["db"] = rounding_bound(expected["db"], b.dtype)
    return Reference(expected, bounds)
