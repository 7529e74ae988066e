"""Tensors on which a config is run."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flash_helpers.kernel_configs import Config, Problem
from flash_helpers.registry.problem import Role, Tensor
from flash_helpers.runtime.tensors import torch_dtype, with_strides


def unwritten(tensor: Tensor) -> float:
    """Return the value that fills an output before the kernel runs: NaN, or the largest integer."""
    dtype = torch_dtype(tensor.element)
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def tensors_for(
    config: Config,
    problem: Problem,
    inputs: Mapping[str, torch.Tensor],
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, torch.Tensor]:
    """Return a problem's inputs and outputs, in the order of `Problem.axes`, on the CPU.

    Their strides are the given ones, or by default strides for which the config itself is launched.
    Outputs are full of `unwritten`.
    """
    strides = strides or config.own_strides(problem)
    found = {}
    for tensor in problem.tensors:
        if tensor.role is Role.OPTIONAL:
            continue
        own = strides.get(tensor.name, tensor.strides)
        fill = unwritten(tensor) if tensor.is_output else 0
        found[tensor.name] = with_strides(tensor, own, fill)
        if tensor.name in inputs:
            found[tensor.name].copy_(inputs[tensor.name])
    return found
