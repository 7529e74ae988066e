"""Tensors that a config is run on."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flash_helpers.kernel_configs import Config, Problem
from flash_helpers.runtime.tensors import with_strides


def tensors_for(
    config: Config,
    problem: Problem,
    inputs: Mapping[str, torch.Tensor],
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, torch.Tensor]:
    """Return a problem's inputs and outputs, in the order of `Problem.axes`, on the CPU.

    They have strides for which the config itself is launched and none that takes over, or the
    strides given; outputs are full of NaN, or of the largest integer.
    """
    strides = strides or config.own_strides(problem)
    found = {}
    for tensor in (*problem.inputs, *problem.outputs):
        is_integer = tensor.element.torch_name.startswith("int")
        fill = torch.iinfo(torch.int32).max if is_integer else math.nan
        own = strides.get(tensor.name, tensor.strides)
        found[tensor.name] = with_strides(tensor, own, fill if tensor.is_output else 0)
        if tensor.name in inputs:
            found[tensor.name].copy_(inputs[tensor.name])
    return found
