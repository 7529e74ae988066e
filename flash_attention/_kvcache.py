"""A cache of keys that grows: new keys are appended in place, rotated, and then attended to."""

from __future__ import annotations

from typing import Any

import torch

from flash_attention import _append as kernels
from flash_attention._decode import FP8, _count, decode
from flash_attention._forward import _ALL_KEYS, _check_flag, _overwritten
from flash_attention._operators import define
from flash_helpers.gpu import MAX_GRID
from flash_helpers.operations.append.baselines import append_rows, rotated
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
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `flash_attn.flash_attn_with_kvcache`, whose arguments these are.

    rotary_seqlens: (batch,), int32: the position of the first new token; cache_seqlens by default.
    k_descale, v_descale: k_scale and v_scale of `decode`, with any strides. New keys and values are
        divided by them before they are rounded to fp8.
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
    _check_scale("k_descale", k_descale, q, k_cache)
    _check_scale("v_descale", v_descale, q, v_cache)
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
        if rotary is not None and k.dtype is FP8:
            raise TypeError(
                f"k is {k.dtype} and rotary_cos is given: pass k in {q.dtype}, to be rotated "
                "before it is rounded"
            )
        q = _turned_and_appended(
            *(q, k, v, rotary, cache_seqlens, rotary_seqlens, block_table, cache_batch_idx),
            *(rotary_interleaved, causal or tuple(window_size) != _ALL_KEYS, k_cache, v_cache),
            *(k_descale, v_descale),
        )
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
        k_scale=None if k_descale is None else k_descale.contiguous(),
        v_scale=None if v_descale is None else v_descale.contiguous(),
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


# -- append ----------------------------------------------------------------------------------------


def _check_scale(
    name: str, scale: torch.Tensor | None, q: torch.Tensor, cache: torch.Tensor
) -> None:
    """Refuse a scale before the cache is written, as `decode` would."""
    if scale is None:
        return
    check_types({name: scale})
    if cache.dtype is not FP8:
        raise ValueError(
            f"{name} is given and the cache is {cache.dtype}: pass a cache in {FP8}, or leave "
            f"{name} out"
        )
    wanted = (q.shape[0], cache.shape[-2]) if cache.ndim == _AXES else ()
    if scale.dtype is not torch.float32:
        raise TypeError(f"{name} is {scale.dtype}: convert it with .float()")
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)}: pass (batch, kv_heads), {wanted}, by "
            ".expand() if it is one number"
        )
    if scale.device != q.device:
        raise ValueError(
            f"{name} is on {scale.device} and q on {q.device}: move them to one device"
        )


def _rounded(
    name: str, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """Return new keys or values, (batch, seq, kv_heads, d_head), as a cache in fp8 has them:
    divided by the scale, and cut to the range of fp8. Those that are in fp8 are returned."""
    if x.dtype is FP8:
        return x
    if x.dtype != q.dtype:
        raise TypeError(
            f"{name} is {x.dtype}, q {q.dtype} and the cache {FP8}: pass {name} in one of both"
        )
    most = torch.finfo(FP8).max
    x = x.float()
    if scale is not None and x.ndim == _AXES and x.shape[2] == scale.shape[1]:
        x = x / scale[:, None, :, None]  # other shapes are refused below
    return x.clamp(-most, most).to(FP8)


def _append_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    _check_append(k, v, cache_seqlens, block_table, cache_batch_idx, k_cache, v_cache)
    if k_cache.dtype is FP8:  # PyTorch moves few tensors of fp8
        k, v, k_cache, v_cache = (x.view(torch.uint8) for x in (k, v, k_cache, v_cache))
    append_rows(k, v, cache_seqlens, block_table, cache_batch_idx, k_cache, v_cache)


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


# -- append and rotary embedding -------------------------------------------------------------------


def _turned_and_appended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    cache_seqlens: torch.Tensor,
    rotary_seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    interleaved: bool,
    in_order: bool,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
) -> torch.Tensor:
    """Append k and v, and return q; k and q are turned, where there is a rotary embedding. It is
    one launch where the registry has a kernel for that, which is for caches in 16 bits."""
    places = cache_seqlens, rotary_seqlens, block_table, cache_batch_idx
    given = k, v, q if rotary else None, *(rotary or (None, None)), *places
    options = kernels.options_of(given[3], interleaved, in_order)
    tensors = dict(zip(kernels.INPUTS, given, strict=True))
    is_fp8 = k_cache.dtype is FP8
    if not is_fp8 and kernels.is_taken({**tensors, "k_cache": k_cache}, options):
        found = torch.empty_like(q, memory_format=torch.contiguous_format) if rotary else None
        _append_rotated(*given, interleaved, in_order, k_cache, v_cache, found)
        return q if found is None else found
    if rotary:
        q, k = _turned(q, k, *rotary, cache_seqlens, rotary_seqlens, interleaved, in_order)
    if is_fp8:
        k, v = _rounded("k", k, q, k_descale), _rounded("v", v, q, v_descale)
    _append(k, v, cache_seqlens, block_table, cache_batch_idx, k_cache, v_cache)
    return q


def _turned(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_seqlens: torch.Tensor,
    rotary_seqlens: torch.Tensor | None,
    interleaved: bool,
    in_order: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = cos, sin, cache_seqlens if rotary_seqlens is None else rotary_seqlens, interleaved
    return rotated(q, *angles, in_order=in_order), rotated(k, *angles)


def _tensors_of(*args: Any) -> tuple[dict[str, torch.Tensor], kernels.Options]:
    """Return the tensors of a call of `_append_rotated`, by the names of the problem, and its
    options. Raises as `_check_append` does."""
    inputs, (interleaved, in_order), outputs = args[:9], args[9:11], args[11:]
    names = (*kernels.INPUTS, *kernels.OUTPUTS)
    found = named(zip(names, (*inputs, *outputs), strict=True))
    k, v, _, cos, _, cache_seqlens, _, *places = inputs
    _check_append(k, v, cache_seqlens, *places, *outputs[:2])
    return found, kernels.options_of(cos, interleaved, in_order)


def _compute_append_rotated(*args: Any) -> None:
    tensors, options = _tensors_of(*args)
    if kernels.by_kernel(tensors, options):
        _overwritten(*(tensors.get(name) for name in kernels.OUTPUTS))
        return
    # the tensors do not lie as a kernel takes them
    k, v, q, cos, sin, cache_seqlens, rotary_seqlens, block_table, cache_batch_idx = args[:9]
    interleaved, in_order, k_cache, v_cache, q_rotated = args[9:]
    if q is not None:
        angles = cos, sin, cache_seqlens, rotary_seqlens, interleaved, in_order
        q, k = _turned(q, k, *angles)
        q_rotated.copy_(q)
    append_rows(k, v, cache_seqlens, block_table, cache_batch_idx, k_cache, v_cache)


def _check_append_rotated(*args: Any) -> None:
    kernels.compile_traced(*_tensors_of(*args))


_append_rotated = define(
    "append_rotated(Tensor k, Tensor v, Tensor? q, Tensor? cos, Tensor? sin, Tensor cache_seqlens, "
    "Tensor? rotary_seqlens, Tensor? block_table, Tensor? cache_batch_idx, bool interleaved, "
    "bool in_order, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? q_rotated) -> ()",
    _compute_append_rotated,
    _check_append_rotated,
)
