"""The problem of the backward pass of layer norm and RMS norm. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import ClassVar

from flash_helpers.operations.norm.problem import Norm, NormedRows
from flash_helpers.registry.problem import Element, option

_MATRIX, _COLUMNS, _ROWS = ("row", "column"), ("column",), ("row",)
# Of each element: g = dy · weight, x - mean, two sums and a product for them, four for dx, three
# for dweight, one for dbias.
OPERATIONS_PER_ELEMENT = 13
OPERATIONS_OF_RMS = 9  # without mean, Σ g and dbias


@dataclass(frozen=True, order=True)
class NormBackward(NormedRows):
    """dx, dweight and dbias of y = (x - mean) · rstd · weight + bias, from dy.

    With g = dy · weight, normed = (x - mean) · rstd, and means along each row,

        dx      = rstd · (g - mean of g - normed · mean of (g · normed))
        dweight = Σ dy · normed and dbias = Σ dy, over all rows

    dy, x and dx are (rows, width). mean and rstd, (rows) in fp32, are those that the forward pass
    has stored (`Norm`): they are inputs, so that no eps is needed. With `rms` there is no mean, and
    neither mean of g nor dbias. weight, (width), may be left out. `dweight`, `dbias`: these outputs
    are computed, too, (width) in the dtype of x, from sums in fp32.

    Raises ValueError for a size below 1, and for a dbias or a mean of RMS norm.
    """

    operation: ClassVar[str] = "norm_backward"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "dy": _MATRIX,
            "x": _MATRIX,
            "rstd": _ROWS,
            "mean": _ROWS,
            "weight": _COLUMNS,
            "dx": _MATRIX,
            "dweight": _COLUMNS,
            "dbias": _COLUMNS,
        }
    )
    optional: ClassVar[frozenset[str]] = frozenset({"mean", "weight", "dweight", "dbias"})
    outputs_named: ClassVar[frozenset[str]] = frozenset({"dx", "dweight", "dbias"})
    of_layer_norm: ClassVar[tuple[str, ...]] = ("dbias",)
    constants: ClassVar[Mapping[str, float]] = MappingProxyType(
        {"dx": 0.0, "dweight": 0.0, "dbias": 0.0}
    )

    _: KW_ONLY
    dweight: bool = option("also the gradient of the weight", False)
    dbias: bool = option("also the gradient of the bias", False)

    def has(self, name: str) -> bool:
        """Whether the problem has a tensor that a call may leave out."""
        return not self.rms if name == "mean" else super().has(name)

    @classmethod
    def posed(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, *, rms: bool = False
    ) -> NormBackward:
        """Return the problem of x, and of the other tensors that are given."""
        if rms and "mean" in shapes:
            raise ValueError("mean: RMS norm has no mean, leave it out")
        return super().posed(shapes, dtype, rms=rms)

    @property
    def forward(self) -> Norm:
        """The problem of the forward pass, which stores what this one reads."""
        options = {"rms": self.rms, "weight": self.weight, "bias": self.dbias}
        return Norm(self.rows, self.width, self.dtype, **options, mean=not self.rms, rstd=True)

    @property
    def operations(self) -> int:
        """Floating-point operations: 13 per element, or 9 of RMS norm."""
        each = OPERATIONS_OF_RMS if self.rms else OPERATIONS_PER_ELEMENT
        return each * self.rows * self.width
