"""The problems of linear_rowsum_backward that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.operations.linear_rowsum.supports import MAX_SIZE
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.registry.supports import MatrixSupports


@dataclass(frozen=True)
class LinearRowsumBackwardSupports(MatrixSupports):
    """Problems of linear_rowsum_backward.

    `tile`: rows of dx or dW and columns that a thread block writes. `piece`: fewest rows of W or x
    that a thread block sums, unless there are fewer. The corners lie around them. `max_blocks`:
    thread blocks of a launch.
    """

    any_stride: ClassVar[frozenset[str]] = frozenset({"dy", "dbias"})

    tile: tuple[int, int]
    piece: int
    max_blocks: int
    max_size: int = MAX_SIZE

    def refusal(self, problem: LinearRowsumBackward, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if reason := super().refusal(problem, kernel):
            return reason
        ways_out = {
            "rows": "split the call by rows, and add up dweight and dbias",
            "in_features": "split the call by input features",
            "out_features": "split the call by rows of W, and add up dx",
        }
        for name, way_out in ways_out.items():
            if getattr(problem, name) > self.max_size:
                return (
                    f"{name} {getattr(problem, name)} is over the limit {self.max_size} of "
                    f"{kernel}: {way_out}"
                )
        groups = -(-problem.rows // self.tile[0]) + -(-problem.out_features // self.tile[0])
        blocks = groups * -(-problem.in_features // self.tile[1])
        if blocks > self.max_blocks:
            return (
                f"rows {problem.rows}, in_features {problem.in_features} and out_features "
                f"{problem.out_features} have {blocks} tiles, over the limit {self.max_blocks} of "
                "a CUDA grid: split the call by input features"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        sizes = f"1 to {self.max_size:,}"
        return {
            "rows": sizes,
            "input features": sizes,
            "output features": sizes,
            "options": "one gradient, two or all",
            "strides": "1 along a row of x, W, dx and dW; any else",
        }

    def corners(self) -> Iterator[LinearRowsumBackward]:
        """Yield small problems at the edges of the declaration: one element; sizes within a tile
        and a piece, at their ends and one beyond; each gradient alone, and two."""
        rows, columns = self.tile
        asked = ("dx", "dweight", "dbias")
        for n, sizes in enumerate(
            (
                (1, 1, 1),
                (3, 37, 5),
                (rows, columns, self.piece),
                (self.piece + 1, columns + 1, rows + 1),
                (2, 9, 3),
                (self.piece, 8, 2),
                (5, 7, self.piece + 1),
            )
        ):
            given = {name: n < 4 or (number == n - 4) for number, name in enumerate(asked)}
            yield LinearRowsumBackward(*sizes, self.dtype, **given)
        for left_out in asked:
            given = {name: name != left_out for name in asked}
            yield LinearRowsumBackward(4, 11, 6, self.dtype, **given)
