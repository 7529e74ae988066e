"""The problem of attention's forward pass. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.registry.problem import Constant, Element, Problem, Role, Tensor, option

MAX_SCALE_EXPONENT = 126  # of two, over or under 1: a softmax scale is a normal number of float32
# Batches and heads of a call from C: with any length, 64 bits count its tiles.
MAX_EXPORTED = 65535
_FP32_EPSILON = 2.0**-24  # scales that differ by less are the same to a kernel

_AXES = ("batch", "seq", "heads", "d_head")


@dataclass(frozen=True, order=True)
class AttentionForward(Problem):
    """softmax(Q K^T · softmax_scale) V for every batch and head.

    Q and O are (batch, len_q, heads, d_head), K and V (batch, len_k, kv_heads, d_head); head h of Q
    uses head h // (heads / kv_heads) of K and V. `causal`: query i sees key j if j <= i + len_k -
    len_q, so that the last query sees all keys. A query that sees no key has an output of 0 and an
    LSE of -infinity. `return_lse`: the LSE is an output too: the natural logarithm of each row's
    sum of exp(q k^T · softmax_scale), float32, (batch, heads, len_q).

    len_k and kv_heads are those of Q, and softmax_scale is 1/sqrt(d_head), unless they are given.
    `dataclasses.replace` passes their old values: they do not follow a change of the fields that
    they come from.

    Raises ValueError for a size below 1, heads that those of K and V do not divide, and a scale
    that is not positive or that float32 does not hold.
    """

    operation: ClassVar[str] = "attention_forward"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {**dict.fromkeys("qkvo", _AXES), "lse": ("batch", "heads", "seq")}
    )
    optional: ClassVar[frozenset[str]] = frozenset({"lse"})
    elements: ClassVar[tuple[Element, ...]] = (Element.FP16, Element.BF16)

    batch: int = option("batch size", most=MAX_EXPORTED)
    heads: int = option("heads of Q", most=MAX_EXPORTED)
    len_q: int = option("sequence length, of queries and keys", name="seq", title="sequence length")
    d_head: int = option("head size", 128)
    dtype: Element = Element.BF16
    _: KW_ONLY
    len_k: int = option("keys, as many as queries by default", None)
    kv_heads: int = option("heads of K and V, as many as of Q by default", None, most=MAX_EXPORTED)
    causal: bool = option("a causal mask, aligned to the bottom right", False)
    softmax_scale: float = option("1/sqrt(d_head) by default", None, metavar="X")
    return_lse: bool = option("also the LSE, the logarithm of each row's sum", False, name="lse")

    def __post_init__(self) -> None:
        for name, usual in (("len_k", self.len_q), ("kv_heads", self.heads)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        for name in ("batch", "heads", "len_q", "len_k", "kv_heads", "d_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        if self.heads % self.kv_heads:
            shared = math.gcd(self.heads, self.kv_heads)
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: as many heads "
                f"of Q must share each of K and V: use {shared} of these"
            )
        if self.softmax_scale is None:
            object.__setattr__(self, "softmax_scale", 1 / math.sqrt(self.d_head))
        if self.softmax_scale < 0:
            raise ValueError(
                f"softmax_scale {self.softmax_scale:g} is negative: pass "
                f"{-self.softmax_scale:g}, and -q"
            )
        if not 2.0**-MAX_SCALE_EXPONENT <= self.softmax_scale <= 2.0**MAX_SCALE_EXPONENT:
            raise ValueError(
                f"softmax_scale {self.softmax_scale:g} is not from 2^-{MAX_SCALE_EXPONENT} to "
                f"2^{MAX_SCALE_EXPONENT}, so that float32 holds it: scale q"
            )

    def __str__(self) -> str:
        heads = f"{self.heads}" + (f" on {self.kv_heads}" if self.kv_heads != self.heads else "")
        seq = f"{self.len_q}" + (f" on {self.len_k}" if self.len_k != self.len_q else "")
        options = [f"batch {self.batch}, heads {heads}, seq {seq}, d_head {self.d_head}"]
        if self.causal:
            options.append("causal")
        if not self.has_usual_scale:
            options.append(f"softmax_scale {self.softmax_scale:g}")
        if self.return_lse:
            options.append("lse")
        return ", ".join(options)

    @classmethod
    def together(cls, problems: Iterable[Any], swept: str) -> str:
        """Return the mask and the heads of the problems, and the batch at each length."""
        found = list(problems)
        heads = sorted({(p.heads, p.kv_heads) for p in found})
        batches = sorted({(getattr(p, swept), p.batch) for p in found})
        parts = [
            "causal (TFLOP/s count the keys that a query sees)" * any(p.causal for p in found),
            " and ".join(f"{n} heads" + (f" on {kv}" if kv != n else "") for n, kv in heads),
            "batch " + ", ".join(f"{batch} at {size}" for size, batch in batches),
        ]
        return ", ".join(filter(None, parts))

    @classmethod
    def posed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
    ) -> AttentionForward:
        """Return the problem of q, k and v, and of o and lse where they are given."""
        cls._fitting(shapes)
        for name in ("q", "k"):
            for axis, size in zip(_AXES, shapes[name], strict=True):
                if size == 0:
                    raise ValueError(
                        f"{name} has {axis} 0, shape {shapes[name]}, and a kernel needs at least "
                        "1: attention() and forward() compute this without a kernel"
                    )
        batch, len_q, heads, d_head = shapes["q"]
        _, len_k, kv_heads, _ = shapes["k"]
        return cls(
            *(batch, heads, len_q, d_head, dtype),
            len_k=len_k,
            kv_heads=kv_heads,
            causal=causal,
            softmax_scale=1 / math.sqrt(d_head) if softmax_scale is None else softmax_scale,
            return_lse="lse" in shapes,
        )

    @classmethod
    def constant(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, **options: Any
    ) -> Constant | None:
        """Return the outputs without a kernel: no elements if there is no batch, head or query; 0
        and an LSE of -infinity if there is no key."""
        if {"q", "k"} - shapes.keys() or (all(shapes["q"][:-1]) and shapes["k"][1]):
            return None
        found = {"q": shapes["q"], **cls._fitting(shapes)}
        # refuses wrong options, and knows the tensors' elements and roles
        alike = {name: (1,) * (len(x) - 1) + x[-1:] for name, x in found.items()}
        alike["lse"] = (1, 1, 1)
        problem = cls.posed({name: alike[name] for name in shapes}, dtype, **options)
        tensors = tuple(replace(x, shape=found[x.name]) for x in problem.tensors)
        return Constant(tensors, {"o": 0.0, "lse": -math.inf})

    @classmethod
    def _fitting(cls, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors but q.

        Raises ValueError for a shape that does not fit, for a d_head of 0, and for heads of Q if K
        and V have none.
        """
        batch, len_q, heads, d_head = shapes["q"]
        _, len_k, kv_heads, _ = shapes["k"]
        fitting = {
            "k": ("q", "batch and d_head", (batch, len_k, kv_heads, d_head)),
            "v": ("k", "all sizes", (batch, len_k, kv_heads, d_head)),
            "o": ("q", "all sizes", (batch, len_q, heads, d_head)),
            "lse": ("q", "batch, heads and seq", (batch, heads, len_q)),
        }
        for name, (other, sizes, wanted) in fitting.items():
            if shapes.get(name, wanted) != wanted:
                raise ValueError(
                    f"{name} has shape {shapes[name]} and {other} {shapes[other]}: {sizes} must be "
                    f"equal, {name} {wanted}"
                )
        if d_head == 0:
            raise ValueError(
                f"q has d_head 0, shape {shapes['q']}: without it there are no logits; use at "
                "least 1"
            )
        if heads and not kv_heads:
            raise ValueError(
                f"k has heads 0, shape {shapes['k']}, and q has {heads}: use a divisor of {heads}"
            )
        return {name: wanted for name, (_, _, wanted) in fitting.items()}

    def call_options(self) -> dict[str, Any]:
        """Return the scale; a mask is compiled into the kernel."""
        return {"softmax_scale": self.softmax_scale}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of Q and O."""
        return self.batch, self.len_q, self.heads, self.d_head

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of K and V."""
        return self.batch, self.len_k, self.kv_heads, self.d_head

    @property
    def lengths(self) -> dict[str, int]:
        """Lengths of queries and keys by name, or the common length seq_len."""
        if self.len_q == self.len_k:
            return {"seq_len": self.len_q}
        return {"len_q": self.len_q, "len_k": self.len_k}

    @property
    def has_usual_scale(self) -> bool:
        """Whether float32 cannot tell softmax_scale from 1/sqrt(d_head)."""
        usual = 1 / math.sqrt(self.d_head)
        least, most = (usual * (1 + sign * _FP32_EPSILON) for sign in (-1, 1))
        return least <= self.softmax_scale <= most

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, the output o, and lse."""
        shapes = {"q": self.shape, "k": self.kv_shape, "v": self.kv_shape, "o": self.shape}
        return (
            *(
                Tensor(name, shape, self.dtype, Role.OUT if name == "o" else Role.IN, _AXES)
                for name, shape in shapes.items()
            ),
            Tensor(
                "lse",
                (self.batch, self.heads, self.len_q),
                Element.FP32,
                Role.OUT if self.return_lse else Role.OPTIONAL,
                self.axes["lse"],
            ),
        )

    def visible_keys(self, query: int) -> int:
        """Number of keys that a query sees, below 1 if it sees none; rows of a tile beyond len_q
        see all."""
        if not self.causal:
            return self.len_k
        return min(query + 1 + self.len_k - self.len_q, self.len_k)

    @property
    def visible(self) -> int:
        """Number of pairs of a query and a key that it sees, in one head."""
        if not self.causal:
            return self.len_q * self.len_k
        seeing = min(self.len_q, self.len_k)  # queries, the last of which sees all keys
        return seeing * self.len_k - seeing * (seeing - 1) // 2

    @property
    def operations(self) -> int:
        """Floating-point operations of Q @ K^T and P @ V: a multiplication and an addition per
        element of d_head and pair of a query and a key that it sees."""
        return 4 * self.batch * self.heads * self.visible * self.d_head

    @property
    def row_stride(self) -> int:
        """Elements from one row of a contiguous Q or O to the next."""
        return self.heads * self.d_head
