"""The problems of adaptive layer norms that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm
from flash_helpers.registry.problem import Element, Tensor
from flash_helpers.registry.supports import WithoutOptions

_MOST_INT = 2**31 - 1


@dataclass(frozen=True)
class AdaptiveNormSupports(WithoutOptions):
    """Problems of adaptive layer norms.

    `alignment`: bytes that a thread loads at once; rows begin at multiples of it. `block_rows`:
    rows of a thread block. `max_width`: elements of a row that its threads hold. `way_out`: for
    longer rows.
    """

    dtype: Element
    alignment: int
    block_rows: int
    max_width: int
    way_out: str

    @property
    def chunk(self) -> int:
        """Elements of `alignment` bytes."""
        return self.alignment // self.dtype.bytes

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the alignment of a tensor's address in bytes: all are loaded in chunks."""
        return self.alignment

    def refusal(self, problem: AdaptiveNorm, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype.short}: {kernel} takes {self.dtype.short}"
        for name in ("width", "context_width"):
            size = getattr(problem, name)
            if size % self.chunk:
                return (
                    f"{name} {size} is not a multiple of {self.chunk} ({kernel}): let PyTorch "
                    "compute it"
                )
            if size > self.max_width:
                return (
                    f"{name} {size} is over the limit {self.max_width} ({kernel}): {self.way_out}"
                )
        tokens = problem.rows + problem.context_rows
        if tokens > _MOST_INT - 2 * self.block_rows:
            return (
                f"batch {problem.batch} has {tokens} tokens, over the limits of {kernel}: split "
                "the call by batch"
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
            "context": "0 or more, with a width of its own",
            "width": f"multiples of {self.chunk} up to {self.max_width}",
            "options": "a gated change or none; norm or none; the sum stored or not; any eps",
            "strides": "1 along a token, others any",
        }

    def corners(self) -> Iterator[AdaptiveNorm]:
        """Yield small problems at the edges of the declaration: one token of one chunk; a row more
        than a thread block has; the longest row; a context of another width; each set of inputs and
        outputs."""
        chunk, dtype = self.chunk, self.dtype
        yield AdaptiveNorm(1, 1, chunk, dtype)
        yield AdaptiveNorm(1, self.block_rows + 1, 3 * chunk, dtype, change=True, sum=True)
        yield AdaptiveNorm(1, 2, self.max_width, dtype, change=True, context=1, context_width=chunk)
        yield AdaptiveNorm(3, 2, 5 * chunk, dtype, change=True, norm=False, context=3)
        yield AdaptiveNorm(2, 1, chunk, dtype, change=True, norm=False, sum=True)
        yield AdaptiveNorm(
            *(2, 3, 2 * chunk, dtype),
            sum=True,
            context=2,
            context_width=self.max_width - chunk,
            eps=0.1,
        )
