#!/usr/bin/env python3
"""Write what was measured into README.md, into the headers of the kernels, and as plots; and into
README.md what the kernels and a call of them take."""

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
    BEST_MARKERS,
    HEADER_BEGIN_MARKER,
    HEADER_END_MARKER,
    LOADS_MARKERS,
    SUPPORTS_MARKERS,
    best_table,
    header_lines,
    loads_table,
    progression_table,
    replace_between_markers,
    supports_table,
)
from flash_helpers.measure.call_overhead import MARKERS as CALL_MARKERS
from flash_helpers.measure.call_overhead import CallOverhead
from flash_helpers.measure.code import changed_line
from flash_helpers.measure.plots import (
    PROGRESSION,
    SEQ_LEN,
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
LOADS = Path("benchmarks/results/large_tile_h200.json")
CALLS = Path("benchmarks/results/call_overhead_h200.json")
# Panels, with the family whose results they show.
PLOTS = {
    Path("docs/images/progression.svg"): (PROGRESSION, "ampere"),
    Path("docs/images/seq_len.svg"): (SEQ_LEN, "ampere"),
    Path("docs/images/hopper.svg"): (SEQ_LEN, "hopper"),
}

EXAMPLES = f"""\
examples:
  after a new measurement:
    python tools/benchmark/pt_bench.py --json {RESULTS}
    python tools/benchmark/update_tables.py
  after new times of calls:
    python benchmarks/call_overhead.py
    python tools/benchmark/update_tables.py
  do the README, the headers and the plots show what the data says, and was the data measured with
  the machine code that the library holds today? (exit 1, with a diff or the names, if not)
    python tools/benchmark/update_tables.py --check

exit status: 0 all is up to date, 1 --check found something stale, 2 wrong usage
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(
        "Replace what stands between the benchmark markers of the README and of each "
        "kernel's header, the README's tables of what the kernels and a call of them take, and "
        "draw the plots that "
        f"are absent or show other numbers (needs matplotlib): {', '.join(map(str, PLOTS))}.",
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


def updated_texts(
    root: Path, by_family: Mapping[str, BenchmarkResults]
) -> dict[Path, tuple[str, str]]:
    """Each file's text as it is and as it should be. Raises OSError, or ValueError for markers."""
    readme = root / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = replace_between_markers(old, progression_table(by_family["ampere"]))
    new = replace_between_markers(new, best_table(by_family["hopper"]), *BEST_MARKERS)
    new = replace_between_markers(new, supports_table(), *SUPPORTS_MARKERS)
    if (root / LOADS).is_file():
        new = replace_between_markers(new, loads_table(load_results(root / LOADS)), *LOADS_MARKERS)
    if (root / CALLS).is_file():
        calls = CallOverhead.load(root / CALLS)
        new = replace_between_markers(new, calls.markdown(), *CALL_MARKERS)
    texts = {readme: (old, new)}
    for step in STEPS.values():
        path = root / step.source
        old = path.read_text(encoding="utf-8")
        new = replace_between_markers(
            old,
            header_lines(by_family[step.family], step),
            HEADER_BEGIN_MARKER,
            HEADER_END_MARKER,
        )
        texts[path] = (old, new)
    return texts


def stale_plots(
    root: Path, by_family: Mapping[str, BenchmarkResults]
) -> dict[Path, tuple[str, str]]:
    """Files of plots that are absent or show other numbers, with what they are of.

    Raises PlotError if there are no numbers for one.
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

    Raises OSError, PlotError, and ValueError for markers that are not there.
    """
    root = arguments.root
    by_family = results_by_family(root, load_results(arguments.results))
    texts = updated_texts(root, by_family)
    stale = {path: pair for path, pair in texts.items() if pair[0] != pair[1]}
    plots = stale_plots(root, by_family)
    if arguments.check:
        for path, pair in stale.items():
            print_text(text_diff(str(path.relative_to(root)), *pair))
        for path in plots:
            name = path.relative_to(root)
            print(f"{name} is absent or shows other numbers than were measured")
    else:
        # all is drawn before anything is written
        drawn = {path: plot_svg(by_family[of], [panel]) for path, (panel, of) in plots.items()}
        for path, text in {**{path: new for path, (_, new) in stale.items()}, **drawn}.items():
            write_if_different(path, text)
            print(f"{path.relative_to(root)} written")
    headline = {id(found): found for found in by_family.values()}.values()
    loads = [load_results(root / LOADS)] if (root / LOADS).is_file() else []
    changed = [line for found in (*headline, *loads) if (line := changed_line(found))]
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
