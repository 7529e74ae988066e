#!/usr/bin/env python3
"""Compare the kernels' outputs with float64 on the same inputs."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flash_helpers.console.command_line import make_parser, print_text, run_tool
from flash_helpers.console.progress import bar
from flash_helpers.console.tables import json_text
from flash_helpers.kernel_configs import OPERATIONS, Problem
from flash_helpers.registry.selection import (
    UsageError,
    add_kernel_arguments,
    add_problem_options,
    asked_problem,
    parse_dtypes,
    require_options_of,
)
from flash_helpers.runtime.backend import DEVICE_CHOICES, KernelsNotRun, find_backend

if TYPE_CHECKING:
    from flash_helpers.check.sanity import SanityRequest

DESCRIPTION = """\
Run each kernel, on a GPU or in the PTX simulator, on outputs full of NaN, and compare all outputs
with the operation in float64 on the same inputs. A kernel passes if each output meets two bounds.
The largest absolute error is at most twice the error of plain PyTorch in the same dtype plus half
an ulp. The relative (Frobenius) error is at most half the dtype's epsilon. An operation may have
bounds of its own; the table's bound column gives both numbers.

Below the table are the reasons of failures, and lints: accesses that the simulator finds legal but
suspicious. A lint fails no kernel. Lints of a kernel that passes are counted, and --lints prints
them.
"""

EXAMPLES = """\
examples:
  every step at its fixed config, with and without a causal mask, in each of its dtypes, on a small
  problem:
    python tools/debug/sanity_check.py --small
  steps 7 to 9 in bf16 at the full size, on a GPU (the simulator takes hours for them):
    python tools/debug/sanity_check.py --kernel 7..9 --dtype bf16
  where is step 2 wrong? Errors by row and the first wrong element:
    python tools/debug/sanity_check.py --small --kernel v2 --inputs countable --diff
  every listed kernel, three heads, for a script:
    python tools/debug/sanity_check.py --small --heads 3 --kernel all --json > sanity.json
  every step that takes a causal mask, grouped heads and an odd length:
    python tools/debug/sanity_check.py --small --causal --heads 4 --kv-heads 2 --seq 77
  the output and the LSE of two causal steps:
    python tools/debug/sanity_check.py --small --kernel h29..h30 --causal --lse
  everything that the simulator finds wrong with step 3: races, missing waits, stray accesses:
    python tools/debug/sanity_check.py --small --kernel v3 --device cpu --keep-going

exit status: 0 every kernel passed, 1 a kernel failed, 2 wrong usage or nothing was run,
130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    problems = "; ".join(
        f"{name}: {o.small} instead of {o.usual}"
        + (
            f", and {o.small_variant} of kernels with a mask that take it"
            if o.small_variant
            else ""
        )
        for name, o in OPERATIONS.items()
    )
    problems += "; with the head size of a kernel's family, unless --d-head is given"
    parser.add_argument("--small", action="store_true", help=problems)
    parser.add_argument("--operation", choices=OPERATIONS, help="(default: all operations)")
    add_kernel_arguments(
        parser,
        "the fixed and causal configs of every step, as far as they take the problem",
    )
    parser.add_argument(
        "--device",
        choices=DEVICE_CHOICES,
        default="auto",
        help="cpu simulates the kernels' PTX (default: auto, a GPU if there is one, else cpu)",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="in the simulator: report every fault of a kernel, not only the first",
    )
    add_problem_options(parser)
    distributions = {name: t for o in OPERATIONS.values() for name, t in o.distributions.items()}
    parser.add_argument(
        "--inputs",
        choices=distributions,
        default="normal",
        help="; ".join(f"{name}: {text}" for name, text in distributions.items()),
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
    parser.add_argument(
        "--diff", action="store_true", help="print errors by row and the first wrong element"
    )
    parser.add_argument(
        "--lints",
        action="store_true",
        help="print every lint, instead of their number by kind, for a kernel that passes too",
    )
    parser.add_argument(
        "--json", action="store_true", help="JSON on stdout; the summary goes to stderr"
    )
    return parser.parse_args(argv)


def chosen_problems(arguments: argparse.Namespace, small: bool) -> dict[str, Problem]:
    """Return the problems that the command line asks for, by operation. small: as with
    `--small`.

    Raises ValueError if a size is not positive.
    """
    return {
        name: asked_problem(arguments, operation.small if small else operation.usual)
        for name, operation in OPERATIONS.items()
        if arguments.operation in (None, name)
    }


def chosen_variants(problems: Mapping[str, Problem]) -> dict[str, Problem]:
    """Return the problems of kernels with a mask, by operation, where the command line leaves the
    small problems as they are."""
    return {
        name: variant
        for name, problem in problems.items()
        if problem == OPERATIONS[name].small
        if (variant := OPERATIONS[name].small_variant)
    }


def announce(request: SanityRequest, small: Mapping[str, Problem]) -> None:
    """Print the simulator's estimated time if it is long, and the time with `--small` if it is
    shorter. small: the problems of `--small`."""
    from flash_helpers.check.sanity import estimated_seconds
    from flash_helpers.runtime.simulator import ANNOUNCE_FROM_SECONDS, duration_text

    seconds = estimated_seconds(request)
    if seconds < ANNOUNCE_FROM_SECONDS:
        return
    with_small = estimated_seconds(
        replace(request, problems=small, variants=chosen_variants(small))
    )
    way_out = "fewer kernels or smaller sizes take less"
    if with_small < seconds:
        way_out = f"--small takes about {duration_text(with_small)}, and is enough for a first look"
    print(
        f"warning: the simulator takes about {duration_text(seconds)} for {len(request.configs)} "
        f"kernels: {way_out}; Ctrl-C ends it",
        file=sys.stderr,
    )


def check(arguments: argparse.Namespace) -> int:
    """Check the kernels and print; returns the exit status. Raises KernelsNotRun and ValueError."""
    import torch  # late, so that --help is fast

    from flash_helpers.check.sanity import SanityReport, check_kernels, make_request

    problems = chosen_problems(arguments, arguments.small)
    backend = find_backend(arguments.device, arguments.keep_going)
    if arguments.keep_going and not backend.is_simulator:
        raise UsageError("--keep-going is for the simulator: add --device cpu")
    request = make_request(
        backend,
        arguments.kernel,
        parse_dtypes(arguments.dtype),
        problems,
        arguments.inputs,
        arguments.seed,
        arguments.diff,
        chosen_variants(problems),
        own_sizes=arguments.d_head is None,
    )
    require_options_of(arguments, request.problems)
    if backend.is_simulator:
        announce(request, chosen_problems(arguments, small=True))
    progress = bar(
        check_kernels(request, backend),
        total=len(request.configs),
        desc="sanity check",
        unit="kernel",
    )
    try:
        report = SanityReport(request, backend.description, tuple(progress))
    except torch.cuda.OutOfMemoryError:
        print("not enough GPU memory: use --small, or smaller sizes", file=sys.stderr)
        return 2
    if arguments.json:
        print_text(json_text(report.as_json()))
        print(report.summary, file=sys.stderr)
    else:
        print_text(f"{report.text(arguments.lints)}\n")
    return report.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: check(arguments), KernelsNotRun, ValueError)


if __name__ == "__main__":
    sys.exit(main())
