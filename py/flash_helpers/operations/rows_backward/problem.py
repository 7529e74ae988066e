"""The problem of the gradients of softmax along rows. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from flash_helpers.operations.rows.problem import Rows

_AXES = ("row", "column")


@dataclass(frozen=True, order=True)
class RowsBackward(Rows):
    """dx = y · (dy - Σ y · dy) along each row of y = softmax(x); all are (rows, width).

    A NaN in a row of y or dy makes all of the row NaN. So does an infinity of dy where y is not 0,
    and also where it is, as in PyTorch: 0 · inf is NaN.

    Raises ValueError for a size below 1.
    """

    operation: ClassVar[str] = "rows_backward"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        dict.fromkeys(("y", "dy", "dx"), _AXES)
    )
    operations_per_element: ClassVar[int] = 4  # product, sum, difference, product
