"""The problem of the gradients of a diagonal matrix times a matrix. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.registry.problem import Constant, Element, Problem, Role, Tensor, option

_VECTOR, _MATRIX = ("row",), ("row", "column")


@dataclass(frozen=True, order=True)
class DiagonalBackward(Problem):
    """da_i = Σ_j dC_ij B_ij and dB_ij = a_i dC_ij, the gradients of C = diag(a) B.

    a and da are (rows,), B, dC and dB (rows, width), called b, dc and db. `db`: dB is computed
    as well.

    Raises ValueError for a size below 1.
    """

    operation: ClassVar[str] = "diagonal_backward"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"a": _VECTOR, "b": _MATRIX, "dc": _MATRIX, "da": _VECTOR, "db": _MATRIX}
    )
    optional: ClassVar[frozenset[str]] = frozenset({"db"})
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16, Element.FP32)

    rows: int = option("rows of B")
    width: int = option("elements of a row of B")
    dtype: Element = Element.BF16
    _: KW_ONLY
    db: bool = option("also the gradient of B", False)

    def __post_init__(self) -> None:
        for name in ("rows", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")

    def __str__(self) -> str:
        return f"rows {self.rows}, width {self.width}{', db' if self.db else ''}"

    @classmethod
    def posed(cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element) -> DiagonalBackward:
        """Return the problem of a, b and dc, and of the outputs that are given."""
        rows, width = shapes["b"]
        cls._check(shapes)
        return cls(rows, width, dtype, db="db" in shapes)

    @classmethod
    def constant(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, **options: Any
    ) -> Constant | None:
        """Return the outputs of a B without elements: da is 0, and dB empty."""
        if {"a", "b", "dc"} - shapes.keys() or all(shapes["b"]):
            return None
        cls._check(shapes)
        return Constant(_tensors(shapes["b"], dtype, "db" in shapes), {"da": 0.0, "db": 0.0})

    @classmethod
    def _check(cls, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError for shapes that do not fit together."""
        for name, axes in cls.axes.items():
            wanted = shapes["b"][: len(axes)]
            if shapes.get(name, wanted) != wanted:
                raise ValueError(
                    f"{name} has shape {shapes[name]} and b {shapes['b']}: {name} must have shape "
                    f"{wanted}"
                )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """a, b and dc, and the outputs da and db."""
        return _tensors((self.rows, self.width), self.dtype, self.db)

    @property
    def operations(self) -> int:
        """Floating-point operations of an element: a product and a sum, and a product of dB."""
        return (2 + self.db) * self.rows * self.width


def _tensors(shape: tuple[int, ...], dtype: Element, has_db: bool) -> tuple[Tensor, ...]:
    roles = dict.fromkeys(("a", "b", "dc"), Role.IN)
    roles |= {"da": Role.OUT, "db": Role.OUT if has_db else Role.OPTIONAL}
    axes = DiagonalBackward.axes
    return tuple(
        Tensor(name, shape[: len(axes[name])], dtype, role, axes[name])
        for name, role in roles.items()
    )
