"""The problem of attention's forward pass. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
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

MAX_SCALE_EXPONENT = 126  # of two, over or under 1: a softmax scale is a normal number of float32
# Batches and heads of a call from C: with any length, 64 bits count its tiles.
MAX_EXPORTED = 65535
_FP32_EPSILON = 2.0**-24  # scales that differ by less are the same to a kernel

_AXES = ("batch", "seq", "heads", "d_head")


@dataclass(frozen=True, order=True)
class AttentionForward(Problem):
    """softmax(Q K^T · softmax_scale) V for every batch and head.

    Q is (batch, len_q, heads, d_head), K (batch, len_k, kv_heads, d_head), V (batch, len_k,
    kv_heads, d_v) and O (batch, len_q, heads, d_v); head h of Q uses head h // (heads / kv_heads)
    of K and V.

    The last query stands at the last key: query i stands at key i + len_k - len_q. `causal`: it
    sees no key behind that one. `window_left`, `window_right`: it sees so many keys before and
    behind that one at most, and any number if None. A window_right of 0 is `causal`, which in turn
    allows no keys behind, whatever window_right says. A bound that hides no key at these lengths
    becomes None.

    `softcap`: a logit is softcap · tanh(q k^T · softmax_scale / softcap); 0 leaves it as it is.
    `sinks`: an input (heads,) has one more logit for each head, neither scaled nor capped, which
    takes part in the sum of exponentials and adds nothing to O. A query that sees no key has an
    output of 0, and an LSE of its head's sink, or -infinity without sinks. `return_lse`: the LSE is
    an output too: the natural logarithm of each row's sum of exponentials, float32, (batch, heads,
    len_q).

    `sequences`: if it is not 0, the batch is 1, and so many sequences of various lengths lie one
    after the other. Inputs cu_seqlens_q and cu_seqlens_k, (sequences + 1,) and int32, tell where
    the queries and the keys of each begin, and then the totals, which len_q and len_k are. Masks
    are those of each sequence.

    len_k and kv_heads are those of Q, d_v is d_head, and softmax_scale is 1/sqrt(d_head), unless
    they are given. `dataclasses.replace` passes their old values: they do not follow a change of
    the fields that they come from, and neither does a bound that has become None.

    Raises ValueError for a size below 1, sequences in several batches, heads that those of K and V
    do not divide, a bound of the window below 0, and a scale or softcap that is negative or that
    float32 does not hold.
    """

    operation: ClassVar[str] = "attention_forward"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            **dict.fromkeys("qkvo", _AXES),  # the last of v and o has d_v elements
            "lse": ("batch", "heads", "seq"),
            "sinks": ("heads",),
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ("begins",)),
        }
    )
    optional: ClassVar[frozenset[str]] = frozenset({"lse", "sinks", "cu_seqlens_q", "cu_seqlens_k"})
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
    window_left: int | None = option(
        "keys before its own that a query sees, all by default", None, least=0
    )
    window_right: int | None = option(
        "keys behind its own that a query sees, all by default", None, least=0
    )
    softcap: float = option("limit of the logits' size, 0 for none", 0.0, metavar="X")
    sinks: bool = option("one more logit per head, which adds nothing to the output", False)
    d_v: int = option("head size of V, that of Q and K by default", None)
    return_lse: bool = option("also the LSE, the logarithm of each row's sum", False, name="lse")
    sequences: int = 0

    def __post_init__(self) -> None:
        usual = {"len_k": self.len_q, "kv_heads": self.heads, "d_v": self.d_head}
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("batch", "heads", "len_q", "len_k", "kv_heads", "d_head", "d_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")
        if self.sequences and self.batch > 1:
            raise ValueError(
                f"batch {self.batch} with {self.sequences} sequences of various lengths: use batch "
                "1, in which all sequences lie one after the other"
            )
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
        self._check_softcap()
        self._reduce_window()

    def _check_softcap(self) -> None:
        if self.softcap == 0:
            return
        least, most = 2.0**-MAX_SCALE_EXPONENT, 2.0**MAX_SCALE_EXPONENT
        for name, value in (
            ("softcap", self.softcap),
            ("softmax_scale / softcap", self.softmax_scale / self.softcap),
        ):
            if not least <= value <= most:
                raise ValueError(
                    f"softcap {self.softcap:g}: {name} must be from 2^-{MAX_SCALE_EXPONENT} to "
                    f"2^{MAX_SCALE_EXPONENT}, so that float32 holds it: 0 switches softcap off"
                )

    def _reduce_window(self) -> None:
        """Bring the window into its one form."""
        for name in ("window_left", "window_right"):
            bound = getattr(self, name)
            if bound is not None and bound < 0:
                raise ValueError(f"{name} {bound} is negative: use 0 or more, or None for no limit")
        if self.window_right is not None and (self.causal or self.window_right == 0):
            object.__setattr__(self, "causal", True)
            object.__setattr__(self, "window_right", None)
        for name, length in (("window_left", self.len_k), ("window_right", self.len_q)):
            bound = getattr(self, name)
            if bound is not None and bound >= length - 1:
                object.__setattr__(self, name, None)

    def __str__(self) -> str:
        heads = f"{self.heads}" + (f" on {self.kv_heads}" if self.kv_heads != self.heads else "")
        seq = f"{self.len_q}" + (f" on {self.len_k}" if self.len_k != self.len_q else "")
        options = [f"batch {self.batch}, heads {heads}, seq {seq}, d_head {self.d_head}"]
        if self.causal:
            options.append("causal")
        if not self.has_usual_scale:
            options.append(f"softmax_scale {self.softmax_scale:g}")
        options += self._variations()
        if self.return_lse:
            options.append("lse")
        return ", ".join(options)

    def _variations(self) -> list[str]:
        """Return the options besides a causal mask that change the output, in words."""
        bounds = {"window_left": self.window_left, "window_right": self.window_right}
        found = [f"{name} {bound}" for name, bound in bounds.items() if bound is not None]
        if self.softcap:
            found.append(f"softcap {self.softcap:g}")
        if self.sinks:
            found.append("sinks")
        if self.d_v != self.d_head:
            found.append(f"d_v {self.d_v}")
        if self.sequences:
            found.append(f"{self.sequences} sequences of various lengths")
        return found

    @classmethod
    def together(cls, problems: Iterable[Any], swept: str) -> str:
        """Return the mask and the heads of the problems, and the batch at each length."""
        found = list(problems)
        heads = sorted({(p.heads, p.kv_heads) for p in found})
        batches = sorted({(getattr(p, swept), p.batch) for p in found})
        parts = [
            "causal (TFLOP/s count the keys that a query sees)" * any(p.causal for p in found),
            *dict.fromkeys(text for p in found for text in p._variations()),
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
        window_left: int | None = None,
        window_right: int | None = None,
        softcap: float = 0.0,
    ) -> AttentionForward:
        """Return the problem of q, k and v, and of o, lse and sinks where they are given."""
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
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            sinks="sinks" in shapes,
            d_v=shapes.get("v", shapes["q"])[-1],
            return_lse="lse" in shapes,
            sequences=cls._sequences(shapes),
        )

    @classmethod
    def _sequences(cls, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the sequences of various lengths, 0 without them. Raises ValueError for none."""
        (begins,) = shapes.get("cu_seqlens_q", (0,))
        if begins == 1:
            raise ValueError(
                "cu_seqlens_q has 1 element: pass batch + 1, where the sequences begin, and the "
                "total"
            )
        return max(begins - 1, 0)

    @classmethod
    def constant(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, **options: Any
    ) -> Constant | None:
        """Return the outputs without a kernel: no elements if there is no batch, head or query; 0,
        and an LSE of -infinity or the sinks, if there is no key."""
        if {"q", "k"} - shapes.keys() or (all(shapes["q"][:-1]) and shapes["k"][1]):
            return None
        found = {"q": shapes["q"], **cls._fitting(shapes)}
        # refuses wrong options, and knows the tensors' elements and roles
        alike = {name: (1,) * (len(x) - 1) + x[-1:] for name, x in found.items()}
        alike |= {"lse": (1, 1, 1), "sinks": (1,), "cu_seqlens_q": (2,), "cu_seqlens_k": (2,)}
        problem = cls.posed({name: alike[name] for name in shapes}, dtype, **options)
        tensors = tuple(replace(x, shape=found[x.name]) for x in problem.tensors)
        lse: Elements = (lambda given: given["sinks"][:, None]) if problem.sinks else -math.inf
        return Constant(tensors, {"o": 0.0, "lse": lse})

    @classmethod
    def _fitting(cls, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors but q.

        Raises ValueError for a shape that does not fit, for a d_head of 0, and for heads of Q if K
        and V have none.
        """
        batch, len_q, heads, d_head = shapes["q"]
        _, len_k, kv_heads, _ = shapes["k"]
        d_v = shapes.get("v", shapes["q"])[-1]
        begins = shapes.get("cu_seqlens_q", ())
        of_o = ("q", "all sizes") if d_v == d_head else ("v", "batch and d_head")
        fitting = {
            "k": ("q", "batch and d_head", (batch, len_k, kv_heads, d_head)),
            "v": ("k", "batch, seq and heads", (batch, len_k, kv_heads, d_v)),
            "o": (*of_o, (batch, len_q, heads, d_v)),
            "lse": ("q", "batch, heads and seq", (batch, heads, len_q)),
            "sinks": ("q", "heads", (heads,)),
            "cu_seqlens_q": ("q", "all sizes", begins),
            "cu_seqlens_k": ("cu_seqlens_q", "sizes", begins),
        }
        if ("cu_seqlens_q" in shapes) != ("cu_seqlens_k" in shapes):
            given, other = ("q", "k") if "cu_seqlens_q" in shapes else ("k", "q")
            raise ValueError(f"cu_seqlens_{given} is given without cu_seqlens_{other}: pass both")
        for name, (other, sizes, wanted) in fitting.items():
            if shapes.get(name, wanted) != wanted:
                raise ValueError(
                    f"{name} has shape {shapes[name]} and {other} {shapes[other]}: {sizes} must be "
                    f"equal, {name} {wanted}"
                )
        for name, size in (("q", d_head), ("v", d_v)):
            if size == 0:
                raise ValueError(
                    f"{name} has d_head 0, shape {shapes[name]}: without it there are no logits or "
                    "values; use at least 1"
                )
        if heads and not kv_heads:
            raise ValueError(
                f"k has heads 0, shape {shapes['k']}, and q has {heads}: use a divisor of {heads}"
            )
        return {name: wanted for name, (_, _, wanted) in fitting.items()}

    def call_options(self) -> dict[str, Any]:
        """Return the scale, the window and the softcap; a causal mask is compiled into the
        kernel."""
        names = ("softmax_scale", "window_left", "window_right", "softcap")
        return {name: getattr(self, name) for name in names}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of Q."""
        return self.batch, self.len_q, self.heads, self.d_head

    @property
    def o_shape(self) -> tuple[int, int, int, int]:
        """Shape of O."""
        return self.batch, self.len_q, self.heads, self.d_v

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of K."""
        return self.batch, self.len_k, self.kv_heads, self.d_head

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """Shape of V."""
        return self.batch, self.len_k, self.kv_heads, self.d_v

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
        """q, k, v, the output o, lse and sinks."""
        shapes = {"q": self.shape, "k": self.kv_shape, "v": self.v_shape, "o": self.o_shape}
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
                AttentionForward.axes["lse"],
            ),
            Tensor(
                "sinks",
                (self.heads,),
                self.dtype,
                Role.IN if self.sinks else Role.OPTIONAL,
                AttentionForward.axes["sinks"],
            ),
            *(
                Tensor(
                    name,
                    (self.sequences + 1,),
                    Element.INT32,
                    Role.IN if self.sequences else Role.OPTIONAL,
                    AttentionForward.axes[name],
                )
                for name in ("cu_seqlens_q", "cu_seqlens_k")
            ),
        )

    @property
    def has_window(self) -> bool:
        """Whether keys are hidden by a window, besides those behind a query in causal attention."""
        return self.window_left is not None or self.window_right is not None

    @property
    def _bounds(self) -> tuple[int | None, int | None]:
        """The first and the last key that query 0 sees, which may lie outside of the keys, and None
        where there is no bound; the next query has them one farther."""
        own = self.len_k - self.len_q
        behind = 0 if self.causal else self.window_right
        return (
            None if self.window_left is None else own - self.window_left,
            None if behind is None else own + behind,
        )

    def visible_keys(self, query: int) -> range:
        """Return the keys that a query sees. If it sees none, the range is empty and may end below
        0. Rows of a tile beyond len_q are taken for queries."""
        first, last = self._bounds
        return range(
            0 if first is None else max(query + first, 0),
            self.len_k if last is None else min(query + last + 1, self.len_k),
        )

    @property
    def visible(self) -> int:
        """Number of pairs of a query and a key that it sees, in one head."""

        def up_to(key: int) -> int:
            """Keys up to the one that query 0 counts to, and each query counts one farther."""
            last = key + self.len_q
            return _sum_within(last, self.len_k) - _sum_within(key, self.len_k)

        first, last = self._bounds
        seen = self.len_q * self.len_k if last is None else up_to(last)
        return seen - (0 if first is None else up_to(first - 1))

    @property
    def operations(self) -> int:
        """Floating-point operations of Q @ K^T and P @ V: a multiplication and an addition per
        element of d_head, or of d_v, and pair of a query and a key that it sees. Of sequences of
        various lengths, so many as if they were all alike."""
        if several := self.sequences:
            lengths = {name: -(-getattr(self, name) // several) for name in ("len_q", "len_k")}
            return several * replace(self, **lengths, sequences=0).operations
        return 2 * self.batch * self.heads * self.visible * (self.d_head + self.d_v)

    @property
    def row_stride(self) -> int:
        """Elements from one row of a contiguous Q or O to the next."""
        return self.heads * self.d_head


def _sum_within(last: int, most: int) -> int:
    """Return the sum of the numbers up to `last`, those below 0 left out and those over `most` as
    `most`."""
    last = max(last, 0)
    rising = min(last, most)
    return rising * (rising + 1) // 2 + most * (last - rising)
