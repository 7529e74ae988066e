"""Norms of a sum along rows in float64, and the largest errors allowed of an output.

The sum is one addition, which fp32 or the dtype rounds. y, mean and rstd are those of the rounded
sum, within the bounds of a norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.check.errors import Reference, computed_bound
from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.norm import reference as norm


def reference(problem: AddNorm, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the results of a problem and their bounds: y, sum, and mean and rstd where it has
    them."""
    x, residual = inputs["x"], inputs["residual"]
    rounded, exact = x + residual, x.double() + residual.double()
    of_sum = norm.reference(problem.of_sum, {**inputs, "x": rounded})
    errors = norm.U * exact.abs() + norm.SMALLEST
    return Reference(
        {**of_sum.expected, "sum": exact},
        {**of_sum.bounds, "sum": computed_bound(exact, errors, rounded)},
    )
