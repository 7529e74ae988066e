"""The problem of softmax along rows. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from flash_helpers.registry.problem import Element, Problem, Role, Tensor, option

_AXES = ("row", "column")
OPERATIONS_PER_ELEMENT = 5  # a maximum, a difference, an exponential, an addition, a product


@dataclass(frozen=True, order=True)
class Rows(Problem):
    """y = softmax(x) along each row of a matrix; x and y are (rows, width).

    An element of -inf beside a finite one gives 0. A row with NaN or +inf, or with -inf only, gives
    NaN throughout, as in torch.softmax.

    Raises ValueError for a size below 1.
    """

    operation: ClassVar[str] = "rows"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({"x": _AXES, "y": _AXES})

    rows: int = option("rows of x")
    width: int = option("elements of a row")
    dtype: Element = Element.BF16

    def __post_init__(self) -> None:
        for name in ("rows", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")

    def __str__(self) -> str:
        return f"rows {self.rows}, width {self.width}"

    @classmethod
    def posed(cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element) -> Rows:
        """Return the problem of x, and of y where it is given."""
        for axis, size in zip(_AXES, shapes["x"], strict=True):
            if size == 0:
                raise ValueError(
                    f"x has {axis} 0, shape {shapes['x']}: softmax over nothing has no value, "
                    "every size must be at least 1"
                )
        if shapes.get("y", shapes["x"]) != shapes["x"]:
            raise ValueError(
                f"y has shape {shapes['y']} and x {shapes['x']}: all sizes must be equal"
            )
        rows, width = shapes["x"]
        return cls(rows, width, dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """x and the output y."""
        shape = (self.rows, self.width)
        roles = {"x": Role.IN, "y": Role.OUT}
        return tuple(Tensor(name, shape, self.dtype, role, _AXES) for name, role in roles.items())

    @property
    def operations(self) -> int:
        """Floating-point operations: for each element a maximum, a difference, an exponential, an
        addition to the sum and a product with its reciprocal."""
        return OPERATIONS_PER_ELEMENT * self.rows * self.width
