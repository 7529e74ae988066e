"""The problems that a kernel takes, declared: refusals, tests' corners and the docs' table follow.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flash_helpers import gpu
from flash_helpers.registry.problem import ELEMENT_BYTES, AttentionForward, DType

MAX_SEQ_LEN = 2**31 - 1  # the kernels take it as an int
_ANY = 2**63 - 1

# What a call may ask for besides a problem's sizes, and the nearest to it that every kernel takes.
OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "causal": "without causal=True every query sees all keys",
        "softmax_scale": "without softmax_scale it is 1/sqrt(d_head); multiply q by "
        "softmax_scale * sqrt(d_head) for another one",
        "return_lse": "without return_lse=True the output alone is returned",
    }
)


@dataclass(frozen=True)
class Supports:
    """Attention forward problems.

    d_heads: head sizes. blocks: numbers that the sequence length must be a multiple of, by what
    they are called. chunk_bytes: tensors begin at, and all strides but the last are, multiples of
    it. max_row_stride, max_stride: elements, of the sequence and of heads and batches. max_tiles:
    of B_r queries of one head, where one dimension of the grid has them all. options: those of
    OPTIONS that the kernel has.
    """

    dtype: DType
    d_heads: tuple[int, ...]
    blocks: Mapping[str, int]
    chunk_bytes: int
    max_row_stride: int
    max_stride: int = _ANY
    max_heads: int = gpu.MAX_GRID[1]
    max_tiles: int = _ANY
    max_seq_len: int = MAX_SEQ_LEN
    options: frozenset[str] = frozenset()

    @property
    def whole(self) -> int:
        """The shortest sequence."""
        return math.lcm(*self.blocks.values())

    def refusal(self, problem: AttentionForward, kernel: str, options: Collection[str] = ()) -> str:
        """Why the kernel does not take the problem, with the way out; "" if it does.

        kernel: how the text names it. options: those of OPTIONS that are asked for.
        """
        for option in options:
            if option not in self.options:
                return f"{option} is not supported by {kernel}: {OPTIONS[option]}"
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype.short}: {kernel} takes {self.dtype.short}"
        if problem.d_head not in self.d_heads:
            known = " and ".join(map(str, self.d_heads))
            return (
                f"d_head {problem.d_head}: {kernel} is built for {known}: pad the last dimension "
                f"with zeros to {max(self.d_heads)} if it is smaller (and scale q, since the "
                f"kernels divide by sqrt({max(self.d_heads)}))"
            )
        for name, rows in self.blocks.items():
            if problem.seq_len % rows:
                longer = -(-problem.seq_len // self.whole) * self.whole
                return (
                    f"seq_len {problem.seq_len} is not a multiple of {name} {rows} ({kernel}): use "
                    f"{longer}, or choose a config whose {name} divides it"
                )
        if problem.seq_len > self.max_seq_len:
            return (
                f"seq_len {problem.seq_len} is over the limit {self.max_seq_len}: split the problem"
            )
        if problem.heads > self.max_heads:
            return (
                f"heads {problem.heads} is over the limit {self.max_heads} of a CUDA grid: split "
                "the call by heads"
            )
        tiles = problem.seq_len // self.blocks.get("B_r", 1) * problem.heads * problem.batch
        if tiles > self.max_tiles:
            return (
                f"batch {problem.batch} with {problem.heads} heads has {tiles} tiles of queries, "
                f"over the limit {self.max_tiles} of a CUDA grid: split the call by batches"
            )
        return ""

    def described(self) -> dict[str, str]:
        """What is taken, in words: quantities by name."""
        chunk = self.chunk_bytes // ELEMENT_BYTES
        return {
            "d_head": ", ".join(map(str, self.d_heads)),
            "seq_len": f"multiples of {' and '.join(self.blocks)}, up to {self.max_seq_len:,}",
            "heads": f"up to {self.max_heads:,}",
            "batches": "any number",
            "strides": f"1 along d_head; else multiples of {chunk}, from row to row up to "
            f"{self.max_row_stride:,}",
        }

    def corners(self) -> Iterator[AttentionForward]:
        """Small problems at the edges of the declaration: one block; several, in which every index
        that a kernel may confuse differs."""
        for d_head in self.d_heads:
            yield AttentionForward(1, 1, self.whole, d_head, self.dtype)
            yield AttentionForward(2, 3, 3 * self.whole, d_head, self.dtype)
