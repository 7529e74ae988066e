"""The problem of joint attention. Standard library only."""

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
MAX_EXPONENT = 126  # of two, over or under 1: a softmax scale is a normal number of float32
MAX_EXPORTED = 65535
_QUERIES = ("context_q", "context_q_weight", "context_o")


@dataclass(frozen=True, order=True)
class JointAttention(Problem):
    """Attention of the tokens of a sequence and its context to all of them, between projections.

    q, k, v and o are (batch, length, width), with width = heads · d_head; those of the context are
    (batch, context, width). Rows of q and k are normed over the whole width, all heads together,

        Q = q / sqrt(mean of q² + eps) · q_weight, K likewise

    with weights of their own in the context, (width). With `rotary` each pair of neighbouring
    elements of the sequence's Q and K is turned as a complex number. The table rotary, (length,
    d_head / 2, 2) in fp32, has the cosine and the sine of the angle for each position and each pair
    of a head. The context is not turned. Then, for each head, over the tokens of sequence and
    context together,

        o = softmax(Q K^T · softmax_scale) V

    `context`: 0 without one: then none of its tensors are given. Without `context_queries` the
    context has keys and values alone. softmax_scale is 1/sqrt(d_head) unless it is given.

    Raises ValueError for a size below 1, a context below 0, an odd d_head with `rotary`, and for an
    eps or a softmax_scale that is negative or that float32 does not hold.
    """

    operation: ClassVar[str] = "joint_attention"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            **dict.fromkeys("qkv", _ROWS),
            **dict.fromkeys(("q_weight", "k_weight"), _COLUMNS),
            "rotary": ("seq", "pair", "part"),
            **dict.fromkeys(("context_q", "context_k", "context_v"), _OF_CONTEXT),
            **dict.fromkeys(("context_q_weight", "context_k_weight"), _COLUMNS),
            "o": _ROWS,
            "context_o": _OF_CONTEXT,
        }
    )
    optional: ClassVar[frozenset[str]] = frozenset(
        {"rotary", *(name for name in axes if name.startswith("context"))}
    )
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16)

    batch: int = option("batch size", most=MAX_EXPORTED)
    heads: int = option("heads of Q", most=MAX_EXPORTED)
    length: int = option("tokens of each sequence", title="sequence length", most=MAX_EXPORTED)
    d_head: int = option("head size", 16, most=MAX_EXPORTED)
    dtype: Element = Element.BF16
    _: KW_ONLY
    context: int = option("tokens of each context, 0 for none", 0, least=0, most=MAX_EXPORTED)
    context_queries: bool = option("a context has queries and an output", True)
    rotary: bool = option("rotary embedding of the sequence", False)
    eps: float = option("added to the mean of squares", EPS, least=0, metavar="EPS")
    softmax_scale: float = option("1/sqrt(d_head) by default", None, metavar="X")

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
        if self.softmax_scale is None:
            object.__setattr__(self, "softmax_scale", 1 / math.sqrt(self.d_head))
        if not 2.0**-MAX_EXPONENT <= self.softmax_scale <= 2.0**MAX_EXPONENT:
            raise ValueError(
                f"softmax_scale {self.softmax_scale:g} is not from 2^-{MAX_EXPONENT} to "
                f"2^{MAX_EXPONENT}, so that float32 holds it: scale q_weight"
            )

    def __str__(self) -> str:
        sizes = [f"{n} {getattr(self, n)}" for n in ("batch", "heads", "length", "d_head")]
        if self.context:
            sizes.append(f"context {self.context}")
            sizes += [] if self.context_queries else ["no context_queries"]
        sizes += ["rotary"] if self.rotary else []
        sizes += [] if self.eps == EPS else [f"eps {self.eps:g}"]
        if self.softmax_scale != 1 / math.sqrt(self.d_head):
            sizes.append(f"softmax_scale {self.softmax_scale:g}")
        return ", ".join(sizes)

    @classmethod
    def posed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        heads: int = 1,
        eps: float = EPS,
        softmax_scale: float | None = None,
    ) -> JointAttention:
        """Return the problem of q, k, v and their weights, and of the other tensors given: of a
        context its k, v and weight of k, and, if it has queries, its q, weight of q and output."""
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
        given = sorted(name for name in shapes if name.startswith("context"))
        context = cls._context(shapes) if given else 0
        has_queries = any(name in shapes for name in _QUERIES)
        if has_queries and "context_o" not in shapes:
            raise ValueError(
                "context_q is given without context_o, the output of its queries: pass a tensor of "
                "the shape of context_q, or leave out context_q and context_q_weight"
            )
        cls._check_table(shapes, length, width // heads)
        problem = cls(
            *(batch, heads, length, width // heads, dtype),
            context=context,
            context_queries=has_queries or not given,
            rotary="rotary" in shapes,
            eps=eps,
            softmax_scale=1 / math.sqrt(width // heads) if softmax_scale is None else softmax_scale,
        )
        for tensor in problem.tensors:
            shape = shapes.get(tensor.name, tensor.shape)
            if shape != tensor.shape:
                raise ValueError(
                    f"{tensor.name} has shape {shape} and q {shapes['q']}: {tensor.name} must have "
                    f"shape {tensor.shape}"
                )
        return problem

    @staticmethod
    def _context(shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the tokens of the context. Raises KeyError for a context without k."""
        shape = shapes["context_k"]
        if shape[1] == 0:
            raise ValueError(
                f"context_k has token 0, shape {shape}: leave out all tensors of a context "
                "without tokens"
            )
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
        """Return the heads, eps and the scale, which no tensor tells."""
        return {"heads": self.heads, "eps": self.eps, "softmax_scale": self.softmax_scale}

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
        found = []
        for name, axes in self.axes.items():
            role = Role.OUT if name in ("o", "context_o") else Role.IN
            if name in self.optional and not self.has(name):
                role = Role.OPTIONAL
            element = Element.FP32 if name == "rotary" else self.dtype
            found.append(Tensor(name, tuple(sizes[axis] for axis in axes), element, role, axes))
        return tuple(found)

    @property
    def operations(self) -> int:
        """Floating-point operations of both products of attention."""
        return 4 * self.batch * self.heads * self.n_queries * self.n_keys * self.d_head
