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
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, eq=False)
class RowErrors:
    """The numbers of an `OutputError` for each row of an output, along its last dimension.

    max_abs, relative: of the output's shape without the last dimension.
    """

    max_abs: torch.Tensor
    relative: torch.Tensor

    def at(self, place: tuple[int, ...]) -> OutputError:
        """Return the numbers of one row."""
        return OutputError(self.max_abs[place].item(), self.relative[place].item())


@dataclass(frozen=True)
class OutputError:
    """Distance of an output from the float64 result, or the largest one allowed.

    max_abs: largest absolute difference of an element; NaN if any element is wrongly NaN.
    relative: Frobenius norm of the difference over that of the result; infinite in a bound that
    does not limit it. rows: the same for each row; None in a bound that is one for all rows.
    """

    max_abs: float
    relative: float
    rows: RowErrors | None = field(default=None, compare=False, repr=False)

    @property
    def of_elements(self) -> float | torch.Tensor:
        """Largest error of an element that a bound allows: of any, or by row, to broadcast."""
        return self.max_abs if self.rows is None else self.rows.max_abs[..., None]

    def within(self, bound: OutputError) -> bool:
        """Whether both errors are finite and no larger than the bound's, in each row if it has one
        for each."""
        # every comparison with NaN is false
        finite = self.max_abs <= bound.max_abs < math.inf and self.relative <= bound.relative
        return finite and self._first_row_over(bound) is None

    def _first_row_over(self, bound: OutputError) -> tuple[OutputError, OutputError, str] | None:
        """Return error, bound and place of the first row that is over a bound of its own."""
        if bound.rows is None:
            return None
        if self.rows is None:
            raise ValueError("the bound is one by row and the error is not: use measure_error")
        own, limits = self.rows, bound.rows
        over = (~((own.max_abs <= limits.max_abs) & (own.relative <= limits.relative))).nonzero()
        if not len(over):
            return None
        place = tuple(over[0].tolist())
        return own.at(place), limits.at(place), ", ".join(map(str, place))

    def excess(self, bound: OutputError) -> str:
        """Return which error is over the bound, in words, of the first such row if each has its
        bound; "" if none is."""
        if found := self._first_row_over(bound):
            own, limit, place = found
            return f"row {place}: {own.excess(limit)}"
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


def half_ulps(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the distance between neighbours of `dtype` at each value: the largest rounding
    error of a value of that size. values: float64."""
    info = torch.finfo(dtype)
    sizes = values.abs().clamp(min=info.tiny)
    powers = sizes / torch.frexp(sizes).mantissa  # the next power of two above each: exact
    return powers * (info.eps / 4)


def half_ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Return what `half_ulps` does, of one value."""
    return half_ulps(torch.tensor(magnitude, dtype=torch.float64), dtype).item()


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
    norm = torch.linalg.vector_norm
    row_errors = norm(errors, dim=-1)
    row_norms = norm(expected.masked_fill(~expected.isfinite(), 0.0), dim=-1)
    rows = RowErrors(errors.amax(-1), _shares(row_errors, row_norms))
    relative = _shares(norm(row_errors), norm(row_norms)).item()
    return OutputError(rows.max_abs.max().item(), relative, rows)


def _shares(errors: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Return errors over norms; 0 where nothing is wrong, also of a result that is 0."""
    return (errors / norms).masked_fill_(errors == 0, 0.0)
