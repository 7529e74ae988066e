"""The problems of norm and rotary embedding of Q and K that a kernel takes. Standard library
only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flash_helpers.operations.qk_norm_rope.problem import QkNormRope
from flash_helpers.registry.problem import Element, Tensor
from flash_helpers.registry.supports import WithoutOptions

_MOST_INT = 2**31 - 1


@dataclass(frozen=True)
class QkNormRopeSupports(WithoutOptions):
    """Problems of norm and rotary embedding of Q and K.

    `alignment`: bytes that a thread loads at once; rows begin at multiples of it. `max_width`:
    elements of a row in the registers of its threads. `block_rows`: rows of a thread block.
    """

    dtype: Element
    alignment: int
    max_width: int
    block_rows: int

    @property
    def chunk(self) -> int:
        """Elements of `alignment` bytes."""
        return self.alignment // self.dtype.bytes

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the alignment of a tensor's address in bytes: all are moved in chunks."""
        return self.alignment

    def refusal(self, problem: QkNormRope, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype.short}: {kernel} takes {self.dtype.short}"
        if problem.d_head % self.chunk:
            return (
                f"d_head {problem.d_head} is not a multiple of {self.chunk} ({kernel}): pad the "
                "heads, or let PyTorch compute it"
            )
        if problem.width > self.max_width:
            return (
                f"{problem.heads} heads of {problem.d_head} are a width of {problem.width}, over "
                f"the limit {self.max_width} of the registers of a row's threads ({kernel}): "
                "choose a config with more row_threads or chunks, or let PyTorch compute it"
            )
        if problem.rows > (most := _MOST_INT - self.block_rows):
            return (
                f"batch {problem.batch} has {problem.rows} rows of Q, K and V, over the limit "
                f"{most} of {kernel}: split the call by batch"
            )
        return ""

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return the reason why a tensor cannot have these strides, with the way out; "" if it
        can."""
        if tensor.name == "rotary":
            d_head = 2 * tensor.shape[1]
            if strides[2] == 1 and strides[1] in (0, 2) and strides[0] in (0, d_head):
                return ""
            return f"rotary has strides {strides} and must be contiguous: call .contiguous()"
        if strides[-1] != 1 and tensor.shape[-1] != 1:
            return (
                f"{tensor.name} has stride {strides[-1]} in its last dimension and must have 1: "
                "call .contiguous()"
            )
        if any(step % self.chunk for step in strides[:-1]):
            return (
                f"{tensor.name} has strides {strides}, of which all but the last must be multiples "
                f"of {self.chunk}: call .contiguous()"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        return {
            "length": "1 or more",
            "context": "0 or more, with queries or without",
            "heads": f"multiples of {self.chunk} elements, together up to {self.max_width}",
            "options": "rotary embedding; any eps",
            "strides": f"1 along the width; others multiples of {self.chunk}",
        }

    def corners(self) -> Iterator[QkNormRope]:
        """Yield small problems at the edges of the declaration: one token of one chunk; all
        registers of a row's threads, and a chunk less; a row more than a thread block has.

        Others have heads whose chunks are not at the same pairs for a thread, and a context with
        queries and without.
        """
        chunk, dtype = self.chunk, self.dtype
        yield QkNormRope(1, 1, 1, chunk, dtype)
        yield QkNormRope(1, self.max_width // (2 * chunk), 1, 2 * chunk, dtype, rotary=True)
        yield QkNormRope(1, self.max_width // chunk - 1, 1, chunk, dtype, context=1, rotary=True)
        yield QkNormRope(1, 2, self.block_rows // 2 + 1, 3 * chunk, dtype, rotary=True)
        yield QkNormRope(2, 3, 3, 2 * chunk, dtype, context=2, rotary=True, eps=0.1)
        yield QkNormRope(2, 1, 2, 5 * chunk, dtype, context=3, context_queries=False, rotary=True)
        yield QkNormRope(1, 2, 1, 2 * chunk, dtype, context=4)
