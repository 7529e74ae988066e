#!/usr/bin/env python3
"""Check that no kernel takes more resources than in the baseline."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.compile.toolchain import DEFAULT_ARCHITECTURES
from flash_helpers.console.command_line import (
    add_architecture_argument,
    make_parser,
    output_file,
    run_tool,
)
from flash_helpers.console.progress import progress_bar
from flash_helpers.measure.baseline import (
    BASELINE,
    Baseline,
    Comparison,
    Reading,
    compare,
    comparison_text,
    load_baseline,
)
from flash_helpers.measure.machine_code import listed_configs
from flash_helpers.registry.config import Config
from flash_helpers.registry.problem import Element
from flash_helpers.registry.selection import KERNEL_NAMES, UsageError, select_kernels
from flash_helpers.sass.read.records import Compiler, SassError

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = """\
Check that no kernel takes more resources than in the baseline. Compared are registers, spilled
bytes, stack, shared memory, blocks per SM, and from the text of the main loop: the number of tensor
instructions, instructions per tensor instruction, and instructions between the HGMMA of one
warpgroup's product. The baseline holds these figures by kernel, architecture and compiler. Each
compiler is compared with itself, since compilers allocate registers differently. The baseline also
holds a digest of all that a kernel's figures follow from: its sources, the compiler and the modules
that read machine code. A kernel whose digest is still the same is not compiled again.
"""

EXAMPLES = """\
examples:
  all listed kernels, on all architectures:
    python tools/analysis/check_resources.py
  one step on one architecture, after a change to it:
    python tools/analysis/check_resources.py --kernel h30 --arch sm_90
  every kernel anew, whatever the baseline says:
    python tools/analysis/check_resources.py --all
  accept a change that is worth its cost, or add another compiler:
    python tools/analysis/check_resources.py --update
  the kernels of another compiler, compared with the compiler in the baseline:
    python tools/analysis/check_resources.py --any-compiler

exit status: 0 no kernel got worse, 1 a kernel got worse or is missing, 2 wrong usage, no baseline
for the compiler, or a kernel that does not compile
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--update", action="store_true", help="write the kernels' figures into the baseline"
    )
    parser.add_argument(
        "--renew",
        action="store_true",
        help="if no figure differs, write what the kernels are made from now into the baseline, so "
        "that the next run compiles none of them",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also compile and read kernels that are made from the same as in the baseline",
    )
    parser.add_argument(
        "--baseline",
        type=output_file,
        default=ROOT / BASELINE,
        metavar="FILE",
        help=f"(default: {BASELINE})",
    )
    parser.add_argument(
        "--kernel",
        nargs="+",
        metavar="NAME",
        help=f"{KERNEL_NAMES}; of a step every listed config is meant (default: all listed)",
    )
    add_architecture_argument(
        parser, f"(default: {' '.join(map(str, DEFAULT_ARCHITECTURES))})", nargs="+"
    )
    parser.add_argument(
        "--any-compiler",
        action="store_true",
        help="if the baseline lacks the compiler, compare with the nearest version",
    )
    return parser.parse_args(argv)


def known_compiler(
    baseline: Baseline, compiler: Compiler, arguments: argparse.Namespace
) -> Compiler:
    """The compiler to compare with. Raises SassError if the user must choose one by an option."""
    if baseline.of(compiler):
        return compiler
    if arguments.any_compiler:
        return baseline.nearest(compiler)
    known = ", ".join(map(str, baseline.figures)) or "nothing"
    raise SassError(
        f"the kernels were made by {compiler}, and {arguments.baseline} has figures of {known}: "
        f"--update adds {compiler}, --any-compiler compares the two"
    )


def text_of(comparison: Comparison, reading: Reading) -> str:
    """The comparison, and how many of its kernels were not compiled."""
    n_known = len(reading.figures) - reading.n_read
    told = f"{n_known} are made from the same as in the baseline and were not read again (--all)"
    return "\n".join([comparison_text(comparison), *([told] if n_known else [])])


def chosen_configs(arguments: argparse.Namespace) -> dict[str, list[Config]]:
    """Return the configs to read, by architecture. Raises UsageError for a step that is listed for
    none of the architectures, and for a config that is made for none."""
    asked = arguments.arch or [f"sm_{number}" for number in DEFAULT_ARCHITECTURES]
    listed = {architecture: listed_configs(architecture) for architecture in asked}
    if not arguments.kernel:
        return listed
    every = sorted({config for configs in listed.values() for config in configs})
    wanted = select_kernels(every, arguments.kernel, Element)
    chosen = {a: [c for c in wanted if _is_made_for(c, a)] for a in asked}
    found = {architecture: configs for architecture, configs in chosen.items() if configs}
    if not found:
        raise UsageError(
            f"--kernel {' '.join(arguments.kernel)} is made for none of {', '.join(asked)}: use "
            f"--arch with one of {', '.join(f'sm_{x}' for x in wanted[0].family.targets)}"
        )
    return found


def _is_made_for(config: Config, architecture: str) -> bool:
    try:
        config.family.target_on(architecture)
    except ValueError:
        return False
    return True


def check(arguments: argparse.Namespace) -> int:
    """Read, compare and print; returns the exit status. Raises SassError, UsageError
    and OSError."""
    baseline = Baseline()
    if arguments.baseline.exists() or not arguments.update:
        baseline = load_baseline(arguments.baseline)
    reading = Reading(Baseline() if arguments.all else baseline)
    for architecture, configs in chosen_configs(arguments).items():
        with progress_bar(f"reading {architecture}") as progress:
            reading.add(architecture, configs, progress)
    compiler, found = reading.compiler, [figures for _, figures in reading.figures]
    if arguments.update:
        comparison = compare(baseline.of(compiler), found)
        baseline.updated(compiler, found).save(arguments.baseline)
        print(text_of(comparison, reading))
        print(f"{arguments.baseline} now holds the figures of {compiler}")
        return 0
    other = known_compiler(baseline, compiler, arguments)
    comparison = compare(baseline.of(other), found)
    print(text_of(comparison, reading))
    if other != compiler:
        print(
            f"compared with {other}, made by {compiler}: the compiler may have caused the changes"
        )
    if arguments.renew and reading.n_read and comparison.is_same and other == compiler:
        baseline.updated(compiler, found).save(arguments.baseline)
        print(f"{arguments.baseline} now holds what they are made from")
    return 0 if comparison.passes else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Check the kernels; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: check(arguments), SassError, OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
