"""The problems of rows_backward that a kernel takes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.operations.rows.supports import RowsSupports
from flash_helpers.operations.rows_backward.problem import RowsBackward


@dataclass(frozen=True)
class RowsBackwardSupports(RowsSupports):
    """Problems of rows_backward, whose rows are those of softmax."""

    problem: ClassVar[type[RowsBackward]] = RowsBackward
