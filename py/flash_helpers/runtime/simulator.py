"""Runs a forward kernel's PTX in the simulator on CPU tensors."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from flash_helpers.kernel_configs import MAX_SMEM_BYTES, FlashForwardKernelConfig
from flash_helpers.ptx import DeviceMemory, Kernel, Observer, Run, load_ptx

_SECONDS_PER_TILE = 4.0e-3
"""One block's pass over 64x64 scores at d_head 128 on one core, measured; for estimates only."""

ANNOUNCE_FROM_SECONDS = 20.0
"""Estimated run time from which on a reader is told what to expect."""

_RUNS_PER_TILE = 8
"""How often each instruction may run for a pass over a K and V tile. Loops inside the pass are
unrolled, so once is enough; a kernel that runs more never ends."""


def load_kernel(config: FlashForwardKernelConfig, ptx: str | Path) -> Kernel:
    """The kernel of a config, from PTX text or a path.

    Raises:
        flash_helpers.ptx.PtxSyntaxError: the text is not a whole PTX module.
        flash_helpers.ptx.LaunchError: it does not hold the config's kernel.
    """
    return load_ptx(ptx).kernel(config.short_form())


def estimate_seconds(
    config: FlashForwardKernelConfig, batch: int, seq_len: int, n_heads: int
) -> float:
    """About how long ``run_forward`` takes for a shape, on one core."""
    tiles = batch * n_heads * (seq_len / 64) ** 2
    return tiles * _SECONDS_PER_TILE * config.d_head / 128


def duration_text(seconds: float) -> str:
    """A duration in the unit that suits it: "40 s", "3 min", "14 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def run_forward(
    config: FlashForwardKernelConfig,
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    *,
    keep_going: bool = False,
    progress: Callable[[int, int], None] | None = None,
    observer: Observer | None = None,
) -> tuple[torch.Tensor, Run]:
    """Computes attention with a kernel's PTX.

    Args:
        config: what the kernel was compiled for.
        kernel: from ``load_kernel``.
        q, k, v: (batch, seq_len, n_heads, d_head) on the CPU, fp16 or bf16 as ``config`` says, with
            stride 1 along d_head; other strides are free. seq_len is a multiple of B_r and B_c.
        o: where the result goes, shaped like q; a new tensor if None.
        keep_going: collect faults in the run rather than raise the first one.
        progress: called with the number of blocks done and the number of blocks.
        observer: is shown registers and shared memory while the kernel runs.

    Returns:
        The output, and the run with its counters and faults.

    Raises:
        flash_helpers.ptx.PtxError: the kernel cannot run, or a fault was found in it.
    """
    batch, seq_len, n_heads, _ = q.shape
    o = torch.empty_like(q, memory_format=torch.contiguous_format) if o is None else o
    memory = DeviceMemory()
    addresses = [memory.upload(_span(x).numpy()) for x in (q, k, v, o)]
    strides = [stride for x in (q, k, v, o) for stride in _strides(x)]
    # ForwardKernelArgs: four pointers, four times (batch, row, head) strides, seq_len, padding.
    args = struct.pack("<4Q12qi4x", *addresses, *strides, seq_len)
    target = "sm_80" if config.smem_bytes <= MAX_SMEM_BYTES[80] else "sm_90"
    tiles = seq_len // config.B_c
    run = kernel.launch(
        grid=(seq_len // config.B_r, n_heads, batch),
        block=config.n_threads,
        shared_bytes=config.smem_bytes,
        args=[args],
        memory=memory,
        keep_going=keep_going,
        max_instructions=_RUNS_PER_TILE * len(kernel.program.instructions) * (tiles + 2),
        progress=progress,
        observer=observer,
        target=target,
    )
    span = _span(o)
    span.copy_(torch.from_numpy(memory.download(addresses[3], span.numel(), np.int16)))
    return o, run


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Elements between batches, rows and heads."""
    batch, row, head, _ = x.stride()
    return batch, row, head


def _span(x: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last, as 16-bit patterns; a view."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return torch.as_strided(x.detach().view(torch.int16), (length,), (1,), x.storage_offset())
