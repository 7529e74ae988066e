"""How far an output may be from its float64 result, for any operation.

The rule, for an output O of one dtype with unit roundoff u (2^-11 for fp16, 2^-8 for bf16, 2^-24
for fp32) and the float64 result R on the same inputs, unless the operation has a bound of its own:

    max |O - R|          <=  2 max |plain - R|  +  half an ulp at max |R|
    ||O - R|| / ||R||    <=  u

`plain` is plain PyTorch, every operation rounded to the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OutputError:
    """Distance of an output from the float64 result, or the largest one allowed.

    max_abs: largest absolute difference of an element; NaN if any element is wrongly NaN.
    relative: Frobenius norm of the difference over that of the result; infinite in a bound that
    does not limit it.
    """

    max_abs: float
    relative: float

    def within(self, bound: OutputError) -> bool:
        """Whether both errors are finite and no larger than the bound's."""
        # every comparison with NaN is false
        return self.max_abs <= bound.max_abs < math.inf and self.relative <= bound.relative

    def excess(self, bound: OutputError) -> str:
        """Return which error is over the bound, in words; "" if none is."""
        return "; ".join(
            f"{name} error {value:.3e} is over its bound {limit:.3e}"
            for name, value, limit in (
                ("max abs", self.max_abs, bound.max_abs),
                ("relative", self.relative, bound.relative),
            )
            if not value <= limit
        )


@dataclass(frozen=True)
class Reference:
    """The float64 results for some inputs, and how far off a kernel's may be, by output."""

    expected: Mapping[str, torch.Tensor]
    bounds: Mapping[str, OutputError]


def half_ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Return half the distance between neighbours of `dtype` at `magnitude`: the largest rounding
    error of a value of that size."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(abs(magnitude), info.tiny))
    return math.ldexp(info.eps, exponent - 1) / 2


def relative_bound(dtype: torch.dtype) -> float:
    """Return the largest relative Frobenius error allowed: the unit roundoff of `dtype`."""
    return torch.finfo(dtype).eps / 2


def absolute_errors(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference of each element from the float64 `expected`.

    An infinity or a NaN that is expected has error 0; elsewhere its error is not finite, as is that
    of a finite value in its place.
    """
    got = output.double()
    same = (got == expected) | (got.isnan() & expected.isnan())
    return (got - expected).abs_().masked_fill_(same, 0.0)


def measure_error(output: torch.Tensor, expected: torch.Tensor) -> OutputError:
    """Return the distance of `output` from the float64 `expected`, over all elements.

    Raises ValueError if the shapes differ.
    """
    if output.shape != expected.shape:
        raise ValueError(
            f"output has shape {tuple(output.shape)}, the reference {tuple(expected.shape)}"
        )
    errors = absolute_errors(output, expected)
    norm = torch.linalg.vector_norm(expected.masked_fill(~expected.isfinite(), 0.0)).item()
    error = torch.linalg.vector_norm(errors).item()
    return OutputError(
        max_abs=errors.max().item(),
        relative=error / norm if norm else math.inf if error else 0.0,
    )
