#!/usr/bin/env python3
"""Time the kernels beside PyTorch's own and the flash_attn package, in one process."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from flash_helpers.command_line import (
    add_commit_argument,
    add_lengths_argument,
    make_parser,
    positive,
    positive_seconds,
    typed_command,
)
from flash_helpers.files import write_if_different
from flash_helpers.measure.benchmark import (
    DEFAULT_SEQ_LENS,
    default_shape,
    library_contenders,
    library_records,
    n_steps,
    run_benchmark,
)
from flash_helpers.measure.benchmark_tables import report_text
from flash_helpers.measure.machine import GpuMonitor, git_commit, provenance, resource_record
from flash_helpers.measure.plots import PlotError, drawable_panels, plot_svg, require_plotting
from flash_helpers.measure.rates import default_rate_works
from flash_helpers.measure.results import (
    CACHE_CHOICES,
    TIMING_CHOICES,
    BenchmarkResults,
    Protocol,
    refuse_another_gpu,
)
from flash_helpers.measure.timing import make_timer
from flash_helpers.registry.selection import (
    add_kernel_arguments,
    chosen_kernels,
    require_supported,
)
from flash_helpers.runtime.backend import KernelsNotRun, find_backend

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = """\
Time the kernels beside PyTorch's flash and cuDNN backends, and the flash_attn package where it is
installed, in one process. Each sample is a CUDA graph that goes round several sets of inputs; every
contender is timed once a round, in an order that changes; outputs are compared with float64
before and after. 16 heads, d_head 128; batch 16, or what 65536 tokens leave; a length that does not
fit in memory is skipped. TFLOP/s count 4 * batch * heads * seq^2 * d_head operations. The chip's
own rates, of a large matrix product and of mma.sync on registers, are measured along with them.
"""

EXAMPLES = """\
examples:
  every kernel that is built, in bf16, and the data for the README's table:
    python tools/benchmark/pt_bench.py --json benchmarks/results/h100.json
  the first three steps at two lengths:
    python tools/benchmark/pt_bench.py --kernel 1..3 --seq 1024 4096
  both dtypes of version 16 within a minute, for a spreadsheet:
    python tools/benchmark/pt_bench.py --kernel v16 --dtype both --time-budget 60 --csv v16.csv
  as a program without CUDA graphs sees it, with a cold L2 cache:
    python tools/benchmark/pt_bench.py --kernel v16 --timing events --cache flush
  percent of FlashAttention-2 by step, and TFLOP/s by length, as a picture (needs matplotlib):
    python tools/benchmark/pt_bench.py --plot benchmark.svg

exit status: 0 every kernel was right and timed, 1 a kernel failed, 2 wrong usage or nothing was
run, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_kernel_arguments(parser, default="all", dtype="bf16")
    add_lengths_argument(parser, "--seq", DEFAULT_SEQ_LENS, "sequence lengths")
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
    parser.add_argument(
        "--timing",
        choices=TIMING_CHOICES,
        default=Protocol().timing,
        help="replay launches from a CUDA graph, so that none costs host time, or issue them one "
        f"by one between events (default: {Protocol().timing})",
    )
    parser.add_argument(
        "--cache",
        choices=CACHE_CHOICES,
        default=Protocol().cache,
        help="go round sets of inputs that together exceed the L2 cache, or overwrite the cache "
        f"before each launch (default: {Protocol().cache})",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="one row a measurement")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="all samples, with what they were measured on"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="percent of flash by step, and TFLOP/s by length",
    )
    add_commit_argument(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(argv)
    seq_lens = sorted(set(arguments.seq))
    protocol = Protocol(rounds=arguments.rounds, timing=arguments.timing, cache=arguments.cache)
    command = typed_command("pt_bench.py", argv)
    try:
        backend = find_backend("cuda")
        found = provenance(
            backend.device, backend.library, command, arguments.commit or git_commit(ROOT)
        )
        if arguments.json:
            refuse_another_gpu(arguments.json, found.gpu)
        if arguments.plot:
            require_plotting()
        configs = chosen_kernels(arguments, backend.kernels, default=backend.kernels)
        for seq_len in seq_lens:
            require_supported(configs, default_shape(seq_len))
    except (KernelsNotRun, OSError, PlotError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    libraries = library_contenders()
    n_dtypes = len({config.dtype for config in configs})
    steps = n_dtypes * n_steps(len(libraries), protocol) + 2 * len(configs)
    try:
        with tqdm(total=len(seq_lens) * steps, desc="benchmark", unit="step") as bar:
            run = run_benchmark(
                configs,
                seq_lens,
                backend,
                make_timer(backend.device, protocol),
                protocol,
                make_monitor=lambda: GpuMonitor(backend.device),
                rate_works=default_rate_works(backend.device),
                time_budget_s=arguments.time_budget,
                advance=bar.update,
            )
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        return 130
    if not run.measurements:
        skipped = run.skipped[0]
        print(f"nothing was measured: seq {skipped.seq_len} {skipped.reason}", file=sys.stderr)
        return 2
    results = BenchmarkResults(
        provenance=found,
        protocol=protocol,
        clocks=tuple(run.clocks),
        rates=tuple(run.rates),
        libraries=library_records(libraries),
        skipped=tuple(run.skipped),
        resources=tuple(resource_record(config, backend.device) for config in configs),
        measurements=tuple(run.measurements),
    )
    if arguments.json:
        results.save(arguments.json)
    if arguments.csv:
        write_if_different(arguments.csv, results.to_csv())
    print(report_text(results))
    if arguments.plot:
        try:
            write_if_different(arguments.plot, plot_svg(results, drawable_panels(results)))
        except PlotError as error:
            print(f"no plot was made: {error}", file=sys.stderr)
            return 1
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
