"""Linear layers of a sequence and its context by PyTorch: what kernels are measured beside."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import gelu, linear, rms_norm, silu

from flash_helpers.measure.libraries import compiled
from flash_helpers.operations.joint_linear.problem import CONTEXT, JointLinear

PACKAGES: Mapping[str, Any] = MappingProxyType({})


def computed(problem: JointLinear, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return y, and context_y if the problem has it, by PyTorch's operators."""
    found = {}
    for stream in ("", CONTEXT) if problem.context else ("",):
        x, weight = tensors[f"{stream}x"], tensors[f"{stream}weight"]
        y = linear(silu(x) if problem.silu else x, weight, tensors.get(f"{stream}bias"))
        if problem.gelu:
            y = gelu(y)
        if problem.norm:
            y = rms_norm(y, y.shape[-1:], tensors[f"{stream}norm_weight"], problem.eps)
        found[f"{stream}y"] = y
    return found


_compiled = functools.cache(lambda: compiled(computed))


def run(
    library: str, problem: JointLinear, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return y, and context_y if the problem has it, by one of the operation's libraries."""
    given = {tensor.name: tensors[tensor.name] for tensor in problem.inputs}
    found: dict[str, torch.Tensor] = (_compiled() if library == "compiled_linear" else computed)(
        problem, given
    )
    return found
