"""The gradients of norms in float64, and the largest errors allowed of them.

Kernels compute in fp32 and round once. The bounds are `computed_bound`, beside PyTorch's operators
in fp32, rounded once, with the error that computing in fp32 allows (`computed`). Mean and rstd are
inputs, whose own errors are none of these. The bound of dx holds for each row by itself, those of
dweight and dbias for all columns together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flash_helpers.check.errors import Reference, computed_bound
from flash_helpers.operations.norm.reference import (
    LEAST_THREADS,
    MOST_OF_FEW,
    SMALLEST,
    TREES,
    U,
)
from flash_helpers.operations.norm_backward.formulas import gradients
from flash_helpers.operations.norm_backward.problem import NormBackward

LEAST_WARPS = 8  # that share the rows of a column
WARP_SUMS = 64  # additions of the sums of warps and of blocks to a column's sum


@dataclass(frozen=True)
class Computed:
    """The results in float64, and the errors that fp32 allows of each, by name."""

    results: Mapping[str, torch.Tensor]
    errors: Mapping[str, torch.Tensor]


def computed(problem: NormBackward, inputs: Mapping[str, torch.Tensor]) -> Computed:
    """Return the results, and the errors allowed of a kernel that computes in fp32: a worst case to
    first order in u = 2^-24.

    A thread adds at most n = max(width / 32, min(width, 128)) elements, and 10 levels of trees
    follow, k = n + 10 in all. Over the rows, at most r = rows / 8 + 64 sums are added. With means
    along a row, and errors in units of u:

        mean of g             (k + 2) mean of |g|: the product g, additions, a division
        mean of g · normed    (k + 6) mean of |g · normed|: besides, a difference, products with it
                              and with rstd, twice
        dx                    rstd times: 2 of g, 1 of its mean and the latter's own error; of
                              normed · mean of (g · normed), 3 and the latter's own error; 2 of dx
        dweight               (r + 4) Σ |dy · normed|: a difference, two products, additions
        dbias                 r Σ |dy|
    """
    dy, x = inputs["dy"].double(), inputs["x"].double()
    rstd = inputs["rstd"].double()[:, None]
    mean = inputs["mean"].double()[:, None] if "mean" in inputs else 0.0
    normed = (x - mean) * rstd
    g = dy * inputs["weight"].double() if problem.weight else dy
    k = max(problem.width / LEAST_THREADS, min(problem.width, MOST_OF_FEW)) + TREES
    r = problem.rows / LEAST_WARPS + WARP_SUMS

    mean_g = torch.zeros_like(rstd) if problem.rms else g.mean(-1, keepdim=True)
    of_mean_g = (k + 2) * g.abs().mean(-1, keepdim=True) * (not problem.rms)
    slope = (g * normed).mean(-1, keepdim=True)
    of_slope = (k + 6) * (g * normed).abs().mean(-1, keepdim=True)
    dx = rstd * (g - mean_g - normed * slope)
    inner = 2 * g.abs() + mean_g.abs() + of_mean_g + normed.abs() * (3 * slope.abs() + of_slope)

    results, errors = {"dx": dx}, {"dx": rstd.abs() * inner + 2 * dx.abs()}
    if problem.dweight:
        results["dweight"] = (dy * normed).sum(0)
        errors["dweight"] = (r + 4) * (dy * normed).abs().sum(0)
    if problem.dbias:
        results["dbias"] = dy.sum(0)
        errors["dbias"] = r * dy.abs().sum(0)
    return Computed(results, {name: U * error + SMALLEST for name, error in errors.items()})


def reference(problem: NormBackward, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the results of a problem and their bounds: dx, and dweight and dbias where it has
    them."""
    found = computed(problem, inputs)
    own = gradients(
        *(inputs["dy"], inputs["x"], inputs["rstd"], inputs.get("mean"), inputs.get("weight")),
        of_weight=problem.dweight,
        of_bias=problem.dbias,
    )
    named = zip(("dx", "dweight", "dbias"), own, strict=True)
    plain = {name: result for name, result in named if result is not None}
    bounds = {
        name: computed_bound(result, found.errors[name], plain[name])
        for name, result in found.results.items()
    }
    return Reference(found.results, bounds)
