"""An append of keys and values to a cache, with rotary embedding, by one kernel: where the registry
has one for the problem, and for tensors that lie as it takes them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from flash_attention._operators import compile_while_tracing
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.append.problem import Append
from flash_helpers.registry.problem import Element
from flash_helpers.runtime.call import compute
from flash_helpers.runtime.tensors import (
    Laid,
    Layout,
    check_output_layout,
    check_strides,
    element_of,
    named,
    posed_problem,
    span_bytes,
)
from flash_helpers.tune.best import choose_config

Options = tuple[tuple[str, Any], ...]

INPUTS = (
    *("k", "v", "q", "cos", "sin"),
    *("cache_seqlens", "rotary_seqlens", "block_table", "cache_batch_idx"),
)
OUTPUTS = ("k_cache", "v_cache", "q_rotated")

# Batch, new keys, blocks, slots of each, heads and their size that stand for all others while
# torch.compile traces a call: sizes may be symbols then, and one program is for all.
_TRACED = (64, 1, 128, 16, 8, 128)
_CHUNK = 8  # elements of 16 bytes: heads and halves of what is turned have a whole number of them
_MOST_KEPT = 1024  # answers for different sizes


def options_of(cos: torch.Tensor | None, interleaved: bool, in_order: bool) -> Options:
    """Return the options of the problem that tensors do not tell. cos: one of the tables."""
    has_fp32 = cos is not None and cos.dtype == torch.float32
    return (("interleaved", interleaved), ("fp32_tables", has_fp32), ("in_order", in_order))


def is_taken(tensors: Mapping[str, torch.Tensor | None], options: Options) -> bool:
    """Whether the registry has a kernel for a call. Of the tensors their shapes and dtypes count.

    tensors: those of the call by the names of the problem (`Append.axes`), in any shape.
    """
    given = named(tensors.items())
    if any(x.ndim != len(Append.axes[name]) for name, x in given.items()):
        return False
    k, cache = given["k"], given["k_cache"]
    if cache.dtype != k.dtype:
        return False
    slots = cache.shape[1]
    batch, new, kv_heads, d_head = k.shape
    blocks = given["block_table"].shape[1] if "block_table" in given else 0
    len_q, heads = given["q"].shape[1:3] if "q" in given else (0, 0)
    positions, pairs = given["cos"].shape if "cos" in given else (0, 0)
    if torch.compiler.is_compiling():
        is_whole, has_whole_pairs = d_head % _CHUNK == 0, pairs % _CHUNK == 0
        batch, new, traced_blocks, slots, kv_heads, traced_size = _TRACED
        blocks = traced_blocks if "block_table" in given else 0
        len_q, heads = (new, kv_heads) if "q" in given else (0, 0)
        d_head, positions = traced_size if is_whole else traced_size + 1, 0
        if "cos" in given:
            pairs = _CHUNK if has_whole_pairs else 1
    facts = (
        *(k.device, str(k.dtype), str(given["cos"].dtype) if "cos" in given else ""),
        *(batch, new, kv_heads, d_head, slots, blocks, heads, len_q, positions, pairs),
        *("cache_batch_idx" in given, "rotary_seqlens" in given),
    )
    return _decided(facts, options)


@torch.compiler.assume_constant_result  # so that a trace does not look into the registry
def _decided(facts: tuple[Any, ...], options: Options) -> bool:
    return _has_kernel(facts, options)


@functools.lru_cache(_MOST_KEPT)
def _has_kernel(facts: tuple[Any, ...], options: Options) -> bool:
    device, dtype, of_table, *sizes, has_rows, has_positions = facts
    batch, new, kv_heads, d_head, slots, blocks, heads, len_q, positions, pairs = sizes
    if of_table not in ("", dtype, "torch.float32"):
        return False
    try:
        problem = Append(
            *(batch, kv_heads, new, max(blocks, 1) * slots, d_head),
            Element.from_name(dtype.removeprefix("torch.")),
            page_size=slots if blocks else 0,
            caches=batch if has_rows else 0,
            rotary_dim=2 * pairs,
            positions=positions,
            rotary_seqlens=has_positions,
            heads=heads,
            len_q=len_q,
            **dict(options),
        )
        _choose(problem, device)
    except (RuntimeError, ValueError):
        return False
    return True


def _choose(problem: Append, device: torch.device) -> Config:
    """Return the config for a problem. Raises RuntimeError for the CPU, where PyTorch's operations
    append the same bits without a simulator, and as `choose_config` does."""
    if device.type == "cpu":
        raise RuntimeError("PyTorch appends on the CPU: call flash_attention.run to simulate")
    return choose_config(problem, device)


def _chosen(tensors: Mapping[str, Laid], options: Options) -> tuple[Append, Config] | None:
    """Return the problem that tensors pose and its config; None if no kernel takes it."""
    try:
        element = element_of("k", tensors["k"], Append.elements)
        problem = posed_problem(Append, element, tensors, **dict(options))
        return problem, _choose(problem, tensors["k"].device)
    except (RuntimeError, TypeError, ValueError):
        return None


@functools.lru_cache(_MOST_KEPT)
def _config_of(layouts: tuple[tuple[str, Layout], ...], options: Options) -> Config | None:
    """Return the config for tensors of these layouts; None if no kernel takes them."""
    laid = dict(layouts)
    if (chosen := _chosen(laid, options)) is None:
        return None
    problem, config = chosen
    try:
        check_strides(config, problem, laid)
        for name in OUTPUTS[:2]:
            check_output_layout(name, laid[name])
    except ValueError:
        return None
    return config


def _lies_apart(config: Config, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether tensors begin where the kernel takes them, and no input is in a cache."""
    spans = {}
    for name, x in tensors.items():
        begin = x.data_ptr()
        alignment = x.element_size() if x.dtype == torch.int32 else config.supports.alignment
        if begin % alignment:
            return False
        spans[name] = begin, begin + span_bytes(x)

    def apart(one: str, other: str) -> bool:
        return spans[one][1] <= spans[other][0] or spans[other][1] <= spans[one][0]

    caches, others = OUTPUTS[:2], spans.keys() - OUTPUTS[:2]
    if not all(apart(cache, name) for cache in caches for name in others):
        return False
    # Both caches may lie in one tensor, in turn. The simulator brings back each with its gaps.
    in_turn = spans["k_cache"][0] != spans["v_cache"][0] and tensors["k_cache"].is_cuda
    return apart(*caches) or in_turn


def _ordered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in Append.axes if name in tensors}


def by_kernel(tensors: Mapping[str, torch.Tensor], options: Options) -> bool:
    """Append, and turn q, by a kernel. Return False, without having written anything, if none takes
    these tensors as they lie.

    tensors: those of the problem by name, without those left out, outputs included.
    """
    given = _ordered(tensors)
    layouts = tuple((n, Layout(x.shape, x.stride(), x.dtype, x.device)) for n, x in given.items())
    config = _config_of(layouts, options)
    if config is None or not _lies_apart(config, given):
        return False
    if any(given[name].requires_grad for name in OUTPUTS if name in given):
        return False
    compute(Append, (config, options), tuple(given), tuple(given.values()))
    return True


def compile_traced(tensors: Mapping[str, torch.Tensor], options: Options) -> None:
    """Compile the kernel of a call while it is traced, if a kernel takes it."""
    if chosen := _chosen(_ordered(tensors), options):
        compile_while_tracing(chosen[1], tensors["k"].device)
