"""The problem of layer norm and RMS norm along rows, and what that of its backward pass shares with
it. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from flash_helpers.registry.problem import Constant, Element, Problem, Role, Tensor, option

Own = TypeVar("Own", bound="NormedRows")

_AXES = ("row", "column")
EPS = 1e-5  # of torch.nn.LayerNorm
# Of each element: a sum, a difference, a square and its sum, products with rstd and with the
# weight, the bias.
OPERATIONS_PER_ELEMENT = 7
OPERATIONS_OF_RMS = 4  # a square and its sum, products with rstd and with the weight


@dataclass(frozen=True, order=True)
class NormedRows(Problem):
    """A problem on matrices of shape (rows, width), with vectors of one element per column or per
    row: what the forward and the backward pass of a norm have in common.

    `outputs_named`: the tensors that are written. `of_layer_norm`: options that RMS norm does not
    have. `constants`: elements of the outputs by name, where a matrix has no rows or no columns. A
    tensor per row is fp32; all others have the problem's dtype. A subclass has a field for each
    tensor that may be left out, or says by `has` when there is one.

    Raises ValueError for a size below 1, and for what RMS norm does not have.
    """

    outputs_named: ClassVar[frozenset[str]]
    of_layer_norm: ClassVar[tuple[str, ...]]
    constants: ClassVar[Mapping[str, float]]
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16, Element.FP32)

    rows: int = option("rows of x")
    width: int = option("elements of a row")
    dtype: Element = Element.BF16
    _: KW_ONLY
    rms: bool = option("RMS norm instead of layer norm", False)
    weight: bool = option("a weight per column", False)

    def __post_init__(self) -> None:
        for name in ("rows", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        for name in self.of_layer_norm:
            if self.rms and getattr(self, name):
                raise ValueError(f"{name}: RMS norm has no {name.removeprefix('d')}, leave it out")

    def __str__(self) -> str:
        flags = (f.name for f in fields(self) if f.type == "bool")
        given = (name for name in flags if getattr(self, name))
        return ", ".join((f"rows {self.rows}", f"width {self.width}", *given))

    def has(self, name: str) -> bool:
        """Whether the problem has a tensor that a call may leave out."""
        return bool(getattr(self, name))

    @classmethod
    def posed(
        cls: type[Own],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *_: Any,
        **options: Any,
    ) -> Own:
        """Return the problem of x, and of the other tensors that are given."""
        sizes = dict(zip(_AXES, shapes["x"], strict=True))
        for axis, size in sizes.items():
            if size == 0:
                raise ValueError(
                    f"x has {axis} 0, shape {shapes['x']}, and a kernel needs at least 1"
                )
        for name, axes in cls.axes.items():
            shape = tuple(sizes[axis] for axis in axes)
            if shapes.get(name, shape) != shape:
                raise ValueError(
                    f"{name} has shape {shapes[name]} and x {shapes['x']}: {name} must have "
                    f"shape {shape}"
                )
        given = {name: name in shapes for name in cls.optional & cls.__dataclass_fields__.keys()}
        rows, width = shapes["x"]
        return cls(rows, width, dtype, **options, **given)

    @classmethod
    def constant(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, **options: Any
    ) -> Constant | None:
        """Return the outputs without a kernel, if there is no row or no column: `constants`."""
        if "x" not in shapes or all(shapes["x"]):
            return None
        # refuses wrong options and shapes, and knows the tensors' elements and roles
        least = {
            name: tuple(size + (size == 0) for size in shape) for name, shape in shapes.items()
        }
        problem = cls.posed(least, dtype, **options)
        sizes = dict(zip(_AXES, shapes["x"], strict=True))
        tensors = tuple(
            replace(tensor, shape=tuple(sizes[axis] for axis in tensor.axes))
            for tensor in problem.tensors
        )
        return Constant(tensors, cls.constants)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of `axes`."""
        sizes = {"row": self.rows, "column": self.width}
        found = []
        for name, axes in self.axes.items():
            role = Role.OUT if name in self.outputs_named else Role.IN
            if name in self.optional and not self.has(name):
                role = Role.OPTIONAL
            element = Element.FP32 if axes == ("row",) else self.dtype
            shape = tuple(sizes[axis] for axis in axes)
            found.append(Tensor(name, shape, element, role, axes))
        return tuple(found)


@dataclass(frozen=True, order=True)
class Norm(NormedRows):
    """y = (x - mean) · rstd · weight + bias along each row; x and y are (rows, width).

    mean is the row's mean, and rstd = 1 / sqrt(variance + eps), where the variance is the mean of
    (x - mean)². With `rms` there is no mean: y = x · rstd · weight + bias, and rstd is
    1 / sqrt(mean of x² + eps). weight and bias are (width), in the dtype of x, and may both be left
    out.

    `mean`, `rstd`: these outputs are stored, too, (rows) in fp32, as the backward pass needs them.
    A NaN or an infinity in a row makes all of the row NaN, as in torch.nn.functional.layer_norm;
    with `rms` an infinity makes rstd 0, as in torch.nn.functional.rms_norm.

    Raises ValueError for a size below 1, an eps that is negative or not finite, and for a mean of
    RMS norm.
    """

    operation: ClassVar[str] = "norm"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "x": _AXES,
            "weight": ("column",),
            "bias": ("column",),
            "y": _AXES,
            "mean": ("row",),
            "rstd": ("row",),
        }
    )
    optional: ClassVar[frozenset[str]] = frozenset({"weight", "bias", "mean", "rstd"})
    outputs_named: ClassVar[frozenset[str]] = frozenset({"y", "mean", "rstd"})
    of_layer_norm: ClassVar[tuple[str, ...]] = ("mean",)
    constants: ClassVar[Mapping[str, float]] = MappingProxyType(
        {"y": 0.0, "mean": math.nan, "rstd": math.nan}
    )

    _: KW_ONLY
    bias: bool = option("a bias per column", False)
    mean: bool = option("also the mean of each row, in fp32", False)
    rstd: bool = option("also the reciprocal deviation of each row, in fp32", False)
    eps: float = option("added to the variance", EPS, least=0, metavar="EPS")

    @classmethod
    def posed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        rms: bool = False,
        eps: float = EPS,
    ) -> Norm:
        """Return the problem of x, and of the other tensors that are given."""
        return super().posed(shapes, dtype, rms=rms, eps=eps)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps {self.eps} is not a number from 0 on: use {EPS}")

    def __str__(self) -> str:
        return super().__str__() + ("" if self.eps == EPS else f", eps {self.eps:g}")

    def call_options(self) -> dict[str, Any]:
        """Return eps; `rms` is compiled into a kernel."""
        return {"eps": self.eps}

    @property
    def operations(self) -> int:
        """Floating-point operations: 7 per element, or 4 of RMS norm, which has no mean and seldom
        a bias."""
        each = OPERATIONS_OF_RMS if self.rms else OPERATIONS_PER_ELEMENT
        return each * self.rows * self.width
