#!/usr/bin/env python3
"""Time the kernels beside PyTorch's flash and cuDNN backends, in one process."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from flash_helpers.backend import KernelsNotRun, find_backend
from flash_helpers.benchmark import (
    DEFAULT_SEQ_LENS,
    LIBRARY_BACKENDS,
    CudaTimer,
    default_shape,
    n_steps,
    run_benchmark,
)
from flash_helpers.benchmark_tables import report_text
from flash_helpers.machine import GpuMonitor, git_commit, provenance, resource_record
from flash_helpers.results import BenchmarkResults, Protocol
from flash_helpers.selection import (
    UsageError,
    add_kernel_arguments,
    parse_dtypes,
    require_whole_blocks,
    select_kernels,
)

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = """\
Time the kernels beside PyTorch's flash and cuDNN backends, in one process. Each sample is a CUDA
graph that goes round several sets of inputs; every contender is timed once a round, in an order
that turns round; outputs are compared with float64 before and after. 16 heads, d_head 128; batch
16, or what 65536 tokens leave. TFLOP/s count 4 * batch * heads * seq^2 * d_head operations.
"""

EXAMPLES = """\
examples:
  every kernel that is built, in bf16, and the data for the README's table:
    python tools/benchmark/pt_bench.py --json benchmarks/results/h100.json
  the first three steps at two lengths:
    python tools/benchmark/pt_bench.py --kernel 1..3 --seq 1024 4096
  both dtypes of version 16 within a minute, for a spreadsheet:
    python tools/benchmark/pt_bench.py --kernel v16 --dtype both --time-budget 60 --csv v16.csv

exit status: 0 every kernel was right and timed, 1 a kernel failed, 2 wrong usage or nothing was run
"""


def positive(text: str) -> int:
    """A positive whole number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive: use 1 or more")
    return value


def positive_seconds(text: str) -> float:
    """A positive number of seconds."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} seconds are not positive")
    return value


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_kernel_arguments(parser, default="all", dtype="bf16")
    parser.add_argument(
        "--seq",
        nargs="+",
        type=positive,
        default=list(DEFAULT_SEQ_LENS),
        metavar="N",
        help=f"sequence lengths (default: {' '.join(map(str, DEFAULT_SEQ_LENS))})",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=Protocol().rounds,
        help=f"samples a contender (default: {Protocol().rounds})",
    )
    parser.add_argument(
        "--time-budget",
        type=positive_seconds,
        default=math.inf,
        metavar="SECONDS",
        help=f"begin no round after so many seconds, but time {Protocol().min_rounds} of each",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="one row a measurement")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="all samples, with what they were measured on"
    )
    parser.add_argument(
        "--commit", metavar="HASH", help="commit of the sources (default: asked from git)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(argv)
    seq_lens = sorted(set(arguments.seq))
    protocol = Protocol(rounds=arguments.rounds)
    try:
        backend = find_backend("cuda")
        configs = select_kernels(
            backend.kernels, arguments.kernel, parse_dtypes(arguments.dtype), backend.kernels
        )
        for seq_len in seq_lens:
            require_whole_blocks(configs, default_shape(seq_len))
    except (KernelsNotRun, UsageError) as error:
        print(error, file=sys.stderr)
        return 2
    n_dtypes = len({config.dtype for config in configs})
    steps = n_dtypes * (n_steps(len(LIBRARY_BACKENDS), protocol)) + 2 * len(configs)
    try:
        with tqdm(total=len(seq_lens) * steps, desc="benchmark", unit="step") as bar:
            measurements, clocks = run_benchmark(
                configs,
                seq_lens,
                backend,
                CudaTimer(backend.device),
                protocol,
                make_monitor=lambda: GpuMonitor(backend.device),
                time_budget_s=arguments.time_budget,
                advance=bar.update,
            )
    except torch.cuda.OutOfMemoryError:
        print(f"not enough memory for seq {max(seq_lens)}: use shorter --seq", file=sys.stderr)
        return 2
    results = BenchmarkResults(
        provenance=provenance(
            backend.device,
            backend.library,
            command=shlex.join(["pt_bench.py", *(sys.argv[1:] if argv is None else argv)]),
            commit=arguments.commit or git_commit(ROOT),
        ),
        protocol=protocol,
        clocks=tuple(clocks),
        resources=tuple(resource_record(config, backend.device) for config in configs),
        measurements=tuple(measurements),
    )
    if arguments.json:
        results.save_json(arguments.json)
    if arguments.csv:
        results.save_csv(arguments.csv)
    print(report_text(results))
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
