#!/usr/bin/env python3
"""Compare the instructions that the SASS predicts with those that a GPU executes."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, run_tool, typed_command
from flash_helpers.console.progress import progress_bar
from flash_helpers.measure.counter_check import add_check_arguments, run_check, shape_for
from flash_helpers.measure.execution_check import (
    METRICS,
    OPCODE_METRIC,
    ExecutionCheck,
    ExecutionRecord,
    predict_launch,
    predict_roles,
    profile_launches,
)
from flash_helpers.measure.machine import git_commit, provenance
from flash_helpers.measure.machine_code import library_kernels
from flash_helpers.measure.nsight import NsightCompute, ProfilerError
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.selection import UsageError, chosen_kernels
from flash_helpers.runtime.backend import Backend, KernelsNotRun, find_backend
from flash_helpers.sass.analyse.phases import NotDeterminedError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results/sass_h100.json")
HOPPER_RESULTS = Path("benchmarks/results/sass_hopper_h200.json")
PAGE = Path("docs/sass.md")
LAUNCHER = Path("tools/benchmark/run_kernels.py")

DESCRIPTION = f"""\
On a machine with a GPU and Nsight Compute: count the instructions in the SASS of every kernel,
weight them with the trip counts that the config and the sequence length give, and compare with what
the GPU counts while it runs the kernel: all executed instructions, those of each kind and pipe, and
those of each opcode ({OPCODE_METRIC}). The warps of family hopper have roles
and spin where they wait: of it those opcodes are compared that ptxas makes one for one of PTX, with
what the simulator executes of that. With --write-docs or --check alone nothing is run: {PAGE}
is brought up to date, or compared, with the numbers of the file.
"""

EXAMPLES = f"""\
examples:
  all kernels of the progression, and what ncu wrote, for diagnosis:
    python tools/analysis/check_executed_counts.py --json {RESULTS} --raw ncu_raw
  family hopper, which has a file and a table of its own:
    python tools/analysis/check_executed_counts.py --kernel h1..h30 --dtype bf16 \\
      --json {HOPPER_RESULTS}
  what would be compared, on a machine without a GPU:
    python tools/analysis/check_executed_counts.py --predict --arch sm_80 --kernel 16
  the table in the docs, from that file (no GPU needed):
    python tools/analysis/check_executed_counts.py --write-docs
  does the page show what the data says? (exit 1 and a diff if not)
    python tools/analysis/check_executed_counts.py --check

exit status: 0 all agree or are up to date, 1 something disagrees, some counters are missing or
--check found the page stale, 2 wrong usage or nothing was run, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    action = add_check_arguments(parser, ROOT, RESULTS, PAGE)
    parser.add_argument(
        "--arch", default="sm_90", help="of --predict; a GPU has its own (default: sm_90)"
    )
    action.add_argument("--predict", action="store_true", help="print the predictions, run nothing")
    return parser.parse_args(argv)


def predict(arguments: argparse.Namespace, backend: Backend, arch: str) -> list[ExecutionRecord]:
    """What each chosen kernel executes, from its text; those that decide by their data are left
    out with a line on stderr. Raises SassError and ValueError."""
    configs = chosen_kernels(arguments, backend.kernels)
    with progress_bar("disassembling") as progress:
        kernels = library_kernels(arch, configs, progress=progress)
    records = []
    for config in configs:
        try:
            shape = shape_for(config, arguments.seq)
            prediction = predict_roles if config.family is HOPPER else predict_launch
            records.append(prediction(kernels[config], config, shape))
        except NotDeterminedError as error:
            print(f"left out: {error}", file=sys.stderr)
    if not records:
        raise UsageError("what the chosen kernels execute cannot be told: choose others")
    return records


def measure(arguments: argparse.Namespace, command: str) -> ExecutionCheck:
    """Predict, then count on the GPU.

    Raises KernelsNotRun without one, SassError, ValueError and ProfilerError.
    """
    import torch  # which --help does not wait for

    backend = find_backend("cuda")
    major, minor = torch.cuda.get_device_capability(backend.device)
    records = predict(arguments, backend, f"sm_{major}{minor}")
    ncu = NsightCompute.find(arguments.raw)
    metrics = ncu.available(METRICS)
    unavailable = tuple(metric for metric in METRICS if metric not in metrics)
    for metric in unavailable:
        print(f"this GPU has no metric {metric}", file=sys.stderr)
    print(f"counting {len(metrics)} of {len(METRICS)} metrics", file=sys.stderr)
    launcher = [sys.executable, str(ROOT / LAUNCHER)]
    records, failure = profile_launches(records, ncu, launcher, metrics)
    return ExecutionCheck(
        provenance=provenance(backend, command, arguments.commit or git_commit(ROOT)),
        profiler=f"Nsight Compute {ncu.version()}",
        profiler_failure=failure,
        unavailable=unavailable,
        kernels=tuple(records),
    )


def print_predictions(arguments: argparse.Namespace) -> int:
    """Print what would be compared; returns the exit status. Raises as `predict` does."""
    for record in predict(arguments, find_backend(), arguments.arch):
        print(f"{record.name} {'x'.join(map(str, record.shape))}")
        for counts in (record.predicted, record.predicted_opcodes):
            print("  ", ", ".join(f"{k} {v:,}" for k, v in counts.items() if v))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check, or bring the page up to date; returns the exit status."""
    arguments = parse_arguments(argv)
    command = typed_command("check_executed_counts.py", argv)

    def run() -> int:
        if arguments.predict:
            return print_predictions(arguments)
        return run_check(arguments, ExecutionCheck, lambda: measure(arguments, command))

    return run_tool(run, KernelsNotRun, ProfilerError, OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
