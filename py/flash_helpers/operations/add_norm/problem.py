"""The problem of layer norm and RMS norm of a sum along rows. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from flash_helpers.operations.norm.problem import Norm

_MATRIX, _COLUMNS, _ROWS = ("row", "column"), ("column",), ("row",)


@dataclass(frozen=True, order=True)
class AddNorm(Norm):
    """sum = x + residual, and y = (sum - mean) · rstd · weight + bias along each row of the sum.

    x, residual, sum and y are (rows, width). The sum is rounded to the dtype, and y is the norm of
    the rounded sum, as PyTorch's addition and norm have it. All else is as in `Norm`.

    Raises ValueError as `Norm` does.
    """

    operation: ClassVar[str] = "add_norm"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "x": _MATRIX,
            "residual": _MATRIX,
            "weight": _COLUMNS,
            "bias": _COLUMNS,
            "y": _MATRIX,
            "sum": _MATRIX,
            "mean": _ROWS,
            "rstd": _ROWS,
        }
    )
    outputs_named: ClassVar[frozenset[str]] = frozenset({"y", "sum", "mean", "rstd"})
    constants: ClassVar[Mapping[str, float]] = MappingProxyType(
        {"y": 0.0, "sum": 0.0, "mean": math.nan, "rstd": math.nan}
    )

    @property
    def of_sum(self) -> Norm:
        """The norm of the sum, which is its x."""
        names = ("rows", "width", "dtype", "rms", "weight", "bias", "mean", "rstd", "eps")
        return Norm(**{name: getattr(self, name) for name in names})

    @property
    def operations(self) -> int:
        """Floating-point operations: those of the norm, and an addition per element."""
        return super().operations + self.rows * self.width
