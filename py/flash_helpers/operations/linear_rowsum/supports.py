"""The problems of linear_rowsum that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.registry.supports import MatrixSupports

MAX_SIZE = 2**30  # of rows and features: sums of a size and a tile are an int


@dataclass(frozen=True)
class LinearRowsumSupports(MatrixSupports):
    """Problems of linear_rowsum.

    `tile`: rows of x, input features and rows of W that a
    thread block takes at once; the corners lie around them. `max_tiles`: tiles of rows of x and of
    W; None for any number.
    """

    any_stride: ClassVar[frozenset[str]] = frozenset({"bias", "y"})

    tile: tuple[int, int, int]
    max_size: int = MAX_SIZE
    max_tiles: int | None = None

    def refusal(self, problem: LinearRowsum, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if reason := super().refusal(problem, kernel):
            return reason
        ways_out = {
            "rows": "split the call by rows",
            "in_features": "add up the results of parts of x and W",
            "out_features": "add up the results of parts of W",
        }
        for name, way_out in ways_out.items():
            if getattr(problem, name) > self.max_size:
                return (
                    f"{name} {getattr(problem, name)} is over the limit {self.max_size} of "
                    f"{kernel}: {way_out}"
                )
        tiles = -(-problem.rows // self.tile[0]) * -(-problem.out_features // self.tile[2])
        if self.max_tiles is not None and tiles > self.max_tiles:
            return (
                f"rows {problem.rows} and out_features {problem.out_features} have {tiles} tiles, "
                f"over the limit {self.max_tiles} of a CUDA grid: split the call by rows"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        sizes = f"1 to {self.max_size:,}"
        return {
            "rows": sizes,
            "input features": sizes,
            "output features": sizes,
            "options": "a bias",
            "strides": "1 along a row of x and W; any else",
        }

    def corners(self) -> Iterator[LinearRowsum]:
        """Yield small problems at the edges of the declaration: one element; sizes within a tile,
        at its end and one beyond."""
        rows, ins, outs = self.tile
        yield LinearRowsum(1, 1, 1, self.dtype)
        yield LinearRowsum(1, 1, 1, self.dtype, bias=True)
        yield LinearRowsum(3, 37, 5, self.dtype, bias=True)
        yield LinearRowsum(rows, ins, outs, self.dtype)
        yield LinearRowsum(rows + 1, ins + 1, outs + 1, self.dtype, bias=True)
