"""Joint attention in float64, and the largest errors allowed of an output.

The bounds are those of attention, twice the error of plain PyTorch in the same dtype, where each
operator's result is rounded: norms, rotary embedding, both products and the softmax. The second
part, the relative error, does not grow with the error of attention in plain PyTorch. A kernel
rounds P and O, which the rule of attention allows; and Q and K behind norm or rotary embedding, as
often as PyTorch does: twice the error of float64 attention on PyTorch's own Q and K is allowed for
that. Both outputs have their own bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flash_helpers.check.errors import (
    OutputError,
    Reference,
    half_ulp,
    measure_error,
    rounding_errors,
)
from flash_helpers.operations.attention_forward.reference import (
    attention_float64,
    attention_same_dtype,
)
from flash_helpers.operations.joint_attention.baselines import outputs, queries_keys_values
from flash_helpers.operations.joint_attention.problem import JointAttention

Outputs = dict[str, torch.Tensor]


def joint_float64(problem: JointAttention, inputs: Mapping[str, torch.Tensor]) -> Outputs:
    """Return o, and context_o if the problem has it, in float64."""
    exact = {name: x.double() for name, x in inputs.items()}
    q, k, v = queries_keys_values(problem, exact)
    return outputs(problem, attention_float64(q, k, v, softmax_scale=problem.softmax_scale))


def _bound(expected: torch.Tensor, plain: torch.Tensor, of_rounded: torch.Tensor) -> OutputError:
    """Return the bound of an output. plain: by PyTorch in its dtype. of_rounded: by float64
    attention on Q and K of that dtype."""
    error = measure_error(plain, expected)
    if not math.isfinite(error.max_abs):
        raise ValueError(
            f"plain PyTorch in {plain.dtype} gives a non-finite result on these inputs, so that "
            "they set no bound: use smaller values"
        )
    norm = torch.linalg.vector_norm
    largest = expected.abs().max().item()
    roundings = norm(rounding_errors(expected, plain.dtype)) / norm(expected) if largest else 0.0
    relative = 2 * measure_error(of_rounded, expected).relative + float(roundings)
    return OutputError(2 * error.max_abs + half_ulp(largest, plain.dtype), relative)


def reference(problem: JointAttention, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the results of a problem and their bounds. Raises ValueError if plain PyTorch
    overflows on these inputs, so that they give no bound."""
    scale = problem.softmax_scale
    expected = joint_float64(problem, inputs)
    q, k, v = queries_keys_values(problem, inputs)
    plain = outputs(problem, attention_same_dtype(q, k, v, softmax_scale=scale))
    of_rounded = outputs(problem, attention_float64(q, k, v, softmax_scale=scale))
    bounds = {
        name: _bound(result, plain[name], of_rounded[name]) for name, result in expected.items()
    }
    return Reference(expected, bounds)
