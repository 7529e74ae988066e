#!/usr/bin/env python3
"""Print the PTX in a cubin or a library."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Iterable, Sequence

from flash_helpers.console.command_line import (
    make_parser,
    output_folder,
    print_texts,
    run_tool,
)
from flash_helpers.measure.machine_code import kernel_names, readable_name
from flash_helpers.measure.sass_commands.arguments import add_file_arguments
from flash_helpers.sass.read.records import SassError
from flash_helpers.sass.show.extract import FileNames, ptx_texts, write_files

DESCRIPTION = """\
Print the PTX in a cubin, fatbin, object file, library or program: the PTX that its cubins were
compiled from, which -lineinfo embeds in them, or else the PTX that it carries for later
compilation. Embedded PTX keeps its line numbers, empty lines at the beginning too, so that they
match the output of extract_sass.py.
"""

EXAMPLES = """\
examples:
  the PTX of step 16, one file per kernel:
    python tools/build/get_embedded_ptx_from_cubin.py flash_attention/libflash_attention.so \\
        --arch sm_90 --kernel v16 -o ptx
  the PTX of a cubin:
    python tools/build/get_embedded_ptx_from_cubin.py \\
        examples/own_kernel/row_softmax.sm_90.cubin > row_softmax.ptx

exit status: 0 done, 2 wrong usage or a file without PTX, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_file_arguments(parser, "modules with this kernel: ")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=output_folder,
        help="write one file per module and architecture into DIR, and print the names",
    )
    return parser.parse_args(argv)


def extract(arguments: argparse.Namespace) -> Iterable[str]:
    """The text to print. Raises SassError and OSError."""
    where = arguments.file
    names = kernel_names([*where.names, *arguments.kernel])
    modules = ptx_texts(where.path, arguments.arch, names, where.member)
    if arguments.output is None:
        return (module.text for module in modules)
    files = FileNames(".ptx", readable_name)
    named = ((files.of(module.architecture, module.name), module.text) for module in modules)
    return write_files(arguments.output, named)


def main(argv: Sequence[str] | None = None) -> int:
    """Extract and print; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: print_texts(extract(arguments)), SassError, OSError)


if __name__ == "__main__":
    sys.exit(main())
