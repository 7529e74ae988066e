#!/usr/bin/env python3
"""Draw the pictures of the course."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from flash_helpers.course.pictures import (
    FOLDER,
    PICTURES,
    picture_title,
    stale_pictures,
    unknown_pictures,
)
from flash_helpers.files import write_if_different

ROOT = Path(__file__).resolve().parents[2]

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
    parser = argparse.ArgumentParser(
        description=f"Draw the pictures of the course as SVG into {FOLDER}. Each is computed from "
        "what it shows: the swizzle's formula, the fragments of mma, the tile shapes, counted "
        "cycles. Nothing is measured, and neither a GPU nor a CUDA toolkit is needed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, check or list; returns the exit status."""
    arguments = parse_arguments(argv)
    names = arguments.names or list(PICTURES)
    try:
        if arguments.list:
            rows = [(name, picture_title(name)) for name in names]
            print(tabulate(rows, ("name", "title"), disable_numparse=True))
            return 0
        stale = stale_pictures(arguments.root, names)
        if not arguments.check:
            for path, text in stale.items():
                write_if_different(path, text)
                print(f"{path.relative_to(arguments.root)} written")
        strange = [] if arguments.names else unknown_pictures(arguments.root)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(arguments.root)} is absent or shows something else")
        for path in strange:
            print(f"{path.relative_to(arguments.root)} is no picture of the course")
        if stale or strange:
            return 1
    if not stale:
        print("all is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
