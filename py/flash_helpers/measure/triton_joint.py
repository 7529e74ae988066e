"""Joint attention and adaptive layer norms with their passes over tokens in Triton: what a page of
Python gives, beside the kernels. Products and attention are PyTorch's.

Imports triton.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

_ELEMENTS_PER_WARP = 256
_MOST_WARPS = 8


@triton.jit
def _norm_turned(
    x_ptr,
    weight_ptr,
    table_ptr,
    y_ptr,
    token,
    pairs,
    head_pairs,
    eps,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of a token's row, of all heads together, and its pairs turned."""
    pair = tl.arange(0, BLOCK)
    inside = (pair < pairs)[:, None]
    column = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(tl.sum(x * x, 1), 0)
    x *= tl.rsqrt(squares / (2 * pairs) + eps)
    x *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ROTARY:
        places = (token * head_pairs + pair[:, None] % head_pairs) * 2 + tl.arange(0, 2)[None, :]
        real, imaginary = tl.split(x)
        cos, sin = tl.split(tl.load(table_ptr + places, mask=inside, other=0.0))
        x = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    tl.store(y_ptr + column, x, mask=inside)


@triton.jit
def _norm_rotary_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
    q_out_ptr,
    k_out_ptr,
    q_batch,
    q_row,
    k_batch,
    k_row,
    q_out_batch,
    k_out_batch,
    tokens,
    pairs,
    head_pairs,
    eps,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has a token's row of K or, if there are two programs per token, of Q."""
    sample = (tl.program_id(0) // tokens).to(tl.int64)
    token = tl.program_id(0) % tokens
    row = token * 2 * pairs
    if tl.program_id(1) == 0:
        x, y = k_ptr + sample * k_batch + token * k_row, k_out_ptr + sample * k_out_batch + row
        _norm_turned(x, k_weight_ptr, table_ptr, y, token, pairs, head_pairs, eps, ROTARY, BLOCK)
    else:
        x, y = q_ptr + sample * q_batch + token * q_row, q_out_ptr + sample * q_out_batch + row
        _norm_turned(x, q_weight_ptr, table_ptr, y, token, pairs, head_pairs, eps, ROTARY, BLOCK)


@triton.jit
def _adaptive_norm_kernel(
    x_ptr,
    shift_ptr,
    scale_ptr,
    y_ptr,
    x_batch,
    x_row,
    shift_batch,
    scale_batch,
    tokens,
    width,
    eps,
    BLOCK: tl.constexpr,
):
    sample = (tl.program_id(0) // tokens).to(tl.int64)
    token = tl.program_id(0) % tokens
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = x_ptr + sample * x_batch + token * x_row
    x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    scale = tl.load(scale_ptr + sample * scale_batch + column, mask=inside).to(tl.float32)
    shift = tl.load(shift_ptr + sample * shift_batch + column, mask=inside).to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * width
    tl.store(y_ptr + place + column, x * (1 + scale) + shift, mask=inside)


@triton.jit
def _gate_kernel(
    x_ptr,
    gate_ptr,
    change_ptr,
    y_ptr,
    x_batch,
    x_row,
    gate_batch,
    change_batch,
    change_row,
    tokens,
    width,
    BLOCK: tl.constexpr,
):
    sample = (tl.program_id(0) // tokens).to(tl.int64)
    token = tl.program_id(0) % tokens
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = x_ptr + sample * x_batch + token * x_row
    change_row_ptr = change_ptr + sample * change_batch + token * change_row
    x = tl.load(row + column, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + sample * gate_batch + column, mask=inside).to(tl.float32)
    change = tl.load(change_row_ptr + column, mask=inside).to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * width
    tl.store(y_ptr + place + column, x + gate * change, mask=inside)


def _options(elements: int) -> dict[str, int]:
    block = triton.next_power_of_2(elements)
    return {"BLOCK": block, "num_warps": min(max(block // _ELEMENTS_PER_WARP, 1), _MOST_WARPS)}


def normed_and_turned(
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    rotary: torch.Tensor | None,
    out: tuple[torch.Tensor | None, torch.Tensor],
    d_head: int,
    eps: float,
) -> None:
    """Write Q and K of the sequence, or with prefix "context_" of its context, behind their RMS
    norms and turned by the table, in one launch.

    tensors: by the names of operation joint_attention. rotary: None turns nothing. out: Q and K,
    (batch, tokens, width), with contiguous rows behind each other; Q is None if there are no
    queries.
    """
    k, k_weight, k_out = tensors[f"{prefix}k"], tensors[f"{prefix}k_weight"], out[1]
    has_queries = out[0] is not None
    q = tensors[f"{prefix}q"] if has_queries else k
    q_weight = tensors[f"{prefix}q_weight"] if has_queries else k_weight
    q_out = k_out if out[0] is None else out[0]
    batch, tokens, width = k.shape
    pairs = width // 2
    _norm_rotary_kernel[(batch * tokens, 1 + has_queries)](
        *(q, k, q_weight, k_weight, rotary, q_out, k_out, *q.stride()[:2], *k.stride()[:2]),
        *(q_out.stride(0), k_out.stride(0), tokens, pairs, d_head // 2, eps, rotary is not None),
        **_options(pairs),
    )


def attended(
    tensors: Mapping[str, torch.Tensor], heads: int, eps: float, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of the sequence and of its context, (batch, tokens, width); the second has
    no tokens for a context that is absent or has no queries.

    tensors: by the names of operation joint_attention. scale: of the softmax; d_head^(-1/2) by
    default.
    """
    k, v = tensors["k"], tensors["v"]
    batch, length, width = k.shape
    d_head = width // heads
    tokens = tensors["context_k"].shape[1] if "context_k" in tensors else 0
    n_queries = length + (tokens if "context_q" in tensors else 0)
    q_out, k_out = (k.new_empty(batch, n, width) for n in (n_queries, length + tokens))
    normed_and_turned(
        *(tensors, "", tensors.get("rotary")), (q_out[:, :length], k_out[:, :length]), d_head, eps
    )
    if tokens:
        own_q = q_out[:, length:] if n_queries > length else None
        normed_and_turned(tensors, "context_", None, (own_q, k_out[:, length:]), d_head, eps)
        v = torch.cat((v, tensors["context_v"]), 1)
    q, k, v = (x.unflatten(-1, (heads, d_head)).transpose(1, 2) for x in (q_out, k_out, v))
    o = scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)
    return o[:, :length], o[:, length:]


def adaptive_norm(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return layer norm of x, (batch, tokens, width), times 1 + scale plus shift, which are
    (batch, 1, width)."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, tokens, width = x.shape
    _adaptive_norm_kernel[(batch * tokens,)](
        *(x, shift, scale, y, *x.stride()[:2], shift.stride(0), scale.stride(0)),
        *(tokens, width, eps),
        **_options(width),
    )
    return y


def gated(x: torch.Tensor, gate: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """Return x + gate · change of (batch, tokens, width); the gate is (batch, 1, width)."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, tokens, width = x.shape
    _gate_kernel[(batch * tokens,)](
        *(x, gate, change, y, *x.stride()[:2], gate.stride(0), *change.stride()[:2]),
        *(tokens, width),
        **_options(width),
    )
    return y


def in_triton(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module of flash_attention.multimodal whose norms of Q and K with their rotary
    embedding, adaptive layer norms and gates run in Triton from then on. Without masks."""

    def fused(part: Any, *projections: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own, projected, rotary, _, *of_context = projections
        tensors = part.gathered(own, projected, rotary, *of_context)
        return attended(tensors, own.width // own.d_head, own.k_norm.eps)

    parts: Iterable[Any] = module.modules()
    for part in parts:
        if hasattr(part, "fused"):
            part.fused = functools.partial(fused, part)
        if hasattr(part, "modulated"):
            part.modulated = functools.partial(adaptive_norm, eps=part.norm.eps)
            part.gated = gated
    return module
