#!/usr/bin/env python3
"""Build the course as a static site that can be opened from a file."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, output_folder, run_tool
from flash_helpers.course.site import SiteWarningsError, build_site

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = """\
Build the pages of docs/ as a static site with a menu and a search. Each step has the CUDA, PTX and
SASS of its kernel, linked line by line. The site needs neither a server nor a network.
"""

EXAMPLES = """\
examples:
  build it, and read it:
    python tools/docs/build_site.py && xdg-open site/index.html
  what continuous integration runs: a link that leads nowhere is an error
    python tools/docs/build_site.py --strict
  link to source files where they are hosted, instead of copying them into the site:
    python tools/docs/build_site.py --repo-url https://github.com/OWNER/NAME/blob/main

exit status: 0 built, 1 --strict found faults, 2 wrong usage or a missing requirement,
130 interrupted. The old site stays unless the new one is complete.
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--output",
        type=output_folder,
        default=ROOT / "site",
        metavar="DIR",
        help="folder of the site, replaced as a whole (default: site/ in the repository)",
    )
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument(
        "--repo-url",
        metavar="URL",
        help="address of the repository's files (default: copy linked files into the site)",
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="the repository (default: this one)"
    )
    return parser.parse_args(argv)


def build(arguments: argparse.Namespace) -> int:
    """Build the site; returns the exit status. Raises the errors of `build_site`."""
    try:
        warnings = build_site(
            arguments.root.resolve(),
            arguments.output.resolve(),
            strict=arguments.strict,
            repo_url=arguments.repo_url,
        )
    except SiteWarningsError as error:
        print(error, file=sys.stderr)
        return 1
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{arguments.output / 'index.html'} written")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: build(arguments), RuntimeError, ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())
