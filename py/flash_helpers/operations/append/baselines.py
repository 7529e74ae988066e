"""Append by PyTorch's operators, with its rotary embedding, and a copy: what kernels are measured
beside, and what calls without a kernel take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flash_helpers.measure.libraries import compiled, copied
from flash_helpers.operations.append.problem import Append

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    begins: torch.Tensor,
    is_interleaved: bool,
    *,
    in_order: bool = True,
) -> torch.Tensor:
    """Return x, (batch, seq, heads, d_head), with its first columns turned by the angles of their
    positions, in fp32, or in float64 if x is.

    cos, sin: (positions, pairs). begins: (batch,), position of each first row. A position that the
    tables lack is the nearest that they have. is_interleaved: a pair is two columns side by side,
    instead of one of each half. in_order: the rows after the first have the positions behind it,
    instead of its own.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    positions = begins.long()[:, None]
    if in_order:
        positions = positions + torch.arange(x.shape[1], device=x.device)
    positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (table[positions].to(wide)[:, :, None] for table in (cos, sin))  # (batch, seq, 1, pairs)
    turned, rest = x.split([2 * cos.shape[1], x.shape[-1] - 2 * cos.shape[1]], dim=-1)
    turned = turned.to(wide)
    a, b = (turned[..., ::2], turned[..., 1::2]) if is_interleaved else turned.chunk(2, dim=-1)
    pairs = a * c - b * s, a * s + b * c
    turned = torch.stack(pairs, -1).flatten(-2) if is_interleaved else torch.cat(pairs, -1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def append_rows(
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


def places(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the inputs that say where new keys go, as `append_rows` takes them."""
    return (
        tensors["cache_seqlens"],
        tensors.get("block_table"),
        tensors.get("cache_batch_idx"),
    )


def turned(problem: Append, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return k, q or v of a problem as it is written: k and q turned, where there are tables."""
    x = tensors[name]
    if name == "v" or not problem.rotary_dim:
        return x
    begins = tensors["rotary_seqlens" if problem.rotary_seqlens else "cache_seqlens"]
    in_order = name == "k" or problem.in_order
    angles = tensors["cos"], tensors["sin"], begins
    return rotated(x, *angles, problem.interleaved, in_order=in_order)


def write(
    problem: Append,
    tensors: Mapping[str, torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Append to both caches by PyTorch's operators, and return all outputs."""
    k, v = (turned(problem, tensors, name) for name in "kv")
    append_rows(k, v, *places(tensors), k_cache, v_cache)
    found = {"k_cache": k_cache, "v_cache": v_cache}
    return found | ({"q_rotated": turned(problem, tensors, "q")} if problem.heads else {})


@functools.cache
def _compiled() -> Callable[..., dict[str, torch.Tensor]]:
    return compiled(write)


# Memory of a library for a problem's k: both caches, or what is copied.
_KEPT: MutableMapping[torch.Tensor, dict[str, tuple[torch.Tensor, ...]]] = WeakTensorKeyDictionary()


def _caches(problem: Append, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shape = problem.tensor("k_cache").shape
    return tuple(k.new_full(shape, torch.nan) for _ in range(2))


def run(
    library: str, problem: Append, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the outputs by one of the operation's libraries. Each has caches of its own, full of
    NaN at first, that are kept as long as k is. "copy" moves as many bytes as the problem, and
    returns nothing of it."""
    k = tensors["k"]
    kept = _KEPT.setdefault(k, {})
    if library == "copy":
        if library not in kept:
            kept[library] = (k.new_zeros(problem.bytes // (2 * k.element_size())),)
        return {"k_cache": copied(*kept[library])}
    if library not in kept:
        kept[library] = _caches(problem, k)
    return (_compiled() if library == "compiled_append" else write)(
        problem, tensors, *kept[library]
    )
