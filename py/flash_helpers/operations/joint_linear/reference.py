"""Linear layers of a sequence and its context in float64, and the largest errors allowed of an
output.

The bounds are those of `computed_bound`, for each row by itself: twice the error of plain PyTorch
in the same dtype, or what computing in fp32 allows, and the rounding of y. Here u is 2^-24, n the
number of input features, and A = Σ |x| |W| + |b|. Sums of products in fp32 are wrong by at most
2 (n + 2) u A, since tensor cores may cut off what an addition leaves: twice the error of rounding.
PyTorch rounds the linear layer's result before the norm. A kernel does not, so that its y has one
rounding.

With a norm these errors e are scaled by rstd · |weight|, and rstd is wrong by at most the share
||e|| / ||v|| of rstd for a row v of the linear layer, and by a few roundings.

GELU scales errors by at most 1.13, the most that it rises, and adds a few roundings of its
argument. y is the layer of SiLU rounded to the dtype, as in PyTorch. Where SiLU lies between two
numbers of the dtype, fp32 may round it to the other one: of a row one element may be an ulp off.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import gelu, silu

from flash_helpers.check.errors import OutputError, Reference, computed_bound
from flash_helpers.operations.joint_linear.baselines import computed
from flash_helpers.operations.joint_linear.problem import CONTEXT, JointLinear

_U = 2.0**-24  # unit roundoff of fp32
_STEEPEST_GELU, _GELU_ROUNDINGS = 1.13, 8
_NORM_ROUNDINGS = 16  # of the sums of squares in trees, of rsqrt and of the products

Inputs = Mapping[str, torch.Tensor]


def _stream(problem: JointLinear, inputs: Inputs, stream: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y of a stream in float64, and the errors that computing in fp32 allows."""
    own = {
        name: inputs[stream + name].double()
        for name in ("x", "weight", "bias", "norm_weight")
        if stream + name in inputs
    }
    if problem.silu:
        own["x"] = silu(own["x"]).to(inputs[f"{stream}x"].dtype).double()
    y = own["x"] @ own["weight"].T
    sizes = own["x"].abs() @ own["weight"].T.abs()
    if "bias" in own:
        y, sizes = y + own["bias"], sizes + own["bias"].abs()
    errors = 2 * (own["x"].shape[-1] + 2) * _U * sizes
    if problem.silu:
        ulp = torch.finfo(inputs[f"{stream}x"].dtype).eps * own["x"].abs().amax(-1, keepdim=True)
        errors = errors + ulp * own["weight"].abs().amax(-1)
    if problem.gelu:
        errors = _STEEPEST_GELU * errors + _GELU_ROUNDINGS * _U * y.abs()
        y = gelu(y)
    if not problem.norm:
        return y, errors
    rstd = (y.square().mean(-1, keepdim=True) + problem.eps).rsqrt()
    norm = torch.linalg.vector_norm
    of_rstd = (norm(errors, dim=-1) / norm(y, dim=-1)).nan_to_num(0.0)[..., None]
    normed = y * rstd * own["norm_weight"]
    scaled = errors * rstd * own["norm_weight"].abs()
    width = y.shape[-1]
    return normed, scaled + normed.abs() * (of_rstd + (width + _NORM_ROUNDINGS) * _U)


def linear_float64(problem: JointLinear, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return y, and context_y if the problem has it, in float64."""
    streams = ("", CONTEXT) if problem.context else ("",)
    return {f"{stream}y": _stream(problem, inputs, stream)[0] for stream in streams}


def reference(problem: JointLinear, inputs: Inputs) -> Reference:
    """Return the results of a problem and their bounds."""
    plain = computed(problem, inputs)
    expected: dict[str, torch.Tensor] = {}
    bounds: dict[str, OutputError] = {}
    for stream in ("", CONTEXT) if problem.context else ("",):
        name = f"{stream}y"
        expected[name], errors = _stream(problem, inputs, stream)
        bounds[name] = computed_bound(expected[name], errors, plain[name])
    return Reference(expected, bounds)
