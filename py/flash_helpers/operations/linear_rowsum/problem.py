"""The problem of a linear layer whose outputs are summed by row. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, order=True)
class LinearRowsum(Problem):
    """y = Σ_o (x W^T + b)_o: the outputs of a linear layer, summed for each row of x.

    x is (rows, in_features), W, called weight, (out_features, in_features), b, called bias,
    (out_features,), and y (rows,). Without `bias` there is no b. The sum over o does not depend on
    the row, so that y = x · ΣW + Σb, where ΣW (in_features,) has the sums of W's columns.

    Raises ValueError for a size below 1.
    """

    operation: ClassVar[str] = "linear_rowsum"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"x": (_ROW, _IN), "weight": (_OUT, _IN), "bias": (_OUT,), "y": (_ROW,)}
    )
    optional: ClassVar[frozenset[str]] = frozenset({"bias"})

    rows: int = option("rows of x")
    in_features: int = option("elements of a row of x and of W", title="input features")
    out_features: int = option("rows of W")
    dtype: Element = Element.BF16
    bias: bool = option("a bias is added to each output before the sum", False)

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")

    def __str__(self) -> str:
        sizes = ", ".join(f"{name.replace('_', ' ')} {getattr(self, name)}" for name in _SIZES)
        return f"{sizes}, bias" if self.bias else sizes

    @classmethod
    def posed(cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element) -> LinearRowsum:
        """Return the problem of x, weight and the bias and y that are given."""
        cls._check(shapes)
        rows, in_features = shapes["x"]
        return cls(rows, in_features, shapes["weight"][0], dtype, "bias" in shapes)

    @classmethod
    def constant(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, **options: Any
    ) -> Constant | None:
        """Return y without a kernel: no elements if x has no rows, 0 if W has no rows, and the sum
        of the bias if there are no input features."""
        if {"x", "weight"} - shapes.keys() or all((*shapes["x"], *shapes["weight"])):
            return None
        cls._check(shapes)
        alike = cls(1, 1, 1, dtype, "bias" in shapes)
        found = {"y": shapes["x"][:1], "bias": shapes["weight"][:1], **shapes}
        tensors = tuple(replace(x, shape=found[x.name]) for x in alike.tensors)
        total: Elements = (lambda given: given["bias"].sum()) if alike.bias else 0.0
        return Constant(tensors, {"y": total})

    @staticmethod
    def _check(shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError for shapes that do not fit together."""
        x, weight = shapes["x"], shapes["weight"]
        if x[1] != weight[1]:
            raise ValueError(
                f"weight has shape {weight} and x {x}: in_features must be equal, as in "
                "torch.nn.functional.linear"
            )
        for name, other, wanted in (("bias", "weight", weight[:1]), ("y", "x", x[:1])):
            if shapes.get(name, wanted) != wanted:
                raise ValueError(
                    f"{name} has shape {shapes[name]} and {other} {shapes[other]}: {name} must "
                    f"have one element for each row of {other}, shape {wanted}"
                )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """x, weight, bias and the output y."""
        sizes = {_ROW: self.rows, _IN: self.in_features, _OUT: self.out_features}
        roles = {
            "x": Role.IN,
            "weight": Role.IN,
            "bias": Role.IN if self.bias else Role.OPTIONAL,
            "y": Role.OUT,
        }
        return tuple(
            Tensor(name, tuple(sizes[axis] for axis in axes), self.dtype, roles[name], axes)
            for name, axes in self.axes.items()
        )

    @property
    def operations(self) -> int:
        """Floating-point operations of the definition: products and sums of the linear layer, and
        the sums of its outputs."""
        return self.rows * self.out_features * (2 * self.in_features + 1 + self.bias)
