"""Differences of an output from the reference: the worst rows and the first wrong element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_helpers.check.errors import absolute_errors
from flash_helpers.console.tables import Table

WORST_ROWS = 8


@dataclass(frozen=True)
class RowError:
    """One row of an output, along its last dimension. place: index along the other dimensions.
    max_abs: NaN if any element is wrongly NaN."""

    place: tuple[int, ...]
    max_abs: float
    n_wrong: int


@dataclass(frozen=True)
class WrongElement:
    """One element that is farther from the reference than the bound. axes: names of the dimensions
    that its place indexes."""

    output: str
    axes: tuple[str, ...]
    place: tuple[int, ...]
    got: float
    expected: float

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {i}" for axis, i in zip(self.axes, self.place, strict=True))
        return f"{self.output} ({where}): got {self.got:g}, expected {self.expected:g}"


@dataclass(frozen=True)
class OutputDifference:
    """Errors of one output by row.

    worst_rows: at most WORST_ROWS, those with the largest errors, NaN first.
    first_wrong: the first in the order of the dimensions; None if no element is wrong.
    """

    axes: tuple[str, ...]
    n_elements: int
    n_wrong: int
    n_rows: int
    n_wrong_rows: int
    worst_rows: tuple[RowError, ...]
    first_wrong: WrongElement | None

    def text(self) -> str:
        """Return a table of the worst rows, after lines on the wrong elements."""
        rows = Table(
            [*self.axes[:-1], "max abs error", "wrong elements"],
            [
                [*map(str, row.place), f"{row.max_abs:.3e}", str(row.n_wrong)]
                for row in self.worst_rows
            ],
            "r",
        ).text()
        return (
            f"{self.n_wrong} of {self.n_elements} elements are wrong, in {self.n_wrong_rows} of "
            f"{self.n_rows} rows\n"
            f"first wrong element: {self.first_wrong or 'none'}\n"
            f"rows with the largest errors:\n{rows}"
        )


def first_wrong(
    name: str,
    output: torch.Tensor,
    expected: torch.Tensor,
    bound: float | torch.Tensor,
    axes: tuple[str, ...] | None = None,
) -> WrongElement | None:
    """Return the first element that differs by more than the bound or is not finite; None if there
    is none. bound: one number, or a tensor that broadcasts to the elements. axes: names of the
    dimensions, numbers by default."""
    wrong = (~(absolute_errors(output, expected) <= bound)).nonzero()
    if not len(wrong):
        return None
    place = tuple(wrong[0].tolist())
    axes = axes or tuple(f"dimension {n}" for n in range(output.ndim))
    return WrongElement(name, axes, place, output[place].item(), expected[place].item())


def output_difference(
    name: str,
    output: torch.Tensor,
    expected: torch.Tensor,
    max_abs_bound: float | torch.Tensor,
    axes: tuple[str, ...],
) -> OutputDifference:
    """Compare an output with the float64 `expected`, of the same shape, whose dimensions are called
    `axes`.

    An element is wrong if it differs by more than `max_abs_bound` or is wrongly not finite. The
    bound is one number, or a tensor that broadcasts to the elements.
    """
    error = absolute_errors(output, expected)
    wrong = ~(error <= max_abs_bound)
    row_errors = error.amax(-1)  # NaN if any element is
    n_wrong = wrong.sum(-1)
    order = row_errors.nan_to_num(nan=torch.inf).flatten().topk(min(WORST_ROWS, row_errors.numel()))
    places = [
        tuple(int(i) for i in torch.unravel_index(index, row_errors.shape))
        for index in order.indices
    ]
    return OutputDifference(
        axes=axes,
        n_elements=error.numel(),
        n_wrong=int(n_wrong.sum()),
        n_rows=row_errors.numel(),
        n_wrong_rows=int((n_wrong > 0).sum()),
        worst_rows=tuple(
            RowError(place, row_errors[place].item(), int(n_wrong[place])) for place in places
        ),
        first_wrong=first_wrong(name, output, expected, max_abs_bound, axes),
    )
