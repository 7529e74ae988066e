"""The problem of merging attention on parts of the keys. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.registry.problem import Element, Problem, Role, Tensor, option

_ROWS = ("row", "head")
_SIZES = ("parts", "rows", "heads", "d_head")
_OUTPUTS = ("o", "lse")
MAX_EXPORTED = 65535  # heads, and elements of one, so that 64 bits hold the threads of all rows
NATURAL = math.log2(math.e)


@dataclass(frozen=True, order=True)
class Merge(Problem):
    """lse = log Σ_i exp(lse_i) and o = Σ_i exp(lse_i - lse) o_i over the parts i of the keys.

    o_parts is (parts, rows, heads, d_head), lse_parts (parts, rows, heads), o (rows, heads, d_head)
    and lse (rows, heads). o_parts and o have one dtype, both lse are fp32: logarithms in base
    2^`1 / log2_base`, natural ones by default, and in base 2 with 1.

    A part without keys has an lse of -inf and anything in o_parts, NaN included. A row whose parts
    are all so has 0 in o and -inf in lse. An lse of NaN or +inf makes its row NaN.

    Raises ValueError for a size below 1, and a log2_base that is not positive and finite.
    """

    operation: ClassVar[str] = "merge"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "o_parts": ("part", *_ROWS, "d_head"),
            "lse_parts": ("part", *_ROWS),
            "o": (*_ROWS, "d_head"),
            "lse": _ROWS,
        }
    )
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16, Element.FP32)

    parts: int = option("parts of the keys")
    rows: int = option("queries of all sequences")
    heads: int = option("heads of a query", most=MAX_EXPORTED)
    d_head: int = option("elements of a head", most=MAX_EXPORTED)
    dtype: Element = Element.BF16
    _: KW_ONLY
    log2_base: float = option(
        "log2 of the base of lse: 1.4427 of natural logarithms, 1 of those in base 2",
        NATURAL,
        least=0,
        metavar="LOG2",
    )

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        if not 0 < self.log2_base < math.inf:
            raise ValueError(f"log2_base {self.log2_base} is not a positive number: use {NATURAL}")

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {getattr(self, name)}" for name in _SIZES)
        return sizes if self.log2_base == NATURAL else f"{sizes}, log2_base {self.log2_base:g}"

    @classmethod
    def posed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        log2_base: float = NATURAL,
    ) -> Merge:
        """Return the problem of o_parts and lse_parts, and of the outputs that are given."""
        for size, axis in zip(shapes["o_parts"], cls.axes["o_parts"], strict=True):
            if size == 0:
                raise ValueError(
                    f"o_parts has {axis} 0, shape {shapes['o_parts']}, and a kernel needs at least "
                    "1 of everything"
                )
        parts, rows, heads, d_head = shapes["o_parts"]
        problem = cls(parts, rows, heads, d_head, dtype, log2_base=log2_base)
        for tensor in problem.tensors:
            shape = shapes.get(tensor.name, tensor.shape)
            if shape != tensor.shape:
                raise ValueError(
                    f"{tensor.name} has shape {shape} and o_parts {shapes['o_parts']}: "
                    f"{tensor.name} must have shape {tensor.shape}"
                )
        return problem

    def call_options(self) -> dict[str, Any]:
        """Return the base of the logarithms."""
        return {"log2_base": self.log2_base}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """o_parts and lse_parts, and the outputs o and lse."""
        sizes = dict(zip(self.axes["o_parts"], (getattr(self, n) for n in _SIZES), strict=True))
        return tuple(
            Tensor(
                name,
                tuple(sizes[axis] for axis in axes),
                Element.FP32 if "lse" in name else self.dtype,
                Role.OUT if name in _OUTPUTS else Role.IN,
                axes,
            )
            for name, axes in self.axes.items()
        )

    @property
    def operations(self) -> int:
        """Floating-point operations: a product and a sum for each element of each part."""
        return 2 * self.parts * self.rows * self.heads * self.d_head
