#!/usr/bin/env python3
"""Write the files that are generated from the registry: the maps from config to kernel, and the
fields of the configs' C++ structs."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "py"))

from flash_helpers.compile.codegen import (  # noqa: E402
    GENERATOR,
    generated_files,
    library_configs,
)
from flash_helpers.console.command_line import make_parser, print_text, run_tool  # noqa: E402
from flash_helpers.console.files import text_diff, write_if_different  # noqa: E402

EXAMPLES = f"""\
examples:
  after a change of the registry, or after a sweep (tools/benchmark/autotune.py):
    python {GENERATOR}
  are the committed files up to date? (exit 1 and a diff if not)
    python {GENERATOR} --check

exit status: 0 done, 1 --check found something stale, 2 wrong usage or bad input
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(__doc__ or "", EXAMPLES)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; print a diff and exit 1 if a committed file is stale",
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="the repository (default: this one)"
    )
    return parser.parse_args(argv)


def generate(arguments: argparse.Namespace) -> int:
    """Write or check; returns the exit status. Raises OSError and ValueError."""
    root = arguments.root
    stale = False
    for name, (old, new) in generated_files(root, library_configs(root)).items():
        if not arguments.check:
            written = write_if_different(root / name, new)
            print(f"{name}{' written' if written else ' is up to date'}")
        elif diff := text_diff(str(name), old, new):
            print_text(diff)
            print(f"{name} is stale: run {GENERATOR}", file=sys.stderr)
            stale = True
    return 1 if stale else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the generated files; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: generate(arguments), OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
