"""Attention over sequences of various lengths that follow one another in memory, as an operator."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from flash_attention._backward import differentiable
from flash_attention._forward import (
    _ALL_KEYS,
    _NO_OPTIONS,
    _NO_SOFTCAP,
    _WINDOWED,
    _check_fake,
    _check_flag,
    _choose,
    _options,
    _scale,
)
from flash_attention._operators import define
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.runtime.call import compute
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
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention` for each of several sequences.

    q: (total_q, heads, d_head). k, v: (total_k, kv_heads, d_head). Sequence n has the queries from
        cu_seqlens_q[n] on, up to cu_seqlens_q[n + 1] and without it, and its keys are those of
        cu_seqlens_k. A sequence may have no queries or no keys.
    cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32, contiguous, on the device of q.
    max_seqlen_q, max_seqlen_k: length of the longest sequence, or more. No kernel needs them.
    sinks: (heads,), as for `attention`; the other options likewise.

    Returns o, with the shape of q; with return_lse (o, lse), where lse is (heads, total_q), fp32.
    Runs on the same devices as `attention`, in CUDA graphs too: each run finds the lengths that are
    on the device then.

    Raises ValueError for lengths that do not fit, if they are on the CPU, and the errors of
    `attention`. A CUDA device is not waited for: there rows of no sequence are left unwritten, and
    rows outside of the tensors are neither read nor written.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_types({"q": q, "k": k, "v": v, **lengths})
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(most, bool) or not isinstance(most, (int, torch.SymInt)):
            raise TypeError(f"{name} is {most!r}: pass the longest length, an int")
    _check_flag("causal", causal)
    _check_flag("return_lse", return_lse)
    _check_flag("deterministic", deterministic)
    longest = max_seqlen_q, max_seqlen_k
    options = *(_options(window_size, softcap, sinks) or _NO_OPTIONS), _scale(softmax_scale)
    flags = deterministic, return_lse
    o, lse = _varlen(q, k, v, *lengths.values(), sinks, *longest, causal, *options, *flags)
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
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given, asked = _call(tensors, *options)
    if q.device.type == "cpu":
        _check_problem(given, **asked)
        _check_lengths("q", q, cu_seqlens_q, max_seqlen_q)
        _check_lengths("k", k, cu_seqlens_k, max_seqlen_k)
    names = tuple(name for name in AttentionForward.axes if name == "o" or name in given)
    in_order = tuple(given.get(name) for name in names)
    found = compute(AttentionForward, (None, tuple(asked.items())), names, in_order, _choose)
    o, lse = found[names.index("o")], given.get("lse")
    return o[0], torch.empty(0, device=q.device) if lse is None else lse[0]


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    sinks: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given, asked = _call(tensors, *options)
    _check_fake(None, given, **asked)
    o = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    lse = given.get("lse")
    return o, torch.empty(0, device=q.device) if lse is None else lse[0]


def _gradient(keys: torch._C.DispatchKeySet, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, *lengths, sinks, _, _, causal, left, right, softcap, scale, deterministic, _ = args
    options = (causal, left, right, softcap, scale, deterministic)
    # the LSE is needed, whether it was asked for or not
    with_lse = (*args[:-1], True)
    return differentiable("varlen", keys, with_lse, (q, k, v, sinks, *lengths), options)


def _call(
    tensors: Mapping[str, torch.Tensor | None],
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    softmax_scale: float | None,
    _deterministic: bool,
    return_lse: bool,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a call, a batch of all rows and new memory for an LSE among them, and
    the options, without the one that only the gradients read."""
    given = {name: x for name, x in tensors.items() if x is not None}
    for name in "qkv":
        if given[name].ndim != len(_AXES):
            raise ValueError(
                f"{name} has {given[name].ndim} dimensions, shape {tuple(given[name].shape)}: pass "
                f"({', '.join(_AXES)})"
            )
        given[name] = given[name][None]
    _check_begins({name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k")})
    if return_lse:
        _, total, heads, _ = given["q"].shape
        shape = 1, heads, total
        given["lse"] = torch.empty(shape, dtype=torch.float32, device=given["q"].device)
    return given, {
        "causal": causal,
        "window_left": window_left,
        "window_right": window_right,
        "softcap": softcap,
        "softmax_scale": softmax_scale,
    }


def _check_begins(cu_seqlens: Mapping[str, torch.Tensor]) -> None:
    """Check the tensors of lengths, without their values."""
    for name, lengths in cu_seqlens.items():
        if lengths.dtype is not torch.int32:
            raise TypeError(f"{name} is {lengths.dtype}: convert it with .to(torch.int32)")
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


def _check_problem(given: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Check all that is known without the values of the lengths."""
    if constant_call(AttentionForward, None, given, **options) is None:
        element = element_of("q", given["q"], AttentionForward.elements)
        posed_problem(AttentionForward, element, given, **options)


def _check_lengths(letter: str, x: torch.Tensor, lengths: torch.Tensor, most: int) -> None:
    """Raises ValueError for lengths that do not fit.

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


_varlen = define(
    "varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? sinks, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "
    f"{_WINDOWED}, bool deterministic, bool return_lse) -> (Tensor, Tensor)",
    _compute,
    _fake,
    _gradient,
)
