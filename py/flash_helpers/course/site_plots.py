"""The plots of the measurements for a page of the site: the numbers for the script that draws them
(docs/assets/plots.js), and as a table for whoever has no script, or reads with the ears."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flash_helpers.kernel_configs import STEPS
from flash_helpers.measure.benchmark_tables import main_dtype
from flash_helpers.measure.plots import PROGRESSION, SEQ_LEN, progression_numbers, seq_len_numbers
from flash_helpers.measure.results import FLASH, LIBRARY_NAMES, LOAD_TEXTS, BenchmarkResults

# The picture that stands in the page on GitHub, and the plot that takes its place in the site.
PLOTTED: Mapping[str, str] = MappingProxyType(
    {"docs/images/progression.svg": PROGRESSION, "docs/images/seq_len.svg": SEQ_LEN}
)

STAIRCASE = "staircase"

Data = Mapping[str, Any]


def site_plots(results: BenchmarkResults, steps: Mapping[str, str]) -> dict[str, str]:
    """HTML of each plot, by the path of the picture that it replaces. steps: names of the pages
    about a step.

    Raises PlotError if there are no numbers for one.
    """
    dtype = main_dtype(results)
    data = {PROGRESSION: _progression(results, dtype), SEQ_LEN: _seq_len(results, dtype)}
    measured = ", ".join(
        (
            results.provenance.gpu,
            dtype,
            LOAD_TEXTS[results.main_load],
            results.provenance.date,
        )
    )
    return {path: _figure(name, data[name], measured, steps) for path, name in PLOTTED.items()}


def _progression(results: BenchmarkResults, dtype: str) -> Data:
    numbers = progression_numbers(results, dtype)
    steps = zip(numbers["steps"], numbers["fixed"], numbers["large"], strict=True)
    return {
        "kind": STAIRCASE,
        "title": f"Percent of {LIBRARY_NAMES[FLASH]}, harmonic mean over lengths",
        "unit": "%",
        "reference": {"label": LIBRARY_NAMES[FLASH], "value": 100},
        "series": ["fixed tile", "large tile"],
        "points": [
            {"x": n, "title": f"Step {n}: {STEPS[n].idea}", "values": [fixed, large]}
            for n, fixed, large in steps
        ],
    }


def _seq_len(results: BenchmarkResults, dtype: str) -> Data:
    numbers = seq_len_numbers(results, dtype)
    labels = list(numbers["lines"])
    return {
        "kind": "lines",
        "title": "TFLOP/s by sequence length",
        "unit": "TFLOP/s",
        "series": labels,
        "libraries": [label for label in labels if label in LIBRARY_NAMES.values()],
        "points": [
            {
                "x": str(seq_len),
                "title": f"Sequence length {seq_len}",
                "values": [numbers["lines"][label][at] for label in labels],
            }
            for at, seq_len in enumerate(numbers["seq_lens"])
        ],
    }


def _figure(name: str, data: Data, measured: str, steps: Mapping[str, str]) -> str:
    title = html.escape(data["title"])
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure class="plot" id="plot-{name}">'
        f"<figcaption><strong>{title}</strong> "
        f'<span class="where">{html.escape(measured)}</span></figcaption>'
        f'<script type="application/json">{text}</script>'
        '<div class="drawing"></div>'
        f"<details><summary>The numbers as a table</summary>{_table(data, steps)}</details>"
        "</figure>"
    )


def _table(data: Data, steps: Mapping[str, str]) -> str:
    header = ["", *(f"{label}, {data['unit']}" for label in data["series"])]
    rows = (
        [_first_cell(data, point, steps), *(_number(value) for value in point["values"])]
        for point in data["points"]
    )
    return (
        '<div class="table-wrapper"><table class="docutils"><thead>'
        f"{_row('th', map(html.escape, header))}</thead><tbody>"
        f"{''.join(_row('td', row) for row in rows)}</tbody></table></div>"
    )


def _first_cell(data: Data, point: Data, steps: Mapping[str, str]) -> str:
    title = html.escape(point["title"])
    page = steps.get(point["x"]) if data["kind"] == STAIRCASE else None
    return title if page is None else f'<a href="{page}.html">{title}</a>'


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _row(tag: str, cells: Iterable[str] | Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"
