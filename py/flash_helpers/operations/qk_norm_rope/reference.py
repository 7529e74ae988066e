"""Norm and rotary embedding of Q and K in float64, and the largest errors allowed of an output.

The bounds are those of `computed_bound`, for each token by itself: twice the error of
plain PyTorch in the same dtype, or what computing in fp32 allows, and the rounding of the output.
PyTorch rounds behind the norm and behind rotary embedding, a kernel once.

A row has at least 32 threads, or as many as leave each MOST_OF_FEW elements, whose sums of squares
trees add up. With u = 2^-24 and n elements of a thread rstd is wrong by (n + 10) u / 2 of it at
most, and by a few roundings. Turning adds two products. V is a copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.check.errors import Reference, computed_bound
from flash_helpers.operations.norm.reference import (
    LEAST_THREADS,
    MOST_OF_FEW,
    SMALLEST,
    TREES,
    U,
)
from flash_helpers.operations.qk_norm_rope.baselines import joined
from flash_helpers.operations.qk_norm_rope.problem import QkNormRope

_ROUNDINGS = 8  # of the mean, rsqrt, the products with rstd and weight, and of turning


def _sizes(problem: QkNormRope, exact: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of |x| and |weight|, and for the elements of a turned pair (a, b) the
    larger of |a| |cos| + |b| |sin| and |a| |sin| + |b| |cos|."""
    absolute = {name: x.abs() for name, x in exact.items()}
    second = joined(problem, absolute)  # a sin + b cos
    if problem.rotary:
        absolute["rotary"] *= torch.tensor([1.0, -1.0]).to(absolute["rotary"])
    first = joined(problem, absolute)  # a cos + b sin
    return {name: torch.maximum(x.abs(), first[name].abs()) for name, x in second.items()}


def reference(problem: QkNormRope, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the results of a problem and their bounds."""
    exact = {name: x.double() for name, x in inputs.items()}
    expected, plain = joined(problem, exact), joined(problem, inputs)
    of_thread = max(-(-problem.width // LEAST_THREADS), min(problem.width, MOST_OF_FEW))
    share = ((of_thread + TREES) / 2 + _ROUNDINGS) * U
    sizes = _sizes(problem, exact)
    bounds = {}
    for name, x in expected.items():
        errors = torch.zeros_like(x) if name == "joint_v" else share * sizes[name] + SMALLEST
        bounds[name] = computed_bound(x, errors, plain[name])
    return Reference(expected, bounds)
