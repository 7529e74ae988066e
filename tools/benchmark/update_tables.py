#!/usr/bin/env python3
"""Write measurements into the headers of the kernels, and draw them as plots."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, print_text, run_tool
from flash_helpers.console.files import text_diff, write_if_different
from flash_helpers.kernel_configs import STEPS
from flash_helpers.measure.benchmark_tables import (
    HEADER_BEGIN_MARKER,
    HEADER_END_MARKER,
    header_lines,
    replace_between_markers,
)
from flash_helpers.measure.code import changed_line, changed_names
from flash_helpers.measure.plots import (
    PLOTS,
    PlotError,
    description,
    plot_svg,
    plotted_numbers,
)
from flash_helpers.measure.results import (
    RESULTS,
    BenchmarkResults,
    load_results,
    results_by_family,
)

ROOT = Path(__file__).resolve().parents[2]

EXAMPLES = f"""\
examples:
  after a new measurement:
    python tools/benchmark/pt_bench.py --json {RESULTS}
    python tools/benchmark/update_tables.py
  do the headers and the plots agree with the data, and does the library still hold the machine code
  that was measured? (exit 1, with a diff or the names, if not)
    python tools/benchmark/update_tables.py --check

exit status: 0 all is up to date, 1 --check found something stale, 2 wrong usage
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(
        "Replace the text between the benchmark markers of each kernel's header, and draw the "
        "plots that are absent or show other numbers (needs matplotlib): "
        f"{', '.join(map(str, PLOTS))}. build_docs.py writes the tables of the README and of the "
        "pages.",
        EXAMPLES,
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


def updated_headers(
    root: Path, by_family: Mapping[str, BenchmarkResults]
) -> dict[Path, tuple[str, str]]:
    """Each kernel's file as it is and as it should be. Raises OSError, or ValueError for missing
    markers."""
    changed = {family: changed_names(results) for family, results in by_family.items()}
    texts = {}
    for step in STEPS.values():
        path = root / step.source
        old = path.read_text(encoding="utf-8")
        lines = header_lines(by_family[step.family], step, changed[step.family])
        new = replace_between_markers(old, lines, HEADER_BEGIN_MARKER, HEADER_END_MARKER)
        texts[path] = (old, new)
    return texts


def stale_plots(
    root: Path, by_family: Mapping[str, BenchmarkResults]
) -> dict[Path, tuple[str, str]]:
    """Files of plots that are absent or show other numbers, with their panels and results.

    Raises PlotError if a plot has no numbers.
    """
    stale = {}
    for name, (panel, family) in PLOTS.items():
        path = root / name
        shown = plotted_numbers(path.read_text(encoding="utf-8")) if path.is_file() else ""
        if shown != description(by_family[family], [panel]):
            stale[path] = (panel, family)
    return stale


def update(arguments: argparse.Namespace) -> int:
    """Update or check the files; returns the exit status.

    Raises OSError, PlotError, and ValueError for missing markers.
    """
    root = arguments.root
    by_family = results_by_family(root, load_results(arguments.results))
    texts = updated_headers(root, by_family)
    stale = {path: pair for path, pair in texts.items() if pair[0] != pair[1]}
    plots = stale_plots(root, by_family)
    if arguments.check:
        for path, pair in stale.items():
            print_text(text_diff(str(path.relative_to(root)), *pair))
        for path in plots:
            name = path.relative_to(root)
            print(f"{name} is absent or shows other numbers than the measurements")
    else:
        # All plots are drawn before any is written.
        drawn = {path: plot_svg(by_family[of], [panel]) for path, (panel, of) in plots.items()}
        for path, text in {**{path: new for path, (_, new) in stale.items()}, **drawn}.items():
            write_if_different(path, text)
            print(f"{path.relative_to(root)} written")
    headline = {id(found): found for found in by_family.values()}.values()
    changed = [line for found in headline if (line := changed_line(found))]
    for line in changed:
        print(line)
    if not stale and not plots and not changed:
        print("all is up to date")
    return 1 if (stale or plots or changed) and arguments.check else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Update or check the files; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: update(arguments), OSError, PlotError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
