#!/usr/bin/env python3
"""Time the kernels of an operation beside its libraries, in one process."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flash_helpers.console.command_line import (
    add_commit_argument,
    make_parser,
    output_file,
    positive,
    positive_seconds,
    run_tool,
    typed_command,
)
from flash_helpers.console.files import write_if_different
from flash_helpers.console.progress import bar
from flash_helpers.kernel_configs import Config, Problem
from flash_helpers.measure.asked import (
    add_measured_options,
    asked_sizes,
    chosen_operation,
    measured_problem,
)
from flash_helpers.measure.benchmark_tables import report_text
from flash_helpers.measure.code import codes_of
from flash_helpers.measure.command_line import provenance_here
from flash_helpers.measure.machine import GpuSensor, resource_record
from flash_helpers.measure.plots import PlotError, drawable_panels, plot_svg, require_plotting
from flash_helpers.measure.results import (
    CACHE_CHOICES,
    LOADS,
    TIMING_CHOICES,
    BenchmarkResults,
    Protocol,
    refuse_another_gpu,
)
from flash_helpers.registry.operation import TFLOPS, Operation
from flash_helpers.registry.selection import (
    ALL,
    UsageError,
    add_kernel_arguments,
    parse_dtypes,
    require_taken,
    select_kernels,
)
from flash_helpers.runtime.backend import Backend, KernelsNotRun, find_backend

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = """\
Time the kernels of one operation beside its libraries, in one process. Attention runs beside
PyTorch's flash and cuDNN backends, and beside the packages flash_attn and fa3_fwd
(FlashAttention-3) where they are installed. Decode runs beside the same, as far as they take its
caches, beside FlashInfer where it is installed, and beside a copy of as many bytes. Softmax along
rows runs beside PyTorch's softmax and a copy.

The kernels are timed first in bursts, between which the chip rests, then under sustained load,
without a pause. Each sample is a CUDA graph whose launches rotate through several sets of inputs.
Every contender is timed once per round, in an order that changes, and compared with a sample of the
first library next to its own. The first library takes part twice, and the ratio of the two gives
the noise. Clock, power and temperature are read at each sample. Outputs are compared with float64
before and after. A size that does not fit in memory is skipped, and a kernel is left out of
problems that it does not take. A file holds one problem per size and dtype.

Attention: d_head is 128. With 16 heads the batch is 16, or fewer to stay within 65536 tokens; with
more heads it is smaller by the same factor. TFLOP/s count 4 * batch * heads * seq^2 * d_head
operations; for causal problems only the pairs of a query and a key that it sees. The chip's own
rates, of a large matrix product and of mma.sync on registers, are measured too. For an H100 or H200
the table also shows the share of the tensor cores' peak at the measured clock: TFLOP/s / (4096 FLOP
per SM and cycle * SMs * SM clock).

Decode: 32 heads on 8, and as many sequences as have 131072 keys together, 256 at most. GB/s count
the keys that queries see, the queries and the outputs, each once.

Softmax along rows: GB/s count each input read once and each output written once.
"""

EXAMPLES = """\
examples:
  every listed kernel, in bf16, and the data for the README's table:
    python tools/benchmark/pt_bench.py --json benchmarks/results/h100.json
  the first three steps at two lengths:
    python tools/benchmark/pt_bench.py --kernel 1..3 --seq 1024 4096
  the speed that a chip with a power limit sustains, without bursts:
    python tools/benchmark/pt_bench.py --kernel v16 --load sustained
  beside FlashAttention-3 on a machine without network, from local wheels:
    pip install --no-deps fa3_fwd-*.whl einops-*.whl packaging-*.whl
    python tools/benchmark/pt_bench.py --kernel v16 o5
  at lengths that tiles of 192 rows and 80 keys divide, too:
    python tools/benchmark/pt_bench.py --kernel v16 o5 --seq 960 1920 3840 7680 15360
  causal problems, then 32 heads of Q on 8 of K and V, each into a file of its own:
    python tools/benchmark/pt_bench.py --kernel h21 h24 --causal --json causal.json
    python tools/benchmark/pt_bench.py --kernel h24 --heads 32 --kv-heads 8 --json grouped.json
  decode on a cache in pages of 16 keys, then on one sequence, in GB/s and microseconds:
    python tools/benchmark/pt_bench.py --kernel decode_sync --page-size 16 --len-k 2048 8192
    python tools/benchmark/pt_bench.py --kernel decode_sync --batch 1 --len-k 1024
  softmax along rows, in GB/s:
    python tools/benchmark/pt_bench.py --kernel softmax --width 1024 8192 --json rows.json
  one sequence at a time:
    python tools/benchmark/pt_bench.py --kernel h30 --batch 1 --json alone.json
  both dtypes of step 16 in bursts, within a minute, for a spreadsheet:
    python tools/benchmark/pt_bench.py --kernel v16 --dtype all --load burst --csv v16.csv \\
      --time-budget 60
  both dtypes with equal bits in their inputs, to separate the power of bits and of instructions:
    python tools/benchmark/pt_bench.py --kernel h20 --dtype all --load sustained --mantissa-bits 7
  launches without CUDA graphs, with a cold L2 cache:
    python tools/benchmark/pt_bench.py --kernel v16 --timing events --cache flush
  a long measurement in parts: the same command continues at the length where it was interrupted
    python tools/benchmark/pt_bench.py --kernel hopper --resume --json hopper.json
  percent of FlashAttention-2 by step, and TFLOP/s by length, as a picture (needs matplotlib):
    python tools/benchmark/pt_bench.py --plot benchmark.svg

exit status: 0 every kernel was right and timed, 1 a kernel failed, 2 wrong usage or nothing was
run, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_kernel_arguments(parser, default="all of attention", dtype="bf16")
    add_measured_options(parser)
    parser.add_argument(
        "--rounds",
        type=positive,
        default=Protocol().rounds,
        help=f"samples per contender and load (default: {Protocol().rounds})",
    )
    parser.add_argument(
        "--load",
        choices=(*LOADS, "both"),
        default="both",
        help="burst: "
        f"samples of {LOADS['burst'].sample_ms:g} ms, after each the chip idles "
        f"{LOADS['burst'].rest:g} times as long; sustained: {LOADS['sustained'].lead_ms:g} ms "
        f"untimed, {LOADS['sustained'].sample_ms:g} ms timed, without a pause (default: both)",
    )
    parser.add_argument(
        "--time-budget",
        type=positive_seconds,
        default=math.inf,
        metavar="SECONDS",
        help="begin no round after so many seconds, but time at least "
        f"{Protocol().min_rounds} rounds per load",
    )
    parser.add_argument(
        "--timing",
        choices=TIMING_CHOICES,
        default=Protocol().timing,
        help="graph: replay launches from a CUDA graph, so that they cost no host time; events: "
        f"issue launches one by one between events (default: {Protocol().timing})",
    )
    parser.add_argument(
        "--cache",
        choices=CACHE_CHOICES,
        default=Protocol().cache,
        help="rotate through sets of inputs that together exceed the L2 cache, or overwrite the "
        f"cache before each launch (default: {Protocol().cache})",
    )
    parser.add_argument(
        "--mantissa-bits",
        type=positive,
        default=Protocol().mantissa_bits,
        metavar="N",
        help="round inputs to N bits behind the leading one: fp16 has 10, bf16 has 7, and each "
        "bit costs power (default: all)",
    )
    parser.add_argument("--csv", type=output_file, metavar="FILE", help="one row per measurement")
    parser.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="all samples, with machine and software",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="write the file of --json after each size; if the file exists, continue at its end",
    )
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE.svg",
        help="percent of the first library by step, and speed by size",
    )
    add_commit_argument(parser)
    arguments = parser.parse_args(argv)
    if arguments.resume and not arguments.json:
        parser.error("--resume needs the file of the interrupted run: name it with --json")
    return arguments


def protocol_of(arguments: argparse.Namespace) -> Protocol:
    """The requested protocol."""
    return Protocol(
        rounds=arguments.rounds,
        loads=tuple(load for load in LOADS.values() if arguments.load in (load.name, "both")),
        timing=arguments.timing,
        cache=arguments.cache,
        mantissa_bits=arguments.mantissa_bits,
    )


def choose(
    arguments: argparse.Namespace,
    backend: Backend,
    operation: Operation,
    shapes: Sequence[Problem],
) -> list[Config]:
    """The chosen kernels; at least one takes each problem. Raises PlotError and UsageError."""
    first = shapes[0]
    if arguments.plot:
        usual = measured_problem(argparse.Namespace(), operation, getattr(first, operation.swept))
        if first != usual:
            raise UsageError("--plot draws steps only at their usual problems: leave --plot out")
        require_plotting()
    dtypes = parse_dtypes(arguments.dtype)
    own = [c for c in backend.kernels if c.family.operation == operation]
    selectors = arguments.kernel or [ALL]
    configs = select_kernels(own, selectors, dtypes, problems={operation.name: first})
    for shape in shapes:
        require_taken(configs, shape)
    return configs


def measure(arguments: argparse.Namespace, command: str) -> BenchmarkResults:
    """Measure the requested kernels.

    Raises KernelsNotRun without a GPU, PlotError if a plot cannot be drawn, OSError, and ValueError
    for kernels that cannot be measured.
    """
    from flash_helpers.measure.benchmark import (  # imports torch: late, so that --help is fast
        BenchmarkRun,
        contenders_for,
        library_records,
        n_steps,
        run_benchmark,
    )
    from flash_helpers.measure.rates import default_rate_works
    from flash_helpers.measure.timing import make_timer

    protocol = protocol_of(arguments)
    backend = find_backend("cuda")
    found = provenance_here(backend, command, arguments, ROOT)
    if arguments.json:
        refuse_another_gpu(arguments.json, found.gpu)
    asked = parse_dtypes(arguments.dtype)
    operation = chosen_operation(backend.kernels, arguments.kernel, asked)
    sizes = asked_sizes(arguments, operation)
    shape_for = partial(measured_problem, arguments, operation)
    shapes = [shape_for(size) for size in sizes]
    configs = choose(arguments, backend, operation, shapes)
    dtypes = sorted({config.dtype for config in configs})
    siblings = {sibling for config in configs for sibling in config.siblings()}
    codes = codes_of(siblings, found.compute_capability)
    contenders = {
        dtype: contenders_for(configs, dtype, backend, operation, codes) for dtype in dtypes
    }
    is_counted = operation.metric == TFLOPS  # otherwise the chip's rates are no ceiling

    def results_of(run: BenchmarkRun) -> BenchmarkResults:
        return BenchmarkResults(
            provenance=found,
            protocol=protocol,
            libraries=library_records(contenders[dtypes[0]], operation),
            resources=tuple(resource_record(config, backend.device) for config in configs),
            **vars(run),
        )

    def keep(run: BenchmarkRun) -> None:
        if arguments.resume:
            results_of(run).save(arguments.json)

    measured = None
    if arguments.resume and arguments.json.exists():
        before = BenchmarkResults.load(arguments.json)
        before.require_same_run(results_of(BenchmarkRun()), arguments.json)
        measured = BenchmarkRun(before.rates, before.skipped, before.measurements)
    steps = sum(n_steps(len(each), protocol) for each in contenders.values())
    with bar(total=len(shapes) * steps, desc="benchmark", unit="step") as shown:
        run = run_benchmark(
            *(contenders, sizes, backend.device, make_timer(backend.device, protocol)),
            *(protocol, GpuSensor(backend.device), shape_for),
            rate_works=default_rate_works(backend.device) if is_counted else {},
            time_budget_s=arguments.time_budget,
            advance=shown.update,
            measured=measured,
            keep=keep,
        )
    if not run.measurements:
        skipped = next(s for s in run.skipped if not s.name)
        raise UsageError(f"nothing was measured: {skipped.asked} {skipped.reason}")
    return results_of(run)


def run(arguments: argparse.Namespace, command: str) -> int:
    """Measure, write the files and print; returns the exit status. Raises as `measure` does."""
    results = measure(arguments, command)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(argv)
    command = typed_command("pt_bench.py", argv)
    kept = "the sizes that were finished are kept, and the same command continues there"
    return run_tool(
        lambda: run(arguments, command),
        *(KernelsNotRun, OSError, PlotError, ValueError),
        interrupted=f"interrupted: {kept if arguments.resume else 'nothing was written'}",
    )


if __name__ == "__main__":
    sys.exit(main())
