"""The problem of the gradients of a linear layer whose outputs are summed by row. Standard library
only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.registry.problem import (
    Constant,
    Element,
    Elements,
    Problem,
    Role,
    Tensor,
    option,
)

_ROW, _IN, _OUT = "row", "in_feature", "out_feature"
_SIZES = ("rows", "in_features", "out_features")
_GRADIENTS = ("dx", "dweight", "dbias")


@dataclass(frozen=True, order=True)
class LinearRowsumBackward(Problem):
    """dx_ik = dy_i Σ_o W_ok, dW_ok = Σ_i dy_i x_ik and db_o = Σ_i dy_i, the gradients of
    y = Σ_o (x W^T + b)_o.

    dy is (rows,), x and dx (rows, in_features), W and dW, called weight and dweight, (out_features,
    in_features), and db, called dbias, (out_features,). All rows of dW are equal, and all elements
    of db. `dx`, `dweight`, `dbias`: the gradients that are computed, one at least.

    Raises ValueError for a size below 1, and if no gradient is asked for.
    """

    operation: ClassVar[str] = "linear_rowsum_backward"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "dy": (_ROW,),
            "x": (_ROW, _IN),
            "weight": (_OUT, _IN),
            "dx": (_ROW, _IN),
            "dweight": (_OUT, _IN),
            "dbias": (_OUT,),
        }
    )
    optional: ClassVar[frozenset[str]] = frozenset(_GRADIENTS)
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16, Element.FP32)

    rows: int = option("rows of x")
    in_features: int = option("elements of a row of x and of W", title="input features")
    out_features: int = option("rows of W")
    dtype: Element = Element.BF16
    _: KW_ONLY
    dx: bool = option("also the gradient of x", False)
    dweight: bool = option("also the gradient of the weight", False)
    dbias: bool = option("also the gradient of the bias", False)

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        if not (self.dx or self.dweight or self.dbias):
            raise ValueError("no gradient is asked for: pass dx, dweight or dbias")

    def __str__(self) -> str:
        sizes = [f"{name.replace('_', ' ')} {getattr(self, name)}" for name in _SIZES]
        return ", ".join(sizes + [name for name in _GRADIENTS if getattr(self, name)])

    @classmethod
    def posed(cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element) -> LinearRowsumBackward:
        """Return the problem of dy, x and weight, and of the gradients that are given."""
        cls._check(shapes)
        rows, in_features = shapes["x"]
        asked = {name: name in shapes for name in _GRADIENTS}
        return cls(rows, in_features, shapes["weight"][0], dtype, **asked)

    @classmethod
    def constant(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, **options: Any
    ) -> Constant | None:
        """Return the gradients of an x or a W without elements: dx and dW are 0 where they have
        elements, and db is the sum of dy."""
        if {"dy", "x", "weight"} - shapes.keys() or all((*shapes["x"], *shapes["weight"])):
            return None
        cls._check(shapes)
        sizes = (*shapes["x"], shapes["weight"][0])
        tensors = _tensors(sizes, dtype, [name for name in _GRADIENTS if name in shapes])
        values: dict[str, Elements] = {"dx": 0.0, "dweight": 0.0}
        values["dbias"] = lambda given: given["dy"].sum()
        return Constant(tensors, {t.name: values[t.name] for t in tensors if t.is_output})

    @classmethod
    def _check(cls, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError for shapes that do not fit together."""
        x, weight = shapes["x"], shapes["weight"]
        if x[1] != weight[1]:
            raise ValueError(
                f"weight has shape {weight} and x {x}: in_features must be equal, as in "
                "torch.nn.functional.linear"
            )
        of = {"dy": ("x", x[:1]), "dx": ("x", x), "dweight": ("weight", weight)}
        of["dbias"] = ("weight", weight[:1])
        for name, (other, wanted) in of.items():
            if shapes.get(name, wanted) != wanted:
                raise ValueError(
                    f"{name} has shape {shapes[name]} and {other} {shapes[other]}: {name} must "
                    f"have shape {wanted}"
                )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """dy, x and weight, and the gradients."""
        sizes = [getattr(self, name) for name in _SIZES]
        return _tensors(sizes, self.dtype, [name for name in _GRADIENTS if getattr(self, name)])

    @property
    def bytes(self) -> int:
        """Least bytes moved: dy, W where dx is computed, x where dW is, and the gradients."""
        unread = [] if self.dx else ["weight"]
        unread += [] if self.dweight else ["x"]
        return super().bytes - sum(self.tensor(name).bytes for name in unread)

    @property
    def operations(self) -> int:
        """Floating-point operations of the algebra: sums of W's columns and a product per element
        of dx, a product and a sum per element of x, and the sum of dy."""
        of_x, of_weight = self.rows * self.in_features, self.out_features * self.in_features
        return self.dx * (of_weight + of_x) + self.dweight * 2 * of_x + self.dbias * self.rows


def _tensors(sizes: Sequence[int], dtype: Element, asked: list[str]) -> tuple[Tensor, ...]:
    of_axis = dict(zip((_ROW, _IN, _OUT), sizes, strict=True))
    roles = {name: Role.OUT if name in asked else Role.OPTIONAL for name in _GRADIENTS}
    return tuple(
        Tensor(name, tuple(of_axis[axis] for axis in axes), dtype, roles.get(name, Role.IN), axes)
        for name, axes in LinearRowsumBackward.axes.items()
    )
