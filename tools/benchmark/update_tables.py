#!/usr/bin/env python3
"""Write what was measured into README.md and into the headers of the kernels."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.benchmark_tables import (
    HEADER_BEGIN_MARKER,
    HEADER_END_MARKER,
    header_lines,
    progression_table,
    replace_between_markers,
)
from flash_helpers.codegen import write_if_different
from flash_helpers.kernel_configs import VERSIONS
from flash_helpers.results import BenchmarkResults, load_results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results/h100.json")

EXAMPLES = f"""\
examples:
  after a new measurement:
    python tools/benchmark/pt_bench.py --json {RESULTS}
    python tools/benchmark/update_tables.py
  do the README and the headers show what the data says? (exit 1 and a diff if not)
    python tools/benchmark/update_tables.py --check

exit status: 0 all is up to date, 1 --check found something stale, 2 wrong usage
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        description="Replace what stands between the benchmark markers of the README and of each "
        "kernel's header.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / RESULTS,
        metavar="FILE",
        help=f"written by pt_bench.py --json (default: {RESULTS})",
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="the repository (default: this one)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; print a diff and exit 1 if stale"
    )
    return parser.parse_args(argv)


def updated_texts(root: Path, results: BenchmarkResults) -> dict[Path, tuple[str, str]]:
    """Each file's text as it is and as it should be. Raises OSError, or ValueError for markers."""
    readme = root / "README.md"
    old = readme.read_text(encoding="utf-8")
    texts = {readme: (old, replace_between_markers(old, progression_table(results)))}
    for number, version in VERSIONS.items():
        path = root / version.source
        old = path.read_text(encoding="utf-8")
        new = replace_between_markers(
            old, header_lines(results, number), HEADER_BEGIN_MARKER, HEADER_END_MARKER
        )
        texts[path] = (old, new)
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Update or check the files; returns the exit status."""
    arguments = parse_arguments(argv)
    try:
        texts = updated_texts(arguments.root, load_results(arguments.results))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    stale = {path: pair for path, pair in texts.items() if pair[0] != pair[1]}
    for path, (old, new) in stale.items():
        name = str(path.relative_to(arguments.root))
        if arguments.check:
            lines = (text.splitlines(keepends=True) for text in (old, new))
            print("".join(difflib.unified_diff(*lines, name, f"{name} (generated)")), end="")
        else:
            write_if_different(path, new)
            print(f"{name} written")
    if not stale:
        print("all is up to date")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
