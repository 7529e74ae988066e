"""Decode by the libraries that kernels are measured beside, and a copy."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flash_helpers.measure.libraries import Package, copied
from flash_helpers.operations.attention_forward import baselines as forward
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.problems import COPY

FLASHINFER = "flashinfer"
PACKAGES = {**forward.PACKAGES, FLASHINFER: Package("flashinfer-python", "flashinfer")}

_LARGEST_PAGE = 16  # keys of a page, where a cache without pages is seen in pages
# FlashInfer recommends 128 MiB. Partial outputs are kept there, and many heads can need more.
_WORKSPACE_BYTES = 384 << 20


def run(
    library: str, problem: Decode, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return o, (batch, len_q, heads, d_head), by one of the operation's libraries.

    The packages take caches of any kind by flash_attn_with_kvcache, and FlashInfer takes any but
    rows that sequences share; PyTorch's backends take whole caches, without pages. FlashInfer alone
    takes a cache in fp8 beside q in 16 bits, and has a number for a scale. For `COPY` it is
    a copy of as many keys of K as the kernels read of K and of V: reading and writing moves the
    same bytes.

    Raises ValueError for options that a library does not take, and otherwise as
    `attention_forward.baselines.run` does.

    The first call of FlashInfer with a cache may compile kernels, and it plans on the host, which a
    graph's capture cannot do. Later calls with the same tensors only run the plan. So plans are not
    timed: users plan once for all layers of a model. The lengths and the table of pages must keep
    their values.
    """
    if library == COPY:
        elements = problem.keys_read * problem.kv_heads * problem.d_head
        read = tensors["k"].view(-1)[:elements]
        # no kernel multiplies numbers of fp8
        return {"o": copied(read.view(torch.int16) if problem.fp8_cache else read)}
    if library == FLASHINFER:
        return {"o": _by_flashinfer(problem, tensors)}
    if problem.fp8_cache:
        raise ValueError(
            f"a cache in fp8: {library} does not take it beside q in {problem.dtype.short}: leave "
            "out the library"
        )
    if library in PACKAGES:
        return {"o": _by_package(library, problem, tensors)}
    asked = {
        "lengths that differ": problem.total_k is not None,
        "pages": problem.page_size > 0,
        "cache_batch_idx": problem.caches > 0,
    }
    for option, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{option}: {library} does not take them: leave out the library")
    return forward.run(library, problem.contiguous(problem.len_k), tensors)


def _by_package(library: str, problem: Decode, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if problem.sinks:
        raise ValueError(f"sinks: {library} does not take them: leave out the library")
    module = importlib.import_module(PACKAGES[library].module)
    places = {name: tensors.get(name) for name in ("cache_seqlens", "cache_batch_idx")}
    table = "page_table" if library == "fa3" else "block_table"
    places[table] = tensors.get("block_table")
    bounds = (problem.window_left, problem.window_right)
    return module.flash_attn_with_kvcache(
        *(tensors[name] for name in "qkv"),
        **{name: value for name, value in places.items() if value is not None},
        softmax_scale=problem.softmax_scale,
        causal=problem.causal,
        window_size=tuple(-1 if bound is None else bound for bound in bounds),
        softcap=problem.softcap,
    )


def _by_flashinfer(problem: Decode, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    asked = {
        "sinks": problem.sinks,
        f"len_q {problem.len_q}, several queries of a sequence": problem.len_q > 1,
        "cache_batch_idx": problem.caches > 0,
        "k_scale and v_scale of each sequence": problem.k_scale or problem.v_scale,
    }
    for option, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{option}: {FLASHINFER} does not take them: leave out the library")
    pages = (-1, _page_size(problem), problem.kv_heads, problem.d_head)
    cache = tuple(tensors[name].view(pages) for name in "kv")
    return _planned(problem, tensors).run(tensors["q"][:, 0], cache)[:, None]


def _page_size(problem: Decode) -> int:
    """Return the keys of a page. A cache without pages is seen in pages of the largest power of two
    that divides its room, at most `_LARGEST_PAGE`."""
    return problem.page_size or math.gcd(_LARGEST_PAGE, problem.len_k)


_PLANNED: MutableMapping[torch.Tensor, dict[Any, Any]] = WeakTensorKeyDictionary()


def _planned(problem: Decode, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return FlashInfer's wrapper, planned for the problem and for the tensors that say where keys
    are.

    It is kept as long as K is. Each has 8 MiB of its own on the device, and as much on the host.
    """
    places = tuple(tensors[name] for name in ("cache_seqlens", "block_table") if name in tensors)
    plans = _PLANNED.setdefault(tensors["k"], {})
    key = (problem, *map(id, places))
    if key not in plans:
        # The tensors are kept, so that no other gets the id of one.
        plans[key] = _plan(problem, tensors), places
    return plans[key][0]


def _plan(problem: Decode, tensors: Mapping[str, torch.Tensor]) -> Any:
    q, page_size = tensors["q"], _page_size(problem)
    # On Hopper the backend "auto" is "fa3", and `plan` gives its options of splitting a cache among
    # thread blocks to "fa2" alone. Few sequences on long caches need the split.
    module = importlib.import_module(PACKAGES[FLASHINFER].module)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(q.device), "NHD", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        *_pages(problem, tensors),
        *(problem.heads, problem.kv_heads, problem.d_head, page_size),
        window_left=-1 if problem.window_left is None else problem.window_left,
        logits_soft_cap=problem.softcap,
        q_data_type=q.dtype,
        kv_data_type=tensors["k"].dtype,
        sm_scale=problem.softmax_scale,
    )
    return wrapper


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Return the memory for parts of outputs, which all plans share, as their runs take turns."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _pages(
    problem: Decode, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return on the host, as int32: where each sequence's pages begin in the second tensor, batch +
    1; the pages of all sequences; the keys in the last page of each, 0 in a sequence without any.
    """
    page_size = _page_size(problem)
    blocks = problem.len_k // page_size
    lengths = torch.full((problem.batch,), problem.len_k, dtype=torch.int32)
    table = torch.arange(problem.batch * blocks, dtype=torch.int32).view(problem.batch, blocks)
    lengths = tensors.get("cache_seqlens", lengths).cpu()
    table = tensors.get("block_table", table).cpu()
    needed = (lengths + page_size - 1) // page_size
    begins = torch.zeros(problem.batch + 1, dtype=torch.int32)
    begins[1:] = needed.cumsum(0)
    own = torch.arange(blocks) < needed[:, None]
    return begins, table[own], lengths - (needed - 1).clamp(min=0) * page_size
