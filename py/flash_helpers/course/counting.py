"""What the simulator counts of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flash_helpers.check.inputs import make_inputs, tensors_for
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.ptx import Counts, Phase
from flash_helpers.runtime.simulator import run_shipped

SEQ_LEN = 512
HEADS = 16  # of the tensors, of which one is computed: those of the benchmark


@dataclass(frozen=True)
class KernelCounts:
    """total: of all instructions, main_loop: of those in it. by_opcode: of PTX. row_stride:
    elements."""

    total: Counts
    main_loop: Counts
    by_opcode: Mapping[str, Counts]
    row_stride: int


def count_kernel(config: Config, seq_len: int = SEQ_LEN) -> KernelCounts:
    """The counts of one head of a tensor with HEADS, whose row stride has the config itself run.

    Raises RuntimeError if the library's PTX cannot be read.
    """
    problem = AttentionForward(1, 1, seq_len, config.d_head, config.dtype)
    row_stride = config.own_row_stride(AttentionForward(1, HEADS, seq_len, config.d_head))
    inputs = make_inputs("normal", problem, getattr(torch, config.dtype.torch_name))
    counters = run_shipped(config, tensors_for(config, *inputs, row_stride)).counters
    main_loop = counters.by_phase()[Phase.MAIN_LOOP]
    return KernelCounts(counters.total, main_loop, counters.by_opcode(), row_stride)
