"""What the simulator counts of a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
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
    """phases: counts by opcode of PTX, of each phase. row_stride: elements."""

    phases: Mapping[Phase, Mapping[str, Counts]]
    row_stride: int

    def total(
        self, phase: Phase | None = None, wanted: Callable[[str], bool] = lambda opcode: True
    ) -> Counts:
        """The sum over all phases or one, of all opcodes or of those that are wanted."""
        found = Counts()
        for name, counts in self.phases.items():
            for opcode, of_opcode in counts.items():
                if phase in (None, name) and wanted(opcode):
                    found.add(of_opcode)
        return found

    def opcodes(self) -> Mapping[str, int]:
        """Instructions by opcode."""
        found = Counter[str]()
        for counts in self.phases.values():
            found.update({opcode: of_opcode.instructions for opcode, of_opcode in counts.items()})
        return found


def count_kernel(config: Config, seq_len: int = SEQ_LEN) -> KernelCounts:
    """The counts of one head of a tensor with HEADS, whose row stride has the config itself run.

    Raises RuntimeError if the library's PTX cannot be read.
    """
    problem = AttentionForward(1, 1, seq_len, config.d_head, config.dtype)
    row_stride = config.own_row_stride(AttentionForward(1, HEADS, seq_len, config.d_head))
    inputs = make_inputs("normal", problem, getattr(torch, config.dtype.torch_name))
    run = run_shipped(config, tensors_for(config, *inputs, row_stride))
    return KernelCounts({phase: run.counters.by_opcode(phase) for phase in Phase}, row_stride)
