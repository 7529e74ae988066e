"""Attention by the libraries that kernels are measured beside."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.supports import SINKS, SOFTCAP, WINDOW, asked_for

_SDPA_BACKENDS = {
    "pytorch_flash": SDPBackend.FLASH_ATTENTION,
    "pytorch_cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Package(NamedTuple):
    """A library that is a package of its own. `name`: the name of the package for pip. `module`:
    module with flash_attn_func(q, k, v), which takes and returns (batch, seq, heads, d_head)."""

    name: str
    module: str

    @property
    def is_installed(self) -> bool:
        """Whether the module can be imported."""
        return importlib.util.find_spec(self.module) is not None


PACKAGES = {
    "flash_attn": Package("flash_attn", "flash_attn"),
    "fa3": Package("fa3_fwd", "fa3_fwd_interface"),
}


def run(
    library: str, problem: AttentionForward, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return o, (batch, seq, heads, d_head), by one of the operation's libraries.

    PyTorch's backends get the same memory as the kernels, as (batch, heads, seq, d_head) views.
    Each is called as users call it: an option is passed only if it is not the usual one.

    Raises ValueError for options that a library does not take: sinks; on PyTorch's backends a
    window, a softcap and a causal problem with two lengths, since PyTorch aligns the mask to the
    top left, the packages and the kernels to the bottom right. Raises RuntimeError if the library
    does not run here, ImportError if it cannot be imported.
    """
    asked = asked_for(problem)
    for name in (SINKS,) if library in PACKAGES else (SINKS, WINDOW, SOFTCAP):
        if name in asked:
            raise ValueError(
                f"{asked[name][0]}: {library} does not take it: leave out the option, or the "
                "library"
            )
    if problem.causal and problem.len_q != problem.len_k:
        raise ValueError(
            f"causal with len_q {problem.len_q} and len_k {problem.len_k}: PyTorch's mask is "
            "aligned to the top left: take as many keys as queries"
        )
    q, k, v = (tensors[name] for name in "qkv")
    if library in PACKAGES:
        module = importlib.import_module(PACKAGES[library].module)
        options: dict[str, Any] = {}
        if not problem.has_usual_scale:
            options["softmax_scale"] = problem.softmax_scale
        if problem.has_window:
            bounds = (problem.window_left, problem.window_right)
            options["window_size"] = tuple(-1 if bound is None else bound for bound in bounds)
        if problem.softcap:
            options["softcap"] = problem.softcap
        return {"o": module.flash_attn_func(q, k, v, causal=problem.causal, **options)}
    with sdpa_kernel(_SDPA_BACKENDS[library]):
        output = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=problem.causal,
            enable_gqa=q.shape[2] != k.shape[2],
            scale=None if problem.has_usual_scale else problem.softmax_scale,
        )
    return {"o": output.transpose(1, 2)}
