"""A kernel's own values of the quantities of FlashAttention-2, block by block, read while the
simulator runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_helpers.check.blockwise import BlockStep
from flash_helpers.check.inputs import tensors_for
from flash_helpers.check.mma_trace import MmaRecorder
from flash_helpers.check.recorder import TracedConfig
from flash_helpers.check.wgmma_trace import WgmmaRecorder
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.ptx import Kernel, Run
from flash_helpers.registry.mma_sync import MmaSyncConfig
from flash_helpers.runtime.simulator import run_kernel


@dataclass(frozen=True)
class KernelTrace:
    """A simulated launch, looked into.

    steps: one for each block of keys, in the kernel's order; what was not computed is NaN.
    output: (batch, seq_len, heads, d_head). run: its counters, and the faults that the watcher
        found.
    """

    steps: tuple[BlockStep, ...]
    output: torch.Tensor
    run: Run


def trace_forward(
    config: TracedConfig,
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> KernelTrace:
    """Run the kernel in the simulator, keep going after faults, and read its values.

    q, k, v: (batch, seq_len, heads, d_head), of the config's dtype, on the CPU; seq_len a multiple
    of B_r and B_c. Raises UntraceableKernel if the kernel is not built the way that the trace
    relies on, ValueError if the values would take more than MAX_TRACE_BYTES, and PtxError if the
    kernel cannot run or does not end.
    """
    batch, seq_len, heads, d_head = q.shape
    problem = AttentionForward(batch, heads, seq_len, d_head, config.dtype)
    make = MmaRecorder if isinstance(config, MmaSyncConfig) else WgmmaRecorder
    recorder = make(config, problem, kernel)
    tensors = tensors_for(config, q, k, v)
    run = run_kernel(config, kernel, tensors, keep_going=True, observer=recorder.observer)
    return KernelTrace(recorder.steps(), tensors["o"].contiguous(), run)
