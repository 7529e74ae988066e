"""The problems of diagonal that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from flash_helpers import gpu
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.registry.supports import MatrixSupports


@dataclass(frozen=True)
class DiagonalSupports(MatrixSupports):
    """Problems of diagonal.

    `piece`: elements of a row that threads share without a
    loop; the corners lie around it. `pieces_per_block`: pieces that a thread block has.
    """

    any_stride: ClassVar[frozenset[str]] = frozenset("a")

    piece: int
    pieces_per_block: int = 1
    max_pieces: int = gpu.MAX_GRID[0]

    def pieces(self, problem: Diagonal) -> int:
        """Return the pieces of all rows."""
        return problem.rows * -(-problem.width // self.piece)

    def blocks(self, problem: Diagonal) -> int:
        """Return the thread blocks that have all pieces."""
        return -(-self.pieces(problem) // self.pieces_per_block)

    def refusal(self, problem: Diagonal, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if reason := super().refusal(problem, kernel):
            return reason
        for name in ("rows", "width"):
            if getattr(problem, name) > gpu.MAX_GRID[0]:
                return (
                    f"{name} {getattr(problem, name)} is over the limit {gpu.MAX_GRID[0]} of an "
                    f"int: split the call by {name}"
                )
        if self.pieces(problem) > self.max_pieces:
            return (
                f"rows {problem.rows} of width {problem.width} have {self.pieces(problem)} pieces "
                f"of {self.piece} elements, over the limit {self.max_pieces} of {kernel}: split "
                "the call by rows"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        return {
            "width": "1 or more",
            "rows": "1 or more",
            "options": "none",
            "strides": "1 along a row of B and C; any from row to row, and in a",
        }

    def corners(self) -> Iterator[Diagonal]:
        """Yield small problems at the edges of the declaration: one element; a row within a chunk;
        lengths around a warp and around a piece. Odd widths put every other row between the
        multiples of 16 bytes."""
        for rows, width in ((1, 1), (3, 2), (9, 31), (2, 129), (1, 1000)):
            yield Diagonal(rows, width, self.dtype)
        for width in (self.piece, self.piece + 1, 2 * self.piece - 1):
            yield Diagonal(2, width, self.dtype)
