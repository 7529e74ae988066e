"""Q, K and V of a test as the tensors that a config is run on."""

from dataclasses import replace

import torch

from flash_helpers.check.tensors import tensors_for
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.operations.attention_forward.trace.traced import KernelTrace, trace_forward
from flash_helpers.ptx import Kernel

FEW_SMS = replace(largest_device(90), sms=4)  # so that a block takes several tiles


def on_sms(sms: int) -> Device:
    return replace(largest_device(90), sms=sms)


def problem_of(config: Config, q: torch.Tensor, k: torch.Tensor) -> AttentionForward:
    return AttentionForward.posed(
        {"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(k.shape)},
        config.dtype,
        **config.supports.options,
    )


def attention_tensors(
    config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> dict[str, torch.Tensor]:
    """q, k, v and an output full of NaN, with strides for which the config itself is launched."""
    return tensors_for(config, problem_of(config, q, k), {"q": q, "k": k, "v": v})


def traced(
    config: Config, kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> KernelTrace:
    problem = problem_of(config, q, k)
    return trace_forward(config, kernel, problem, {"q": q, "k": k, "v": v})
