"""The backward pass of the libraries that kernels are measured beside.

A call is the operator that autograd would call, on what the library's own forward pass has kept for
it: each library has an LSE of its own shape. That forward pass runs once for a Q, not in each call.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.operations.attention_forward.baselines import longest_of
from flash_helpers.operations.attention_forward.supports import (
    SINKS,
    SOFTCAP,
    VARLEN,
    WINDOW,
    asked_for,
)

PACKAGES: Mapping[str, Any] = MappingProxyType({})

_FLASH = "pytorch_flash"
_TAKEN = MappingProxyType({_FLASH: frozenset({WINDOW, VARLEN}), "pytorch_cudnn": frozenset()})

_KEPT: MutableMapping[torch.Tensor, dict[str, tuple[Any, ...]]] = WeakTensorKeyDictionary()


def run(
    library: str, problem: AttentionBackward, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return dq, dk and dv by one of the operation's libraries.

    Raises ValueError for options that a library does not take, and for a causal problem with two
    lengths, which PyTorch aligns to the top left. Raises RuntimeError if the library does not run
    here.
    """
    for name, (values, _) in asked_for(problem).items():
        if name in {WINDOW, SOFTCAP, SINKS, VARLEN} - _TAKEN[library]:
            raise ValueError(
                f"{values}: {library} does not take it: leave out the option, or the library"
            )
    if problem.causal and problem.len_q != problem.len_k:
        raise ValueError(
            f"causal with len_q {problem.len_q} and len_k {problem.len_k}: PyTorch's mask is "
            "aligned to the top left: take as many keys as queries"
        )
    of = _by_flash if library == _FLASH else _by_cudnn
    return dict(zip(GRADIENTS, of(problem, tensors), strict=True))


def _by_flash(
    problem: AttentionBackward, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    do, q, k, v = (tensors[name] for name in ("do", "q", "k", "v"))
    begins: list[torch.Tensor | None] = [None, None]
    most = [problem.len_q, problem.len_k]
    if problem.sequences:
        given = [tensors[f"cu_seqlens_{name}"] for name in "qk"]
        do, q, k, v = (x[0] for x in (do, q, k, v))
        begins, most = [*given], [*map(longest_of, given)]
    options = {
        "scale": problem.softmax_scale,
        "window_size_left": -1 if problem.window_left is None else problem.window_left,
        "window_size_right": -1 if problem.window_right is None else problem.window_right,
    }
    masks = (0.0, problem.causal)
    kept = _KEPT.setdefault(tensors["q"], {})
    if _FLASH not in kept:
        kept[_FLASH] = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *begins, *most, *masks, False), **options
        )[:4]
    o, lse, *random = kept[_FLASH]
    found = torch.ops.aten._flash_attention_backward(
        *(do, q, k, v, o, lse, *begins, *most, *masks, *random), **options
    )
    return tuple(x[None] for x in found) if problem.sequences else found


def _by_cudnn(
    problem: AttentionBackward, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    do, q, k, v = (tensors[name].transpose(1, 2) for name in ("do", "q", "k", "v"))
    scale = problem.softmax_scale
    kept = _KEPT.setdefault(tensors["q"], {})
    if "pytorch_cudnn" not in kept:
        kept["pytorch_cudnn"] = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(q, k, v, None, True, 0.0, problem.causal), scale=scale
        )[:8]
    o, lse, begins_q, begins_k, most_q, most_k, seed, offset = kept["pytorch_cudnn"]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(do, q, k, v, o, lse, seed, offset, None, begins_q, begins_k, most_q, most_k),
        *(0.0, problem.causal),
        scale=scale,
    )
    return tuple(x.transpose(1, 2) for x in found)
