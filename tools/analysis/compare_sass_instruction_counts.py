#!/usr/bin/env python3
"""Compare the number of instructions by opcode in two pieces of SASS."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence

from flash_helpers.console.command_line import make_parser, print_text, run_tool
from flash_helpers.console.progress import progress_bar
from flash_helpers.sass.read.choice import NAMED_SO, KernelPath
from flash_helpers.sass.read.records import SassError
from flash_helpers.sass.show.count_comparison import (
    compare_counts,
    comparison_as_csv,
    comparison_as_json,
    comparison_as_text,
)
from flash_helpers.sass.show.listing_counts import add_choice_arguments, load_counts

DESCRIPTION = """\
Compare the number of instructions by opcode in two pieces of SASS, the largest change first. Each
piece is a file of counts (from count_sass_instructions.sh, or from sort | uniq -c), a listing, or
machine code. Filler (@!PT) and padding are left out, except in a file of counts, which does not
tell them apart. The numbers are of instructions in the text, not of executions:
tools/analysis/compare_kernels.py counts by loop.
"""

EXAMPLES = """\
examples:
  two versions, for a commit message:
    python tools/analysis/compare_sass_instruction_counts.py --base --markdown \\
        examples/own_kernel/row_softmax.sm_90.cubin \\
        examples/own_kernel/row_softmax_fixed.sm_90.cubin
  two kernels of a library, with the opcodes that did not change:
    python tools/analysis/compare_sass_instruction_counts.py --arch sm_90 --all \\
        flash_attention/libflash_attention.so#v1_bf16_d128_Br64 \\
        flash_attention/libflash_attention.so#v2_bf16_d128_Br64

exit status: 0 compared, 2 wrong usage, or a file that cannot be counted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    for name in ("before", "after"):
        parser.add_argument(name, type=KernelPath.parse, metavar=name.upper(), help=NAMED_SO)
    parser.add_argument("--all", action="store_true", help="also the opcodes that did not change")
    add_choice_arguments(parser)
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--csv", action="store_true", help="CSV on stdout")
    machine.add_argument("--json", action="store_true", help="JSON on stdout, with the total")
    machine.add_argument("--markdown", action="store_true", help="a table for Markdown")
    return parser.parse_args(argv)


def compare(arguments: argparse.Namespace) -> str:
    """The text to print. Raises SassError and OSError."""
    sides = []
    for where in (arguments.before, arguments.after):
        with progress_bar("reading") as progress:
            counts = load_counts(
                where.path,
                where.name or arguments.function,
                arguments.arch,
                where.member,
                progress=progress,
            )
        sides.append(counts.base() if arguments.base else counts)
    comparison = compare_counts(*sides)
    if arguments.csv:
        return comparison_as_csv(comparison, arguments.all)
    if arguments.json:
        return comparison_as_json(comparison, arguments.all)
    return comparison_as_text(comparison, arguments.all, arguments.markdown) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Count, compare and print; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: print_text(compare(arguments)), SassError, OSError)


if __name__ == "__main__":
    sys.exit(main())
