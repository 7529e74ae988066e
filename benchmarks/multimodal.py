#!/usr/bin/env python3
"""Time a multimodal block, its attention and a model of such blocks, beside torch.compile."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, not_negative, positive
from flash_helpers.console.progress import bar
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.measure.multimodal import (
    NAMES,
    PARTS,
    BlockTimes,
    counts_table,
    problems,
)
from flash_helpers.measure.results import LOADS, SUSTAINED, Protocol
from flash_helpers.runtime.backend import find_backend

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/multimodal_h200.json"
BATCHES, LENGTHS, CONTEXTS = (1, 16, 64, 256, 1024), (64, 186, 512), (0, 64, 256)

DESCRIPTION = """\
Time joint attention, a transformer block and a model of 12 layers of flash_attention.multimodal, at
width 128 with 8 heads and feed-forward 512, in bf16: eager with PyTorch's attention, eager with a
kernel where one takes the problem, eager with norms, rotary embedding, modulation and gates in
Triton, where it is installed, and compiled by torch.compile with max-autotune, with PyTorch's
attention and with a kernel. All are replayed from CUDA graphs, in turns under sustained load. Each
output is first compared with float64. The floor is the time of the least bytes at the speed of a
copy, or of the matrix products at the speed of a large one, both measured in the same process. The
file is written after each problem.
"""

EXAMPLES = f"""\
examples:
  measure, print and write {RESULTS}; needs a GPU:
    python benchmarks/multimodal.py
  attention in heads of 64, which kernels take, without the compiler:
    python benchmarks/multimodal.py --part attention --heads 2 --name eager kernels --json two.json
  bytes and operations of all sizes with each other, without a GPU:
    python benchmarks/multimodal.py --count --product

exit status: 0 measured or counted, 1 a contender is wrong or failed, 2 wrong usage or no GPU,
130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_results_arguments(parser, ROOT, RESULTS)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--name", nargs="+", choices=NAMES, default=[*NAMES], help="contenders")
    for name, usual, kind in (
        ("batch", BATCHES, positive),
        ("length", LENGTHS, positive),
        ("context", CONTEXTS, not_negative),
    ):
        text = " ".join(map(str, usual))
        parser.add_argument(
            f"--{name}", nargs="+", type=kind, default=None, metavar="N", help=f"(default: {text})"
        )
    parser.add_argument("--heads", type=positive, default=8, metavar="N", help="(default: 8)")
    parser.add_argument(
        "--product",
        action="store_true",
        help="all sizes with each other; by default one at a time differs from batch 64, length "
        "186 and context 64, unless sizes are given",
    )
    parser.add_argument(
        "--count", action="store_true", help="print bytes and operations alone; needs no GPU"
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="(default: 5)")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, command: str) -> int:
    """Measure, print and write; returns the exit status. Raises KernelsNotRun without a GPU."""
    given = arguments.batch, arguments.length, arguments.context
    sizes = (own or usual for own, usual in zip(given, (BATCHES, LENGTHS, CONTEXTS), strict=True))
    product = arguments.product or any(given)
    asked = problems(arguments.part, *sizes, arguments.heads, product)
    if arguments.count:
        print(counts_table(asked).text())
        return 0
    backend = find_backend("cuda")

    import torch  # late, so that --help is fast

    from flash_attention import multimodal
    from flash_helpers.measure.machine import GpuSensor
    from flash_helpers.measure.multimodal import (
        contenders,
        left_out,
        make_call,
        measure_problem,
        measure_rates,
    )
    from flash_helpers.measure.timing import make_timer

    protocol = Protocol(rounds=arguments.rounds, loads=(LOADS[SUSTAINED],))
    timer, sensor = make_timer(backend.device, protocol), GpuSensor(backend.device)
    provenance = provenance_here(backend, command, arguments, ROOT)
    reasons = {name: reason for name in arguments.name if (reason := left_out(name))}
    for name, reason in reasons.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    names = [name for name in arguments.name if name not in reasons]
    found = []
    with torch.no_grad(), bar(asked, desc="timing", unit="problem") as shown:
        rates = measure_rates(backend.device, timer, protocol)
        for problem in shown:
            torch.compiler.reset()  # a graph for each problem, whatever came before
            exact = make_call(multimodal, problem, backend.device, "torch").exact()
            calls = contenders(multimodal, problem, backend.device, names)
            found += measure_problem(problem, calls, exact, timer, protocol, sensor)
            del calls  # before those of the next problem are made
            times = BlockTimes(provenance, protocol, *rates, tuple(found))
            times.save(arguments.json)
    print(times.table().text())
    # that no kernel takes a problem is no failure of the benchmark
    failures = [r for r in found if r.failure and "backend 'kernels'" not in r.failure]
    for failed in failures:
        print(f"{failed.name}, {failed.problem}: {failed.failure}", file=sys.stderr)
    return 1 if failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    arguments = parse_arguments(argv)
    kept = f"{arguments.json} holds each problem that was measured"
    return run_measurement(run, arguments, "benchmarks/multimodal.py", argv, OSError, kept=kept)


if __name__ == "__main__":
    sys.exit(main())
