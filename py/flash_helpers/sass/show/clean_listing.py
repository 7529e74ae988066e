"""Listings without the parts that change when an instruction moves, so that diff can compare two of
them."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, output_file, print_text, run_tool
from flash_helpers.console.files import write_if_different
from flash_helpers.sass.read.listing import Line, ListedFunction, decode, parse_listing
from flash_helpers.sass.read.records import SassError

_LABEL = re.compile(r"\.L_\w+")
_TARGET = re.compile(r"0x([0-9a-f]+);$")
_NAMES_AN_ADDRESS = re.compile(r"(?:BRA|BSSY|WARPSYNC)(?:\.|$)|CALL\.REL")
_INDENT = " " * 8


def clean(text: str, name: str) -> str:
    """The code of a listing without addresses, encodings, source lines and live registers.

    Jumps go to labels, numbered in each function from its start; labels that no instruction names
    are left out. `name`: name of the file, for errors. Raises SassError for a text that is no
    listing.
    """
    functions = parse_listing(text, name)
    return "\n".join("\n".join(_lines(function)) + "\n" for function in functions)


def _lines(function: ListedFunction) -> Iterator[str]:
    if function.architecture:
        yield f"\t.target\t{function.architecture}"
    if function.name:
        yield f'\t.section\t.text.{function.name},"ax",@progbits'
    lines = function.lines
    named = {_target(line) for line in lines.values()}
    for line in lines.values():
        named.update(function.labels.get(label) for label in _LABEL.findall(line.text))
    there = (address for address in lines if address in named)
    labels = {address: f".L_x_{number}" for number, address in enumerate(there, start=1)}
    names = {label: labels[at] for label, at in function.labels.items() if at in labels}
    for address, line in lines.items():
        if address in labels:
            yield f"{labels[address]}:"
        text, target = line.text, _target(line)
        if target in labels:
            yield _INDENT + _TARGET.sub(f"`({labels[target]});", text)
        else:
            yield _INDENT + _LABEL.sub(lambda match: names.get(match[0], match[0]), text)


def _target(line: Line) -> int | None:
    """The address to which an instruction jumps, or at which it waits."""
    found = _TARGET.search(line.text) if _NAMES_AN_ADDRESS.match(line.instruction[1]) else None
    return int(found[1], 16) if found else None


DESCRIPTION = """\
Print the code of a SASS listing without the parts that change when an instruction moves: addresses,
encodings, source lines, live registers, sizes. diff can then compare two listings. Jumps go to
labels, numbered in each function from its start; labels that no instruction names are left out.
LISTING is the output of nvdisasm, cuobjdump -sass or tools/build/extract_sass.py; - reads standard
input.
Registers stay as they are: tools/analysis/compare_kernels.py --sass compares without their names.
"""

EXAMPLES = """\
examples:
  what changed, whatever made the listings, such as nvdisasm -c or cuobjdump -sass:
    diff <(python tools/build/extract_sass.py examples/own_kernel/row_softmax.sm_90.cubin \\
            | tools/build/clean_asm.sh -) \\
         <(python tools/build/extract_sass.py examples/own_kernel/row_softmax_fixed.sm_90.cubin \\
            | tools/build/clean_asm.sh -)

exit status: 0 done, 2 wrong usage, or a file that is no listing
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES, prog="clean_asm.sh")
    parser.add_argument("listings", nargs="+", metavar="LISTING")
    parser.add_argument(
        "-o",
        dest="output",
        type=output_file,
        metavar="FILE",
        help="write there, whole or not at all, and not to standard output",
    )
    arguments = parser.parse_args(argv)
    if len(arguments.listings) > 1:
        parser.error(f"one listing at a time: {' or '.join(arguments.listings)}")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Clean the listing, and print or write it. Raises SassError and OSError."""
    (file,) = arguments.listings
    name = "standard input" if file == "-" else file
    try:
        data = Path("/dev/stdin" if file == "-" else file).read_bytes()
    except OSError as error:
        raise SassError(f"{name} cannot be read: name a listing ({error.strerror})") from error
    text = clean(decode(data, name), name)
    if arguments.output is None:
        print_text(text)
        return
    write_if_different(arguments.output, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Clean and print; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: run(arguments), SassError, OSError)


if __name__ == "__main__":
    sys.exit(main())
