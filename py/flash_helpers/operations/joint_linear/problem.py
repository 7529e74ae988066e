"""The problem of linear layers of a sequence and its context. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.registry.problem import Element, Problem, Role, Tensor, option

EPS = 1e-6  # of the modules in flash_attention.multimodal
MAX_EXPORTED = 65535
OPERATIONS_OF_GELU, OPERATIONS_OF_SILU = 8, 4  # per element, erf and e^x as one each
CONTEXT = "context_"  # before the names of the context's tensors
_STREAM: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "x": ("batch", "seq", "in_feature"),
        "weight": ("out_feature", "in_feature"),
        "bias": ("out_feature",),
        "norm_weight": ("out_feature",),
    }
)
_Y = ("batch", "seq", "out_feature")
_AXES_OF_CONTEXT = {"seq": "token", "in_feature": "context_in", "out_feature": "context_out"}


def _of_context(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_AXES_OF_CONTEXT.get(axis, axis) for axis in axes)


@dataclass(frozen=True, order=True)
class JointLinear(Problem):
    """Linear layers of the tokens of a sequence and of its context, each with weights of its own.

        y = x W^T + b

    x is (batch, length, in_features), W, called weight, (out_features, in_features), b, called
    bias, (out_features), and y (batch, length, out_features). Those of the context are (batch,
    context, context_in), (context_out, context_in), and so on. With `norm` rows of y are normed,

        y / sqrt(mean of y² + eps) · norm_weight

    with a weight (out_features), and the context with its own. With `gelu` y is GELU(x W^T + b)
    before a norm, the exact function with erf; with `silu` x / (1 + e^-x) stands in place of x,
    rounded to the dtype. Both streams have the same of these.

    `context`: 0 without one: then none of its tensors are given. context_in and context_out are
    in_features and out_features unless they are given. Both streams have a bias, or none; and a
    norm, or none.

    Raises ValueError for a size below 1, a context below 0, and an eps that is negative or not
    finite.
    """

    operation: ClassVar[str] = "joint_linear"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            **_STREAM,
            **{CONTEXT + name: _of_context(axes) for name, axes in _STREAM.items()},
            "y": _Y,
            f"{CONTEXT}y": _of_context(_Y),
        }
    )
    optional: ClassVar[frozenset[str]] = frozenset(
        {"bias", "norm_weight", *(name for name in axes if name.startswith(CONTEXT))}
    )
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16)

    batch: int = option("batch size", most=MAX_EXPORTED)
    length: int = option("tokens of each sequence", title="sequence length", most=MAX_EXPORTED)
    in_features: int = option("elements of a token of x", title="input features", most=MAX_EXPORTED)
    out_features: int = option("elements of a token of y", most=MAX_EXPORTED)
    dtype: Element = Element.BF16
    _: KW_ONLY
    bias: bool = option("a bias is added to each output", False)
    norm: bool = option("RMS norm of each token of y, with a weight", False)
    gelu: bool = option("GELU of each output, behind the bias", False)
    silu: bool = option("SiLU of each element of x, before the layer", False)
    context: int = option("tokens of each context, 0 for none", 0, least=0, most=MAX_EXPORTED)
    context_in: int = option(
        "in_features of the context, by default as x", None, metavar="N", most=MAX_EXPORTED
    )
    context_out: int = option(
        "out_features of the context, by default as y", None, metavar="N", most=MAX_EXPORTED
    )
    eps: float = option("added to the mean of squares", EPS, least=0, metavar="EPS")

    def __post_init__(self) -> None:
        for own, of_context in (("in_features", "context_in"), ("out_features", "context_out")):
            if getattr(self, of_context) is None or self.context == 0:
                object.__setattr__(self, of_context, getattr(self, own))
        for name in ("batch", "length", *("in_features", "out_features"), *_SIZES_OF_CONTEXT):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        if self.context < 0:
            raise ValueError(f"context {self.context} is negative: use 0 for none")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps {self.eps} is not a number from 0 on: use {EPS}")

    def __str__(self) -> str:
        names = ("batch", "length", "in_features", "out_features")
        sizes = [f"{name} {getattr(self, name)}" for name in names]
        if self.context:
            sizes.append(f"context {self.context}")
            own = (self.in_features, self.out_features)
            for name, of_x in zip(_SIZES_OF_CONTEXT, own, strict=True):
                size = getattr(self, name)
                sizes += [] if size == of_x else [f"{name} {size}"]
        sizes += [name for name in ("bias", "norm", "gelu", "silu") if getattr(self, name)]
        sizes += [] if self.eps == EPS else [f"eps {self.eps:g}"]
        return ", ".join(sizes)

    @classmethod
    def posed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        eps: float = EPS,
        gelu: bool = False,
        silu: bool = False,
    ) -> JointLinear:
        """Return the problem of x and its weight, and of the other tensors given: of a context its
        x, weight and output, and bias and weight of the norm if the sequence has them."""
        given = [name for name in shapes if name.startswith(CONTEXT)]
        for stream in ("", CONTEXT) if given else ("",):
            cls._check_stream(shapes, stream)
        if given and f"{CONTEXT}y" not in shapes:
            raise ValueError(
                "context_x is given without context_y, its output: pass a tensor of shape "
                f"{(*shapes['context_x'][:2], shapes['context_weight'][0])}"
            )
        for name in ("bias", "norm_weight"):
            if given and (name in shapes) != (CONTEXT + name in shapes):
                one, other = (name, CONTEXT + name) if name in shapes else (CONTEXT + name, name)
                raise ValueError(f"{one} is given without {other}: pass both or neither")
        batch, length, in_features = shapes["x"]
        of_context: tuple[int, ...] = shapes["context_x"] if given else (batch, 0, in_features)
        problem = cls(
            *(batch, length, in_features, shapes["weight"][0], dtype),
            bias="bias" in shapes,
            norm="norm_weight" in shapes,
            context=of_context[1],
            context_in=of_context[2],
            context_out=shapes["context_weight"][0] if given else shapes["weight"][0],
            eps=eps,
            gelu=bool(gelu),
            silu=bool(silu),
        )
        for tensor in problem.tensors:
            shape = shapes.get(tensor.name, tensor.shape)
            if shape != tensor.shape:
                raise ValueError(
                    f"{tensor.name} has shape {shape} and x {shapes['x']}: {tensor.name} must have "
                    f"shape {tensor.shape}"
                )
        return problem

    @classmethod
    def _check_stream(cls, shapes: Mapping[str, tuple[int, ...]], stream: str) -> None:
        """Raises ValueError for sizes of 0 and for widths that differ, KeyError for a context
        without x or weight."""
        x, weight = f"{stream}x", f"{stream}weight"
        for name in (x, weight):
            for axis, size in zip(cls.axes[name], shapes[name], strict=True):
                if size == 0:
                    way_out = (
                        "leave out all tensors of a context without tokens"
                        if axis == "token"
                        else "a kernel needs at least 1"
                    )
                    raise ValueError(f"{name} has {axis} 0, shape {shapes[name]}: {way_out}")
        if shapes[x][2] != shapes[weight][1]:
            raise ValueError(
                f"{weight} has shape {shapes[weight]} and {x} {shapes[x]}: the input features must "
                "be equal, as in torch.nn.functional.linear"
            )

    def call_options(self) -> dict[str, Any]:
        """Return eps and the activations, which no tensor tells."""
        return {"eps": self.eps, "gelu": self.gelu, "silu": self.silu}

    def has(self, name: str) -> bool:
        """Whether the problem has a tensor that a call may leave out."""
        own = name.removeprefix(CONTEXT)
        if own != name and self.context == 0:
            return False
        return {"bias": self.bias, "norm_weight": self.norm}.get(own, True)

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.length

    @property
    def context_rows(self) -> int:
        """Tokens of all contexts."""
        return self.batch * self.context

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of `axes`."""
        sizes = {
            "batch": self.batch,
            "seq": self.length,
            "in_feature": self.in_features,
            "out_feature": self.out_features,
            "token": max(self.context, 1),
            "context_in": self.context_in,
            "context_out": self.context_out,
        }
        found = []
        for name, axes in self.axes.items():
            role = Role.OUT if name.endswith("y") else Role.IN
            role = role if self.has(name) else Role.OPTIONAL
            shape = tuple(sizes[axis] for axis in axes)
            found.append(Tensor(name, shape, self.dtype, role, axes))
        return tuple(found)

    @property
    def operations(self) -> int:
        """Floating-point operations of the products, of bias, GELU and norm for each output, and of
        SiLU for each input."""
        of_output = self.bias + 4 * self.norm + OPERATIONS_OF_GELU * self.gelu
        of_input = OPERATIONS_OF_SILU * self.silu
        products = self.rows * self.out_features * (2 * self.in_features + of_output) + (
            self.context_rows * self.context_out * (2 * self.context_in + of_output)
        )
        inputs = self.rows * self.in_features + self.context_rows * self.context_in
        return products + of_input * inputs


_SIZES_OF_CONTEXT = ("context_in", "context_out")
