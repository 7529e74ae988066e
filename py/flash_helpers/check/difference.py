"""Where an output differs from the reference: the worst rows and the first wrong element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_helpers.console.tables import Table

WORST_ROWS = 8


@dataclass(frozen=True)
class RowError:
    """One row of the output, d_head elements. max_abs is NaN if any of them is."""

    batch: int
    head: int
    row: int
    max_abs: float
    n_wrong: int


@dataclass(frozen=True)
class WrongElement:
    """One element that is farther from the reference than the bound."""

    batch: int
    head: int
    row: int
    column: int
    got: float
    expected: float

    def __str__(self) -> str:
        return (
            f"(batch {self.batch}, head {self.head}, row {self.row}, column {self.column}): "
            f"got {self.got:g}, expected {self.expected:g}"
        )


@dataclass(frozen=True)
class OutputDifference:
    """Errors of one output by row.

    worst_rows: at most WORST_ROWS, those with the largest errors, NaN first.
    first_wrong: the first in the order batch, head, row, column; None if no element is wrong.
    """

    n_elements: int
    n_wrong: int
    n_rows: int
    n_wrong_rows: int
    worst_rows: tuple[RowError, ...]
    first_wrong: WrongElement | None

    def text(self) -> str:
        """Several lines for a reader."""
        rows = Table(
            ["batch", "head", "row", "max abs error", "wrong elements"],
            [
                [str(r.batch), str(r.head), str(r.row), f"{r.max_abs:.3e}", str(r.n_wrong)]
                for r in self.worst_rows
            ],
            "r",
        ).text()
        return (
            f"{self.n_wrong} of {self.n_elements} elements are wrong, in {self.n_wrong_rows} of "
            f"{self.n_rows} rows\n"
            f"first wrong element: {self.first_wrong or 'none'}\n"
            f"rows with the largest errors:\n{rows}"
        )


def output_difference(
    output: torch.Tensor, expected: torch.Tensor, max_abs_bound: float
) -> OutputDifference:
    """Compare `output` with the float64 `expected`, both (batch, seq_len, heads, d_head).

    An element is wrong if it differs by more than `max_abs_bound` or is not finite.
    """
    # (batch, heads, seq_len, d_head), the order in which elements are named
    error = (output.double() - expected).abs().transpose(1, 2)
    wrong = ~(error <= max_abs_bound)
    row_errors = error.amax(-1)  # NaN if any element is
    n_wrong = wrong.sum(-1)
    order = row_errors.nan_to_num(nan=torch.inf).flatten().topk(min(WORST_ROWS, row_errors.numel()))
    places = [
        tuple(int(i) for i in torch.unravel_index(index, row_errors.shape))
        for index in order.indices
    ]
    first = None
    wrong_rows = n_wrong.nonzero()
    if len(wrong_rows):
        batch, head, row = (int(i) for i in wrong_rows[0])
        column = int(wrong[batch, head, row].nonzero()[0])
        first = WrongElement(
            batch,
            head,
            row,
            column,
            got=output[batch, row, head, column].item(),
            expected=expected[batch, row, head, column].item(),
        )
    return OutputDifference(
        n_elements=error.numel(),
        n_wrong=int(n_wrong.sum()),
        n_rows=row_errors.numel(),
        n_wrong_rows=len(wrong_rows),
        worst_rows=tuple(
            RowError(*place, row_errors[place].item(), int(n_wrong[place])) for place in places
        ),
        first_wrong=first,
    )
