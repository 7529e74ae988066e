"""Distance of an output from its float64 result, and its bound, for any operation.

The rule, for an output O of one dtype with unit roundoff u (2^-11 for fp16, 2^-8 for bf16, 2^-24
for fp32) and the float64 result R on the same inputs, unless the operation has a bound of its own:

    max |O - R|          <=  2 max |plain - R|  +  half an ulp at max |R|
    ||O - R|| / ||R||    <=  ||E|| / ||R||, where E is `rounding_errors`: u |R|, and more where
                             elements of R are subnormal in the dtype

`plain` is the result of plain PyTorch, with each operation rounded to the dtype.
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
    """Distance of an output from the float64 result, or the largest allowed distance.

    max_abs: largest absolute difference of an element; NaN if any element is wrongly NaN.
    relative: Frobenius norm of the difference over the norm of the result; infinite in a bound that
    does not limit it. rows: both numbers for each row; None in a bound that all rows share.
    """

    max_abs: float
    relative: float
    rows: RowErrors | None = field(default=None, compare=False, repr=False)

    @property
    def of_elements(self) -> float | torch.Tensor:
        """Largest error that a bound allows for an element: one number, or one per row, shaped to
        broadcast."""
        return self.max_abs if self.rows is None else self.rows.max_abs[..., None]

    def within(self, bound: OutputError) -> bool:
        """Whether both errors are finite and within the bound; in each row, if the bound has one
        per row."""
        # Comparisons with NaN are false.
        finite = self.max_abs <= bound.max_abs < math.inf and self.relative <= bound.relative
        return finite and self._first_row_over(bound) is None

    def _first_row_over(self, bound: OutputError) -> tuple[OutputError, OutputError, str] | None:
        """Return error, bound and place of the first row that exceeds the row's own bound."""
        if bound.rows is None:
            return None
        if self.rows is None:
            raise ValueError("the bound is by row and the error is not: use measure_error")
        own, limits = self.rows, bound.rows
        over = (~((own.max_abs <= limits.max_abs) & (own.relative <= limits.relative))).nonzero()
        if not len(over):
            return None
        place = tuple(over[0].tolist())
        return own.at(place), limits.at(place), ", ".join(map(str, place))

    def excess(self, bound: OutputError) -> str:
        """Return the errors that exceed the bound, in words; "" if none does. With a bound per row,
        the errors are those of the first row that exceeds its own."""
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
    """The float64 results for some inputs, and the bounds on a kernel's errors, by output."""

    expected: Mapping[str, torch.Tensor]
    bounds: Mapping[str, OutputError]


def half_ulps(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the distance between neighbouring numbers of `dtype` at each value, the largest
    rounding error there. values: float64."""
    info = torch.finfo(dtype)
    sizes = values.abs().clamp(min=info.tiny)
    powers = sizes / torch.frexp(sizes).mantissa  # the next power of two above each: exact
    return powers * (info.eps / 4)


def half_ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Return `half_ulps` of one value."""
    return half_ulps(torch.tensor(magnitude, dtype=torch.float64), dtype).item()


def rounding_errors(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest error that rounding to `dtype` leaves of each value: the unit roundoff
    times the value; of a subnormal one half the spacing there, at most twice the value, since a
    value that is not exact may be rounded away from 0. values: float64."""
    info = torch.finfo(dtype)
    u, sizes = info.eps / 2, values.abs()
    return torch.maximum(sizes * u, (2 * sizes).clamp_(max=info.tiny * u))


def relative_bound(dtype: torch.dtype) -> float:
    """Return the largest relative Frobenius error allowed of normal numbers: the unit roundoff of
    `dtype`."""
    return torch.finfo(dtype).eps / 2


def in_range(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values with an infinity for those that a dtype rounds to one, as fp16 does from 65520
    on. values: float64."""
    rounded = values.to(dtype)
    return torch.where(rounded.isinf(), rounded.double(), values)


def absolute_errors(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference of each element from the float64 `expected`.

    An expected infinity or NaN has error 0; an infinity is expected of a value beyond the output's
    dtype, too. An unexpected one has an error that is not finite, and so has a finite value in
    place of an expected one.
    """
    got, expected = output.double(), in_range(expected, output.dtype)
    same = (got == expected) | (got.isnan() & expected.isnan())
    return (got - expected).abs_().masked_fill_(same, 0.0)


def computed_bound(
    expected: torch.Tensor, errors: torch.Tensor, plain: torch.Tensor
) -> OutputError:
    """Return the bound of an output, for each row by itself, from the error that computing in fp32
    allows: with R the float64 result and a these errors,

        max |O - R|          <=  max(2 max |plain - R|, max a)  +  half an ulp at max |R|
        ||O - R|| / ||R||    <=  ||max(u |R|, h) + a|| / ||R||

    u is the unit roundoff and h half the distance of subnormal numbers of the dtype of `plain`,
    PyTorch's own result. In fp32 a decides alone. Elements of R that are not finite in that dtype
    have no bound: the output must be so, too. Where a is not finite, no error is allowed.

    `expected`, `errors`: float64, of the shape of `plain`.
    """
    finite = in_range(expected, plain.dtype).isfinite() & errors.isfinite()
    values, allowed = (each.masked_fill(~finite, 0.0) for each in (expected, errors))
    most = allowed.amax(-1)
    if plain.dtype != torch.float32:
        of_plain = absolute_errors(plain, expected).masked_fill(~finite, 0.0).amax(-1)
        most = torch.maximum(2 * of_plain, most) + half_ulps(values.abs().amax(-1), plain.dtype)
        info = torch.finfo(plain.dtype)
        u = info.eps / 2
        rounding = (values.abs() * u).clamp_(min=info.smallest_normal * u)
        allowed = allowed + rounding.masked_fill_(~finite, 0.0)
    norm = torch.linalg.vector_norm
    rows = RowErrors(most, norm(allowed, dim=-1) / norm(values, dim=-1))
    rows.relative.nan_to_num_(nan=0.0, posinf=torch.inf)
    relative = (norm(allowed) / norm(values)).nan_to_num_(nan=0.0, posinf=torch.inf)
    return OutputError(most.max().item(), relative.item(), rows)


def measure_error(output: torch.Tensor, expected: torch.Tensor) -> OutputError:
    """Return the distance of `output` from the float64 `expected`, over all elements.

    Raises ValueError if the shapes differ.
    """
    if output.shape != expected.shape:
        raise ValueError(
            f"output has shape {tuple(output.shape)}, the reference {tuple(expected.shape)}"
        )
    expected = in_range(expected, output.dtype)
    errors = absolute_errors(output, expected)
    norm = torch.linalg.vector_norm
    row_errors = norm(errors, dim=-1)
    row_norms = norm(expected.masked_fill(~expected.isfinite(), 0.0), dim=-1)
    rows = RowErrors(errors.amax(-1), _shares(row_errors, row_norms))
    relative = _shares(norm(row_errors), norm(row_norms)).item()
    return OutputError(rows.max_abs.max().item(), relative, rows)


def _shares(errors: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Return errors over norms; 0 where the error is 0, even if the norm is 0."""
    return (errors / norms).masked_fill_(errors == 0, 0.0)
