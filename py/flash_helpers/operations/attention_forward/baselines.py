"""Attention by the libraries that kernels are measured beside."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from flash_helpers.measure.libraries import Package
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.supports import (
    SINKS,
    SOFTCAP,
    VARLEN,
    WINDOW,
    asked_for,
)

_FLASH = "pytorch_flash"
_SDPA_BACKENDS = {
    _FLASH: SDPBackend.FLASH_ATTENTION,
    "pytorch_cudnn": SDPBackend.CUDNN_ATTENTION,
}


PACKAGES = {
    "flash_attn": Package("flash_attn", "flash_attn"),
    "fa3": Package("fa3_fwd", "fa3_fwd_interface"),
}


# Options that each kind of library takes.
_OF_PACKAGES = frozenset({WINDOW, SOFTCAP, VARLEN})
_OF_FLASH = frozenset({WINDOW, VARLEN})


def run(
    library: str, problem: AttentionForward, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return o, (batch, seq, heads, d_head), by one of the operation's libraries.

    PyTorch's backends get the same memory as the kernels, as (batch, heads, seq, d_head) views.
    Each is called as users call it: an option is passed only if it is not the usual one. A window
    and sequences of various lengths are no options of PyTorch's own function; they go to the
    operator of its flash backend.

    Raises ValueError for options that a library does not take, and for a causal problem with two
    lengths, since PyTorch aligns the mask to the top left, the packages and the kernels to the
    bottom right. Raises RuntimeError if the library does not run here, ImportError if it cannot be
    imported.
    """
    taken = _OF_PACKAGES if library in PACKAGES else _OF_FLASH if library == _FLASH else frozenset()
    for name, (values, _) in asked_for(problem).items():
        if name in {WINDOW, SOFTCAP, SINKS, VARLEN} - taken:
            raise ValueError(
                f"{values}: {library} does not take it: leave out the option, or the library"
            )
    if problem.causal and problem.len_q != problem.len_k:
        raise ValueError(
            f"causal with len_q {problem.len_q} and len_k {problem.len_k}: PyTorch's mask is "
            "aligned to the top left: take as many keys as queries"
        )
    if library in PACKAGES:
        return {
            "o": _by_package(importlib.import_module(PACKAGES[library].module), problem, tensors)
        }
    if problem.has_window or problem.sequences:
        return {"o": _by_flash_operator(problem, tensors)}
    q, k, v = (tensors[name] for name in "qkv")
    with sdpa_kernel(_SDPA_BACKENDS[library]):
        output = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=problem.causal,
            enable_gqa=q.shape[2] != k.shape[2],
            scale=_scale(problem),
        )
    return {"o": output.transpose(1, 2)}


def _scale(problem: AttentionForward) -> float | None:
    return None if problem.has_usual_scale else problem.softmax_scale


def _by_package(
    module: Any, problem: AttentionForward, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    options: dict[str, Any] = {"causal": problem.causal}
    if not problem.has_usual_scale:
        options["softmax_scale"] = problem.softmax_scale
    if problem.has_window:
        bounds = (problem.window_left, problem.window_right)
        options["window_size"] = tuple(-1 if bound is None else bound for bound in bounds)
    if problem.softcap:
        options["softcap"] = problem.softcap
    q, k, v = (tensors[name] for name in "qkv")
    if not problem.sequences:
        return module.flash_attn_func(q, k, v, **options)
    begins = [tensors[f"cu_seqlens_{name}"] for name in "qk"]
    tokens = (x[0] for x in (q, k, v))
    return module.flash_attn_varlen_func(*tokens, *begins, *map(longest_of, begins), **options)[
        None
    ]


def _by_flash_operator(
    problem: AttentionForward, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    tokens = [tensors[name] for name in "qkv"]
    begins: list[torch.Tensor | None] = [None, None]
    longest = [problem.len_q, problem.len_k]
    if problem.sequences:
        given = [tensors[f"cu_seqlens_{name}"] for name in "qk"]
        tokens, begins, longest = [x[0] for x in tokens], [*given], [*map(longest_of, given)]
    output, *_ = torch.ops.aten._flash_attention_forward(
        *(*tokens, *begins, *longest, 0.0, problem.causal, False),
        scale=_scale(problem),
        window_size_left=-1 if problem.window_left is None else problem.window_left,
        window_size_right=-1 if problem.window_right is None else problem.window_right,
    )
    return output[None] if problem.sequences else output


_LONGEST: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()


def longest_of(begins: torch.Tensor) -> int:
    """Return the length of the longest sequence. It is kept, since reading it waits for the device,
    which a graph's capture cannot do."""
    if begins not in _LONGEST:
        _LONGEST[begins] = int(begins.diff().max())
    return _LONGEST[begins]
