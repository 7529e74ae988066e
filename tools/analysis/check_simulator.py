#!/usr/bin/env python3
"""Compare the simulator with a GPU: outputs bit by bit, and counts with Nsight Compute's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from flash_helpers.backend import Backend, KernelsNotRun, find_backend
from flash_helpers.benchmark_tables import replace_between_markers
from flash_helpers.command_line import (
    add_commit_argument,
    make_parser,
    run_tool,
    typed_command,
    write_or_check,
)
from flash_helpers.machine import git_commit, provenance
from flash_helpers.nsight import NsightCompute, ProfilerError
from flash_helpers.selection import (
    UsageError,
    add_kernel_arguments,
    chosen_kernels,
)
from flash_helpers.simulator_check import (
    BEGIN_MARKER,
    END_MARKER,
    SimulatorCheck,
    check_tables,
    compare_kernel,
    disagreements,
    load_check,
    profile_kernels,
    shape_for,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results/simulator_h100.json")
PAGE = Path("docs/simulator.md")
LAUNCHER = Path("tools/benchmark/run_kernels.py")

DESCRIPTION = f"""\
On a machine with a GPU, run every kernel on the GPU and in the simulator on the same inputs and
compare the outputs; then run Nsight Compute on the same launches and compare its counters with the
simulator's. With --write-docs or --check alone nothing is run: {PAGE} is brought up to date, or
compared, with the numbers of the file.
"""

EXAMPLES = f"""\
examples:
  all kernels of the progression, and what ncu wrote, for diagnosis:
    python tools/analysis/check_simulator.py --json {RESULTS} --raw ncu_raw
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
    add_kernel_arguments(parser)
    parser.add_argument("--seq", type=int, default=512, help="sequence length (default: 512)")
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / RESULTS,
        metavar="FILE",
        help=f"where the numbers go or come from (default: {RESULTS})",
    )
    parser.add_argument("--raw", type=Path, metavar="DIR", help="keep all that ncu wrote")
    parser.add_argument("--no-profiler", action="store_true", help="compare the outputs only")
    add_commit_argument(parser)
    parser.add_argument("--docs", type=Path, default=ROOT / PAGE, help=f"(default: {PAGE})")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write-docs", action="store_true", help="write the table from the file")
    action.add_argument(
        "--check", action="store_true", help="write nothing; print a diff and exit 1 if stale"
    )
    return parser.parse_args(argv)


def update_docs(arguments: argparse.Namespace) -> int:
    """Write or check the page; returns the exit status."""
    old = arguments.docs.read_text(encoding="utf-8")
    tables = check_tables(load_check(arguments.json))
    new = replace_between_markers(old, tables, BEGIN_MARKER, END_MARKER)
    return write_or_check(arguments.docs, old, new, arguments.check)


def measure(arguments: argparse.Namespace, backend: Backend, command: str) -> SimulatorCheck:
    """Run the kernels both ways, then count. Raises UsageError if a kernel is not built."""
    configs = chosen_kernels(arguments, backend.kernels)
    if arguments.seq < 1:
        raise UsageError(f"--seq {arguments.seq} is not positive")
    records = [
        compare_kernel(config, shape_for(config, arguments.seq), backend)
        for config in tqdm(configs, desc="simulator and GPU", unit="kernel")
    ]
    profiler = failure = ""
    if not arguments.no_profiler:
        try:
            ncu = NsightCompute.find(arguments.raw)
            profiler = f"Nsight Compute {ncu.version()}"
            print("counting with Nsight Compute", file=sys.stderr)
            launcher = [sys.executable, str(ROOT / LAUNCHER)]
            records, failure = profile_kernels(records, ncu, launcher)
        except ProfilerError as error:
            failure = str(error)
    return SimulatorCheck(
        provenance=provenance(
            backend.device, backend.library, command, arguments.commit or git_commit(ROOT)
        ),
        profiler=profiler,
        profiler_failure=failure,
        kernels=tuple(records),
    )


def run(arguments: argparse.Namespace, command: str) -> int:
    """Check and print, or bring the page up to date; returns the exit status.

    Raises KernelsNotRun without a GPU, OSError and ValueError.
    """
    if arguments.write_docs or arguments.check:
        return update_docs(arguments)
    check = measure(arguments, find_backend("cuda"), command)
    check.save(arguments.json)
    print(check_tables(check))
    found = disagreements(check)
    print("\n".join(["", *found] if found else ["", "all counts agree"]))
    if check.profiler_failure:
        print(check.profiler_failure, file=sys.stderr)
    return 1 if found or check.profiler_failure else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check, or bring the page up to date; returns the exit status."""
    arguments = parse_arguments(argv)
    command = typed_command("check_simulator.py", argv)
    return run_tool(lambda: run(arguments, command), KernelsNotRun, OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
