"""The norms of PyTorch, and a copy: the libraries that kernels of norms are measured beside."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.measure.libraries import compiled, copied
from flash_helpers.operations.norm.problem import Norm

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def plain(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    eps: float,
) -> torch.Tensor:
    """Return y, (rows, width), by PyTorch's own function. rms_norm takes no bias: with one, it is
    added to the result in fp32."""
    shape = x.shape[-1:]
    if not rms:
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)
    y = torch.nn.functional.rms_norm(x, shape, weight, eps)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


_compiled = functools.cache(lambda: compiled(plain))


def run(
    library: str, problem: Norm, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return y, (rows, width), by one of the operation's libraries; for "copy" it is x."""
    x = tensors["x"]
    if library == "copy":
        return {"y": copied(x)}
    function = _compiled() if library == "compiled_norm" else plain
    y = function(x, tensors.get("weight"), tensors.get("bias"), problem.rms, problem.eps)
    return {"y": y}
