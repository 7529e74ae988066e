#!/usr/bin/env python3
"""Draw the pictures of the course."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, print_text, run_tool
from flash_helpers.console.files import write_if_different
from flash_helpers.console.tables import Table
from flash_helpers.course.pictures import FOLDER, PICTURES, draw, stale_pictures, unknown_pictures
from flash_helpers.course.pictures.stairs import FOLDER as STAIRS
from flash_helpers.course.pictures.stairs import stale_stairs
from flash_helpers.measure.results import RESULTS

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = f"""\
Draw the pictures of the course as SVG into {FOLDER}. Each is computed from what it shows: the
swizzle's formula, the fragments of mma, the tile shapes, counted cycles. Without names, also the
staircases with a step lit into {STAIRS}, from {RESULTS}. Neither a GPU nor a CUDA toolkit is
needed.
"""

EXAMPLES = """\
examples:
  draw all pictures that are absent or show something else than the code says:
    python tools/docs/draw_pictures.py
  two of them:
    python tools/docs/draw_pictures.py swizzle bank_conflicts
  are all of them there and current? (exit 1 and their names if not)
    python tools/docs/draw_pictures.py --check
  what is there to draw?
    python tools/docs/draw_pictures.py --list

exit status: 0 all is up to date or was drawn, 1 --check found something stale, 2 wrong usage
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of pictures (default: all)")
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="the repository (default: this one)"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a picture is stale"
    )
    action.add_argument("--list", action="store_true", help="print names and titles")
    return parser.parse_args(argv)


def update(arguments: argparse.Namespace) -> int:
    """Draw, check or list; returns the exit status. Raises ValueError and OSError."""
    names = arguments.names or list(PICTURES)
    if arguments.list:
        rows = [(name, draw(name).title) for name in names]
        print_text(f"{Table(('name', 'title'), rows, 'll').text()}\n")
        return 0
    stale = stale_pictures(arguments.root, names)
    if not arguments.names:
        stale |= stale_stairs(arguments.root)
    strange = [] if arguments.names else unknown_pictures(arguments.root)
    for path, text in stale.items():
        name = path.relative_to(arguments.root)
        if arguments.check:
            print(f"{name} is absent or shows something else")
        else:
            write_if_different(path, text)
            print(f"{name} written")
    for path in strange if arguments.check else ():
        print(f"{path.relative_to(arguments.root)} is no picture of the course")
    if not stale and not (arguments.check and strange):
        print("all is up to date")
    return int(arguments.check and bool(stale or strange))


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, check or list; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: update(arguments), ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())
