"""The problems of rows that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from flash_helpers import gpu
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.registry.supports import MatrixSupports


@dataclass(frozen=True)
class RowsSupports(MatrixSupports):
    """Problems of rows.

    `max_width`: elements of a row; `wider`: the way out for a
    wider one. `held`: elements of a row that its threads take in one pass of their loops; the
    corners lie around it.
    """

    problem: ClassVar[type[Rows]] = Rows

    max_width: int
    wider: str
    held: int
    max_rows: int = gpu.MAX_GRID[0]

    def refusal(self, problem: Any, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if reason := super().refusal(problem, kernel):
            return reason
        if problem.width > self.max_width:
            return (
                f"width {problem.width} is over the limit {self.max_width} of {kernel}: "
                f"{self.wider}"
            )
        if problem.rows > self.max_rows:
            return (
                f"rows {problem.rows} is over the limit {self.max_rows} of a CUDA grid: split the "
                "call by rows"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        return {
            "width": f"1 to {self.max_width:,}",
            "rows": f"up to {self.max_rows:,}",
            "options": "none",
            "strides": "1 along a row; any from row to row",
        }

    def corner_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield rows and widths at the edges of the declaration: one element; a row within a chunk;
        lengths around a warp and around one pass of a block's loops. Odd widths put every other
        row between the multiples of 16 bytes."""
        yield from ((1, 1), (3, 2), (2, 31), (3, 33), (2, 127), (1, 1000))
        yield from ((2, width) for width in (self.held, self.held + 1, 2 * self.held - 1))

    def corners(self) -> Iterator[Any]:
        """Yield small problems of `corner_sizes`."""
        for rows, width in self.corner_sizes():
            yield self.problem(rows, width, self.dtype)
