"""What is computed: the problems that kernels solve, without a kernel in mind.

A problem knows its tensors, what it costs at least, and nothing of how it is computed. What is
right for it, float64 reference, error bound and inputs, is in `flash_helpers.check`, which needs
torch. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

ELEMENT_BYTES = 2  # fp16 and bf16


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
    """A tensor of a problem. shape: elements, the last dimension without gaps."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Strides:
    """Distances in elements between batches, rows of the sequence and heads; 0 where there is only
    one."""

    batch: int
    row: int
    head: int


@dataclass(frozen=True, order=True)
class AttentionForward:
    """softmax(Q K^T / sqrt(d_head)) V for every batch and head; queries and keys of one length.

    Tensors are (batch, seq_len, heads, d_head). Raises ValueError for a size below 1.
    """

    batch: int
    heads: int
    seq_len: int
    d_head: int = 128
    dtype: DType = DType.BF16

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"{name} {size} is not positive: use 1 or more")

    def __str__(self) -> str:
        return f"batch {self.batch}, heads {self.heads}, seq {self.seq_len}, d_head {self.d_head}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of each tensor, in the order of its dimensions."""
        return self.batch, self.seq_len, self.heads, self.d_head

    @property
    def sizes(self) -> dict[str, int]:
        """All but the element type, by name."""
        return {name: getattr(self, name) for name in ("batch", "heads", "seq_len", "d_head")}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v and the output o."""
        return tuple(Tensor(name, self.shape) for name in "qkvo")

    @property
    def operations(self) -> int:
        """Floating-point operations of Q @ K^T and P @ V, a multiplication and an addition each."""
        return 4 * self.batch * self.heads * self.seq_len**2 * self.d_head

    @property
    def bytes(self) -> int:
        """What has to be moved at least: each input read once, the output written once."""
        return ELEMENT_BYTES * sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def row_stride(self) -> int:
        """Elements from one row of a contiguous tensor to the next."""
        return self.heads * self.d_head

    def strides(self) -> Mapping[str, Strides]:
        """Of contiguous tensors, by name; 0 where a size of 1 makes them meaningless."""
        own = (self.seq_len * self.row_stride, self.row_stride, self.d_head)
        sizes = (self.batch, self.seq_len, self.heads)
        strides = Strides(*(s if n > 1 else 0 for s, n in zip(own, sizes, strict=True)))
        return {tensor.name: strides for tensor in self.tensors}

    def in_dtype(self, dtype: DType) -> AttentionForward:
        """The same problem in another element type."""
        return replace(self, dtype=dtype)
