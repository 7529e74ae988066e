"""Attention over sequences of various lengths that follow one another in memory, as an operator."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from flash_attention._forward import (
    _ALL_KEYS,
    _NO_SOFTCAP,
    _WINDOWED,
    _check_flag,
    _define,
    _options,
    _scale,
    attention,
)
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.runtime.tensors import check_types, constant_call, element_of, posed_problem

_AXES = ("total", "heads", "d_head")


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention` for each of several sequences.

    q: (total_q, heads, d_head). k, v: (total_k, kv_heads, d_head). Sequence n has the queries from
        cu_seqlens_q[n] on, up to cu_seqlens_q[n + 1] and without it, and its keys are those of
        cu_seqlens_k. A sequence may have no queries or no keys.
    cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32, contiguous, on the device of q.
    max_seqlen_q, max_seqlen_k: length of the longest sequence, or more.
    sinks: (heads,), as for `attention`.

    Returns o, with the shape of q; with return_lse (o, lse), where lse is (heads, total_q), fp32.
    On CPU tensors the sequences are computed one by one.

    Raises RuntimeError for other tensors, which no kernel computes yet; ValueError for lengths that
    do not fit; and the errors of `attention`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_types({"q": q, "k": k, "v": v, **lengths})
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(most, bool) or not isinstance(most, (int, torch.SymInt)):
            raise TypeError(f"{name} is {most!r}: pass the longest length, an int")
    _check_flag("causal", causal)
    _check_flag("return_lse", return_lse)
    longest = max_seqlen_q, max_seqlen_k
    options = *(_options(window_size, softcap, sinks) or (None, None, 0.0)), _scale(softmax_scale)
    o, lse = _varlen(q, k, v, *lengths.values(), sinks, *longest, causal, *options, return_lse)
    return (o, lse) if return_lse else o


def _compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    sinks: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    softmax_scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    options: dict[str, Any] = {"causal": causal, "softcap": softcap}
    options["softmax_scale"] = softmax_scale
    bounds = {"window_left": window_left, "window_right": window_right}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    o, lse = _new_outputs(q, k, v, sinks, lengths, return_lse, **options, **bounds)
    queries = _sequences("q", q, cu_seqlens_q, max_seqlen_q)
    keys = _sequences("k", k, cu_seqlens_k, max_seqlen_k)
    left, right = (-1 if bound is None else bound for bound in (window_left, window_right))
    for own, seen in zip(queries, keys, strict=True):
        found = attention(
            *(q[None, own], k[None, seen], v[None, seen]),
            window_size=(left, right),
            sinks=sinks,
            **options,
            return_lse=return_lse,
        )
        if return_lse:
            o[own], lse[:, own] = found[0][0], found[1][0]
        else:
            o[own] = found[0]
    return o, lse


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    sinks: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    softmax_scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    options: dict[str, Any] = {"causal": causal, "softcap": softcap}
    options["softmax_scale"] = softmax_scale
    bounds = {"window_left": window_left, "window_right": window_right}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _new_outputs(q, k, v, sinks, lengths, return_lse, **options, **bounds)


def _new_outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens: Mapping[str, torch.Tensor],
    return_lse: bool,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check all that is known without the values of the lengths; return memory for o and the LSE,
    which has no elements if it is not asked for."""
    qkv = {"q": q, "k": k, "v": v}
    for name, x in qkv.items():
        if x.ndim != len(_AXES):
            raise ValueError(
                f"{name} has {x.ndim} dimensions, shape {tuple(x.shape)}: pass ({', '.join(_AXES)})"
            )
    as_one = {name: x[None] for name, x in qkv.items()}  # a batch of one sequence of all rows
    if sinks is not None:
        as_one["sinks"] = sinks
    if constant_call(AttentionForward, None, as_one, **options) is None:
        element = element_of("q", q, AttentionForward.elements)
        posed_problem(AttentionForward, element, as_one, **options)
    for name, lengths in cu_seqlens.items():
        if lengths.dtype is not torch.int32:
            raise TypeError(f"{name} is {lengths.dtype}: convert it with .to(torch.int32)")
        if lengths.device != q.device:
            raise ValueError(
                f"{name} is on {lengths.device} and q on {q.device}: move them to one device"
            )
        if lengths.ndim != 1 or lengths.shape[0] == 0:
            raise ValueError(
                f"{name} has shape {tuple(lengths.shape)}: pass (batch + 1,), where the sequences "
                "begin, and the total"
            )
        if not lengths.is_contiguous():
            raise ValueError(f"{name} has stride {lengths.stride(0)}: call .contiguous()")
    # len() would be one number to a tracer
    sizes = tuple(lengths.shape[0] for lengths in cu_seqlens.values())
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"cu_seqlens_k has {sizes[1]} elements and cu_seqlens_q {sizes[0]}: pass batch + 1 in "
            "both"
        )
    if q.device.type not in ("cpu", "meta"):
        raise RuntimeError(
            f"the tensors are on {q.device}, and no kernel takes sequences of various lengths "
            "there yet: call flash_attn_func for each sequence, as on q[begin:end][None], or for "
            "sequences of one length"
        )
    lse_shape = (q.shape[1], q.shape[0]) if return_lse else (0,)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    return torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device), lse


def _sequences(letter: str, x: torch.Tensor, lengths: torch.Tensor, most: int) -> list[slice]:
    """Return the rows of each sequence. Raises ValueError for lengths that do not fit.

    letter: "q" or "k", as in the names of `lengths` and `most`. x: the tensor of that name.
    """
    name, begins = f"cu_seqlens_{letter}", lengths.tolist()
    if begins[0] != 0:
        raise ValueError(f"{name} begins with {begins[0]}: pass 0 first")
    for n, (begin, end) in enumerate(pairwise(begins)):
        if end < begin:
            raise ValueError(
                f"{name} falls from {begin} to {end} at sequence {n}: pass cumulative lengths"
            )
    if begins[-1] != len(x):
        raise ValueError(
            f"{name} ends with {begins[-1]} and {letter} has {len(x)} rows: pass that total last"
        )
    longest = max((end - begin for begin, end in pairwise(begins)), default=0)
    if most < longest:
        raise ValueError(
            f"max_seqlen_{letter} {most} is less than the longest sequence, {longest}: pass "
            f"{longest}"
        )
    return [slice(begin, end) for begin, end in pairwise(begins)]


_varlen = _define(
    "varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? sinks, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "
    f"{_WINDOWED}, bool return_lse) -> (Tensor, Tensor)",
    _compute,
    _fake,
)
