"""FlashAttention-3's functions: `from flash_attention.flash_attn_3 import flash_attn_func`.

Names, order, defaults and meaning of the arguments are those of FlashAttention-3's
`flash_attn_interface`. Unlike those of `flash_attention.flash_attn` they return (out, softmax_lse)
with return_attn_probs, and have neither dropout_p nor alibi_slopes.
    pack_gqa: changes nothing: it chooses among FlashAttention's kernels, whose results are equal.
    num_splits: 1, or 0, with which FlashAttention chooses. flash_attn_with_kvcache takes any number
        from 0 on.
    k_descale, v_descale: taken by flash_attn_with_kvcache alone, for a cache in
        torch.float8_e4m3fn: (batch, kv_heads), fp32. q stays in fp16 or bf16 beside it, where
        FlashAttention has q in fp8.
    qv, q_descale, seqused_q, seqused_k, attention_chunk, sm_margin: refused, unless they are None
        or 0; and so are cache_leftpad, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q and
        scheduler_metadata of flash_attn_with_kvcache.
"""

from __future__ import annotations

import torch

from flash_attention import flash_attn
from flash_attention._forward import _ALL_KEYS, _NO_SOFTCAP, _check_flag
from flash_attention._kvcache import with_kvcache
from flash_attention._states import combined
from flash_attention._unbuilt import refuse_unbuilt, refuse_unbuilt_on_cache, unpacked
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


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _ALL_KEYS,
    attention_chunk: int = 0,
    softcap: float = _NO_SOFTCAP,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Append new keys and values to a cache, and compute attention on it, as
    `flash_attn.flash_attn_with_kvcache` does.

    page_table: its block_table, and named so in messages. rotary_seqlens: (batch,), int32: the
    position of each sequence's first new token, instead of cache_seqlens. Positions that rotary_cos
    lacks are the nearest that it has. k_descale, v_descale: k_scale and v_scale of
    `flash_attention.decode`, with any strides; others than contiguous ones are copied in each call.
    With a cache in fp8, k and v are in its dtype, or in that of q: then they are divided by the
    scales, cut to the range of fp8 and rounded.
    """
    refuse_unbuilt_on_cache(
        qv=qv,
        cache_leftpad=cache_leftpad,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        q_descale=q_descale,
        attention_chunk=attention_chunk,
        scheduler_metadata=scheduler_metadata,
        sm_margin=sm_margin,
    )
    if pack_gqa is not None:
        _check_flag("pack_gqa", pack_gqa)
    _check_flag("return_softmax_lse", return_softmax_lse)
    return with_kvcache(
        *(q, k_cache, v_cache, k, v),
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        block_table=page_table,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_lse=return_softmax_lse,
        num_splits=num_splits,
        k_descale=k_descale,
        v_descale=v_descale,
    )


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Combine attention on several parts of the keys into attention on all of them; return (out,
    lse), with None in place of lse without return_lse.

    out_partial: (parts, batch, len_q, heads, d_head), or (parts, total_q, heads, d_head).
    lse_partial: the same without d_head: natural logarithms, as `flash_attention.decode` returns
        them, with heads last; -inf where a part has no keys, whose output is not read.
    out: written and returned if given. out_dtype: dtype of a new out, by default that of
        out_partial.

    Computes in fp32: CUDA tensors in a kernel, unless a gradient is asked for, and all else by
    PyTorch's operators. A row that no part has keys for has 0 in out and -inf in lse, which is
    fp32.
    """
    check_types({"out_partial": out_partial, "lse_partial": lse_partial})
    _check_flag("return_lse", return_lse)
    if out_partial.ndim not in (4, 5):
        raise ValueError(
            f"out_partial has {out_partial.ndim} dimensions, shape {tuple(out_partial.shape)}: "
            "pass (parts, batch, seq, heads, d_head) or (parts, total, heads, d_head)"
        )
    shape, dtype = out_partial.shape[1:], out_dtype or out_partial.dtype
    if out is not None:
        check_types({"out": out})
        if out.shape != shape:
            raise ValueError(f"out has shape {tuple(out.shape)}: pass {tuple(shape)}")
        if out_dtype not in (None, out.dtype):
            raise TypeError(f"out is {out.dtype} and out_dtype {out_dtype}: leave one of them out")
        dtype = out.dtype
    names = "out_partial", "lse_partial"
    found, lse = combined(out_partial, lse_partial, 0, names, base_2=False, dtype=dtype)
    result = found if out is None else out.copy_(found)
    return result, lse if return_lse else None


def _without_none(found: flash_attn.Result) -> Result:
    return found[:2] if isinstance(found, tuple) else found
