"""The problems of append that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flash_helpers import gpu
from flash_helpers.operations.append.problem import Append
from flash_helpers.registry.problem import Element, Tensor
from flash_helpers.registry.supports import WithoutOptions

_MOST_INT = 2**31 - 1


@dataclass(frozen=True)
class AppendSupports(WithoutOptions):
    """Problems of append.

    `alignment`: bytes that a thread loads at once; heads begin at multiples of it. `n_threads`:
    of a thread block.
    """

    dtype: Element
    alignment: int
    n_threads: int

    @property
    def chunk(self) -> int:
        """Elements of `alignment` bytes."""
        return self.alignment // self.dtype.bytes

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the alignment of a tensor's address in bytes: integers are read one by one."""
        return tensor.element.bytes if tensor.element is Element.INT32 else self.alignment

    def blocks(self, problem: Append) -> tuple[int, int]:
        """Return the thread blocks of all tokens, and those of a token."""
        chunks = (2 * problem.kv_heads + problem.heads) * (problem.d_head // self.chunk)
        tokens = problem.batch * max(problem.len_new, problem.len_q)
        return tokens, -(-chunks // self.n_threads)

    def refusal(self, problem: Append, kernel: str) -> str:
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
        if problem.rotary_dim % (2 * self.chunk):
            return (
                f"rotary_dim {problem.rotary_dim} is not a multiple of {2 * self.chunk} "
                f"({kernel}): let PyTorch compute it"
            )
        tokens, of_token = self.blocks(problem)
        if tokens > _MOST_INT:
            return (
                f"batch {problem.batch} has {tokens} tokens, over the limit {_MOST_INT} of a grid "
                f"({kernel}): split the call by batch"
            )
        if of_token > gpu.MAX_GRID[1]:
            return (
                f"a token has {of_token} thread blocks, over the limit {gpu.MAX_GRID[1]} of a grid "
                f"({kernel}): split the call by heads"
            )
        return ""

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return the reason why a tensor cannot have these strides, with the way out; "" if it
        can."""
        if strides[-1] != 1 and tensor.shape[-1] != 1:
            return (
                f"{tensor.name} has stride {strides[-1]} in its last dimension and must have 1: "
                "call .contiguous()"
            )
        if tensor.element is not Element.INT32 and any(x % self.chunk for x in strides[:-1]):
            return (
                f"{tensor.name} has strides {strides}, of which all but the last must be multiples "
                f"of {self.chunk}: call .contiguous()"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        return {
            "cache": "rows of sequences, rows that they choose, pages of any size",
            "d_head": f"multiples of {self.chunk}",
            "rotary_dim": f"0 and multiples of {2 * self.chunk}, in halves or interleaved",
            "options": "q or not; tables of fp32 or of the dtype; positions of their own",
            "strides": f"1 along d_head; others multiples of {self.chunk}",
        }

    def corners(self) -> Iterator[Append]:
        """Yield small problems at the edges of the declaration: one key; heads whose chunks do not
        fill a thread block, and more than one; room for the new keys alone; all kinds of caches,
        tables and queries."""
        chunk, half = self.chunk, 2 * self.chunk

        def make(
            batch: int, kv_heads: int, len_new: int, room: int, d_head: int, **options: Any
        ) -> Append:
            return Append(batch, kv_heads, len_new, room, d_head, self.dtype, **options)

        yield make(1, 1, 1, 1, chunk)
        yield make(2, 3, 3, 5, 3 * chunk, caches=3)
        yield make(3, 1, 2, 9, half, page_size=1, pages=40)
        yield make(2, 2, 4, 6, half, page_size=3, rotary_dim=half)
        for interleaved in (False, True):
            turned = {"rotary_dim": half, "interleaved": interleaved}
            yield make(2, 1, 2, 7, half + chunk, **turned, fp32_tables=True, heads=3, len_q=2)
            yield make(
                *(3, 2, 1, 4, 2 * half), **turned, caches=4, rotary_seqlens=True, positions=6,
                heads=2, len_q=3, in_order=False,
            )  # fmt: skip
        wide = self.n_threads * chunk // 2 + half  # K alone takes more than half of the threads
        yield make(1, 1, 2, 8, wide, page_size=4, rotary_dim=half, heads=1, len_q=1)
