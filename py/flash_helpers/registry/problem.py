"""What is computed: the problems that kernels solve, without a kernel in mind.

A problem knows its tensors, what it costs at least, and nothing of how it is computed. What is
right for it, float64 reference, error bound and inputs, is in `flash_helpers.check`, which needs
torch. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import IntEnum

ELEMENT_BYTES = 2  # fp16 and bf16
LSE_BYTES = 4  # fp32
MAX_SCALE_EXPONENT = 126  # of two, over or under 1: a softmax scale is a normal number of float32
_FP32_EPSILON = 2.0**-24  # scales that differ by less are the same to a kernel


class DType(IntEnum):
    """Element type of Q, K, V and O. The values are those of the C++ enum."""

    FP16 = 0
    BF16 = 1

    @property
    def short(self) -> str:
        """The name in a config's short form: "fp16" or "bf16"."""
        return self.name.lower()

    @property
    def torch_name(self) -> str:
        """Name of the same type in torch: "float16" or "bfloat16"."""
        return {DType.FP16: "float16", DType.BF16: "bfloat16"}[self]

    @classmethod
    def from_name(cls, name: str) -> DType:
        """The type called `name` ("fp16", "float16", "bf16", "bfloat16", case ignored).

        Raises ValueError for any other name.
        """
        for dtype in cls:
            if name.lower() in (dtype.short, dtype.torch_name):
                return dtype
        accepted = ", ".join(f"{dtype.short} ({dtype.torch_name})" for dtype in cls)
        raise ValueError(f"dtype {name!r} is not one of {accepted}")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a problem. shape: elements, the last dimension without gaps. element_bytes: of
    one."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int = ELEMENT_BYTES


@dataclass(frozen=True)
class Strides:
    """Distances in elements between batches, rows of the sequence and heads; 0 where there is only
    one."""

    batch: int
    row: int
    head: int


@dataclass(frozen=True, order=True)
class AttentionForward:
    """softmax(Q K^T · softmax_scale) V for every batch and head.

    Q and O are (batch, len_q, heads, d_head), K and V (batch, len_k, kv_heads, d_head); head h of Q
    uses head h // (heads / kv_heads) of K and V. causal: query i sees key j if
    j <= i + len_k - len_q, so that the last query sees all keys; a query that sees none has an
    output of 0 and an LSE of -infinity. return_lse: of each row the natural logarithm of the sum of
    exp(q k^T · softmax_scale), float32, (batch, heads, len_q), is an output too.

    len_k and kv_heads are those of Q, and softmax_scale is 1/sqrt(d_head), unless they are given.
    `dataclasses.replace` gives them: it does not follow a change of what they come from.

    Raises ValueError for a size below 1, heads that those of K and V do not divide, and a scale
    that is not positive or that float32 does not hold.
    """

    batch: int
    heads: int
    len_q: int
    d_head: int = 128
    dtype: DType = DType.BF16
    _: KW_ONLY
    len_k: int = None  # as kv_heads and softmax_scale a number from __post_init__ on
    kv_heads: int = None
    causal: bool = False
    softmax_scale: float = None
    return_lse: bool = False

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

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of Q and O, in the order of its dimensions."""
        return self.batch, self.len_q, self.heads, self.d_head

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Of K and V, likewise."""
        return self.batch, self.len_k, self.kv_heads, self.d_head

    @property
    def lengths(self) -> dict[str, int]:
        """By name: of queries and keys, or that of both, seq_len."""
        if self.len_q == self.len_k:
            return {"seq_len": self.len_q}
        return {"len_q": self.len_q, "len_k": self.len_k}

    @property
    def has_usual_scale(self) -> bool:
        """Whether float32 cannot tell softmax_scale from 1/sqrt(d_head)."""
        usual = 1 / math.sqrt(self.d_head)
        return math.isclose(self.softmax_scale, usual, rel_tol=_FP32_EPSILON)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, the output o and, if it is asked for, lse."""
        shapes = {"q": self.shape, "k": self.kv_shape, "v": self.kv_shape, "o": self.shape}
        found = tuple(Tensor(name, shape) for name, shape in shapes.items())
        lse = Tensor("lse", (self.batch, self.heads, self.len_q), LSE_BYTES)
        return (*found, lse) if self.return_lse else found

    def visible_keys(self, query: int) -> int:
        """Keys that a query sees, below 1 if it sees none; of a tile's rows beyond len_q all."""
        if not self.causal:
            return self.len_k
        return min(query + 1 + self.len_k - self.len_q, self.len_k)

    @property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        if not self.causal:
            return self.len_q * self.len_k
        seeing = min(self.len_q, self.len_k)  # queries, the last of which sees all keys
        return seeing * self.len_k - seeing * (seeing - 1) // 2

    @property
    def operations(self) -> int:
        """Floating-point operations of Q @ K^T and P @ V, a multiplication and an addition for each
        pair of a query and a key that it sees."""
        return 4 * self.batch * self.heads * self.visible * self.d_head

    @property
    def bytes(self) -> int:
        """What has to be moved at least: each input read once, the outputs written once."""
        return sum(math.prod(tensor.shape) * tensor.element_bytes for tensor in self.tensors)

    @property
    def row_stride(self) -> int:
        """Elements from one row of a contiguous Q or O to the next."""
        return self.heads * self.d_head

    def strides(self) -> Mapping[str, Strides]:
        """Of contiguous q, k, v and o, by name; 0 where a size of 1 makes them meaningless."""
        found = {}
        for name in "qkvo":
            batch, length, heads, d_head = self.kv_shape if name in "kv" else self.shape
            own = (length * heads * d_head, heads * d_head, d_head)
            sizes = (batch, length, heads)
            found[name] = Strides(*(s if n > 1 else 0 for s, n in zip(own, sizes, strict=True)))
        return found

    def in_dtype(self, dtype: DType) -> AttentionForward:
        """The same problem in another element type."""
        return replace(self, dtype=dtype)
