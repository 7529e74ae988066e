"""diag(a) B in float64, and the largest errors allowed of an output.

An element is one product, so that the right result is the exact product rounded to the dtype. The
bound is that rounding, for each row by itself, with R the float64 result:

    max |c - R|          <=  half an ulp at max |R|
    ||c - R|| / ||R||    <=  ||max(u |R|, h)|| / ||R||

u is the unit roundoff (2^-11 of fp16, 2^-8 of bf16, 2^-24 of fp32), and h, where R is not 0, half
the distance of subnormal numbers. In fp32 and bf16 a kernel may flush products below 2^-126 to 0;
h is 2^-126 there. Both bounds are half of what the rule for other operations allows, since PyTorch
keeps them, too. Elements of R that are NaN or infinite must be so in the output
(`absolute_errors`), and set no bound.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.check.errors import OutputError, Reference, RowErrors, half_ulps
from flash_helpers.operations.diagonal.problem import Diagonal


def diagonal_float64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return diag(a) b in float64, which holds every product of two fp32 numbers exactly."""
    return a.double()[:, None] * b.double()


def rounding_bound(expected: torch.Tensor, dtype: torch.dtype) -> OutputError:
    """Return the bound of an output that is `expected`, rounded to a dtype. expected: (rows, width)
    in float64."""
    info = torch.finfo(dtype)
    u = info.eps / 2
    is_flushed = dtype != torch.float16  # fp32 holds products of fp16 as normal numbers
    h = info.smallest_normal * (1.0 if is_flushed else u)
    sizes = expected.abs().masked_fill_(~expected.isfinite(), 0.0)
    allowed = (sizes * u).clamp_(min=h).masked_fill_(sizes == 0, 0.0)
    max_abs = half_ulps(sizes.amax(-1), dtype).clamp_(min=h)
    norm = torch.linalg.vector_norm
    # 0 / 0, of a row of zeros, allows no error
    relative = (norm(allowed, dim=-1) / norm(sizes, dim=-1)).nan_to_num_(0.0)
    overall = (norm(allowed) / norm(sizes)).nan_to_num(0.0)
    return OutputError(max_abs.max().item(), overall.item(), RowErrors(max_abs, relative))


def diagonal_reference(a: torch.Tensor, b: torch.Tensor) -> Reference:
    """Return the float64 result and its bound for a, (rows,), and b, (rows, width)."""
    expected = diagonal_float64(a, b)
    return Reference({"c": expected}, {"c": rounding_bound(expected, b.dtype)})


def reference(problem: Diagonal, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the result of a problem."""
    return diagonal_reference(inputs["a"], inputs["b"])
