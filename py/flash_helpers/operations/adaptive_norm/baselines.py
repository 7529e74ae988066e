"""Adaptive layer norms by PyTorch: what kernels are measured beside."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import layer_norm

from flash_helpers.measure.libraries import compiled
from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def gated_sum(
    x: torch.Tensor, change: torch.Tensor | None, gate: torch.Tensor | None
) -> torch.Tensor:
    """Return x + gate · change, or x without a change. x: (batch, length, width). gate: (batch,
    width)."""
    return x if change is None or gate is None else x + gate[:, None] * change


def modulated(
    x: torch.Tensor, scale: torch.Tensor | None, shift: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return layer norm of x · (1 + scale) + shift, or x without these. x: (batch, length, width).
    scale, shift: (batch, width)."""
    if scale is None or shift is None:
        return x
    return layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale[:, None]) + shift[:, None]


def computed(problem: AdaptiveNorm, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of a problem by PyTorch's operators."""
    found = {}
    for stream in problem.streams:
        names = ("x", "change", "gate", "scale", "shift")
        x, change, gate, scale, shift = (tensors.get(stream + name) for name in names)
        assert x is not None
        total = gated_sum(x, change, gate)
        found[f"{stream}y"] = modulated(total, scale, shift, problem.eps)
        if problem.sum:
            found[f"{stream}sum"] = total
    return found


_compiled = functools.cache(lambda: compiled(computed))


def run(
    library: str, problem: AdaptiveNorm, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the outputs of a problem by one of the operation's libraries."""
    given = {tensor.name: tensors[tensor.name] for tensor in problem.inputs}
    found: dict[str, torch.Tensor] = (_compiled() if library == "compiled_adaptive" else computed)(
        problem, given
    )
    return found
