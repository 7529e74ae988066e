#!/usr/bin/env python3
"""Draw the staircases of the course, the losses of trainings, the speeds of rings of GPUs, and the
speeds by width of a row."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.compile.codegen import CHOICE_PATTERN, CONFIG_FOLDER
from flash_helpers.console.command_line import make_parser, run_tool
from flash_helpers.console.files import write_if_different
from flash_helpers.course.stairs import FOLDER, stairs_svg, stale_stairs
from flash_helpers.measure.plots import PlotError
from flash_helpers.measure.results import RESULTS
from flash_helpers.measure.ring_plot import FILES as RINGS
from flash_helpers.measure.ring_plot import ring_svg, stale_rings
from flash_helpers.measure.training_plot import FILES, stale_trainings, training_svg
from flash_helpers.measure.training_plot import FOLDER as TRAININGS
from flash_helpers.measure.width_plot import (
    TABLES,
    stale_tables,
    stale_widths,
    width_csv,
    width_svg,
)

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = f"""\
Draw SVG files that are absent or whose numbers differ from the measurements (needs matplotlib): the
staircase of each family, of {RESULTS} and the family's own results, into {FOLDER};
and the losses of each {RESULTS.with_name(FILES)}, the speeds
of each {RESULTS.with_name(RINGS)}, and the speeds by width of a row that
{CONFIG_FOLDER}/{CHOICE_PATTERN} has, into {TRAININGS}, these as CSV into {TABLES} too.
All other pictures of the course are drawings, committed in docs/images/course.
"""

EXAMPLES = """\
examples:
  after a new measurement or a new step:
    python tools/docs/draw_pictures.py
  do all of them agree with the measurements? (exit 1 and the names of those that do not)
    python tools/docs/draw_pictures.py --check

exit status: 0 all are up to date or were drawn, 1 --check found a stale one, 2 wrong usage, or
matplotlib is missing
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="the repository (default: this one)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a picture is stale"
    )
    return parser.parse_args(argv)


def update(arguments: argparse.Namespace) -> int:
    """Draw or check; returns the exit status. Raises ValueError, OSError and PlotError."""
    from flash_helpers.tune.best import config_for  # imports torch, for which --help does not wait

    root = arguments.root
    stale = {
        path: (text, numbers)
        for text, found in (
            (stairs_svg, stale_stairs(root)),
            (training_svg, stale_trainings(root)),
            (ring_svg, stale_rings(root)),
            (width_svg, stale_widths(root, config_for)),
            (width_csv, stale_tables(root, config_for)),
        )
        for path, numbers in found.items()
    }
    for path, (text, numbers) in stale.items():
        name = path.relative_to(root)
        if arguments.check:
            print(f"{name} is absent or shows other numbers than the measurements")
        else:
            write_if_different(path, text(numbers))
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
