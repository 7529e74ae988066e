"""Addition and norm by PyTorch, and copies: what kernels of add_norm are measured beside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.measure.libraries import compiled, copied
from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.norm.baselines import plain as norm

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def plain(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the sum, (rows, width), by PyTorch's own functions."""
    total = x + residual
    return norm(total, weight, bias, rms, eps), total


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return compiled(plain)


def run(
    library: str, problem: AddNorm, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return y and sum, (rows, width), by one of the operation's libraries; for "copy" these are x
    and residual."""
    x, residual = tensors["x"], tensors["residual"]
    if library == "copy":
        return {"y": copied(x), "sum": copied(residual)}
    given = x, residual, tensors.get("weight"), tensors.get("bias"), problem.rms, problem.eps
    y, total = (_compiled() if library == "compiled_add_norm" else plain)(*given)
    return {"y": y, "sum": total}
