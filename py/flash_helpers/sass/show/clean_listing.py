"""Listings without what moves when an instruction does, so that two can be compared by diff."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, output_file, print_text, run_tool
from flash_helpers.console.files import write_if_different
from flash_helpers.sass.read.listing import Kind, Line, decode, holds_nothing, scan
from flash_helpers.sass.read.records import SassError

_LABEL = re.compile(r"\.L_\w+")
_TARGET = re.compile(r"0x([0-9a-f]+);$")
_NAMES_AN_ADDRESS = re.compile(r"(?:BRA|BSSY|WARPSYNC)(?:\.|$)|CALL\.REL")
_INDENT = " " * 8


def clean(text: str, name: str) -> str:
    """The listing without addresses, encodings, source lines, live registers and sizes.

    Jumps go to labels, numbered in each function from its start; those that no instruction names
    are left out. name: of the file, for errors. Raises SassError for what is no listing.
    """
    lines = [line for line in scan(text, name) if not _moves(line)]
    code = [line for line in lines if line.kind is Kind.INSTRUCTION]
    if not code:
        raise holds_nothing(name, text)
    named = {label for line in code for label in _LABEL.findall(line.text)}
    functions = list(itertools.accumulate(line.kind is Kind.FUNCTION for line in lines))
    places = list(zip(functions, lines, strict=True))
    wanted = {(f, target) for f, line in places if (target := _target(line)) is not None}

    # What stands at one place has one label, whatever it was called.
    numbers: Counter[int] = Counter()  # the last one of each function
    new_name: dict[str, str] = {}
    label_at: dict[tuple[int, int | None], str] = {}
    opened: dict[int, str] = {}  # index of a line to the label before it
    behind_label = False
    for index, (function, line) in enumerate(places):
        is_label = _is_label(line) and line.name in named
        is_target = line.kind is Kind.INSTRUCTION and (function, line.address) in wanted
        if is_label or is_target:
            if not behind_label:
                numbers[function] += 1
                opened[index] = f".L_x_{numbers[function]}"
            label = f".L_x_{numbers[function]}"
            if is_label:
                new_name[line.name] = label
            else:
                label_at[function, line.address] = label
        behind_label = is_label

    found = []
    for index, (function, line) in enumerate(places):
        if index in opened:
            found.append(f"{opened[index]}:")
        if line.kind is Kind.INSTRUCTION:
            label = label_at.get((function, _target(line)))
            text = _TARGET.sub(f"`({label});", line.text) if label else line.text
            found.append(_INDENT + _renamed(text, new_name))
        elif not _is_label(line) and (line.raw or (found and found[-1])):
            found.append(_renamed(line.raw, new_name))
    return "\n".join(found).removesuffix("\n") + "\n"


def _renamed(text: str, new_name: Mapping[str, str]) -> str:
    return _LABEL.sub(lambda match: new_name.get(match[0], match[0]), text)


def _moves(line: Line) -> bool:
    """Whether a line holds nothing but what is left out."""
    return line.text.startswith(".size ") or (not line.text and line.remark.startswith("//"))


def _is_label(line: Line) -> bool:
    return line.kind is Kind.LABEL and bool(_LABEL.fullmatch(line.name))


def _target(line: Line) -> int | None:
    """The address that an instruction jumps to, or waits at."""
    found = _TARGET.search(line.text) if _NAMES_AN_ADDRESS.match(line.instruction[1]) else None
    return int(found[1], 16) if found else None


DESCRIPTION = """\
Strip from a SASS listing what moves when an instruction does, so that two can be compared by diff:
addresses, encodings, source lines, live registers, sizes. Jumps go to labels, numbered in each
function from its start; labels that no instruction names are left out. LISTING is what nvdisasm,
cuobjdump -sass or tools/build/extract_sass.py print; - reads standard input. Registers stay as they
are: tools/analysis/compare_kernels.py --sass compares without their names.
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
