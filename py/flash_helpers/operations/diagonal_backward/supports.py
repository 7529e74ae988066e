"""The problems of diagonal_backward that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward
from flash_helpers.operations.rows.supports import RowsSupports


@dataclass(frozen=True)
class DiagonalBackwardSupports(RowsSupports):
    """Problems of diagonal_backward, whose rows are those of softmax, but of any length."""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        strides = "1 along a row and in a and da; any from row to row"
        return {**super().described(), "options": "db or not", "strides": strides}

    def corners(self) -> Iterator[Any]:
        """Yield small problems of `corner_sizes`, with dB and without."""
        for n, (rows, width) in enumerate(self.corner_sizes()):
            yield DiagonalBackward(rows, width, self.dtype, db=n % 3 > 0)
