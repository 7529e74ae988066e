"""Merged attention in float64, and the largest errors allowed of an output.

The bound of o holds for each row by itself (`computed_bound`): twice the error of PyTorch's
operators in the dtype, half an ulp, and the error that computing in fp32 allows. The latter is a
worst case to first order in u = 2^-24, for a kernel that adds n parts in any order. With
t_i = m - lse_i, m the largest lse of the row, both natural, an element of o has in units of u, for
each term share_i |o_i|:

    2.25 t_i     exponent: the difference, the product (u each), log2(e) rounded to fp32 (0.22 u)
    5            ex2.approx: 2 ulp from the correctly rounded result [1], 2 u each, and u
    2.25 ln n    the same exponents in l, of which the mean of t is at most ln n
    5            ex2.approx in l
    n + 10       additions of l: parts, or every 32nd part and a tree over 32 lanes
    3            reciprocal of l, and products
    n            additions of o

lse = m + log(l) has the errors of l, 4 u of lg2.approx and of the division by log2_base, each at
most log2(n) + 1 as large, and u of the sum.

[1] PTX ISA 9.0, "Floating Point Instructions: ex2" and "lg2".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flash_helpers.check.errors import OutputError, Reference, computed_bound
from flash_helpers.operations.merge.baselines import merged, plain
from flash_helpers.operations.merge.problem import Merge

_U = 2.0**-24  # unit roundoff of fp32
_SMALLEST = 2.0**-126  # of fp32; smaller results may be flushed to zero


def _o_error(problem: Merge, o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the errors that fp32 allows of each element of o. o, lse: parts, in float64."""
    t = (lse.amax(0) - lse) * problem.log2_base * math.log(2)
    shares = torch.softmax(-t, 0)[..., None]
    constant = 23 + 2.25 * math.log(problem.parts) + 2 * problem.parts
    terms = shares * o.abs() * (2.25 * t[..., None] + constant)
    return _U * torch.where(shares > 0, terms, 0.0).sum(0) + _SMALLEST  # NaN without any key


def _lse_error(problem: Merge, lse: torch.Tensor) -> torch.Tensor:
    """Return the error that fp32 allows of each lse, (rows, heads) in float64."""
    natural = 15 + 2.25 * math.log(problem.parts) + problem.parts + 5 * math.log2(2 * problem.parts)
    return _U * (natural / (problem.log2_base * math.log(2)) + lse.abs())


def _lse_bound(expected: torch.Tensor, error: torch.Tensor) -> OutputError:
    finite = expected.isfinite()
    allowed, values = (x.masked_fill(~finite, 0.0) for x in (error, expected))
    norm = torch.linalg.vector_norm
    relative = (norm(allowed) / norm(values)).nan_to_num_(nan=0.0, posinf=torch.inf)
    return OutputError(allowed.max().item(), relative.item())


def reference(problem: Merge, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return o and lse of a problem, and their bounds."""
    o, lse = (inputs[name].double() for name in ("o_parts", "lse_parts"))
    expected, of_all = merged(o, lse, problem.log2_base)
    own, _ = plain(inputs["o_parts"], inputs["lse_parts"], problem.log2_base)
    return Reference(
        {"o": expected, "lse": of_all},
        {
            "o": computed_bound(expected, _o_error(problem, o, lse), own),
            "lse": _lse_bound(of_all, _lse_error(problem, of_all)),
        },
    )
