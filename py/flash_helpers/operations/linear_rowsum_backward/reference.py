"""Gradients of a linear layer, summed by row, in float64, and the largest errors allowed of them.

Kernels compute in fp32 and round once. The bounds are `computed_bound`, beside PyTorch's operators
in fp32, rounded once, with the error that computing in fp32 allows (`fp32_errors`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.check.errors import Reference, computed_bound, in_range
from flash_helpers.operations.linear_rowsum_backward.baselines import gradients
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward

_U = 2.0**-24  # unit roundoff of fp32
_SMALLEST = 2.0**-126  # of fp32; smaller results may be flushed to zero
JOINED = 64  # additions of the sums of a block's warps, and of those of all warps that add pieces


def _gradients_float64(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all gradients in float64."""
    dy, x, weight = (inputs[name].double() for name in ("dy", "x", "weight"))
    return {
        "dx": dy[:, None] * weight.sum(0),
        "dweight": (dy @ x).expand(weight.shape),
        "dbias": dy.sum().expand(len(weight)),
    }


def fp32_errors(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the error of each gradient that computing in fp32 allows, a worst case to first
    order in u = 2^-24.

    A sum of n elements takes at most n + 64 additions of each, in pieces of any size. An addition
    has a relative error of at most u of a partial sum, which is no larger than the sum of the
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). The product
    with dy is rounded, too. So the errors are at most

        dx       (out_features + 65) u |dy_i| Σ_o |W_ok|
        dweight  (rows + 65) u Σ_i |dy_i x_ik|
        dbias    (rows + 64) u Σ_i |dy_i|
    """
    magnitudes = _gradients_float64({name: x.double().abs() for name, x in inputs.items()})
    rows, out_features = len(inputs["dy"]), len(inputs["weight"])
    turns = {"dx": out_features + 1, "dweight": rows + 1, "dbias": rows}
    return {n: _U * (turns[n] + JOINED) * x + _SMALLEST for n, x in magnitudes.items()}


def reference(problem: LinearRowsumBackward, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the gradients of a problem that it asks for, and their bounds."""
    given = {name: inputs[name] for name in ("dy", "x", "weight")}
    own = gradients(
        *given.values(), of_x=problem.dx, of_weight=problem.dweight, of_bias=problem.dbias
    )
    named = zip(("dx", "dweight", "dbias"), own, strict=True)
    plain = {name: value for name, value in named if value is not None}
    dtype = given["x"].dtype
    results, errors = _gradients_float64(given), fp32_errors(given)
    expected = {name: in_range(results[name], dtype) for name in plain}
    bounds = {
        name: computed_bound(expected[name], errors[name], value) for name, value in plain.items()
    }
    return Reference(expected, bounds)
