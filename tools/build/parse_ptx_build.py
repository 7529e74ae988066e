#!/usr/bin/env python3
"""Tabulate the resources of kernels from logs of ptxas."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence

from flash_helpers.compile.ptxas_tables import (
    LogError,
    entries_as_csv,
    entries_as_json,
    entries_as_text,
    read_logs,
)
from flash_helpers.console.command_line import make_parser, output_file, print_text, run_tool
from flash_helpers.console.files import write_if_different

DESCRIPTION = """\
Tabulate the output of `ptxas -v`, one row per kernel and architecture: registers per thread, spills
and stack in bytes per thread, static shared memory and constant memory in bytes, and barriers. A
kernel of this repository is named by the short form of its config, any other kernel by its symbol.
A cell is empty if this ptxas does not report the number.
"""

EXAMPLES = """\
examples:
  the logs that were kept when the library was built:
    python tools/build/parse_ptx_build.py flash_attention/ptxas
  a kernel of your own, while it compiles:
    nvcc -Xptxas -v -arch=sm_90 -c kernel.cu 2>&1 | python tools/build/parse_ptx_build.py -
  two builds, for a spreadsheet:
    python tools/build/parse_ptx_build.py before.log after.log --csv --output registers.csv

exit status: 0 tabulated, 2 wrong usage, or a log that names no kernel or is cut off
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="a file, a folder of .log files, or - for standard input",
    )
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--csv", action="store_true", help="CSV, with the symbol and the log")
    machine.add_argument("--json", action="store_true", help="JSON, constant memory by bank")
    parser.add_argument(
        "--output", type=output_file, metavar="FILE", help="write to FILE instead of stdout"
    )
    return parser.parse_args(argv)


def tabulate(arguments: argparse.Namespace) -> None:
    """Read the logs, and print or write the table. Raises LogError and OSError."""
    entries = read_logs(arguments.logs, sys.stdin.buffer)
    if arguments.csv:
        text = entries_as_csv(entries)
    elif arguments.json:
        text = entries_as_json(entries)
    else:
        text = entries_as_text(entries) + "\n"
    if arguments.output:
        write_if_different(arguments.output, text)
    else:
        print_text(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Read, tabulate and print; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: tabulate(arguments), LogError, OSError)


if __name__ == "__main__":
    sys.exit(main())
