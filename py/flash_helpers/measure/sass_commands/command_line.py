"""The command line of `python -m flash_helpers.sass`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser
from flash_helpers.measure.sass_commands import compare, extract, report

PROG = "python -m flash_helpers.sass"

DESCRIPTION = """\
Read machine code (SASS) of NVIDIA GPUs, in any cubin, fatbin, object file, library or program. It
needs neither a GPU nor a CUDA toolkit, but nvdisasm: pip install nvidia-cuda-nvdisasm

commands, each with a --help of its own:
  list      the kernels of a file
  report    one kernel: registers, spills, roles of warps, its main loop and the loop's bounds
  compare   several kernels: resources, instructions, diffs, and a page with CUDA, PTX and SASS
  extract   kernels disassembled, with control words, live registers and source lines
"""

EXAMPLES = """\
examples:
  the kernels of a file:
    python -m flash_helpers.sass list examples/own_kernel/row_softmax.sm_90.cubin
  the report on one of them, launched with 64 threads:
    python -m flash_helpers.sass report \\
        examples/own_kernel/row_softmax.sm_90.cubin#row_softmax --threads 64
  a kernel before and after a change, also as a page:
    python -m flash_helpers.sass compare --sass --html change.html \\
        examples/own_kernel/row_softmax.sm_90.cubin \\
        examples/own_kernel/row_softmax_fixed.sm_90.cubin
  its machine code:
    python -m flash_helpers.sass extract examples/own_kernel/row_softmax.sm_90.cubin

exit status: 0 done, 2 wrong usage or a file that cannot be read, 130 interrupted
"""


def _in_folder(
    main: Callable[[Sequence[str] | None, Path, str], int],
) -> Callable[[Sequence[str], str], int]:
    """A command for which the current folder is that of the repository, if it is in one."""
    return lambda argv, command: main(argv, Path.cwd(), command)


COMMANDS: Mapping[str, Callable[[Sequence[str], str], int]] = {
    "list": extract.list_main,
    "report": _in_folder(report.main),
    "compare": _in_folder(compare.main),
    "extract": extract.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = make_parser(DESCRIPTION, EXAMPLES, PROG)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command")
    parsed = parser.parse_args(argv)
    return COMMANDS[parsed.command](parsed.arguments, f"{PROG} {parsed.command}")
