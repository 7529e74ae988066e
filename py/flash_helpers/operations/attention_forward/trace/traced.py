"""A kernel's own values of the quantities of FlashAttention-2, block by block, read while the
simulator runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flash_helpers.check.tensors import tensors_for
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.operations.attention_forward.configs import AttentionConfig
from flash_helpers.operations.attention_forward.trace.blockwise import BlockStep
from flash_helpers.operations.attention_forward.trace.mma_trace import MmaRecorder
from flash_helpers.operations.attention_forward.trace.wgmma_trace import WgmmaRecorder
from flash_helpers.ptx import Kernel, Run
from flash_helpers.registry.mma_sync import MmaSyncConfig
from flash_helpers.runtime.simulator import run_kernel
from flash_helpers.runtime.tensors import device_for


@dataclass(frozen=True)
class KernelTrace:
    """A simulated launch with the values inside the kernel.

    `steps`: one for each block of keys, in the kernel's order; values that were not computed are
    NaN. `outputs`: o, (batch, len_q, heads, d_v), and lse, (batch, heads, len_q), if the problem
    asks for it. `run`: the run with its counters, and the faults that the watcher found.
    """

    steps: tuple[BlockStep, ...]
    outputs: Mapping[str, torch.Tensor]
    run: Run

    @property
    def output(self) -> torch.Tensor:
        """The output o."""
        return self.outputs["o"]


def trace_forward(
    config: AttentionConfig,
    kernel: Kernel,
    problem: AttentionForward,
    inputs: Mapping[str, torch.Tensor],
    device: Device | None = None,
) -> KernelTrace:
    """Run the kernel in the simulator, keep going after faults, and read its values.

    `problem`: one that the config takes. `inputs`: those of the problem, on the CPU. `device`: the
    GPU that the launch is made for, by default the largest that the family is compiled for.

    Raises UntraceableKernel if the kernel lacks the structure that the trace relies on, ValueError
    if the values would take more than MAX_TRACE_BYTES, and PtxError if the kernel cannot run or
    does not end.
    """
    device = device or device_for(config.family, torch.device("cpu"))
    recorder: MmaRecorder | WgmmaRecorder = (
        MmaRecorder(config, problem, kernel, device)
        if isinstance(config, MmaSyncConfig)
        else WgmmaRecorder(config, problem, kernel, device)
    )
    tensors = tensors_for(config, problem, inputs)
    run = run_kernel(
        config,
        kernel,
        tensors,
        device=device,
        keep_going=True,
        observe=lambda *_: recorder.observer,
        **problem.call_options(),
    )
    outputs = {tensor.name: tensors[tensor.name].contiguous() for tensor in problem.outputs}
    return KernelTrace(recorder.steps(), outputs, run)
