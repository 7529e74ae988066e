"""Attention of few queries on a cache of keys: decode(), and its registration as operators."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import torch

from flash_attention._forward import (
    _ALL_KEYS,
    _MOST_KEYS,
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

FP8 = torch.float8_e4m3fn  # of a cache that is not in the dtype of q


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
    pieces: int = 0,
    keys_per_piece: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of the last queries of each sequence on its keys, which lie in a cache, by
    the best kernel for the problem.

    q: (batch, len_q, heads, d_head), fp16 or bf16.
    k, v: (batch, room, kv_heads, d_head), with the dtype and device of q, or in float8_e4m3fn on
        that device. With cache_batch_idx they are (rows, room, kv_heads, d_head), with block_table
        (pages, page_size, kv_heads, d_head). kv_heads and strides are as for `attention`, but that
        strides in fp8 are multiples of 16: pages may be views of memory in which heads stand before
        keys.
    k_scale, v_scale: (batch, kv_heads), fp32, contiguous and on the device of q: the factors of k
        and v of each sequence and head, if they are in fp8; 1 by default.
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
    pieces: as many equal pieces of each sequence's keys are computed by themselves, and added up in
        order. 0 lets the kernel choose, by the number of sequences and SMs.
    keys_per_piece: pieces of as many keys instead, which begin at multiples of it from each
        sequence's first key on, with a window too: a multiple of 64, or of 32 at a d_head over 128.
        The call takes memory for all pieces of the room or of the window: at a d_head of 128, 4 to
        8 KB for each piece and head of k, if at most 8 queries share that. Not for a cache in fp8.

    With either of them, the bits of a sequence's results follow from its own queries and keys, and
    from that number, len_q, heads and masks. They do not depend on the other sequences, their
    number and order, the room, the place of keys in rows or pages, and the number of SMs. GPUs of
    different kinds may have different kernels, which differ in their bits.

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
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_types(named((*places.items(), *scales.items())))
    _check_flag("causal", causal)
    _check_flag("return_lse", return_lse)
    if block_table is not None and k.ndim == len(Decode.axes["k"]) and k.shape[1] == 0:
        raise ValueError(
            f"page_size 0: k has shape {tuple(k.shape)} and a page has at least 1 key: pass "
            "(pages, page_size, kv_heads, d_head), or leave out block_table"
        )
    bounds = _options(window_size, softcap, sinks) or _NO_OPTIONS
    cut = _count("pieces", pieces), _count("keys_per_piece", keys_per_piece)
    options = causal, *bounds, _scale(softmax_scale), *cut, k.dtype.itemsize == 1
    given = q, k, v, sinks, *places.values(), *scales.values()
    if o is None:
        return (_decode_lse if return_lse else _decode)(*given, *options)
    check_types({"o": o})
    lse = _new_lse(q) if return_lse else None
    _decode_out(*given, o, *options, lse)
    return o if lse is None else (o, lse)


def _count(name: str, value: Any) -> int:
    """Return a whole number. Raises TypeError for a value that is none."""
    try:
        if not isinstance(value, bool):
            return min(index(value), _MOST_KEYS)
    except TypeError:
        pass
    raise TypeError(f"{name} is {value!r}: pass a whole number, or 0 for the kernel's choice")


def _choose(asked: _Asked, given: Mapping[str, Laid]) -> Config:
    """Return the config that computes a call. Raises ValueError, with a way out, if no kernel
    does."""
    element = element_of("q", given["q"], Decode.elements)
    problem = posed_problem(Decode, element, given, **dict(asked[1]))
    return choose_config(problem, given["q"].device)


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cache_seqlens, Tensor? block_table, "
    "Tensor? cache_batch_idx, Tensor? k_scale, Tensor? v_scale"
)
_CUT = f"bool causal, {_WINDOWED}, int pieces, int keys_per_piece, bool fp8_cache"
_decode = _define_with_options(f"decode({_TENSORS}, {_CUT}) -> Tensor", Decode, _choose)
_decode_lse = _define_with_options(
    f"decode_lse({_TENSORS}, {_CUT}) -> (Tensor, Tensor)", Decode, _choose
)
_decode_out = _define_with_options(
    f"decode_out({_TENSORS}, Tensor(a!) o, {_CUT}, Tensor(b!)? lse) -> ()",
    Decode,
    _choose,
)
