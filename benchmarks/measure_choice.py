#!/usr/bin/env python3
"""Measure the kernels that compete for a problem, on a grid of problems, beside the libraries."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flash_helpers.console.command_line import (
    make_parser,
    positive,
    positive_seconds,
    run_tool,
    typed_command,
)
from flash_helpers.console.progress import bar
from flash_helpers.kernel_configs import OPERATIONS
from flash_helpers.measure.command_line import add_results_arguments, provenance_here
from flash_helpers.measure.results import Load, Protocol
from flash_helpers.operations.attention_forward import OPERATION as ATTENTION
from flash_helpers.runtime.backend import KernelsNotRun, find_backend
from flash_helpers.tune.choices import Choices, MeasuredProblem, competitors

if TYPE_CHECKING:
    from flash_helpers.measure.benchmark import InputSet

ROOT = Path(__file__).resolve().parents[1]
FILE = "configs/choice_h100_80gb_hbm3.json"
LOAD = Load("turns", sample_ms=60.0)
DESCRIPTION = f"""\
Time kernels of many tiles on each problem of an operation's grid, beside the operation's libraries:
for attention PyTorch's flash and cuDNN backends and FlashAttention-3, where they take the problem
and are installed. Samples of {LOAD.sample_ms:g} ms follow one another without a pause, each
contender's once per round, in another order each round. Launches are replayed from CUDA graphs, and
rotate through inputs that exceed the L2 cache. Outputs are compared with float64 before and after.
Calls that name no kernel, such as attention(), take theirs from the file.

A run can be interrupted: problems that were finished are in the file, and stay there if a later run
measures others with the same commit; --resume leaves them out of it.
"""
EXAMPLES = f"""\
examples:
  the whole grid, within about 12 minutes, into {FILE}:
    python benchmarks/measure_choice.py
  two groups, elsewhere:
    python benchmarks/measure_choice.py --group short lengths --json build/choice.json
  norms by width:
    python benchmarks/measure_choice.py --operation norm --json configs/choice_norm_h200.json
  rows of one width, beside a copy alone:
    python benchmarks/measure_choice.py --operation norm --width 65536 --library copy

exit status: 0 measured, 1 a kernel failed, 2 wrong usage or no GPU, 130 interrupted
"""


def with_lengths(own: InputSet) -> InputSet:
    """Return the input set with lognormal lengths of sequences, the keys' those of the queries, as
    prompts of a language model have them."""
    import torch  # late, so that --help is fast

    reference = ATTENTION.part("reference").reference
    problem, device = own.problem, own.inputs["q"].device
    generator = torch.Generator().manual_seed(problem.sequences)
    ends = torch.randn(problem.sequences, generator=generator).exp().cumsum(0)
    begins = torch.cat([torch.zeros(1), ends / ends[-1] * problem.len_q]).round().int().to(device)
    inputs = {**own.inputs, "cu_seqlens_q": begins, "cu_seqlens_k": begins}
    return replace(own, inputs=inputs, reference=reference(problem, inputs))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_results_arguments(parser, ROOT, FILE, "the measured choices")
    parser.add_argument(
        "--operation",
        choices=[name for name, own in OPERATIONS.items() if own.has_part("grid")],
        default=ATTENTION.name,
        help=f"(default: {ATTENTION.name})",
    )
    parser.add_argument(
        "--group", nargs="+", metavar="GROUP", help="of the operation's grid (default: all groups)"
    )
    parser.add_argument(
        "--width",
        type=positive,
        nargs="+",
        metavar="N",
        help="of rows: measure no problem of another width (default: all widths)",
    )
    parser.add_argument(
        "--library",
        nargs="+",
        metavar="NAME",
        help="beside the kernels (default: all of the operation)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out problems that the file has"
    )
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="(default: 3)")
    parser.add_argument(
        "--time-budget",
        type=positive_seconds,
        default=math.inf,
        metavar="SECONDS",
        help="begin no problem after so many seconds",
    )
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, command: str) -> int:
    """Measure and write; returns the exit status. Raises KernelsNotRun without a GPU."""
    from flash_attention import prepare
    from flash_helpers.measure.benchmark import (
        kernel_contender,
        library_contenders,
        library_records,
        make_input_sets,
        measure_problem,
    )
    from flash_helpers.measure.machine import GpuSensor
    from flash_helpers.measure.timing import make_timer

    operation = OPERATIONS[arguments.operation]
    groups = operation.part("grid").GROUPS
    if unknown := set(arguments.group or ()) - {*groups}:
        raise ValueError(
            f"--group {', '.join(sorted(unknown))}: the grid of {operation.name} has "
            f"{', '.join(groups)}"
        )
    names = arguments.library or [*operation.libraries]
    if unknown := set(names) - {*operation.libraries}:
        raise ValueError(
            f"--library {', '.join(sorted(unknown))}: {operation.name} is measured beside "
            f"{', '.join(operation.libraries)}"
        )
    backend = find_backend("cuda")
    end = time.monotonic() + arguments.time_budget
    protocol = Protocol(rounds=arguments.rounds, min_rounds=arguments.rounds, loads=(LOAD,))
    timer, sensor = make_timer(backend.device, protocol), GpuSensor(backend.device)
    libraries = [c for c in library_contenders(operation) if c.name in names]  # not the control
    found = Choices(
        provenance_here(backend, command, arguments, ROOT),
        protocol,
        library_records(libraries, operation),
        (),
    )
    found = found.continued(arguments.json)
    finished = {row.asked for row in found.problems} if arguments.resume else set()
    asked = [
        (group, problem)
        for group in arguments.group or groups
        for problem in groups[group]
        if problem not in finished
        and (not arguments.width or getattr(problem, "width", None) in arguments.width)
    ]
    kernels = {problem: competitors(problem) for _, problem in asked}
    prepare(*dict.fromkeys(config for own in kernels.values() for config in own))
    failed = False
    for group, problem in bar(asked, desc="grid", unit="problem"):
        if time.monotonic() > end:
            break
        own = [kernel_contender(config, backend.execute) for config in kernels[problem]]
        contenders = [c for c in (*libraries, *own) if not c.refusal(problem)]
        sets = make_input_sets(problem, problem.dtype, backend.device, timer, protocol)
        if operation is ATTENTION and problem.sequences:
            sets = [*map(with_lengths, sets)]
        measured = measure_problem(
            contenders, sets, problem, problem.dtype, timer, protocol, sensor
        )
        row = MeasuredProblem.of(group, problem, measured)
        failed |= any(m.failure for m in measured if m.ran)
        found = found.updated(row)
        found.save(arguments.json)
        print(row.text())
    return int(failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    arguments = parse_arguments(argv)
    command = typed_command("benchmarks/measure_choice.py", argv)
    return run_tool(
        lambda: run(arguments, command),
        *(KernelsNotRun, OSError, ValueError),
        interrupted="interrupted: the problems that were finished are in the file",
    )


if __name__ == "__main__":
    sys.exit(main())
