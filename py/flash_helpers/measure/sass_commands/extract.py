"""Disassemble kernels, with control words, live registers and source lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from flash_helpers.console.command_line import (
    make_command_parser,
    make_parser,
    output_folder,
    print_text,
    print_texts,
    run_tool,
)
from flash_helpers.console.progress import progress_bar
from flash_helpers.measure.machine_code import kernel_names, own_paths, readable_name
from flash_helpers.measure.sass_commands.arguments import add_file_arguments
from flash_helpers.sass.read.reader import find_kernels, iter_kernels
from flash_helpers.sass.read.records import SassError
from flash_helpers.sass.show.extract import (
    FileNames,
    graph_text,
    kernel_list_text,
    listing_text,
    write_files,
)

COMMAND = "python tools/build/extract_sass.py"

DESCRIPTION = """\
Disassemble the kernels in a cubin, fatbin, object file, library or program. Each instruction is
printed with its address, encoding, control word, live registers, PTX line, and CUDA line with the
lines it was inlined at. Each kernel has its resources. Lines need a file compiled with -lineinfo.

A control word such as "s02 y w0 r- b:01---- u:a--" reads: 2 cycles until the next instruction may
issue; the scheduler may turn to another warp; barrier 0 is raised until the result is written, none
until the operands are read; wait for barriers 0 and 1; operand a stays in the reuse cache. Live
registers are counted as general, predicate, uniform, uniform predicate.

The tool needs nvdisasm: pip install nvidia-cuda-nvdisasm
"""

EXAMPLES = """\
examples:
  the contents of the installed library:
    python tools/build/extract_sass.py flash_attention/libflash_attention.so --list --arch sm_90
  step 16, one file per kernel:
    python tools/build/extract_sass.py flash_attention/libflash_attention.so --arch sm_90 \\
        --kernel v16 -o sass
  one kernel of any library, by its C++ name or a part of the name:
    python tools/build/extract_sass.py 'examples/own_kernel/row_softmax.sm_90.cubin#row_softmax'
  two cubins compared by diff:
    python tools/build/extract_sass.py --no-offsets \\
        examples/own_kernel/row_softmax.sm_90.cubin > before.sass
    python tools/build/extract_sass.py --no-offsets \\
        examples/own_kernel/row_softmax_fixed.sm_90.cubin > after.sass
    diff before.sass after.sass
  a picture of the control flow:
    python tools/build/extract_sass.py --cfg \\
        examples/own_kernel/row_softmax.sm_90.cubin | dot -Tsvg > kernel.svg

exit status: 0 done, 2 wrong usage or an unusable file, 130 interrupted
"""

LIST_DESCRIPTION = """\
List the kernels and device functions in a cubin, fatbin, object file, library, program or archive:
architecture, symbol, name. Those that share a name are listed with their members.
"""
LIST_EXAMPLES = """\
examples:
  the kernels of a file:
    python -m flash_helpers.sass list examples/own_kernel/row_softmax.sm_90.cubin
  steps of the installed library, for one architecture:
    python -m flash_helpers.sass list flash_attention/libflash_attention.so --arch sm_90 \\
        --kernel v7..v9

exit status: 0 listed, 2 wrong usage or an unusable file
"""


def parse_arguments(argv: Sequence[str] | None, command: str = COMMAND) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong. `command`: as a user calls it."""
    parser = make_command_parser(DESCRIPTION, EXAMPLES, COMMAND, command)
    add_file_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--list",
        action="store_true",
        help="only name architectures, kernels and device functions; those that share a name are "
        "listed with their archive members",
    )
    what.add_argument(
        "--cfg", action="store_true", help="instead: print blocks and loops as a Graphviz graph"
    )
    parser.add_argument(
        "--no-offsets",
        action="store_true",
        help="leave out addresses, encodings, live registers and line numbers, so that a plain "
        "diff works",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=output_folder,
        help="write one file per kernel and architecture into DIR, and print the names",
    )
    return parser.parse_args(argv)


def listed(arguments: argparse.Namespace) -> str:
    """The list of kernels to print. Raises SassError."""
    return kernel_list_text(find_kernels(*_chosen(arguments)), readable_name)


def _chosen(arguments: argparse.Namespace) -> tuple[Any, ...]:
    """The arguments of `reader.iter_kernels`."""
    where = arguments.file
    names = kernel_names([*where.names, *arguments.kernel])
    return where.path, arguments.arch, names, where.member


def extract(arguments: argparse.Namespace) -> Iterator[str]:
    """The texts to print, one per kernel. Raises SassError and OSError."""
    chosen = _chosen(arguments)
    if arguments.list:
        yield listed(arguments)
    elif arguments.output is None:
        for number, (_, text) in enumerate(texts(arguments, chosen)):
            yield f"\n{text}" if number else text
    else:
        yield from write_files(arguments.output, texts(arguments, chosen))


def texts(arguments: argparse.Namespace, chosen: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """File name and text of each kernel, one in memory at a time. chosen: arguments of
    `reader.iter_kernels`."""
    make, suffix = (graph_text, ".dot") if arguments.cfg else (listing_text, ".sass")
    files = FileNames(suffix, readable_name)
    # A progress bar would break up the printed lines.
    is_shown = arguments.output is None and sys.stdout.isatty()
    with nullcontext() if is_shown else progress_bar("disassemble") as progress:
        for kernel in iter_kernels(*chosen, sources=own_paths, progress=progress):
            name = files.of(kernel.architecture, kernel.symbol)
            yield name, make(kernel, offsets=not arguments.no_offsets)


def main(argv: Sequence[str] | None = None, command: str = COMMAND) -> int:
    """Extract and print; returns the exit status."""
    arguments = parse_arguments(argv, command)
    return run_tool(lambda: print_texts(extract(arguments)), SassError, OSError)


def list_main(argv: Sequence[str] | None, command: str) -> int:
    """Print the list of kernels; returns the exit status."""
    parser = make_parser(LIST_DESCRIPTION, LIST_EXAMPLES, command)
    add_file_arguments(parser)
    arguments = parser.parse_args(argv)
    return run_tool(lambda: print_text(listed(arguments)), SassError, OSError)
