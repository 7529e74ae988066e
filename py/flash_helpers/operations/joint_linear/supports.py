"""The problems of linear layers of a sequence and its context that a kernel takes. Standard library
only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.registry.problem import Element, Tensor
from flash_helpers.registry.supports import WithoutOptions

MOST_IN = 512
"""Input features with which the layers are bound by memory rather than by tensor cores."""
_MOST_INT = 2**31 - 1


@dataclass(frozen=True)
class JointLinearSupports(WithoutOptions):
    """Problems of linear layers of a sequence and its context.

    `alignment`: bytes that a thread copies at once; rows begin at multiples of it. `B_r`, `B_c`:
    rows and outputs of a thread block. `piece`: input features of a piece in shared memory.
    `most_in`: the most input features. `activations`: whether it takes GELU of y and SiLU of x.
    """

    dtype: Element
    alignment: int
    B_r: int
    B_c: int
    piece: int
    most_in: int
    activations: bool = False

    @property
    def chunk(self) -> int:
        """Elements of `alignment` bytes."""
        return self.alignment // self.dtype.bytes

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the alignment of a tensor's address in bytes: all are copied in chunks."""
        return self.alignment

    def refusal(self, problem: JointLinear, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype.short}: {kernel} takes {self.dtype.short}"
        for name in ("in_features", "out_features", "context_in", "context_out"):
            size = getattr(problem, name)
            if size % self.chunk:
                return (
                    f"{name} {size} is not a multiple of {self.chunk} ({kernel}): pad the weights "
                    f"to {-(-size // self.chunk) * self.chunk}, or let PyTorch compute it"
                )
            if "in" in name.split("_") and size > self.most_in:
                way_out = "let PyTorch compute it"
                if self.most_in < MOST_IN:
                    way_out = "choose a config with a larger depth, or jl1"
                return f"{name} {size} is over the limit {self.most_in} ({kernel}): {way_out}"
            if problem.norm and "out" in name.split("_") and size > self.B_c:
                return (
                    f"{name} {size} is over {self.B_c}, the columns of a thread block, which norms "
                    f"whole rows ({kernel}): choose a config with a larger B_c, or let PyTorch "
                    "compute it"
                )
        for name in ("gelu", "silu"):
            if getattr(problem, name) and not self.activations:
                return f"{name}: {kernel} has no activations; choose jl4, or let PyTorch compute it"
        tokens = max(problem.rows, problem.context_rows)
        most = _MOST_INT - self.B_r
        columns = max(problem.out_features, problem.context_out)
        if 2 * tokens * -(-columns // self.B_c) > most:
            return (
                f"batch {problem.batch} has {tokens} tokens of {columns} outputs, over the limits "
                f"of {kernel}: split the call by batch"
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
        if len(strides) == 3 and all(strides[:2]) and strides[0] != tensor.shape[1] * strides[1]:
            return (
                f"{tensor.name} has strides {strides} for shape {tensor.shape}, and the rows of "
                f"all samples must be {strides[1]} elements apart: call .contiguous()"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        return {
            "length": "1 or more",
            "context": "0 or more, with widths of its own",
            "in_features": f"multiples of {self.chunk} up to {self.most_in}",
            "out_features": f"multiples of {self.chunk}; with a norm up to B_c",
            "options": "bias; RMS norm with any eps"
            + ("; GELU of y, SiLU of x" if self.activations else ""),
            "strides": "1 along a token; one distance of all tokens",
        }

    def corners(self) -> Iterator[JointLinear]:
        """Yield small problems at the edges of the declaration: one token of one chunk; a row more
        than a thread block has; a chunk more than a piece, and than the columns of a thread block.

        Others have a norm over all columns of a thread block, and a context of other widths.
        """
        chunk, dtype = self.chunk, self.dtype
        yield JointLinear(1, 1, chunk, chunk, dtype)
        yield JointLinear(1, 1, chunk, chunk, dtype, bias=True, norm=True)
        more = min(self.piece + chunk, self.most_in)
        yield JointLinear(1, self.B_r + 1, more, self.B_c, dtype, norm=True)
        yield JointLinear(2, 3, 2 * chunk, self.B_c + chunk, dtype, context=1, bias=True)
        yield JointLinear(
            *(1, 2, self.piece, 3 * chunk, dtype),
            context=5,
            context_in=min(2 * self.piece + chunk, self.most_in),
            context_out=2 * chunk,
            bias=True,
            norm=True,
            eps=0.1,
        )
        if self.activations:
            yield JointLinear(1, 5, 3 * chunk, 2 * chunk, dtype, bias=True, gelu=True, context=3)
            yield JointLinear(1, 2, more, 3 * chunk, dtype, silu=True, context=self.B_r + 1)
            yield JointLinear(1, 2, chunk, self.B_c, dtype, norm=True, gelu=True, silu=True)
