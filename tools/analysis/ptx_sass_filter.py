#!/usr/bin/env python3
"""Show a PTX instruction, the PTX that it depends on, and the SASS of each."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence

from flash_helpers.console.command_line import (
    add_architecture_argument,
    make_parser,
    print_text,
    run_tool,
)
from flash_helpers.measure.machine_code import kernel_names
from flash_helpers.sass.analyse.ptx_links import read_kernel_ptx
from flash_helpers.sass.read.choice import NAMED_SO, KernelPath
from flash_helpers.sass.read.reader import load_kernel
from flash_helpers.sass.read.records import SassError
from flash_helpers.sass.show.ptx_links_text import LinkFormat, fan_out_text, slice_text

DESCRIPTION = """\
Show a PTX instruction, the PTX that it depends on, and the SASS of each. With --fan-out, show the
PTX instructions that became several SASS instructions, and those that vanished. The file is a cubin
compiled with -lineinfo, which then holds its PTX, or a library, program, object file or fatbin with
such cubins. Dependences are followed back through registers, around loops too, but not through
memory. The line table names one PTX line per SASS instruction: if ptxas merged PTX instructions,
one of them has the SASS, and the others seem to have vanished.
"""

EXAMPLES = """\
examples:
  the lines of the PTX, with their numbers:
    python tools/build/get_embedded_ptx_from_cubin.py \\
        examples/own_kernel/row_softmax.sm_90.cubin | cat -n
  line 308, the PTX that it depends on, and the SASS, with line numbers and addresses:
    python tools/analysis/ptx_sass_filter.py examples/own_kernel/row_softmax.sm_90.cubin 308 -n
  only the PTX, six steps back:
    python tools/analysis/ptx_sass_filter.py examples/own_kernel/row_softmax.sm_90.cubin 308 -ptx \\
        --depth 6
  the SASS of all PTX instructions of step 9, by opcode:
    python tools/analysis/ptx_sass_filter.py --arch sm_90 --fan-out \\
        flash_attention/libflash_attention.so#v9_bf16_d128_Br64

exit status: 0 shown, 2 wrong usage or an unusable file, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("file", metavar="FILE", type=KernelPath.parse, help=NAMED_SO)
    parser.add_argument("line", metavar="LINE", type=int, nargs="?", help="line of the PTX, from 1")
    parser.add_argument("-ptx", action="store_true", help="print only PTX")
    parser.add_argument("-sass", action="store_true", help="print only SASS")
    parser.add_argument("-n", action="store_true", help="print PTX line numbers and SASS addresses")
    parser.add_argument(
        "--depth",
        type=int,
        default=2,
        metavar="N",
        help="steps to follow back; 0 for the instruction alone (default: 2)",
    )
    parser.add_argument(
        "--fan-out", action="store_true", help="the SASS of all PTX instructions, by opcode"
    )
    add_architecture_argument(parser, "for a file of several architectures")
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        help="a NAME if the file holds several kernels, or a step of this library",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.fan_out == (arguments.line is not None):
        parser.error("name a LINE of the PTX, or use --fan-out for all of them")
    if arguments.ptx and arguments.sass:
        parser.error("-ptx and -sass leave nothing to print: drop both to print both")
    if arguments.depth < 0:
        parser.error(f"--depth {arguments.depth} is negative: use 0 or more")
    return arguments


def links(arguments: argparse.Namespace) -> str:
    """The text to print. Raises SassError and OSError."""
    where = arguments.file
    names = kernel_names([*where.names, *arguments.kernel])
    kernel = load_kernel(where.path, arguments.arch, names, where.member)
    ptx = read_kernel_ptx(kernel)
    shape = LinkFormat(ptx=not arguments.sass, sass=not arguments.ptx, numbers=arguments.n)
    if arguments.fan_out:
        return fan_out_text(kernel, ptx, shape)
    return slice_text(kernel, ptx, arguments.line, arguments.depth, shape)


def main(argv: Sequence[str] | None = None) -> int:
    """Read and print; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: print_text(links(arguments)), SassError, OSError)


if __name__ == "__main__":
    sys.exit(main())
