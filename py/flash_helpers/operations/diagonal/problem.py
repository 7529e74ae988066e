"""The problem of a diagonal matrix times a matrix. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.registry.problem import Constant, Element, Problem, Role, Tensor, option

_AXES = ("row", "column")


@dataclass(frozen=True, order=True)
class Diagonal(Problem):
    """C = diag(a) B: row i of C is a[i] times row i of B. a is (rows,), B and C are (rows, width).

    NaN and infinities stay in their rows, as in a[:, None] * B. The matrix product
    torch.diag(a) @ B also multiplies them by the zeros of diag(a), which gives NaN in other rows.

    Raises ValueError for a size below 1.
    """

    operation: ClassVar[str] = "diagonal"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"a": _AXES[:1], "b": _AXES, "c": _AXES}
    )

    rows: int = option("rows of B")
    width: int = option("elements of a row of B")
    dtype: Element = Element.BF16

    def __post_init__(self) -> None:
        for name in ("rows", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")

    def __str__(self) -> str:
        return f"rows {self.rows}, width {self.width}"

    @classmethod
    def posed(cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element) -> Diagonal:
        """Return the problem of a and b, and of c where it is given."""
        cls._check(shapes)
        rows, width = shapes["b"]
        return cls(rows, width, dtype)

    @classmethod
    def constant(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, **options: Any
    ) -> Constant | None:
        """Return the empty C of a B without elements."""
        if {"a", "b"} - shapes.keys() or all(shapes["b"]):
            return None
        cls._check(shapes)
        return Constant(_tensors(shapes["b"], dtype), {"c": 0.0})

    @staticmethod
    def _check(shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError for shapes that do not fit together."""
        if shapes["a"] != shapes["b"][:1]:
            raise ValueError(
                f"a has shape {shapes['a']} and b {shapes['b']}: a must have one element for each "
                f"row of b, shape {shapes['b'][:1]}"
            )
        if shapes.get("c", shapes["b"]) != shapes["b"]:
            raise ValueError(
                f"c has shape {shapes['c']} and b {shapes['b']}: all sizes must be equal"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """a, b and the output c."""
        return _tensors((self.rows, self.width), self.dtype)

    @property
    def operations(self) -> int:
        """Floating-point operations: one product for each element."""
        return self.rows * self.width


def _tensors(shape: tuple[int, ...], dtype: Element) -> tuple[Tensor, ...]:
    return (
        Tensor("a", shape[:1], dtype, Role.IN, _AXES[:1]),
        Tensor("b", shape, dtype, Role.IN, _AXES),
        Tensor("c", shape, dtype, Role.OUT, _AXES),
    )
