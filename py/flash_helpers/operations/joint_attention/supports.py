"""The problems of joint attention that a kernel takes. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flash_helpers import gpu
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.registry.problem import Element, Tensor

CLUSTER_KEYS = (64, 128, 256, 512, 768)
"""Most keys of the configs in which a thread block has all keys of a head."""
_MOST_INT = 2**31 - 1
_OUTPUTS = ("o", "context_o")  # also where a problem has no context_o


@dataclass(frozen=True)
class JointSupports:
    """Problems of joint attention.

    `alignment`: bytes that a thread loads at once; rows begin at multiples of it. `B_r`: queries of
    a thread block. `B_c`: keys of a block in shared memory.
    """

    dtype: Element
    d_head: int
    alignment: int
    B_r: int
    B_c: int

    @property
    def chunk(self) -> int:
        """Elements of `alignment` bytes."""
        return self.alignment // self.dtype.bytes

    def alignment_of(self, tensor: Tensor) -> int:
        """Return the alignment of a tensor's address in bytes: outputs are stored in pairs."""
        return 2 * tensor.element.bytes if tensor.name in _OUTPUTS else self.alignment

    @property
    def options(self) -> Mapping[str, Any]:
        """No options."""
        return MappingProxyType({})

    @property
    def sizes(self) -> Mapping[str, int]:
        """The head size."""
        return MappingProxyType({"d_head": self.d_head})

    @property
    def smallest(self) -> int:
        """The least length of a sequence."""
        return 1

    def lacking(self, problem: JointAttention) -> dict[str, tuple[str, str]]:
        """Return nothing: no kernel lacks an option."""
        return {}

    def adapted(self, problem: Any) -> Any:
        """Return the problem: no option is compiled in."""
        return problem

    def refusal(self, problem: JointAttention, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype.short}: {kernel} takes {self.dtype.short}"
        if problem.d_head != self.d_head:
            return (
                f"d_head {problem.d_head} is not {self.d_head} ({kernel}): choose a config of that "
                "head size, or let PyTorch compute it"
            )
        for name, most in (("heads", gpu.MAX_GRID[1]), ("batch", gpu.MAX_GRID[2])):
            if getattr(problem, name) > most:
                return (
                    f"{name} {getattr(problem, name)} is over the limit {most} of a grid "
                    f"({kernel}): split the call by {name}"
                )
        rows = problem.batch * (problem.n_queries + problem.n_keys)
        threads = rows * max(gpu.WARP, problem.heads * (self.d_head // self.chunk))
        if threads > _MOST_INT:
            return (
                f"batch {problem.batch} with {problem.n_keys} tokens of {problem.heads} heads "
                f"takes {threads} threads, over the limit {_MOST_INT} of {kernel}: split the call "
                "by batch"
            )
        return ""

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        """Return the reason why a tensor cannot have these strides, with the way out; "" if it
        can."""
        if tensor.name == "rotary":
            if strides[2] == 1 and strides[1] in (0, 2) and strides[0] in (0, self.d_head):
                return ""
            return f"rotary has strides {strides} and must be contiguous: call .contiguous()"
        if strides[-1] != 1 and tensor.shape[-1] != 1:
            return (
                f"{tensor.name} has stride {strides[-1]} in its last dimension and must have 1: "
                "call .contiguous()"
            )
        multiple = 2 if tensor.name in _OUTPUTS else self.chunk
        if any(step % multiple for step in strides[:-1]):
            return (
                f"{tensor.name} has strides {strides}, of which all but the last must be multiples "
                f"of {multiple}: call .contiguous()"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        return {
            "length": "1 or more",
            "context": "0 or more, with queries or without",
            "heads": f"1 or more, of {self.d_head} elements",
            "options": "rotary embedding; any eps and softmax_scale",
            "strides": f"1 along the width; others of q, k, v multiples of {self.chunk}",
        }

    def corners(self) -> Iterator[JointAttention]:
        """Yield small problems at the edges of the declaration: one token; lengths that fill a
        block of keys, and that do not; a context of a block of keys.

        Others have a context without queries, heads whose chunks are more than a warp has, and one
        query less than a thread block has.
        """
        own = (self.d_head, self.dtype)
        yield JointAttention(1, 1, 1, *own)
        yield JointAttention(1, 1, self.B_c, *own, rotary=True)
        yield JointAttention(2, 3, 17, *own, context=1, rotary=True, eps=0.1)
        yield JointAttention(1, 2, 1, *own, context=self.B_c, softmax_scale=0.1)
        yield JointAttention(1, 1, 5, *own, context=2, context_queries=False, rotary=True)
        yield JointAttention(1, 17, 3, *own, context=2)
        yield JointAttention(1, 1, self.B_r - 1, *own, context=3, rotary=True)


@dataclass(frozen=True)
class JointClusterSupports(JointSupports):
    """Problems of kernels in which a cluster has the heads of a sample, and a thread block all keys
    of a head. `B_c`: the most keys. `cluster_blocks`: the most heads."""

    cluster_blocks: int

    def refusal(self, problem: JointAttention, kernel: str) -> str:
        """Return the reason why the kernel does not take a problem, with the way out; "" if it
        does.

        `kernel`: the kernel's name in the text.
        """
        if found := super().refusal(problem, kernel):
            return found
        if problem.heads > self.cluster_blocks:
            return (
                f"heads {problem.heads} is over the limit {self.cluster_blocks} of the thread "
                f"blocks of a cluster ({kernel}): choose a config of {gpu.PORTABLE_CLUSTER}, or a "
                "step of family joint"
            )
        if problem.n_keys > self.B_c:
            return (
                f"length {problem.length} and context {problem.context} have {problem.n_keys} "
                f"keys, over the limit {self.B_c} of shared memory ({kernel}): choose a config "
                "with a larger B_c, or a step of family joint"
            )
        return ""

    def described(self) -> dict[str, str]:
        """Return the accepted problems in words: quantities by name."""
        return {
            **super().described(),
            "length": f"with the context up to B_c, at most {CLUSTER_KEYS[-1]}",
            "heads": f"1 to {self.cluster_blocks}, of {self.d_head} elements",
        }

    def corners(self) -> Iterator[JointAttention]:
        """Yield small problems at the edges of the declaration: one token; all keys of a block,
        in a sequence and in a context; one query less than a thread block has.

        Others have a context without queries, and as many heads as a cluster has blocks.
        """
        own = (self.d_head, self.dtype)
        yield JointAttention(1, 1, 1, *own)
        yield JointAttention(1, 1, self.B_c, *own, rotary=True)
        yield JointAttention(
            2, min(3, self.cluster_blocks), 17, *own, context=1, rotary=True, eps=0.1
        )
        yield JointAttention(1, 2, 1, *own, context=self.B_c - 1, softmax_scale=0.1)
        yield JointAttention(1, 1, 5, *own, context=2, context_queries=False, rotary=True)
        yield JointAttention(1, self.cluster_blocks, 3, *own, context=2)
        queries = min(self.B_r - 1, self.B_c)
        yield JointAttention(1, 1, queries, *own, context=self.B_c - queries, rotary=True)
