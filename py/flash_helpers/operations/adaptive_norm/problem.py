"""The problem of adaptive layer norm of gated sums of a sequence and its context. Standard library
only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.registry.problem import Element, Problem, Role, Tensor, option

EPS = 1e-6  # of the modules in flash_attention.multimodal
MAX_EXPORTED = 65535
CONTEXT = "context_"  # before the names of the context's tensors
VECTORS = ("gate", "scale", "shift")  # of each sample
OPERATIONS_OF_SUM, OPERATIONS_OF_NORM = 2, 8  # per element
_TOKENS, _SAMPLES = ("batch", "seq", "column"), ("batch", "column")
_INPUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"x": _TOKENS, "change": _TOKENS, **dict.fromkeys(VECTORS, _SAMPLES)}
)
_OUTPUTS: Mapping[str, tuple[str, ...]] = MappingProxyType({"y": _TOKENS, "sum": _TOKENS})
_AXES_OF_CONTEXT = {"seq": "token", "column": "context_column"}


def _of_context(stream: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {
        CONTEXT + name: tuple(_AXES_OF_CONTEXT.get(axis, axis) for axis in axes)
        for name, axes in stream.items()
    }


@dataclass(frozen=True, order=True)
class AdaptiveNorm(Problem):
    """Adaptive layer norm of each token of a sequence and of its context, behind a gated sum:

        sum = x + gate · change
        y   = (sum - mean) · rstd · (1 + scale) + shift

    x, change, sum and y are (batch, length, width), and gate, scale and shift (batch, width), one
    of each for all tokens of a sample. mean is that of a token's sum, and rstd is
    1 / sqrt(variance + eps). The sum is rounded to the dtype, and y is the norm of the rounded sum.
    Tensors of the context have its own number of tokens and its own width.

    `change`: change and gate are given; without them the sum is x. `norm`: scale and shift are
    given; without them y is the sum. `sum`: the sum is stored, too. These hold for both streams.
    `context`: 0 without one: then none of its tensors are given. context_width is width unless it
    is given. A NaN or an infinity in a sum makes all of a norm's row NaN, as in PyTorch.

    Raises ValueError for a size below 1, a context below 0, and an eps that is negative or not
    finite.
    """

    operation: ClassVar[str] = "adaptive_norm"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {**_INPUTS, **_of_context(_INPUTS), **_OUTPUTS, **_of_context(_OUTPUTS)}
    )
    optional: ClassVar[frozenset[str]] = frozenset(axes) - {"x", "y"}
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16)

    batch: int = option("batch size", most=MAX_EXPORTED)
    length: int = option("tokens of each sequence", title="sequence length", most=MAX_EXPORTED)
    width: int = option("elements of a token of x", most=MAX_EXPORTED)
    dtype: Element = Element.BF16
    _: KW_ONLY
    change: bool = option("a change is added to x, times a gate of each sample", False)
    norm: bool = option("layer norm of the sum, with scale and shift of each sample", True)
    sum: bool = option("the sum is an output, too", False)
    context: int = option("tokens of each context, 0 for none", 0, least=0, most=MAX_EXPORTED)
    context_width: int = option(
        "width of the context, by default as x", None, metavar="N", most=MAX_EXPORTED
    )
    eps: float = option("added to the variance", EPS, least=0, metavar="EPS")

    def __post_init__(self) -> None:
        if self.context_width is None or self.context == 0:
            object.__setattr__(self, "context_width", self.width)
        for name in ("batch", "length", "width", "context_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        if self.context < 0:
            raise ValueError(f"context {self.context} is negative: use 0 for none")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps {self.eps} is not a number from 0 on: use {EPS}")

    def __str__(self) -> str:
        sizes = [f"{name} {getattr(self, name)}" for name in ("batch", "length", "width")]
        sizes += [f"context {self.context}"] if self.context else []
        same = self.context_width == self.width
        sizes += [] if same else [f"context_width {self.context_width}"]
        sizes += [name for name in ("change", "norm", "sum") if getattr(self, name)]
        sizes += [] if self.eps == EPS else [f"eps {self.eps:g}"]
        return ", ".join(sizes)

    @classmethod
    def posed(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, *, eps: float = EPS
    ) -> AdaptiveNorm:
        """Return the problem of x and of the other tensors given: of a context its x, its output,
        and those that the sequence has."""
        given = [name for name in shapes if name.startswith(CONTEXT)]
        for name in (x for x in ("x", f"{CONTEXT}x") if x in shapes):
            for axis, size in zip(cls.axes[name], shapes[name], strict=True):
                if size == 0:
                    way_out = (
                        "leave out all tensors of a context without tokens"
                        if axis == "token"
                        else "a kernel needs at least 1"
                    )
                    raise ValueError(f"{name} has {axis} 0, shape {shapes[name]}: {way_out}")
        pairs = [("change", "gate"), ("scale", "shift")]
        if given:
            pairs += [(f"{CONTEXT}{one}", f"{CONTEXT}{other}") for one, other in pairs]
            pairs += [(name, CONTEXT + name) for name in ("change", "scale", "sum", "y")]
        for one, other in pairs:
            if (one in shapes) != (other in shapes) and one != "y":
                had, lacking = (one, other) if one in shapes else (other, one)
                raise ValueError(f"{had} is given without {lacking}: pass both or neither")
        if given and f"{CONTEXT}y" not in shapes:
            raise ValueError(
                "context_x is given without context_y, its output: pass a tensor of shape "
                f"{shapes['context_x']}"
            )
        batch, length, width = shapes["x"]
        of_context: tuple[int, ...] = shapes["context_x"] if given else (batch, 0, width)
        problem = cls(
            *(batch, length, width, dtype),
            change="change" in shapes,
            norm="scale" in shapes,
            sum="sum" in shapes,
            context=of_context[1],
            context_width=of_context[2],
            eps=eps,
        )
        for tensor in problem.tensors:
            shape = shapes.get(tensor.name, tensor.shape)
            if shape != tensor.shape:
                raise ValueError(
                    f"{tensor.name} has shape {shape} and x {shapes['x']}: {tensor.name} must have "
                    f"shape {tensor.shape}"
                )
        return problem

    def call_options(self) -> dict[str, Any]:
        """Return eps, which no tensor tells."""
        return {"eps": self.eps}

    def has(self, name: str) -> bool:
        """Whether the problem has a tensor that a call may leave out."""
        own = name.removeprefix(CONTEXT)
        if own != name and self.context == 0:
            return False
        needs = {"change": self.change, "gate": self.change, "sum": self.sum}
        return {**needs, "scale": self.norm, "shift": self.norm}.get(own, True)

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.length

    @property
    def context_rows(self) -> int:
        """Tokens of all contexts."""
        return self.batch * self.context

    @property
    def streams(self) -> tuple[str, ...]:
        """The prefix of each stream's tensors."""
        return ("", CONTEXT) if self.context else ("",)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of `axes`."""
        sizes = {
            "batch": self.batch,
            "seq": self.length,
            "column": self.width,
            "token": max(self.context, 1),
            "context_column": self.context_width,
        }
        found = []
        for name, axes in self.axes.items():
            role = Role.OUT if name.removeprefix(CONTEXT) in _OUTPUTS else Role.IN
            role = role if self.has(name) else Role.OPTIONAL
            shape = tuple(sizes[axis] for axis in axes)
            found.append(Tensor(name, shape, self.dtype, role, axes))
        return tuple(found)

    @property
    def operations(self) -> int:
        """Floating-point operations of the sum and of the norm, and 1 per element at least."""
        of_element = OPERATIONS_OF_SUM * self.change + OPERATIONS_OF_NORM * self.norm
        elements = self.rows * self.width + self.context_rows * self.context_width
        return elements * max(of_element, 1)
