"""The problems of merge that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from flash_helpers import gpu
from flash_helpers.operations.merge.problem import Merge
from flash_helpers.registry.problem import Element, Tensor
from flash_helpers.registry.supports import MatrixSupports


@dataclass(frozen=True)
class MergeSupports(MatrixSupports):
    """Problems of merge.

    `chunk`: elements of a thread's load or store. d_head and the distances between rows of o_parts
    and o are multiples of it. With 1 a warp has a row.
    """

    any_stride: ClassVar[frozenset[str]] = frozenset({"lse_parts", "lse"})

    chunk: int
    max_threads: int = gpu.MAX_GRID[0]

    @property
    def alignment(self) -> int:
        """Bytes of a chunk, or of an element of lse."""
        return max(self.chunk * self.dtype.bytes, Element.FP32.bytes)

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the bytes of a chunk of o_parts and o, and of an element of lse."""
        return tensor.element.bytes * (1 if tensor.name in self.any_stride else self.chunk)

    @property
    def smallest(self) -> int:
        """The least d_head."""
        return self.chunk

    def threads(self, problem: Merge) -> int:
        """Return the threads of all rows."""
        of_row = gpu.WARP if self.chunk == 1 else problem.d_head // self.chunk
        return problem.rows * problem.heads * of_row

    def refusal(self, problem: Merge, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if reason := super().refusal(problem, kernel):
            return reason
        if problem.d_head % self.chunk:
            return (
                f"d_head {problem.d_head} is not a multiple of {self.chunk} ({kernel}): choose a "
                "config of step u1, or pad o_parts with zeros"
            )
        if problem.parts > gpu.MAX_GRID[0]:
            return (
                f"parts {problem.parts} is over the limit {gpu.MAX_GRID[0]} of an int: merge the "
                "parts in several calls"
            )
        if self.threads(problem) > self.max_threads:
            return (
                f"rows {problem.rows} with {problem.heads} heads of {problem.d_head} elements take "
                f"{self.threads(problem)} threads, over the limit {self.max_threads} of {kernel}: "
                "split the call by rows"
            )
        return ""

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return the reason why a tensor cannot have these strides, with the way out; "" if it
        can."""
        if reason := super().layout_refusal(tensor, strides):
            return reason
        if tensor.name in self.any_stride or not any(step % self.chunk for step in strides[:-1]):
            return ""
        return (
            f"{tensor.name} has strides {strides}, of which all but the last must be multiples of "
            f"{self.chunk}: call .contiguous(), or choose a config of step u1"
        )

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        multiple = "" if self.chunk == 1 else f", a multiple of {self.chunk}"
        aligned = "" if self.chunk == 1 else f", multiples of {self.chunk}"
        return {
            "parts": "1 or more",
            "rows, heads": "1 or more",
            "d_head": f"{self.chunk} or more{multiple}",
            "options": "any base of the logarithms",
            "strides": f"1 along d_head; any others of o_parts and o{aligned}; any of lse",
        }

    def corners(self) -> Iterator[Merge]:
        """Yield small problems at the edges of the declaration: one chunk; more parts than lanes of
        a warp; heads and chunks that do not divide a warp; rows that do not fill a block."""
        sizes = ((1, 1, 1, 1), (33, 2, 1, 2), (2, 3, 5, 12), (3, 7, 3, 5))
        for parts, rows, heads, chunks in sizes:
            yield Merge(parts, rows, heads, chunks * self.chunk, self.dtype)
        yield Merge(65, 1, 1, 3 * self.chunk, self.dtype, log2_base=1.0)
