#!/usr/bin/env python3
"""Check that no kernel takes more than it did."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, output_file, run_tool
from flash_helpers.console.progress import progress_bar
from flash_helpers.measure.baseline import (
    Baseline,
    compare,
    comparison_text,
    load_baseline,
    read_library,
)
from flash_helpers.measure.machine_code import installed_library
from flash_helpers.sass.read.records import Compiler, SassError

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / "benchmarks" / "resources.json"

DESCRIPTION = """\
Check that no kernel takes more than it did: registers, spilled bytes, stack, shared memory, blocks
an SM, tensor instructions in the main loop, instructions of the main loop for each of them, and
what stands between those of one product of a warpgroup (HGMMA), as they stand in the machine code.
The baseline holds them by kernel, architecture and compiler; other compilers allocate registers
differently, so that each is compared with itself. The first run has to disassemble every kernel;
later ones read what it kept.
"""

EXAMPLES = """\
examples:
  the installed library, all its architectures:
    python tools/analysis/check_resources.py
  one architecture, after a change to a kernel:
    pip install . && python tools/analysis/check_resources.py --arch sm_90
  a change that is worth it, or another compiler: keep what the library takes now:
    python tools/analysis/check_resources.py --update
  what another compiler makes of the kernels, beside the one that the baseline knows:
    python tools/analysis/check_resources.py --any-compiler

exit status: 0 no kernel got worse, 1 one did or is missing, 2 wrong usage, nothing to compare with,
or a library that cannot be read
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--update", action="store_true", help="write what the library takes into the baseline"
    )
    parser.add_argument(
        "--baseline",
        type=output_file,
        default=BASELINE,
        metavar="FILE",
        help=f"(default: {BASELINE.relative_to(ROOT)})",
    )
    parser.add_argument("--library", type=Path, metavar="FILE", help="(default: the installed one)")
    parser.add_argument(
        "--arch", nargs="+", metavar="sm_NN", help="(default: all that the library holds)"
    )
    parser.add_argument(
        "--any-compiler",
        action="store_true",
        help="if the baseline does not know the compiler, compare with the nearest version of it",
    )
    return parser.parse_args(argv)


def known_compiler(
    baseline: Baseline, compiler: Compiler, arguments: argparse.Namespace
) -> Compiler:
    """The compiler to compare with. Raises SassError if that takes a word of the user."""
    if baseline.of(compiler):
        return compiler
    if arguments.any_compiler:
        return baseline.nearest(compiler)
    known = ", ".join(map(str, baseline.figures)) or "nothing"
    raise SassError(
        f"the library was made by {compiler}, and {arguments.baseline} tells of {known}: --update "
        "adds it, --any-compiler compares all the same"
    )


def check(arguments: argparse.Namespace) -> int:
    """Read, compare and print; returns the exit status. Raises SassError and OSError."""
    baseline = Baseline()
    if arguments.baseline.exists() or not arguments.update:
        baseline = load_baseline(arguments.baseline)
    library = arguments.library or installed_library()
    with progress_bar("reading") as progress:
        compiler, found = read_library(library, arguments.arch, progress=progress)
    if arguments.update:
        comparison = compare(baseline.of(compiler), found)
        baseline.updated(compiler, found).save(arguments.baseline)
        print(comparison_text(comparison))
        print(f"{arguments.baseline} now holds what {compiler} made")
        return 0
    other = known_compiler(baseline, compiler, arguments)
    comparison = compare(baseline.of(other), found)
    print(comparison_text(comparison))
    if other != compiler:
        print(
            f"compared with {other}, made by {compiler}: what changed may be the compiler's doing"
        )
    return 0 if comparison.passes else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Check the library; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: check(arguments), SassError, OSError)


if __name__ == "__main__":
    sys.exit(main())
