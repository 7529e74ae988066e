"""The problem of norm and rotary embedding of Q and K of two streams. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.registry.problem import Element, Problem, Role, Tensor, option

_ROWS, _OF_CONTEXT = ("batch", "seq", "column"), ("batch", "token", "column")
_COLUMNS = ("column",)
EPS = 1e-6  # of the modules in flash_attention.multimodal
MAX_EXPORTED = 65535
_QUERIES = ("context_q", "context_q_weight")
_VALUES = ("v", "context_v", "joint_v")
OUTPUTS = ("joint_q", "joint_k", "joint_v")


@dataclass(frozen=True, order=True)
class QkNormRope(Problem):
    """Q, K and V of attention from projections of a sequence and its context: norm, rotary
    embedding, and both streams as one sequence.

    q, k and v are (batch, length, width), with width = heads · d_head; those of the context are
    (batch, context, width). Rows of q and k are normed over the whole width, all heads together,

        Q = q / sqrt(mean of q² + eps) · q_weight, K likewise

    with weights of their own in the context, (width). With `rotary` each pair of neighbouring
    elements of the sequence's Q and K is turned as a complex number. The table rotary, (length,
    d_head / 2, 2) in fp32, has the cosine and the sine of the angle for each position and each pair
    of a head. The context is not turned.

    joint_q, (batch, length + context, width), has Q of the sequence, and behind it that of the
    context; joint_k and joint_v have K and V, which is copied.

    `context`: 0 without one: then none of its tensors are given, and neither are v and joint_v,
    since V is what it was. Without `context_queries` the context has keys and values alone.

    Raises ValueError for a size below 1, a context below 0, an odd d_head with `rotary`, and for an
    eps that is negative or not finite.
    """

    operation: ClassVar[str] = "qk_norm_rope"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            **dict.fromkeys(("q", "k"), _ROWS),
            **dict.fromkeys(("q_weight", "k_weight"), _COLUMNS),
            "v": _ROWS,
            "rotary": ("seq", "pair", "part"),
            **dict.fromkeys(("context_q", "context_k", "context_v"), _OF_CONTEXT),
            **dict.fromkeys(("context_q_weight", "context_k_weight"), _COLUMNS),
            "joint_q": ("batch", "query", "column"),
            **dict.fromkeys(("joint_k", "joint_v"), ("batch", "key", "column")),
        }
    )
    optional: ClassVar[frozenset[str]] = frozenset(
        {"rotary", *_VALUES, *(name for name in axes if name.startswith("context"))}
    )
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16)

    batch: int = option("batch size", most=MAX_EXPORTED)
    heads: int = option("heads of Q", most=MAX_EXPORTED)
    length: int = option("tokens of each sequence", title="sequence length", most=MAX_EXPORTED)
    d_head: int = option("head size", 128, most=MAX_EXPORTED)
    dtype: Element = Element.BF16
    _: KW_ONLY
    context: int = option("tokens of each context, 0 for none", 0, least=0, most=MAX_EXPORTED)
    context_queries: bool = option("a context has queries", True)
    rotary: bool = option("rotary embedding of the sequence", False)
    eps: float = option("added to the mean of squares", EPS, least=0, metavar="EPS")

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "length", "d_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        if self.context < 0:
            raise ValueError(f"context {self.context} is negative: use 0 for none")
        if self.rotary and self.d_head % 2:
            raise ValueError(
                f"d_head {self.d_head} is odd and rotary embedding turns pairs: use an even one, "
                "or leave out rotary"
            )
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps {self.eps} is not a number from 0 on: use {EPS}")

    def __str__(self) -> str:
        sizes = [f"{n} {getattr(self, n)}" for n in ("batch", "heads", "length", "d_head")]
        if self.context:
            sizes.append(f"context {self.context}")
            sizes += [] if self.context_queries else ["no context_queries"]
        sizes += ["rotary"] if self.rotary else []
        sizes += [] if self.eps == EPS else [f"eps {self.eps:g}"]
        return ", ".join(sizes)

    @classmethod
    def posed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        heads: int = 1,
        eps: float = EPS,
    ) -> QkNormRope:
        """Return the problem of q, k and their weights, and of the other tensors given: of a
        context its k, v and weight of k, with v and joint_v, and, if it has queries, its q and
        weight of q."""
        batch, length, width = shapes["q"]
        for axis, size in zip(_ROWS, shapes["q"], strict=True):
            if size == 0:
                raise ValueError(
                    f"q has {axis} 0, shape {shapes['q']}, and a kernel needs at least 1"
                )
        if heads < 1 or width % heads:
            raise ValueError(
                f"q has width {width}, shape {shapes['q']}, which is not a multiple of heads "
                f"{heads}: pass heads = width / d_head"
            )
        given = any(name.startswith("context") for name in shapes)
        cls._check_table(shapes, length, width // heads)
        problem = cls(
            *(batch, heads, length, width // heads, dtype),
            context=cls._context(shapes) if given else 0,
            context_queries=not given or any(name in shapes for name in _QUERIES),
            rotary="rotary" in shapes,
            eps=eps,
        )
        for tensor in problem.tensors:
            shape = shapes.get(tensor.name, tensor.shape)
            if tensor.role is Role.OPTIONAL and tensor.name in shapes:
                raise ValueError(
                    f"{tensor.name} is given without a context, where V stays as it is: leave it "
                    "out"
                )
            if shape != tensor.shape:
                raise ValueError(
                    f"{tensor.name} has shape {shape} and q {shapes['q']}: {tensor.name} must have "
                    f"shape {tensor.shape}"
                )
        return problem

    @staticmethod
    def _context(shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the tokens of the context. Raises KeyError for a context without k, and for one
        without joint_v, which no call makes."""
        shape = shapes["context_k"]
        if shape[1] == 0:
            raise ValueError(
                f"context_k has token 0, shape {shape}: leave out all tensors of a context "
                "without tokens"
            )
        if "joint_v" not in shapes:
            raise KeyError("joint_v")
        return shape[1]

    @staticmethod
    def _check_table(shapes: Mapping[str, tuple[int, ...]], length: int, d_head: int) -> None:
        wanted = (length, d_head // 2, 2)
        found = shapes.get("rotary", wanted)
        if found == wanted:
            return
        if found[1:] != wanted[1:]:
            raise ValueError(
                f"rotary has shape {found} and heads of {d_head} need {wanted}: pass cosine and "
                "sine of each pair"
            )
        way_out = "make a longer table" if found[0] < length else f"pass its first {length}"
        raise ValueError(
            f"rotary has {found[0]} positions and q {length} tokens, shape {shapes['q']}: {way_out}"
        )

    def call_options(self) -> dict[str, Any]:
        """Return the heads and eps, which no tensor tells."""
        return {"heads": self.heads, "eps": self.eps}

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.heads * self.d_head

    @property
    def n_keys(self) -> int:
        """Tokens of a sequence and its context."""
        return self.length + self.context

    @property
    def n_queries(self) -> int:
        """Those of them that have queries."""
        return self.length + (self.context if self.context_queries else 0)

    @property
    def rows(self) -> int:
        """Rows of Q, of K, and of V where it is copied."""
        copied = self.n_keys if self.context else 0
        return self.batch * (self.n_queries + self.n_keys + copied)

    def has(self, name: str) -> bool:
        """Whether the problem has a tensor that a call may leave out."""
        if name == "rotary":
            return self.rotary
        return self.context > 0 and (self.context_queries or name not in _QUERIES)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of `axes`."""
        sizes = {"batch": self.batch, "seq": self.length, "column": self.width, "part": 2}
        sizes |= {"token": max(self.context, 1), "pair": max(self.d_head // 2, 1)}
        sizes |= {"query": self.n_queries, "key": self.n_keys}
        found = []
        for name, axes in self.axes.items():
            role = Role.OUT if name in OUTPUTS else Role.IN
            if name in self.optional and not self.has(name):
                role = Role.OPTIONAL
            element = Element.FP32 if name == "rotary" else self.dtype
            found.append(Tensor(name, tuple(sizes[axis] for axis in axes), element, role, axes))
        return tuple(found)

    @property
    def operations(self) -> int:
        """Floating-point operations: of each element of Q and K a square and its sum, products with
        rstd and with the weight, and of those that are turned two products and a sum."""
        normed = 4 * self.batch * (self.n_queries + self.n_keys)
        turned = 3 * 2 * self.batch * self.length if self.rotary else 0
        return (normed + turned) * self.width
