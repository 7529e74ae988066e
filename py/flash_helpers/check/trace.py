"""A kernel's own values of the quantities of FlashAttention-2, block by block, read while the
simulator runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_helpers.check.blockwise import BlockStep, TracedConfig
from flash_helpers.check.inputs import tensors_for
from flash_helpers.check.mma_trace import MmaRecorder
from flash_helpers.check.wgmma_trace import WgmmaRecorder
from flash_helpers.ptx import Kernel, Run
from flash_helpers.registry.mma_sync import MmaSyncConfig
from flash_helpers.runtime.simulator import run_kernel
from flash_helpers.runtime.tensors import posed_problem


@dataclass(frozen=True)
class KernelTrace:
    """A simulated launch, looked into.

    steps: one for each block of keys, in the kernel's order; what was not computed is NaN.
    output: (batch, len_q, heads, d_head). run: its counters, and the faults that the watcher
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
    softmax_scale: float | None = None,
) -> KernelTrace:
    """Run the kernel in the simulator, keep going after faults, and read its values.

    q, k, v: on the CPU, a problem that the config takes. softmax_scale: 1/sqrt(d_head) by default.
    Raises UntraceableKernel if the kernel is not built the way that the trace
    relies on, ValueError if the values would take more than MAX_TRACE_BYTES, and PtxError if the
    kernel cannot run or does not end.
    """
    problem = posed_problem({"q": q, "k": k, "v": v}, config.supports.causal, softmax_scale)
    make = MmaRecorder if isinstance(config, MmaSyncConfig) else WgmmaRecorder
    recorder = make(config, problem, kernel)
    tensors = tensors_for(config, q, k, v)
    run = run_kernel(
        config,
        kernel,
        tensors,
        softmax_scale=softmax_scale,
        keep_going=True,
        observer=recorder.observer,
    )
    return KernelTrace(recorder.steps(), tensors["o"].contiguous(), run)
