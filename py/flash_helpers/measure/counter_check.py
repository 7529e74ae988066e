"""The command line of the tools that compare their own counts with Nsight Compute's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flash_helpers.command_line import add_commit_argument, write_or_check
from flash_helpers.measure.benchmark_tables import replace_between_markers
from flash_helpers.registry.selection import add_kernel_arguments


def add_check_arguments(
    parser: argparse.ArgumentParser, root: Path, results: Path, page: Path
) -> argparse._MutuallyExclusiveGroup:
    """Add the kernels, the shape, and where numbers go; returns the group of --write-docs, --check.

    results, page: relative to root.
    """
    add_kernel_arguments(parser)
    parser.add_argument("--seq", type=int, default=512, help="sequence length (default: 512)")
    parser.add_argument(
        "--json",
        type=Path,
        default=root / results,
        metavar="FILE",
        help=f"where the numbers go or come from (default: {results})",
    )
    parser.add_argument("--raw", type=Path, metavar="DIR", help="keep all that ncu wrote")
    add_commit_argument(parser)
    parser.add_argument("--docs", type=Path, default=root / page, help=f"(default: {page})")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write-docs", action="store_true", help="write the table from the file")
    action.add_argument(
        "--check", action="store_true", help="write nothing; print a diff and exit 1 if stale"
    )
    return action


def update_page(
    arguments: argparse.Namespace, tables: Callable[[Path], str], markers: tuple[str, str]
) -> int:
    """Write or check the page; returns the exit status. Raises OSError and ValueError.

    tables: what stands between the markers, from the file of numbers.
    """
    old = arguments.docs.read_text(encoding="utf-8")
    new = replace_between_markers(old, tables(arguments.json), *markers)
    return write_or_check(arguments.docs, old, new, arguments.check)


def print_check(tables: str, disagreements: Sequence[str], profiler_failure: str) -> int:
    """Print what a run found; returns the exit status, 1 if not all was counted and agrees."""
    print(tables)
    print("\n".join(["", *disagreements] if disagreements else ["", "all counts agree"]))
    if profiler_failure:
        print(profiler_failure, file=sys.stderr)
    return 1 if disagreements or profiler_failure else 0
