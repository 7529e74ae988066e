"""The problem of softmax along rows. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, TypeVar

from flash_helpers.registry.problem import Element, Problem, Role, Tensor, option

Own = TypeVar("Own", bound="Rows")

_AXES = ("row", "column")


@dataclass(frozen=True, order=True)
class Rows(Problem):
    """y = softmax(x) along each row of a matrix; x and y are (rows, width).

    An element of -inf beside a finite one gives 0. A row with NaN or +inf, or with -inf only, gives
    NaN throughout, as in torch.softmax.

    Raises ValueError for a size below 1.
    """

    operation: ClassVar[str] = "rows"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({"x": _AXES, "y": _AXES})
    operations_per_element: ClassVar[int] = 5  # maximum, difference, exponential, sum, product

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
    def posed(cls: type[Own], shapes: Mapping[str, tuple[int, ...]], dtype: Element) -> Own:
        """Return the problem of the first tensor, and of the others that are given."""
        first = next(iter(cls.axes))
        for axis, size in zip(_AXES, shapes[first], strict=True):
            if size == 0:
                raise ValueError(
                    f"{first} has {axis} 0, shape {shapes[first]}: softmax over nothing has no "
                    "value, every size must be at least 1"
                )
        for name, shape in shapes.items():
            if shape != shapes[first]:
                raise ValueError(
                    f"{name} has shape {shape} and {first} {shapes[first]}: all sizes must be equal"
                )
        rows, width = shapes[first]
        return cls(rows, width, dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All matrices, of which the last is the output."""
        shape = (self.rows, self.width)
        *inputs, output = self.axes
        roles = {**dict.fromkeys(inputs, Role.IN), output: Role.OUT}
        return tuple(Tensor(name, shape, self.dtype, role, _AXES) for name, role in roles.items())

    @property
    def operations(self) -> int:
        """Floating-point operations, `operations_per_element` for each element."""
        return self.operations_per_element * self.rows * self.width
