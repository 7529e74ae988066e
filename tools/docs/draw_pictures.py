#!/usr/bin/env python3
"""Draw the staircases of the course."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, run_tool
from flash_helpers.console.files import write_if_different
from flash_helpers.course.stairs import FOLDER, stairs_svg, stale_stairs
from flash_helpers.measure.plots import PlotError
from flash_helpers.measure.results import RESULTS

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = f"""\
Draw the staircase of each family as SVG into {FOLDER}, if it is absent or its numbers differ from
{RESULTS} and the family's own results (needs matplotlib). All other pictures of the course are
drawings, committed in docs/images/course.
"""

EXAMPLES = """\
examples:
  after a new measurement or a new step:
    python tools/docs/draw_pictures.py
  do all staircases agree with the measurements? (exit 1 and their names if not)
    python tools/docs/draw_pictures.py --check

exit status: 0 all staircases are up to date or were drawn, 1 --check found a stale staircase,
2 wrong usage, or matplotlib is missing
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="the repository (default: this one)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a staircase is stale"
    )
    return parser.parse_args(argv)


def update(arguments: argparse.Namespace) -> int:
    """Draw or check; returns the exit status. Raises ValueError, OSError and PlotError."""
    stale = stale_stairs(arguments.root)
    for path, numbers in stale.items():
        name = path.relative_to(arguments.root)
        if arguments.check:
            print(f"{name} is absent or shows other numbers than the measurements")
        else:
            write_if_different(path, stairs_svg(numbers))
            print(f"{name} written")
    if not stale:
        print("all is up to date")
    return int(arguments.check and bool(stale))


def main(argv: Sequence[str] | None = None) -> int:
    """Draw or check; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: update(arguments), ValueError, OSError, PlotError)


if __name__ == "__main__":
    sys.exit(main())
