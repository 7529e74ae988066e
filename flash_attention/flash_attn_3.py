"""FlashAttention-3's functions: `from flash_attention.flash_attn_3 import flash_attn_func`.

Names, order, defaults and meaning of the arguments are those of FlashAttention-3's
`flash_attn_interface`. Unlike those of `flash_attention.flash_attn` they return (out, softmax_lse)
with return_attn_probs, and have neither dropout_p nor alibi_slopes.
    pack_gqa: changes nothing: it chooses among FlashAttention's kernels, whose results are equal.
    num_splits: 1, or 0, with which FlashAttention chooses.
    qv, q_descale, k_descale, v_descale, seqused_q, seqused_k, attention_chunk, sm_margin: refused,
        unless they are None or 0.
"""

from __future__ import annotations

import torch

from flash_attention import flash_attn
from flash_attention._forward import _ALL_KEYS, _NO_SOFTCAP, _check_flag
from flash_attention._unbuilt import refuse_unbuilt, unpacked
from flash_attention.flash_attn import Window
from flash_helpers.runtime.tensors import check_types

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = _ALL_KEYS,
    attention_chunk: int = 0,
    softcap: float = _NO_SOFTCAP,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention; return out, as q. softmax_lse is (batch, heads, len_q).

    q: (batch, len_q, heads, d_head). k, v: (batch, len_k, kv_heads, d_head).
    """
    refuse_unbuilt(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse_unbuilt(attention_chunk=attention_chunk, num_splits=num_splits, sm_margin=sm_margin)
    if pack_gqa is not None:
        _check_flag("pack_gqa", pack_gqa)
    return _without_none(
        flash_attn.flash_attn_func(
            *(q, k, v),
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            deterministic=deterministic,
            return_attn_probs=return_attn_probs,
        )
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = _ALL_KEYS,
    attention_chunk: int = 0,
    softcap: float = _NO_SOFTCAP,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_func` of qkv: (batch, seq, 3, heads, d_head), or with num_heads_q
    (batch, seq, num_heads_q + 2 · kv_heads, d_head)."""
    check_types({"qkv": qkv})
    if qkv.ndim != 4:
        q, k, v = unpacked("qkv", qkv, ("batch", "seq", "3", "heads", "d_head"))
    else:
        heads = qkv.shape[2]
        if num_heads_q is None or not 0 <= num_heads_q <= heads or (heads - num_heads_q) % 2:
            raise ValueError(
                f"num_heads_q is {num_heads_q} and qkv has {heads} heads, shape "
                f"{tuple(qkv.shape)}: pass the number of heads of Q, so that K and V have half of "
                "the others each"
            )
        kv_heads = (heads - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], dim=2)
    return flash_attn_func(
        *(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size),
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = _ALL_KEYS,
    attention_chunk: int = 0,
    softcap: float = _NO_SOFTCAP,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention within each of several sequences, as `flash_attn.flash_attn_varlen_func`
    does."""
    refuse_unbuilt(seqused_q=seqused_q, seqused_k=seqused_k)
    refuse_unbuilt(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse_unbuilt(attention_chunk=attention_chunk, num_splits=num_splits, sm_margin=sm_margin)
    if pack_gqa is not None:
        _check_flag("pack_gqa", pack_gqa)
    return _without_none(
        flash_attn.flash_attn_varlen_func(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            deterministic=deterministic,
            return_attn_probs=return_attn_probs,
        )
    )


def _without_none(found: flash_attn.Result) -> Result:
    return found[:2] if isinstance(found, tuple) else found
