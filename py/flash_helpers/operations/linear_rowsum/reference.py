"""The summed outputs of a linear layer in float64, and the largest errors allowed of y.

R is the float64 result on the same inputs, with u the unit roundoff of the dtype. For fp16 and bf16
the rule for all operations holds, with F.linear(x, W, b).sum(-1) as `plain`:

    max |y - R|          <=  2 max |plain - R|  +  half an ulp at max |R|
    ||y - R|| / ||R||    <=  2 ||plain - R|| / ||R||  +  u

F.linear rounds each output before the sum. Where outputs cancel, the errors of this rounding exceed
u ||R||, and a kernel that rounds likewise has errors of the same size: the second bound allows for
twice plain's. Elements of plain that overflow, which fp16 can, allow nothing. Rows whose R is not
finite, or is beyond the dtype, must have the same NaN or infinity (`absolute_errors`), and set no
bound.

In fp32 nothing is rounded to a lower precision, and the errors of the sums decide: `fp32_bound`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.check.errors import (
    OutputError,
    Reference,
    absolute_errors,
    half_ulp,
    in_range,
)
from flash_helpers.operations.linear_rowsum.baselines import run
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum

_U = 2.0**-24  # unit roundoff of fp32
TREES = 20  # additions of an element in trees over lanes, warps and tiles, at most


def linear_rowsum_float64(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the outputs for each row of x in float64."""
    x, weight = inputs["x"].double(), inputs["weight"].double()
    y = x @ weight.sum(0)
    return y + inputs["bias"].double().sum() if "bias" in inputs else y


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Return values with 0 for those that are not finite."""
    return values.nan_to_num(0.0, 0.0, 0.0)


def _share(errors: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of errors over that of the finite expected values; 0 if there are none."""
    norm = torch.linalg.vector_norm
    return (norm(errors) / norm(_finite(expected))).nan_to_num(0.0).item()


def fp32_bound(inputs: Mapping[str, torch.Tensor], expected: torch.Tensor) -> OutputError:
    """Return the largest error of an fp32 output allowed, a worst case to first order in u = 2^-24.

    In any order of the sums a product x_ik W_ok is rounded once, unless an FFMA adds it, and takes
    part in at most in_features + out_features additions and those of the trees. Each of them has a
    relative error of at most u of a partial sum, which is no larger than the sum of the magnitudes
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). So with
    A_i = Σ_k |x_ik| Σ_o |W_ok| + Σ_o |b_o|:

        |y_i - R_i|  <=  (in_features + out_features + TREES) u A_i

    `expected`: (rows,).
    """
    magnitudes = linear_rowsum_float64({name: x.double().abs() for name, x in inputs.items()})
    out_features, in_features = inputs["weight"].shape
    allowed = _finite(magnitudes) * (_U * (in_features + out_features + TREES))
    return OutputError(allowed.max().item(), _share(allowed, expected))


def linear_rowsum_reference(inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the float64 result of x, weight and perhaps bias, by name, and the bound that the
    module's rules give for their dtype."""
    dtype = inputs["x"].dtype
    expected = in_range(linear_rowsum_float64(inputs), dtype)
    if dtype == torch.float32:
        return Reference({"y": expected}, {"y": fp32_bound(inputs, expected)})
    x, weight = inputs["x"], inputs["weight"]
    problem = LinearRowsum(len(x), x.shape[1], len(weight), bias="bias" in inputs)
    errors = _finite(absolute_errors(run("pytorch", problem, inputs)["y"], expected))
    bound = OutputError(
        2 * errors.max().item() + half_ulp(_finite(expected).abs().max().item(), dtype),
        2 * _share(errors, expected) + torch.finfo(dtype).eps / 2,
    )
    return Reference({"y": expected}, {"y": bound})


def reference(problem: LinearRowsum, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the result of a problem."""
    return linear_rowsum_reference(inputs)
