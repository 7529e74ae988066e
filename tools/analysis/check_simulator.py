#!/usr/bin/env python3
"""Compare the simulator with a GPU: outputs bit by bit, and counts with Nsight Compute's."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flash_helpers.console.command_line import make_parser, run_tool, typed_command
from flash_helpers.console.progress import bar
from flash_helpers.measure.counter_check import (
    add_check_arguments,
    run_check,
    shape_for,
    with_counters,
)
from flash_helpers.measure.machine import git_commit, provenance
from flash_helpers.measure.nsight import NsightCompute, ProfilerError
from flash_helpers.registry.selection import chosen_kernels
from flash_helpers.runtime.backend import KernelsNotRun, find_backend

if TYPE_CHECKING:
    from flash_helpers.measure.simulator_check import SimulatorCheck

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results/simulator_h100.json")
HOPPER_RESULTS = Path("benchmarks/results/simulator_hopper_h200.json")
PAGE = Path("docs/simulator.md")
LAUNCHER = Path("tools/benchmark/run_kernels.py")

DESCRIPTION = f"""\
On a machine with a GPU, run every kernel on the GPU and in the simulator on the same inputs and
compare the outputs; then run Nsight Compute on the same launches and compare its counters with the
simulator's: of family hopper those of wgmma, TMA and stmatrix. With --write-docs or --check alone
nothing is run: {PAGE} is brought up to date, or compared, with the numbers of the file.
"""

EXAMPLES = f"""\
examples:
  all kernels of the progression, and what ncu wrote, for diagnosis:
    python tools/analysis/check_simulator.py --json {RESULTS} --raw ncu_raw
  family hopper, which has a file and a table of its own:
    python tools/analysis/check_simulator.py --kernel h1..h30 --dtype bf16 \\
      --json {HOPPER_RESULTS}
    python tools/analysis/check_simulator.py --write-docs --json {HOPPER_RESULTS}
  the table in the docs, from that file (no GPU needed):
    python tools/analysis/check_simulator.py --write-docs
  does the page show what the data says? (exit 1 and a diff if not)
    python tools/analysis/check_simulator.py --check

exit status: 0 all agree or are up to date, 1 something disagrees or --check found the page stale,
2 wrong usage or nothing was run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_check_arguments(parser, ROOT, RESULTS, PAGE)
    parser.add_argument("--no-profiler", action="store_true", help="compare the outputs only")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, command: str) -> SimulatorCheck:
    """Run the kernels both ways, then count.

    Raises KernelsNotRun without a GPU, UsageError if a kernel is not built.
    """
    from flash_helpers.measure.simulator_check import METRICS, SimulatorCheck, compare_kernel

    backend = find_backend("cuda")
    configs = chosen_kernels(arguments, backend.kernels)
    records = [
        compare_kernel(config, shape_for(config, arguments.seq), backend)
        for config in bar(configs, desc="simulator and GPU", unit="kernel")
    ]
    profiler = failure = ""
    if not arguments.no_profiler:
        try:
            ncu = NsightCompute.find(arguments.raw)
            profiler = f"Nsight Compute {ncu.version()}"
            print("counting with Nsight Compute", file=sys.stderr)
            launcher = [sys.executable, str(ROOT / LAUNCHER)]
            records, failures = with_counters(records, ncu, launcher, METRICS)
            failure = "\n".join(failures)
        except ProfilerError as error:
            failure = str(error)
    return SimulatorCheck(
        provenance=provenance(backend, command, arguments.commit or git_commit(ROOT)),
        profiler=profiler,
        profiler_failure=failure,
        kernels=tuple(records),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check, or bring the page up to date; returns the exit status."""
    arguments = parse_arguments(argv)
    command = typed_command("check_simulator.py", argv)

    def run() -> int:
        from flash_helpers.measure.simulator_check import SimulatorCheck  # --help does without

        return run_check(arguments, SimulatorCheck, lambda: measure(arguments, command))

    return run_tool(run, KernelsNotRun, OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
