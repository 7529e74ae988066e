"""Attention of few queries on a cache of keys: decode(), and its registration as operators."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_attention._forward import (
    _ALL_KEYS,
    _NO_OPTIONS,
    _NO_SOFTCAP,
    _WINDOWED,
    _Asked,
    _check_flag,
    _check_tensors,
    _define_with_options,
    _new_lse,
    _options,
    _scale,
)
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.runtime.tensors import Laid, check_types, element_of, named, posed_problem
from flash_helpers.tune.best import choose_config


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    o: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of the last queries of each sequence on its keys, which lie in a cache, by
    the best kernel for the problem.

    q: (batch, len_q, heads, d_head), fp16 or bf16.
    k, v: (batch, room, kv_heads, d_head), with the dtype and device of q. With cache_batch_idx they
        are (rows, room, kv_heads, d_head), with block_table (pages, page_size, kv_heads, d_head).
        kv_heads and strides are as for `attention`: pages may be views of memory in which heads
        stand before keys.
    cache_seqlens: (batch,), the keys of each sequence; without it each has as many as there is room
        for. A length below 0 counts as 0, and one over the room as the room. Keys behind a
        sequence's end are not read.
    block_table: (batch, blocks): key j of sequence b is key j % page_size of page
        block_table[b, j // page_size], and the room is blocks · page_size keys. Entries of blocks
        without a key that a query sees may be anything. The others must name a page of k. That is
        not checked, since it would wait for the device; level 5 of the log of calls names wrong
        entries.
    cache_batch_idx: (batch,): sequence b has row cache_batch_idx[b] of k and v, by default row b.
        It must name a row of k, likewise.
        These three are int32, contiguous and on the device of q.
    causal: query i sees key j if j <= i + length - len_q, at its sequence's own length: the last
        query stands at the last key. A single query sees all keys.
    window_size, softcap, sinks, softmax_scale: as for `attention`, at each sequence's own length.
    return_lse: also return the LSE: (batch, heads, len_q), fp32, natural logarithm, as for
        `attention`.
    o: written and returned if given, with the shape, dtype and device of q, without overlap with
        other tensors; otherwise a new contiguous tensor.

    Returns o, with return_lse (o, lse). A query that sees no key, such as all queries of a sequence
    of length 0, has 0 in o, and its sink or -inf in lse. Runs on the same devices as `attention`,
    under torch.compile and in CUDA graphs too, and never waits for the device: each run finds the
    lengths and the tables that are on the device then. It has no gradient.

    Raises the errors of `attention`.
    """
    places = {
        "cache_seqlens": cache_seqlens,
        "block_table": block_table,
        "cache_batch_idx": cache_batch_idx,
    }
    _check_tensors(q, k, v)
    check_types(named(places.items()))
    _check_flag("causal", causal)
    _check_flag("return_lse", return_lse)
    if block_table is not None and k.ndim == len(Decode.axes["k"]) and k.shape[1] == 0:
        raise ValueError(
            f"page_size 0: k has shape {tuple(k.shape)} and a page has at least 1 key: pass "
            "(pages, page_size, kv_heads, d_head), or leave out block_table"
        )
    bounds = _options(window_size, softcap, sinks) or _NO_OPTIONS
    options = causal, *bounds, _scale(softmax_scale)
    given = q, k, v, sinks, *places.values()
    if o is None:
        return (_decode_lse if return_lse else _decode)(*given, *options)
    check_types({"o": o})
    lse = _new_lse(q) if return_lse else None
    _decode_out(*given, o, *options, lse)
    return o if lse is None else (o, lse)


def _choose(asked: _Asked, given: Mapping[str, Laid]) -> Config:
    """Return the config that computes a call. Raises ValueError, with a way out, if no kernel
    does."""
    element = element_of("q", given["q"], Decode.elements)
    problem = posed_problem(Decode, element, given, **dict(asked[1]))
    return choose_config(problem, given["q"].device)


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cache_seqlens, Tensor? block_table, "
    "Tensor? cache_batch_idx"
)
_decode = _define_with_options(
    f"decode({_TENSORS}, bool causal, {_WINDOWED}) -> Tensor", Decode, _choose
)
_decode_lse = _define_with_options(
    f"decode_lse({_TENSORS}, bool causal, {_WINDOWED}) -> (Tensor, Tensor)", Decode, _choose
)
_decode_out = _define_with_options(
    f"decode_out({_TENSORS}, Tensor(a!) o, bool causal, {_WINDOWED}, Tensor(b!)? lse) -> ()",
    Decode,
    _choose,
)
