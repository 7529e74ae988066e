#!/usr/bin/env python3
"""Measure a forward and a backward pass through autograd, beside PyTorch's own attention."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flash_helpers.console.command_line import make_parser, positive
from flash_helpers.console.progress import bar
from flash_helpers.kernel_configs import Element
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.measure.machine import GpuSensor
from flash_helpers.measure.results import LOADS, SUSTAINED, Protocol
from flash_helpers.operations.attention_backward.problems import measured
from flash_helpers.runtime.backend import find_backend

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/autograd_h200.json"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

DESCRIPTION = """\
Time a forward and a backward pass of attention() and of PyTorch's flash and cuDNN backends, each
through autograd, as a training calls them: with gradients of q, k and v for a given dO, in bf16,
with and without a causal mask, replayed from CUDA graphs. Contenders are interleaved under
sustained load. Gradients are compared with float64 before and after. The speed counts 3.5 times the
operations of the forward pass. The file is written after each problem.
"""

EXAMPLES = f"""\
examples:
  measure, print and write {RESULTS}, within five minutes; needs a GPU:
    python benchmarks/autograd.py
  one length, in a copy without git, keeping the data elsewhere:
    python benchmarks/autograd.py --seq 2048 --commit 68cfc22 --json autograd.json

exit status: 0 measured, 1 attention() failed, 2 wrong usage or no GPU, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_results_arguments(parser, ROOT, RESULTS)
    lengths = " ".join(map(str, LENGTHS))
    parser.add_argument(
        *("--seq", "--size"),
        dest="sizes",
        nargs="+",
        type=positive,
        default=LENGTHS,
        metavar="N",
        help=f"sequence lengths (default: {lengths})",
    )
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="(default: 3)")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, command: str) -> int:
    """Measure, print and write; returns the exit status. Raises KernelsNotRun without a GPU."""
    backend = find_backend("cuda")

    import flash_attention  # late, so that --help is fast
    from flash_helpers.measure.autograd import LAB, AutogradSpeeds, contenders
    from flash_helpers.measure.benchmark import make_input_sets, measure_problem
    from flash_helpers.measure.timing import make_timer

    protocol = Protocol(rounds=arguments.rounds, loads=(LOADS[SUSTAINED],))
    timer, sensor = make_timer(backend.device, protocol), GpuSensor(backend.device)
    asked = [measured(n, causal=causal) for causal in (False, True) for n in arguments.sizes]
    provenance = provenance_here(backend, command, arguments, ROOT)
    found = []
    with bar(asked, desc="timing", unit="problem") as problems:
        for problem in problems:
            problem = replace(problem, dtype=Element.BF16)
            sets = make_input_sets(problem, Element.BF16, backend.device, timer, protocol)
            found += measure_problem(
                *(
                    contenders(flash_attention.attention, problem.causal),
                    sets,
                    problem,
                    Element.BF16,
                ),
                *(timer, protocol, sensor),
            )
            del sets  # before those of the next problem are made
            speeds = AutogradSpeeds(provenance, protocol, tuple(found))
            speeds.save(arguments.json)
    print(speeds.table().text())
    failures = [m for m in found if m.failure]
    for failed in failures:
        print(f"{failed.name}, {failed.asked}: {failed.failure}", file=sys.stderr)
    return 1 if any(failed.name == LAB for failed in failures) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    arguments = parse_arguments(argv)
    kept = f"{arguments.json} holds each problem that was measured"
    return run_measurement(run, arguments, "benchmarks/autograd.py", argv, OSError, kept=kept)


if __name__ == "__main__":
    sys.exit(main())
