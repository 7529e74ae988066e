"""Plans of FlashInfer's wrappers: the sizes that `run` must have, and where keys are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from flash_attention._decode import FP8
from flash_attention._forward import _check_flag, _number, _options, _scale
from flash_helpers.runtime.tensors import check_types

Cache: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
Result: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
DataType: TypeAlias = "str | torch.dtype"

_LN_2 = math.log(2)
_LAYOUTS = {
    "NHD": "(pages, page_size, num_kv_heads, head_dim)",
    "HND": "(pages, num_kv_heads, page_size, head_dim)",
}
_DTYPES = (torch.float16, torch.bfloat16)
_NAMES_OF_FP8 = (FP8, "float8_e4m3fn", "fp8_e4m3", "fp8_e4m3fn")

# The value of an argument with which nothing is asked for, and the way out of all others.
_USUAL: Mapping[str, tuple[Any, str]] = {
    "backend": ("auto", "pass 'auto': others name kernels of FlashInfer"),
    "jit_args": (None, "pass None: others describe kernels of FlashInfer"),
    "pos_encoding_mode": (
        "NONE",
        "pass 'NONE', and rotate q and the keys of the cache before, as flash_attn_with_kvcache "
        "does",
    ),
    "block_tables": (None, "pass None: the table is made of indptr and indices"),
    "seq_lens": (None, "pass None: lengths are those of indptr and last_page_len"),
    "fixed_split_size": (None, "pass None: a thread block computes all keys of its queries"),
    "custom_mask": (None, "pass None, or call torch.nn.attention.flex_attention with a mask_mod"),
    "packed_custom_mask": (None, "pass None, or call torch.nn.attention.flex_attention"),
    "use_fp16_qk_reduction": (False, "pass False: scores are summed in fp32"),
    "q_scale": (None, "pass None, and sm_scale times q_scale"),
    "k_scale": (None, "pass None, and sm_scale times k_scale, or a cache in fp8"),
    "v_scale": (None, "pass None, and multiply the result, or pass a cache in fp8"),
}


def refuse_unusual(**values: Any) -> None:
    """Refuse arguments, by name, that ask for what is not built. Raises ValueError."""
    for name, value in values.items():
        usual, way_out = _USUAL[name]
        if isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is not built: {way_out}")
        if type(value) is not type(usual) or value != usual:
            raise ValueError(f"{name} {value!r} is not built: {way_out}")


@dataclass(frozen=True)
class Sizes:
    """Sizes and options of a plan; `run` takes no other sizes.

    q: shape. rows: shape of a page as the kernels read it, (page_size, num_kv_heads, head_dim).
    dtype: of q and the output. kv_dtype: of the cache. options: of `decode`, and of attention over
    sequences.
    """

    q: tuple[int, int, int]
    rows: tuple[int, int, int]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    options: Mapping[str, Any]


def _data_type(name: str, value: DataType) -> torch.dtype:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if found not in _DTYPES:
        raise ValueError(f"{name} {value} is not built: pass torch.float16 or torch.bfloat16")
    return found


def sizes_of(
    q_rows: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    data_types: Mapping[str, DataType | None],
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    *,
    takes_fp8: bool = False,
) -> Sizes:
    """Return the sizes of a plan. takes_fp8: whether the cache may be in fp8. Raises TypeError and
    ValueError for those that no call has."""
    given = {
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
    }
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}: pass an int")
        if value < 1:
            raise ValueError(f"{name} {value} is less than 1: pass 1 or more")
    if num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads {num_qo_heads} is not a multiple of num_kv_heads {num_kv_heads}: pass "
            f"a divisor of {num_qo_heads}"
        )
    dtype = _data_type("q_data_type", data_types["q_data_type"] or "float16")
    kv_dtype = FP8 if takes_fp8 and data_types["kv_data_type"] in _NAMES_OF_FP8 else dtype
    for name in ("kv_data_type", "o_data_type"):
        other = None if name == "kv_data_type" and kv_dtype is FP8 else data_types[name]
        if other is not None and _data_type(name, other) is not dtype:
            raise ValueError(f"{name} {other} is not q_data_type {dtype}: pass None")
    softcap = 0.0 if logits_soft_cap is None else logits_soft_cap
    window_size = window_left, -1
    _options(window_size, softcap, None)
    return Sizes(
        (q_rows, num_qo_heads, head_dim),
        (page_size, num_kv_heads, head_dim),
        dtype,
        kv_dtype,
        {
            "window_size": window_size,
            "softcap": softcap,
            "softmax_scale": _scale(sm_scale),
        },
    )


def scaled(
    sizes: Sizes,
    device: torch.device,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
) -> dict[str, Any]:
    """Return the options of `decode` for the scales of a cache in fp8: a number of K is part of the
    softmax scale, and all else a tensor (batch, num_kv_heads). Raises TypeError and ValueError for
    what is no scale, and for scales of another cache."""
    found: dict[str, Any] = {}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if sizes.kv_dtype is not FP8:
            refuse_unusual(**{name: scale})
        shape = (sizes.q[0], sizes.rows[1])
        if isinstance(scale, torch.Tensor):
            if scale.numel() != 1 and tuple(scale.shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(scale.shape)}: pass a number, a tensor of one, or "
                    f"{shape}, the batch and num_kv_heads of plan()"
                )
            own = scale if tuple(scale.shape) == shape else scale.reshape(()).expand(shape)
            found[name] = own.contiguous()
            continue
        number = _number(name, scale, "None for 1")
        if name == "k_scale":
            planned = sizes.options["softmax_scale"]
            usual = 1 / math.sqrt(sizes.q[2]) if planned is None else planned
            found["softmax_scale"] = usual * number
        else:
            found[name] = torch.full(shape, number, dtype=torch.float32, device=device)
    return found


def pieces_of(
    fixed_split_size: int | None, disable_split_kv: bool, page_size: int
) -> dict[str, int]:
    """Return how keys are cut, as `decode` takes it. disable_split_kv goes before fixed_split_size,
    in pages, as in FlashInfer. Raises TypeError and ValueError for what is no number of pages."""
    _check_flag("disable_split_kv", disable_split_kv)
    if fixed_split_size is not None:
        if isinstance(fixed_split_size, bool) or not isinstance(fixed_split_size, int):
            raise TypeError(f"fixed_split_size is {fixed_split_size!r}: pass a number of pages")
        if fixed_split_size < 1:
            raise ValueError(
                f"fixed_split_size {fixed_split_size} is less than 1 page: pass 1 or more, or None "
                "for the kernel's choice"
            )
    if disable_split_kv:
        return {"pieces": 1}
    return {} if fixed_split_size is None else {"keys_per_piece": fixed_split_size * page_size}


def host(name: str, x: torch.Tensor) -> list[int]:
    """Return the values of a tensor of numbers, (n,), of int32."""
    check_types({name: x})
    if x.dtype is not torch.int32:
        raise TypeError(f"{name} is {x.dtype}: convert it with .to(torch.int32)")
    if x.ndim != 1:
        raise ValueError(f"{name} has {x.ndim} dimensions, shape {tuple(x.shape)}: pass 1")
    return x.tolist()


def check_begins(name: str, begins: list[int]) -> None:
    if not begins:
        raise ValueError(f"{name} has shape (0,): pass (batch + 1,)")
    if begins[0] != 0:
        raise ValueError(f"{name} begins with {begins[0]}: pass 0 first")
    for n, (begin, end) in enumerate(pairwise(begins)):
        if end < begin:
            raise ValueError(
                f"{name} falls from {begin} to {end} at sequence {n}: pass cumulative numbers"
            )


def host_lengths(
    names: tuple[str, str, str],
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
) -> tuple[list[int], list[int]]:
    """Return the pages and the keys of each sequence. Raises TypeError and ValueError for tensors
    that do not fit together. names: of the three tensors."""
    begins, last = host(names[0], indptr), host(names[2], last_page_len)
    check_begins(names[0], begins)
    check_types({names[1]: indices})
    if indices.dtype is not torch.int32 or indices.ndim != 1:
        raise TypeError(
            f"{names[1]} is {indices.dtype} {tuple(indices.shape)}: pass torch.int32, of one "
            "dimension"
        )
    if begins[-1] > len(indices):
        raise ValueError(
            f"{names[0]} ends with {begins[-1]} and {names[1]} has {len(indices)} pages: pass all"
        )
    if len(last) != len(begins) - 1:
        raise ValueError(
            f"{names[2]} has {len(last)} elements and {names[0]} {len(begins)}: pass batch and "
            "batch + 1"
        )
    pages = [end - begin for begin, end in pairwise(begins)]
    for n, (count, own) in enumerate(zip(pages, last, strict=True)):
        if count and not 1 <= own <= page_size:
            raise ValueError(
                f"{names[2]} {own} of sequence {n} is not from 1 to page_size {page_size}: pass "
                "the keys in its last page"
            )
    lengths = [(n - 1) * page_size + own if n else 0 for n, own in zip(pages, last, strict=True)]
    return pages, lengths


def lengths_on_device(
    indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Return the keys of each sequence, (batch,), int32."""
    pages = indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).int()


def table_on_device(indptr: torch.Tensor, indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the pages of each sequence, (batch, blocks), int32; 0 behind them."""
    block = torch.arange(blocks, device=indptr.device)
    if len(indices) == 0:
        return torch.zeros(len(indptr) - 1, blocks, dtype=torch.int32, device=indptr.device)
    own = (indptr[:-1, None] + block).clamp(max=len(indices) - 1)
    return torch.where(block < indptr.diff()[:, None], indices[own], 0)


def fixed_buffers(
    buffers: Mapping[str, torch.Tensor | None], device: torch.device
) -> list[torch.Tensor]:
    """Return the buffers that plans of CUDA graphs are written to. Raises TypeError and ValueError
    for those that are none."""
    found = []
    for name, buffer in buffers.items():
        if buffer is None:
            raise ValueError(f"{name} is None with use_cuda_graph: pass an int32 tensor")
        check_types({name: buffer})
        if buffer.dtype is not torch.int32 or buffer.ndim != 1 or buffer.device != device:
            raise ValueError(
                f"{name} is {buffer.dtype} {tuple(buffer.shape)} on {buffer.device}: pass "
                f"torch.int32, of one dimension, on {device}"
            )
        found.append(buffer)
    *begins, _, last = buffers
    for name in begins:
        of_batch, batch = buffers[name], found[-1]
        assert of_batch is not None
        if len(of_batch) != len(batch) + 1:
            raise ValueError(
                f"{name} has {len(of_batch)} elements and {last} {len(batch)}: pass batch + 1 and "
                "batch"
            )
    return found


class PagedWrapper:
    """The common part of the wrappers: the layout of a cache, and whether `run` fits the plan."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        check_types({"float_workspace_buffer": float_workspace_buffer})
        if kv_layout not in _LAYOUTS:
            raise ValueError(
                f"kv_layout {kv_layout!r} is not one of {', '.join(_LAYOUTS)}: pass one"
            )
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._sizes: Sizes | None = None

    def _planned(self) -> Sizes:
        if self._sizes is None:
            raise RuntimeError("run() without a plan: call plan() before")
        return self._sizes

    def _checked(
        self, sizes: Sizes, q: torch.Tensor, paged_kv_cache: Cache, window_left: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, (pages, page_size, num_kv_heads, head_dim). Raises TypeError and
        ValueError for tensors that are not those of the plan."""
        check_types({"q": q})
        if tuple(q.shape) != sizes.q:
            raise ValueError(
                f"q has shape {tuple(q.shape)} and plan() was for {sizes.q}: call plan() for this "
                "batch"
            )
        k, v = _unpacked(paged_kv_cache)
        page = sizes.rows
        if self._kv_layout == "HND":
            page = (page[1], page[0], page[2])
        for name, x in (("k", k), ("v", v)):
            if tuple(x.shape[1:]) != page:
                raise ValueError(
                    f"{name} of paged_kv_cache has shape {tuple(x.shape)} and plan() was for pages "
                    f"of {page}: pass {_LAYOUTS[self._kv_layout]}, or call plan() for it"
                )
        for name, x in (("q", q), ("k", k), ("v", v)):
            planned = sizes.dtype if name == "q" else sizes.kv_dtype
            if x.dtype != planned:
                raise TypeError(
                    f"{name} is {x.dtype} and plan() was for {planned}: pass data_types to plan()"
                )
            if x.device != self.device:
                raise ValueError(
                    f"{name} is on {x.device} and float_workspace_buffer on {self.device}: move "
                    "them to one device"
                )
        own = sizes.options["window_size"][0]
        if window_left not in (None, own):
            raise ValueError(
                f"window_left {window_left} and plan() was for {own}: pass it to plan() alone"
            )
        if self._kv_layout == "HND":
            return k.transpose(1, 2), v.transpose(1, 2)
        return k, v


def _unpacked(paged_kv_cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a pair, or of one tensor (pages, 2, ...)."""
    if isinstance(paged_kv_cache, torch.Tensor):
        if paged_kv_cache.ndim != 5 or paged_kv_cache.shape[1] != 2:
            raise ValueError(
                f"paged_kv_cache has shape {tuple(paged_kv_cache.shape)}: pass (pages, 2, ...), or "
                "a pair of K and V"
            )
        k, v = paged_kv_cache.unbind(1)
        return k, v
    try:
        k, v = paged_kv_cache
    except (TypeError, ValueError):
        raise TypeError(
            f"paged_kv_cache is a {type(paged_kv_cache).__name__}: pass a pair of K and V, or one "
            "tensor (pages, 2, ...)"
        ) from None
    check_types({"k of paged_kv_cache": k, "v of paged_kv_cache": v})
    return k, v


def result(
    o: torch.Tensor, lse: torch.Tensor | None, out: torch.Tensor | None, own: torch.Tensor | None
) -> Result:
    """Return the result of `run`. lse: (..., heads), natural, None if it is not asked for. out,
    own: tensors for o and lse that were given."""
    if out is not None and out is not o:
        o = out.copy_(o)
    if lse is None:
        return o
    lse = lse / _LN_2
    return o, lse if own is None else own.copy_(lse)


def check_outputs(sizes: Sizes, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    for name, x, shape, dtype in (
        ("out", out, sizes.q, sizes.dtype),
        ("lse", lse, sizes.q[:2], torch.float32),
    ):
        if x is not None:
            check_types({name: x})
            if tuple(x.shape) != shape or x.dtype != dtype:
                raise ValueError(
                    f"{name} is {x.dtype} {tuple(x.shape)}: pass {dtype} {shape}, or leave it out"
                )
