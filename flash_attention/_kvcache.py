"""A cache of keys that grows: new keys are appended in place, rotated, and then attended to."""

from __future__ import annotations

from typing import Any

import torch

from flash_attention._decode import _count, decode
from flash_attention._forward import _ALL_KEYS, _check_flag
from flash_attention._operators import define
from flash_helpers.gpu import MAX_GRID
from flash_helpers.runtime.tensors import check_types, named

_AXES = 4  # (batch, seq, heads, d_head), also of a cache: (rows or pages, keys, ...)


def with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_interleaved: bool,
    rotary_seqlens: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    block_table: torch.Tensor | None,
    causal: bool,
    window_size: tuple[int, int],
    num_splits: int,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `flash_attn.flash_attn_with_kvcache`, whose arguments these are.

    rotary_seqlens: (batch,), int32: the position of the first new token; cache_seqlens by default.
    options: others of `decode`, whose result is returned.
    """
    check_types({"q": q, "k_cache": k_cache, "v_cache": v_cache})
    check_types(named([("k", k), ("v", v)]))
    pieces = _count("num_splits", num_splits)
    if not 0 <= pieces <= MAX_GRID[2]:  # refused before the cache is written
        raise ValueError(
            f"num_splits {pieces} is not from 0, for the kernel's choice, to {MAX_GRID[2]}, the "
            "limit of a CUDA grid: pass one of these"
        )
    _check_flag("causal", causal)
    _check_flag("rotary_interleaved", rotary_interleaved)
    if type(cache_seqlens) is int:
        cache_seqlens = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    elif cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor):
        raise TypeError(
            f"cache_seqlens is {cache_seqlens!r}: pass an int, or an int32 tensor (batch,)"
        )
    check_types(named([("block_table", block_table), ("cache_batch_idx", cache_batch_idx)]))
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{given} is given and {missing} is None: pass both, or neither")
    rotary = _rotary(rotary_cos, rotary_sin, q, k, rotary_seqlens)
    lengths: torch.Tensor | None = cache_seqlens
    if rotary is not None:
        blocks = 1 if block_table is None else block_table.shape[-1]
        room = blocks * k_cache.shape[1] if k_cache.ndim == _AXES else 0
        if rotary[0].shape[0] < room:
            raise ValueError(
                f"rotary_cos has {rotary[0].shape[0]} positions and the cache has room for {room} "
                f"keys of a sequence: pass a table of {room} positions"
            )
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise ValueError(
                "k and v are given and cache_seqlens is None: pass the keys that each sequence has "
                "before them, an int or an int32 tensor (batch,)"
            )
        _check_place("cache_seqlens", cache_seqlens, (q.shape[0],), q.device)
        if rotary is not None:
            begins = cache_seqlens if rotary_seqlens is None else rotary_seqlens
            has_order = causal or tuple(window_size) != _ALL_KEYS
            q = _rotated(q, *rotary, begins, rotary_interleaved, in_order=has_order)
            k = _rotated(k, *rotary, begins, rotary_interleaved)
        _append(k, v, cache_seqlens, block_table, cache_batch_idx, k_cache, v_cache)
        lengths = cache_seqlens + k.shape[1]
    return decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens=lengths,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        causal=causal,
        window_size=window_size,
        pieces=pieces,
        **options,
    )


# -- rotary embedding ------------------------------------------------------------------------------


def _rotary(
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor | None,
    seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return both tables of a rotary embedding; None without one. Raises TypeError and ValueError
    for what is none."""
    tables = {"rotary_cos": cos, "rotary_sin": sin}
    check_types(named([*tables.items(), ("rotary_seqlens", seqlens)]))
    if cos is None and sin is None:
        if seqlens is not None:
            raise ValueError("rotary_seqlens is given without rotary_cos: pass both, or neither")
        return None
    if cos is None or sin is None:
        missing = "rotary_cos" if cos is None else "rotary_sin"
        raise ValueError(f"{missing} is None: pass both rotary_cos and rotary_sin, or neither")
    if k is None:
        raise ValueError(
            "rotary_cos is given and k is None: pass k and v, the new keys and values, or rotate q "
            "before the call"
        )
    for name, x in (("q", q), ("k", k)):
        if x.ndim != _AXES or (x.shape[0], x.shape[-1]) != (q.shape[0], q.shape[-1]):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: pass (batch, seq, heads, d_head), with the "
                "batch and the d_head of q"
            )
    most = q.shape[-1] // 2
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.ndim != 2 or not 1 <= table.shape[1] <= most or table.shape[0] == 0:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}: pass (positions, rotary_dim / 2), with a "
                f"rotary_dim of at most d_head {q.shape[-1]}"
            )
        if not table.is_floating_point():
            raise TypeError(f"{name} is {table.dtype}: convert it with .to({q.dtype})")
        if table.device != q.device:
            raise ValueError(
                f"{name} is on {table.device} and q on {q.device}: move them to one device"
            )
    if cos.shape != sin.shape:
        raise ValueError(
            f"rotary_sin has shape {tuple(sin.shape)} and rotary_cos {tuple(cos.shape)}: pass two "
            "of one shape"
        )
    if seqlens is not None:
        _check_place("rotary_seqlens", seqlens, (q.shape[0],), q.device)
    return cos, sin


def _rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    begins: torch.Tensor,
    is_interleaved: bool,
    *,
    in_order: bool = True,
) -> torch.Tensor:
    """Return x, (batch, seq, heads, d_head), with its first columns turned by the angles of their
    positions, in fp32.

    cos, sin: (positions, pairs). begins: (batch,), position of each first row. A position that the
    tables lack is the nearest that they have. is_interleaved: a pair is two columns side by side,
    instead of one of each half. in_order: the rows after the first have the positions behind it,
    instead of its own.
    """
    places = begins.long()[:, None]
    if in_order:
        places = places + torch.arange(x.shape[1], device=x.device)
    places = places.clamp(0, cos.shape[0] - 1)
    c, s = (table[places].float()[:, :, None] for table in (cos, sin))  # (batch, seq, 1, pairs)
    turned, rest = x.split([2 * cos.shape[1], x.shape[-1] - 2 * cos.shape[1]], dim=-1)
    turned = turned.float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if is_interleaved else turned.chunk(2, dim=-1)
    pairs = a * c - b * s, a * s + b * c
    turned = torch.stack(pairs, -1).flatten(-2) if is_interleaved else torch.cat(pairs, -1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


# -- append ----------------------------------------------------------------------------------------


def _append_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Write k and v, (batch, new, kv_heads, d_head), behind the keys that each sequence has. A row
    whose place is not in the cache is not written. Nothing waits for the device."""
    _check_append(k, v, cache_seqlens, block_table, cache_batch_idx, k_cache, v_cache)
    batch, new = k.shape[:2]
    blocks, size = 1, k_cache.shape[1]
    if block_table is not None:
        blocks = block_table.shape[1]
    if not (batch and new and blocks and k_cache.shape[0] and size):
        return
    key = cache_seqlens.long()[:, None] + torch.arange(new, device=k.device)  # (batch, new)
    exists = (key >= 0) & (key < blocks * size)
    key = key.clamp(0, blocks * size - 1)
    if block_table is not None:
        row, slot = block_table.long().gather(1, key // size), key % size
    else:
        own = torch.arange(batch, device=k.device) if cache_batch_idx is None else cache_batch_idx
        row, slot = own.long()[:, None].expand(-1, new), key
    exists = (exists & (row >= 0) & (row < k_cache.shape[0])).flatten()
    # A row without a place becomes a copy of the first that has one, so that each place is written
    # once, or with one value. If none has a place, the cache's own values are written.
    every = torch.arange(batch * new, device=k.device)
    chosen = torch.where(exists, every, exists.long().argmax())
    row, slot = (place.flatten()[chosen] for place in (row, slot))
    row = row.clamp(0, k_cache.shape[0] - 1)
    for x, cache in ((k, k_cache), (v, v_cache)):
        rows = torch.where(exists.any(), x.flatten(0, 1)[chosen], cache[row, slot])
        cache.index_put_((row, slot), rows)


def _check_append(
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    if k_cache.ndim != _AXES:
        first = "batch, room" if block_table is None else "pages, page_size"
        raise ValueError(
            f"k_cache has {k_cache.ndim} dimensions, shape {tuple(k_cache.shape)}: pass ({first}, "
            "kv_heads, d_head)"
        )
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("block_table and cache_batch_idx are both given: pass one of them")
    batch, new = (*k.shape[:2], 0, 0)[:2]
    wanted = {"k": (batch, new, *k_cache.shape[2:]), "v": tuple(k.shape)}
    for name, x, like in (("k", k, "k_cache"), ("v", v, "k")):
        if tuple(x.shape) != wanted[name]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and {like} "
                f"{tuple((k_cache if name == 'k' else k).shape)}: pass (batch, seq, kv_heads, "
                "d_head), with the kv_heads and the d_head of the cache"
            )
    if v_cache.shape != k_cache.shape:
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)} and k_cache {tuple(k_cache.shape)}: pass "
            "equal ones"
        )
    for name, x in (("k_cache", k_cache), ("v", v), ("v_cache", v_cache)):
        if x.dtype != k.dtype:
            raise TypeError(f"{name} is {x.dtype} and k {k.dtype}: convert one with .to()")
        if x.device != k.device:
            raise ValueError(
                f"{name} is on {x.device} and k on {k.device}: move them to one device"
            )
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(
                f"{name} has strides {x.stride()} for shape {tuple(x.shape)}, so that elements "
                "share memory, and k is written to it: pass a tensor that is not expanded"
            )
    _check_place("cache_seqlens", cache_seqlens, (batch,), k.device)
    if cache_batch_idx is not None:
        _check_place("cache_batch_idx", cache_batch_idx, (batch,), k.device)
    elif block_table is not None:
        blocks = block_table.shape[-1] if block_table.ndim else 0
        _check_place("block_table", block_table, (batch, blocks), k.device)
    elif k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)} and k {tuple(k.shape)}: pass a row for each "
            "sequence, or cache_batch_idx"
        )


def _check_place(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Check a tensor that says where rows are: its dtype, shape and device."""
    if x.dtype is not torch.int32:
        raise TypeError(f"{name} is {x.dtype}: convert it with .to(torch.int32)")
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: pass {shape}, for a batch of {shape[0]}"
        )
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and q on {device}: move them to one device")


_append = define(
    "append(Tensor k, Tensor v, Tensor cache_seqlens, Tensor? block_table, "
    "Tensor? cache_batch_idx, Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()",
    _append_rows,
    _check_append,
)
