#!/usr/bin/env python3
"""Count the cycles of an SM per tensor core instruction, by Nsight Compute."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flash_helpers.console.command_line import make_parser
from flash_helpers.console.tables import Table, number
from flash_helpers.kernel_configs import Element
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.measure.nsight import NsightCompute, ProfilerError
from flash_helpers.measure.results import Provenance, RecordFile
from flash_helpers.runtime.backend import find_backend

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/mma_cycles_h100.json"
LAUNCHES = 3
MMA_TYPES = (Element.FP16, Element.BF16)
INSTRUCTIONS = "sm__inst_executed_pipe_tensor.sum"
CYCLES = "sm__cycles_active.sum"  # over all SMs; cycles do not depend on the clock

DESCRIPTION = f"""\
Count, with Nsight Compute, the tensor core instructions in a loop of mma.sync, and the SMs' busy
cycles. pt_bench.py reports the speed of the same loop (src/include/mma_rate.cuh: eight independent
m16n8k16 per warp, 16 warps per SM, operands in registers). Unlike TFLOP/s, cycles do not depend on
the clock. The tools' bounds (flash_helpers.sass.read.opcodes) use the quotient of the two counts.
Each dtype has {LAUNCHES} launches.
"""

EXAMPLES = f"""\
examples:
  count, print and write {RESULTS}; needs a GPU and ncu:
    python benchmarks/mma_cycles.py
  in a copy without git, and keeping the data elsewhere:
    python benchmarks/mma_cycles.py --commit 68cfc22 --json mma.json

exit status: 0 counted, 2 wrong usage, no GPU or no profiler, 130 interrupted
"""


@dataclass(frozen=True)
class LoopLaunch:
    """One launch of the loop. instructions, cycles: sums over all SMs."""

    dtype: str
    instructions: int
    cycles: int


@dataclass(frozen=True)
class MmaCycles(RecordFile):
    """Counts of one run. profiler: its version."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "cycles of mma.sync"

    provenance: Provenance
    profiler: str
    launches: tuple[LoopLaunch, ...]

    def table(self) -> Table:
        """Table of one row per launch."""
        header = ["dtype", "instructions", "cycles of SMs", "cycles each"]
        rows = [
            [m.dtype, str(m.instructions), str(m.cycles), number(m.cycles / m.instructions, 4)]
            for m in self.launches
        ]
        return Table(header, rows)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_results_arguments(parser, ROOT, RESULTS, "the counts")
    parser.add_argument(
        "--launch", choices=[d.short for d in MMA_TYPES], help="only launch, for ncu"
    )
    return parser.parse_args(argv)


def launch(dtype: str) -> int:
    """Launch the loop and wait; returns the exit status."""
    import torch  # late, so that --help is fast

    from flash_helpers.runtime.mma_loop import MmaLoop

    device = torch.device("cuda", torch.cuda.current_device())
    loop = MmaLoop(Element.from_name(dtype), device)
    for _ in range(LAUNCHES):
        loop.launch()
    torch.cuda.synchronize(device)
    return 0


def count(profiler: NsightCompute, dtype: str) -> list[LoopLaunch]:
    """Count the launches of one dtype. Raises ProfilerError."""
    command = [sys.executable, __file__, "--launch", dtype]
    found = profiler.profile(command, "^loop", (INSTRUCTIONS, CYCLES), dtype)
    counted = [(run.values.get(INSTRUCTIONS), run.values.get(CYCLES)) for run in found]
    if not all(instructions and cycles for instructions, cycles in counted):
        raise ProfilerError(f"this GPU does not count {INSTRUCTIONS} or {CYCLES}")
    return [LoopLaunch(dtype, int(i), int(c)) for i, c in counted if i and c]


def run(arguments: argparse.Namespace, command: str) -> int:
    """Count, print and write; returns the exit status. Raises KernelsNotRun and ProfilerError."""
    backend = find_backend("cuda")
    if arguments.launch:
        return launch(arguments.launch)
    profiler = NsightCompute.find()
    launches = [each for dtype in MMA_TYPES for each in count(profiler, dtype.short)]
    found = MmaCycles(
        provenance_here(backend, command, arguments, ROOT),
        f"Nsight Compute {profiler.version()}",
        tuple(launches),
    )
    print(f"{found.table().text()}\n\n{found.provenance.sentence(found.profiler)}")
    found.save(arguments.json)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Count; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_measurement(
        run, arguments, "mma_cycles.py", argv, ProfilerError, ValueError, RuntimeError
    )


if __name__ == "__main__":
    sys.exit(main())
