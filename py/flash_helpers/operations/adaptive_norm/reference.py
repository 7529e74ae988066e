"""Adaptive layer norms in float64, and the largest errors allowed of an output.

The sum is one product and one addition in fp32, then rounded to the dtype. The product of two
elements of 16 bits has no error in fp32. The norm is that of the rounded sum, within the bounds of
a norm whose weight is 1 + scale, which fp32 rounds once, and whose bias is shift. Where it is more,
an output may have twice the error of PyTorch's operators, which round after each of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.check.errors import (
    OutputError,
    Reference,
    absolute_errors,
    computed_bound,
)
from flash_helpers.operations.adaptive_norm.baselines import gated_sum, modulated
from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm
from flash_helpers.operations.norm import reference as norm
from flash_helpers.operations.norm.problem import Norm

Inputs = Mapping[str, torch.Tensor]


def _sums(inputs: Inputs, stream: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of a stream in float64, and as a kernel rounds them."""
    x, change, gate = (inputs.get(stream + name) for name in ("x", "change", "gate"))
    assert x is not None
    if change is None or gate is None:
        return x.double(), x
    exact = x.double() + gate.double()[:, None] * change.double()
    return exact, (x.float() + gate.float()[:, None] * change.float()).to(x.dtype)


def _normed(
    problem: AdaptiveNorm, rounded: torch.Tensor, inputs: Inputs, stream: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the rounded sums of a stream in float64, and the errors that computing in
    fp32 allows."""
    width = rounded.shape[-1]

    def of_tokens(vector: torch.Tensor) -> torch.Tensor:
        return vector[:, None].expand(rounded.shape).reshape(-1, width)

    factor = of_tokens(1 + inputs[f"{stream}scale"].double())
    shift = of_tokens(inputs[f"{stream}shift"].double())
    rows = {"x": rounded.reshape(-1, width), "weight": factor, "bias": shift}
    asked = Norm(len(factor), width, problem.dtype, weight=True, bias=True, eps=problem.eps)
    found = norm.computed(asked, rows)
    errors = found.y_error + norm.U * (found.y - shift).abs()
    return found.y.view(rounded.shape), errors.view(rounded.shape)


def adaptive_norm_float64(problem: AdaptiveNorm, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the outputs of a problem in float64, whose norms are those of exact sums."""
    found = {}
    for stream in problem.streams:
        total, _ = _sums(inputs, stream)
        given = (inputs.get(stream + name) for name in ("scale", "shift"))
        scale, shift = (x if x is None else x.double() for x in given)
        found[f"{stream}y"] = modulated(total, scale, shift, problem.eps)
        found |= {f"{stream}sum": total} if problem.sum else {}
    return found


def _bound(expected: torch.Tensor, errors: torch.Tensor, plain: torch.Tensor) -> OutputError:
    """Return the bound of an output. errors: what computing in fp32 allows. plain: by PyTorch."""
    rounding = expected.abs() * (torch.finfo(plain.dtype).eps / 2)  # the bound has it once more
    of_plain = 2 * absolute_errors(plain, expected) - rounding
    return computed_bound(expected, errors.maximum(of_plain), plain)


def reference(problem: AdaptiveNorm, inputs: Inputs) -> Reference:
    """Return the results of a problem and their bounds."""
    expected: dict[str, torch.Tensor] = {}
    bounds: dict[str, OutputError] = {}
    for stream in problem.streams:
        exact, rounded = _sums(inputs, stream)
        plain = gated_sum(*(inputs.get(stream + name) for name in ("x", "change", "gate")))  # type: ignore[arg-type]
        of_sum = _bound(exact, norm.U * exact.abs() + norm.SMALLEST, plain)
        if problem.sum:
            expected[f"{stream}sum"], bounds[f"{stream}sum"] = exact, of_sum
        name = f"{stream}y"
        if problem.norm:
            scale, shift = inputs[f"{stream}scale"], inputs[f"{stream}shift"]
            expected[name], errors = _normed(problem, rounded, inputs, stream)
            own = modulated(plain, scale, shift, problem.eps)
            bounds[name] = _bound(expected[name], errors, own)
        else:
            expected[name], bounds[name] = exact, of_sum
    return Reference(expected, bounds)
