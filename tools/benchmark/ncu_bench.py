#!/usr/bin/env python3
"""Time and count kernels with Nsight Compute."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.console.command_line import (
    add_commit_argument,
    make_parser,
    output_file,
    output_folder,
    positive,
)
from flash_helpers.console.files import write_if_different
from flash_helpers.measure.asked import chosen_operation, measured_problem
from flash_helpers.measure.command_line import provenance_here, run_measurement
from flash_helpers.measure.ncu_bench import LIBRARY_KERNELS, NcuResults, ncu_table, profile_kernels
from flash_helpers.measure.nsight import NsightCompute, ProfilerError
from flash_helpers.registry.selection import (
    UsageError,
    add_kernel_arguments,
    add_problem_options,
    chosen_kernels,
    parse_dtypes,
    require_options_of,
    require_supported,
)
from flash_helpers.runtime.backend import find_backend

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "tools/benchmark/run_kernels.py"

SIZE = 4096  # of the problem, if none is asked for
DESCRIPTION = f"""\
Run kernels under Nsight Compute and print its counts, the mean of --runs launches. The table has
duration, cycles, registers, occupancy, L2 hit rate, use of the tensor pipe, bank conflicts of
shared memory, instructions, and the largest stall reasons, in cycles that a warp waited per issued
instruction. The problem is the one that pt_bench.py measures at a size, {SIZE} by default.
Clocks are left as they are. A launch is repeated for each group of counters, so that its duration
is that of a single launch on the GPU, with a warm cache; compare speeds with pt_bench.py.
"""

EXAMPLES = """\
examples:
  the bank conflicts that the swizzle removes, on a GPU:
    python tools/benchmark/ncu_bench.py --kernel 1 2 --dtype bf16
  step 16 beside PyTorch's flash backend:
    python tools/benchmark/ncu_bench.py --kernel 16 --dtype bf16 --library flash --seq 8192
  causal kernels of step h24, 32 heads of Q on 8 of K and V:
    python tools/benchmark/ncu_bench.py --kernel h24 --causal --heads 32 --kv-heads 8
  the whole progression, for a spreadsheet:
    python tools/benchmark/ncu_bench.py --dtype bf16 --csv ncu.csv --json ncu.json

exit status: 0 every kernel was counted, 1 a kernel was not, 2 wrong usage or nothing could be
counted, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_kernel_arguments(parser, dtype="bf16")
    parser.add_argument(
        "--library",
        nargs="+",
        choices=LIBRARY_KERNELS,
        default=[],
        help="also count a library's attention",
    )
    add_problem_options(parser)
    parser.add_argument("--runs", type=positive, default=3, help="launches per kernel (default: 3)")
    parser.add_argument("--csv", type=output_file, metavar="FILE", help="one row per kernel")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="counts, machine and software"
    )
    parser.add_argument("--raw", type=output_folder, metavar="DIR", help="keep all output of ncu")
    add_commit_argument(parser)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, command: str) -> int:
    """Profile, print and write; returns the exit status.

    Raises KernelsNotRun without a GPU, ProfilerError, OSError and ValueError.
    """
    backend = find_backend("cuda")
    dtypes = parse_dtypes(arguments.dtype)
    operation = chosen_operation(backend.kernels, arguments.kernel, dtypes)
    require_options_of(arguments, [operation.name])
    others = [
        name for name in arguments.library if LIBRARY_KERNELS[name][0] not in operation.libraries
    ]
    if others:
        raise UsageError(f"--library {' '.join(others)} does not compute {operation.name}")
    asked = getattr(arguments, operation.swept)
    shape = measured_problem(arguments, operation, SIZE if asked is None else asked)
    profiler = NsightCompute.find(arguments.raw)
    configs = chosen_kernels(arguments, backend.kernels, {shape.operation: shape})
    require_supported(configs, shape)
    print(f"counting {len(configs)} kernels with {profiler.executable}", file=sys.stderr)
    launcher = [sys.executable, str(LAUNCHER)]
    kernels, failures = profile_kernels(
        configs, arguments.library, shape, arguments.runs, profiler, launcher
    )
    print("\n".join(failures), file=sys.stderr, end="\n" if failures else "")
    if not kernels:
        return 2
    results = NcuResults(
        provenance=provenance_here(backend, command, arguments, ROOT),
        profiler=f"Nsight Compute {profiler.version()}",
        kernels=tuple(kernels),
    )
    print(ncu_table(results))
    if arguments.csv:
        write_if_different(arguments.csv, results.to_csv())
    if arguments.json:
        results.save(arguments.json)
    return 1 if failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Profile the kernels; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_measurement(run, arguments, "ncu_bench.py", argv, OSError, ProfilerError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
