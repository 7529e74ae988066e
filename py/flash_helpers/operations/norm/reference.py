"""Norms along rows in float64, and the largest errors allowed of an output.

The bound of y is `computed_bound`, beside PyTorch's norm, with the error that computing in fp32
allows (`computed`). In 16 bits that error is far below the rounding of y, except where the
deviation of a row is small beside its mean. A row of one value has a variance of 0, and the
rounding of its mean is multiplied by 1 / sqrt(eps). For mean and rstd the error of computing
decides alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flash_helpers.check.errors import OutputError, Reference, computed_bound
from flash_helpers.operations.norm.baselines import plain
from flash_helpers.operations.norm.problem import Norm

U = 2.0**-24  # unit roundoff of fp32
SMALLEST = 2.0**-126  # of fp32; smaller results may be flushed to zero
LEAST_THREADS = 32  # that share a row, or as many as leave a thread MOST_OF_FEW elements
MOST_OF_FEW = 128
TREES = 10  # levels of the trees over 32 lanes and 32 warps


@dataclass(frozen=True)
class Computed:
    """The results in float64, and the errors that fp32 allows of each. y, y_error: (rows, width);
    the others: (rows, 1)."""

    y: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor
    y_error: torch.Tensor
    mean_error: torch.Tensor
    rstd_error: torch.Tensor


def computed(problem: Norm, inputs: Mapping[str, torch.Tensor]) -> Computed:
    """Return the results, and the errors allowed of a kernel that computes in fp32 in two passes: a
    worst case to first order in u = 2^-24.

    A thread adds at most n = max(width / 32, min(width, 128)) elements, and 10 levels of trees
    follow, k = n + 10 in all. Errors in units of u:

        mean      (k + 1) A, where A is the mean of |x|: additions, and a division
        variance  (k + 4) V: difference and square of an element (2 u, u), additions, a division.
                  An error d of the mean adds d², since the mean of x - mean is 0.
        rstd      half of the relative error of V + eps, 1 for the sum with eps, and 2.2 of
                  rsqrt.approx, 2^-22.9 [1], all relative to rstd
        y         rstd |weight| d for the mean; of |(x - mean) rstd weight| the error of rstd, and 3
                  for difference and products; 1 of y for the sum with the bias

    The error of the one-pass variance, mean of x² less mean², is k (V + mean²) u. No multiple of
    V + d² covers it where the mean is far from zero.

    [1] PTX ISA 9.0, "Floating Point Instructions: rsqrt".
    """
    x = inputs["x"].double()
    width = problem.width
    k = max(width / LEAST_THREADS, min(width, MOST_OF_FEW)) + TREES
    if problem.rms:
        mean = mean_error = torch.zeros_like(x[:, :1])
    else:
        mean = x.mean(-1, keepdim=True)
        mean_error = U * (k + 1) * x.abs().mean(-1, keepdim=True) + SMALLEST
    centred = x - mean
    variance = centred.square().mean(-1, keepdim=True)
    raised = variance + problem.eps
    rstd = raised.rsqrt()
    of_variance = U * (k + 4) * variance + mean_error.square()
    relative = of_variance / raised / 2 + U * (1 + 2.2)
    scale = inputs["weight"].double() if problem.weight else torch.ones_like(x[0])
    scaled = centred * rstd * scale
    y = scaled + inputs["bias"].double() if problem.bias else scaled
    of_mean = rstd * scale.abs() * mean_error * (1 + relative)
    y_error = of_mean + scaled.abs() * (relative + 3 * U) + U * y.abs() + SMALLEST
    return Computed(y, mean, rstd, y_error, mean_error, rstd * relative + SMALLEST)


def _statistic_bound(expected: torch.Tensor, error: torch.Tensor) -> OutputError:
    """Return the bound of mean or rstd. Both arguments: (rows). An infinity or a NaN in a row makes
    them infinite, NaN or exactly 0."""
    finite = expected.isfinite()
    allowed = error.masked_fill(~finite, 0.0).nan_to_num_(nan=0.0)
    norm = torch.linalg.vector_norm
    relative = norm(allowed) / norm(expected.masked_fill(~finite, 0.0))
    return OutputError(allowed.max().item(), relative.nan_to_num_(nan=0.0, posinf=torch.inf).item())


def reference(problem: Norm, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the results of a problem and their bounds: y, and mean and rstd where it has them."""
    found = computed(problem, inputs)
    own = plain(inputs["x"], inputs.get("weight"), inputs.get("bias"), problem.rms, problem.eps)
    expected, bounds = {"y": found.y}, {"y": computed_bound(found.y, found.y_error, own)}
    for name in ("mean", "rstd"):
        if getattr(problem, name):
            expected[name] = getattr(found, name)[:, 0]
            bounds[name] = _statistic_bound(expected[name], getattr(found, f"{name}_error")[:, 0])
    return Reference(expected, bounds)
