"""Joint attention with its norms and rotary embedding by one operation of the kernels, where the
registry has a kernel for the problem."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_attention import ops
from flash_attention.multimodal._attend import attend
from flash_attention.multimodal._rotary import rotate
from flash_attention.multimodal._streams import (
    MOST_KEPT,
    StreamsOperator,
    has_kernel,
    sizes_asked,
)
from flash_helpers.operations.joint_attention.problem import JointAttention as Problem

if TYPE_CHECKING:
    from jaxtyping import Float

_CONTEXT = ("context_q", "context_k", "context_v", "context_q_weight", "context_k_weight")
_INPUTS = ("q", "k", "v", "q_weight", "k_weight", "rotary", *_CONTEXT)


def _new(tensors: Mapping[str, Tensor], stream: str) -> Tensor | None:
    q = tensors.get(f"{stream}q")
    return None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)


def _none(o: Tensor) -> Tensor:
    return o.new_empty(o.shape[0], 0, o.shape[2])


def _formula(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the operator's outputs by operators with gradients: norms and attention in kernels on
    a GPU that has them."""
    *inputs, heads, eps = args
    given = {name: x for name, x in zip(_INPUTS, inputs, strict=True) if x is not None}
    rms_norm = ops.rms_norm if given["q"].is_cuda else torch.nn.functional.rms_norm

    def in_heads(name: str) -> Tensor:
        x, weight = given[name], given.get(f"{name}_weight")
        if weight is not None:
            x = rms_norm(x, weight.shape, weight, eps)
        x = x.unflatten(-1, (heads, -1))
        turns = name in ("q", "k") and "rotary" in given
        return rotate(x, given["rotary"]) if turns else x

    names = ((name for name in (n, f"context_{n}") if name in given) for n in "qkv")
    q, k, v = (torch.cat([in_heads(name) for name in each], 1) for each in names)
    length = given["q"].shape[1]
    o = attend(q, k, v).flatten(-2)
    return o[:, :length], o[:, length:]


_joint_attention = StreamsOperator(
    Problem, _INPUTS, ("heads", "eps"), ("o", "context_o"), _new, _none, formula=_formula
).define()


@functools.lru_cache(MOST_KEPT)
def _is_taken(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    heads: int,
    d_head: int,
    has_queries: bool,
    rotary: bool,
) -> bool:
    batch, length, context = sizes
    return has_kernel(
        device,
        dtype,
        lambda element: Problem(
            *(batch, heads, length, d_head, element),
            context=context,
            context_queries=has_queries,
            rotary=rotary,
        ),
    )


@torch.compiler.assume_constant_result  # so that a trace does not look into the registry
def _decided(*facts: Any) -> bool:
    return _is_taken(*facts)


def takes(tensors: Mapping[str, Tensor], heads: int, *, masked: bool, dropout: float) -> bool:
    """Whether a kernel computes a call by `joint_attention`; `qk_norm_rope` and `attend` decide of
    all others.

    tensors: those of the call by name, without those left out. A mask and dropout have no kernel.
    """
    q = tensors["q"]
    if masked or dropout > 0 or not all(q.shape):
        return False
    if any(x.dtype != q.dtype for name, x in tensors.items() if name != "rotary"):
        return False
    if "rotary" in tensors and tensors["rotary"].dtype != torch.float32:
        return False
    context = tensors["context_k"].shape[1] if "context_k" in tensors else 0
    sizes = sizes_asked(q.shape[0], q.shape[1], context)
    has_queries = "context_q" in tensors
    return _decided(
        *(q.device, q.dtype, sizes, heads, q.shape[2] // heads, has_queries, "rotary" in tensors)
    )


def joint_attention(
    tensors: Mapping[str, Tensor], heads: int, eps: float
) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch tokens width"]]:
    """Compute attention of a sequence and its context from their projections: norms, rotary
    embedding and attention. Return the outputs of both, of which the second has no tokens for a
    context without queries.

    tensors: by the names of the operation's problem (`Problem.axes`), without those left out.
    """
    return _joint_attention(*map(tensors.get, _INPUTS), heads, eps)
