"""FlashAttention-2's functions: `from flash_attention.flash_attn import flash_attn_func`.

Names, order, defaults and meaning of the arguments are FlashAttention-2's:
    softmax_scale: 1/sqrt(d_head) by default.
    causal: aligned to the bottom right: the last query sees the last key.
    window_size: keys before and behind a query, aligned likewise, that it sees; -1 is no bound.
    softcap: logits x become softcap · tanh(x / softcap); 0.0 leaves them.
    deterministic: without it the gradient of q may differ in its last bits from call to call, as
        the docstring of `flash_attention.attention` tells.
    return_attn_probs: returns (out, softmax_lse, None). FlashAttention has probabilities in place
        of None where there is dropout. softmax_lse is fp32.
    dropout_p, alibi_slopes, block_table of flash_attn_varlen_func, cache_leftpad: refused, unless
        they are 0.0, or None.

K and V may have fewer heads than Q, a divisor of its number. Packed tensors are split into views,
without copies. Each function computes as `flash_attention.attention` does: dtypes, sizes, strides
and errors are the same, torch.compile and torch.export see one operator, and autograd has the
gradients of q, k and v. softmax_lse has no gradient, and flash_attn_with_kvcache has none at all.
"""

from __future__ import annotations

import torch

from flash_attention._forward import _ALL_KEYS, _NO_SOFTCAP, _check_flag, attention
from flash_attention._kvcache import with_kvcache
from flash_attention._unbuilt import refuse_unbuilt, refuse_unbuilt_on_cache, unpacked
from flash_attention._varlen import varlen_attention

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
Window = tuple[int, int]

_KV = ("2", "kv_heads", "d_head")
_QKV = ("3", "heads", "d_head")


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention; return out, as q. softmax_lse is (batch, heads, len_q).

    q: (batch, len_q, heads, d_head). k, v: (batch, len_k, kv_heads, d_head).
    """
    refuse_unbuilt(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _check_flag("return_attn_probs", return_attn_probs)
    found = attention(
        *(q, k, v),
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_attn_probs,
        deterministic=deterministic,
    )
    return (*found, None) if isinstance(found, tuple) else found


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_func` of q over kv, (batch, len_k, 2, kv_heads, d_head)."""
    k, v = unpacked("kv", kv, ("batch", "len_k", *_KV))
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_func` of qkv, (batch, seq, 3, heads, d_head)."""
    q, k, v = unpacked("qkv", qkv, ("batch", "seq", *_QKV))
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """Compute attention within each of several sequences; return out, as q. softmax_lse is
    (heads, total_q).

    q: (total_q, heads, d_head). k, v: (total_k, kv_heads, d_head). Sequence n has the queries from
        cu_seqlens_q[n] up to cu_seqlens_q[n + 1], without the latter, and its keys likewise. It may
        have no queries or no keys.
    cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32, contiguous, on the device of q.
    max_seqlen_q, max_seqlen_k: length of the longest sequence, or more.

    Lengths that do not fit are refused on CPU tensors. A CUDA device is not waited for: there rows
    of no sequence are left unwritten, and nothing outside of the tensors is read or written.
    """
    refuse_unbuilt(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    _check_flag("return_attn_probs", return_attn_probs)
    found = varlen_attention(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_attn_probs,
        deterministic=deterministic,
    )
    return (*found, None) if isinstance(found, tuple) else found


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_varlen_func` of q over kv, (total_k, 2, kv_heads, d_head)."""
    k, v = unpacked("kv", kv, ("total_k", *_KV))
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_varlen_func` of qkv, (total, 3, heads, d_head)."""
    q, k, v = unpacked("qkv", qkv, ("total", *_QKV))
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append new keys and values to a cache, and compute attention on it as
    `flash_attention.decode` does; return out, as q. With return_softmax_lse return (out,
    softmax_lse), which is (batch, heads, len_q).

    q: (batch, len_q, heads, d_head).
    k_cache, v_cache: (batch, room, kv_heads, d_head), or as many rows as cache_batch_idx, (batch,),
        chooses from; with block_table, (batch, blocks), (pages, page_size, kv_heads, d_head), of
        any page_size.
        They may be in torch.float8_e4m3fn; `flash_attn_3` has scales for these.
    k, v: (batch, len_new, kv_heads, d_head). They are written in place behind the keys that each
        sequence has, and attended to. Keys behind the room, and those whose row or page does not
        exist, are not written.
    cache_seqlens: (batch,), int32, or one int: keys of each sequence before k. It is not changed.
        Without k and v it may be None: then all keys of the room count.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2), with a position for each key of the room.
        The first rotary_dim columns of k are turned by the angles of its positions, cache_seqlens
        and those behind it. With causal or a window_size those of q are turned likewise; otherwise
        all queries of a sequence stand at cache_seqlens. They need k and v.
    rotary_interleaved: columns 2i and 2i + 1 make a pair, instead of i and i + rotary_dim / 2.
    num_splits: pieces of each sequence's keys, as `decode` takes them; 0 lets the kernel choose.

    The append and the rotation wait for no device either, and can be captured in CUDA graphs.
    """
    refuse_unbuilt_on_cache(cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes)
    _check_flag("return_softmax_lse", return_softmax_lse)
    return with_kvcache(
        *(q, k_cache, v_cache, k, v),
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=None,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_lse=return_softmax_lse,
        num_splits=num_splits,
    )
