"""Benchmark results as SVG: percent of FlashAttention-2 by step, and TFLOP/s by sequence length.

The picture has no background, and its lines and letters have middle brightness, so that it is
legible on a light page and on a dark one. Its description holds the plotted numbers
(`plotted_numbers`), so that a check against the data needs no new drawing and does not depend on
the release of matplotlib.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from flash_helpers.kernel_configs import Config
from flash_helpers.measure.benchmark_tables import main_dtype
from flash_helpers.measure.results import (
    CUDNN,
    FA3,
    FLASH,
    FLASH_ATTN,
    LIBRARY_NAMES,
    LOAD_TEXTS,
    MMA_SYNC,
    RATE_NAMES,
    BenchmarkResults,
)
from flash_helpers.measure.staircases import Stair, stairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROGRESSION = "progression"
SEQ_LEN = "seq_len"
# The committed pictures, each with its panel and the family whose results it shows.
PLOTS: Mapping[PurePosixPath, tuple[str, str]] = MappingProxyType(
    {
        PurePosixPath("docs/images/progression.svg"): (PROGRESSION, "ampere"),
        PurePosixPath("docs/images/seq_len.svg"): (SEQ_LEN, "ampere"),
        PurePosixPath("docs/images/hopper.svg"): (SEQ_LEN, "hopper"),
    }
)
MILESTONE_GAIN = 1.05  # a step is drawn by length if its mean exceeds all before it by this factor

_DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
_WIDTH, _PANEL_HEIGHT = 9.0, 4.2  # inches
TEXT = "#7a828b"  # contrast over 3.8 : 1 on white and on GitHub's dark background
_GRID = "#7a828b40"
_LABEL_LEADING = 12  # points from one label of a line to the next
BLUE, ORANGE = "#2f81f7", "#db6d28"
_LIBRARY_COLORS = MappingProxyType(
    {FLASH: TEXT, CUDNN: "#8957e5", FLASH_ATTN: "#bf4b8a", FA3: "#8a7d1f"}
)
_DRAWN_LIBRARIES = tuple(_LIBRARY_COLORS)
_RATE_TITLES = MappingProxyType({r: f"{name} of the chip" for r, name in RATE_NAMES.items()})
_STEP_COLORS = (
    "#8b949e",
    "#2ea043",
    "#1a9ba8",
    "#2f81f7",
    "#a371f7",
    "#b08800",
    ORANGE,
    "#e5534b",
)
# Any, since matplotlib's type lists every key.
_STYLE: Mapping[Any, object] = MappingProxyType(
    {
        "svg.hashsalt": "flash_helpers",
        "svg.fonttype": "none",
        "font.size": 10.5,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"),
            TEXT,
        ),
        "axes.edgecolor": _GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)

Numbers = Mapping[str, Any]


class PlotError(RuntimeError):
    """A picture cannot be drawn; the message says why."""


def require_plotting() -> None:
    """Raise PlotError, with the way out, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("plots need matplotlib, which is not installed: pip install matplotlib")


def _rounded(value: float | None, factor: float = 1) -> float | None:
    return None if value is None else round(factor * value, 1)


def _stairs(results: BenchmarkResults, dtype: str) -> Iterable[Stair]:
    return stairs(dtype, results.operation).values() if results.measurements else ()


def progression_numbers(results: BenchmarkResults, dtype: str) -> Numbers:
    """Numbers of the panel by step: percent of PyTorch's flash backend in the harmonic mean over
    all lengths, for each measured step and for the contenders beside them. Steps are at
    the fixed tile, at the large tile, and at the large tile with a stride read at run time.

    Raises PlotError if no step was measured at every length, or the flash backend was not.
    """
    measured = {*results.names(dtype)}
    found = [
        own
        for own in _stairs(results, dtype)
        if not measured.isdisjoint(config.short_form() for config in own.configs)
    ]

    def percents(configs: Iterable[Config | None]) -> list[float | None]:
        shares = (results.of_first(c.short_form(), dtype) if c else None for c in configs)
        return [_rounded(share, 100) for share in shares]

    heights = {
        "fixed": percents(own.fixed for own in found),
        "large": percents(own.large for own in found),
        "read": percents(own.read for own in found),
    }
    if not any(value is not None for values in heights.values() for value in values):
        raise PlotError(f"no step of {dtype} was measured beside {LIBRARY_NAMES[FLASH]}")
    lines = {LIBRARY_NAMES[name]: results.of_first(name, dtype) for name in _DRAWN_LIBRARIES}
    flash_of_rate = results.of_rate(MMA_SYNC, FLASH, dtype)
    lines[_RATE_TITLES[MMA_SYNC]] = 1 / flash_of_rate if flash_of_rate else None
    return {
        "load": results.main_load,
        "steps": [own.step.id for own in found],
        **heights,
        "lines": {label: _rounded(share, 100) for label, share in lines.items() if share},
    }


def _milestones(results: BenchmarkResults, dtype: str) -> dict[str, str]:
    """Names and labels of the kernels to draw: the faster tile of each step that gained, and of the
    last measured step of each family."""
    measured = []
    highest = 0.0
    for own in _stairs(results, dtype):
        tiles = [(own.fixed, own.step.id), (own.large, f"{own.step.id}, large tile")]
        speeds = [
            (results.speed(config.short_form(), dtype) or 0.0, config, label)
            for config, label in tiles
            if config is not None
        ]
        mean, config, label = max(speeds, key=lambda found: found[0])
        if mean:
            gained = mean > MILESTONE_GAIN * highest
            label = label if own.fixed else own.step.id
            measured.append((own.step.family, config.short_form(), label, gained))
            highest = max(highest, mean)
    last = {family: name for family, name, *_ in measured}
    return {
        name: label for family, name, label, gained in measured if gained or name == last[family]
    }


def seq_len_numbers(results: BenchmarkResults, dtype: str) -> Numbers:
    """Numbers of the panel by length: TFLOP/s of the libraries and of the steps that gained, by
    label.

    Raises PlotError if nothing was measured.
    """
    shown = {name: LIBRARY_NAMES[name] for name in _DRAWN_LIBRARIES} | _milestones(results, dtype)
    lines = {}
    for name, label in shown.items():
        speeds = [_rounded(results.speed(name, dtype, n)) for n in results.sizes]
        if any(speed is not None for speed in speeds):
            lines[label] = speeds
    if not lines:
        raise PlotError(f"nothing was measured in {dtype}")
    rates = {title: results.rate(rate, dtype) for rate, title in _RATE_TITLES.items()}
    return {
        "load": results.main_load,
        "seq_lens": results.sizes,
        "lines": lines,
        "rates": {label: _rounded(rate) for label, rate in rates.items() if rate},
    }


_NUMBERS: Mapping[str, Callable[[BenchmarkResults, str], Numbers]] = MappingProxyType(
    {PROGRESSION: progression_numbers, SEQ_LEN: seq_len_numbers}
)


def description(results: BenchmarkResults, panels: Sequence[str]) -> str:
    """Description of a picture of the panels: the GPU and the plotted numbers, as JSON.

    Raises PlotError if a panel has no numbers, ValueError if nothing was measured at all.
    """
    dtype = main_dtype(results)
    numbers = {panel: _NUMBERS[panel](results, dtype) for panel in panels}
    return json.dumps({"gpu": results.provenance.gpu, "dtype": dtype, **numbers})


def plotted_numbers(svg: str) -> str:
    """The `description` in a picture; "" if the picture has none."""
    try:
        found = ElementTree.fromstring(svg).find(f".//{_DESCRIPTION}")
    except ElementTree.ParseError:
        return ""
    return (found.text or "") if found is not None else ""


def stale_pictures(numbers: Iterable[tuple[Path, Numbers]]) -> dict[Path, Numbers]:
    """Files of pictures that are absent or show other numbers than they are given with, with the
    numbers to draw. Raises OSError if a file cannot be read."""

    def shown(path: Path) -> str:
        return plotted_numbers(path.read_text(encoding="utf-8")) if path.is_file() else ""

    return {path: own for path, own in numbers if shown(path) != json.dumps(own)}


def drawable_panels(results: BenchmarkResults) -> list[str]:
    """The panels that the results have numbers for."""
    panels = []
    for panel in _NUMBERS:
        with contextlib.suppress(PlotError):
            description(results, [panel])
            panels.append(panel)
    return panels


def plot_svg(results: BenchmarkResults, panels: Sequence[str]) -> str:
    """Text of an SVG file with the panels, PROGRESSION and SEQ_LEN, one below the other.

    The same results and the same release of matplotlib give the same text.

    Raises PlotError without matplotlib, without panels, or if a panel has no numbers.
    """
    if not panels:
        raise PlotError("there is nothing to draw: no kernel was measured at every length")

    said = description(results, panels)
    return figure_svg(plot_figure(said, panels), said)


def plot_figure(said: str, panels: Sequence[str]) -> Figure:
    """Draw the panels of a description. Raises PlotError without matplotlib."""
    numbers = json.loads(said)

    def draw(*rows: Axes) -> None:
        for axes, panel in zip(rows, panels, strict=True):
            _DRAW[panel](axes, numbers[panel])
            load = LOAD_TEXTS[numbers[panel]["load"]]
            title = f"{PLOT_TITLES[panel]}: {numbers['gpu']}, {numbers['dtype']}, {load}"
            axes.set_title(title, loc="left", fontsize=11.5)

    return drawn_figure(draw, (_WIDTH, _PANEL_HEIGHT), len(panels))


def drawn_figure(
    draw: Callable[..., None], size: tuple[float, float], n_rows: int = 1, n_columns: int = 1
) -> Figure:
    """Draw a figure of rows of panels in the style of this module. size: of each row, in inches.
    draw: called with the axes of all panels, row by row.

    Raises PlotError without matplotlib.
    """
    require_plotting()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(dict(_STYLE)):
        width, height = size
        figure = Figure(figsize=(width, height * n_rows), layout="constrained")
        figure.patch.set_alpha(0)
        panels = [*figure.subplots(n_rows, n_columns, squeeze=False).flat]
        for axes in panels:
            axes.patch.set_alpha(0)
            axes.grid(axis="y", color=_GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(length=0)
        draw(*panels)
    return figure


def figure_svg(figure: Figure, said: str) -> str:
    """Text of the SVG file of a figure of `drawn_figure`. said: the description."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(dict(_STYLE)):
        figure.savefig(
            text,
            format="svg",
            metadata={"Date": None, "Creator": "flash_helpers.measure.plots", "Description": said},
        )
    return text.getvalue()


PLOT_TITLES: Mapping[str, str] = MappingProxyType(
    {
        PROGRESSION: "Percent of FlashAttention-2, harmonic mean over lengths",
        SEQ_LEN: "TFLOP/s by sequence length",
    }
)


def _draw_progression(axes: Axes, numbers: Numbers) -> None:
    steps, fixed, large, read = (numbers[name] for name in ("steps", "fixed", "large", "read"))
    edges = [place - 0.5 for place in range(len(steps) + 1)]
    for values, color, label in ((fixed, BLUE, "fixed tile"), (large, ORANGE, "large tile")):
        heights = [float("nan") if value is None else value for value in values]
        axes.stairs(heights, edges, color=color, linewidth=2.2, baseline=None, label=label)
        axes.stairs(heights, edges, color=color, alpha=0.12, fill=True)
    for place, (blue, orange, dashed) in enumerate(zip(fixed, large, read, strict=True)):
        if blue is not None:
            _number(axes, blue, (place, blue), BLUE, -11)
        if orange is not None and (blue is None or orange > blue):
            _number(axes, orange, (place, max(orange, dashed or 0)), ORANGE, 4)
        elif orange is not None:
            _number(axes, orange, (place, orange), ORANGE, -11)
    treads = [(place, value) for place, value in enumerate(read) if value is not None]
    for nth, (place, value) in enumerate(treads):
        axes.hlines(
            *(value, place - 0.4, place + 0.4),
            color=ORANGE,
            linewidth=1.4,
            linestyle=(0, (2, 2)),
            label="" if nth else "large tile, stride read at run time",
        )
    lines = numbers["lines"]
    for height in lines.values():
        axes.axhline(height, color=TEXT, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.grid(visible=False)  # each step is labelled with its number
    axes.set_ylim(0, 1.08 * max(v for v in (*fixed, *large, *lines.values()) if v is not None))
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xticks(range(len(steps)), steps, fontsize=9.5)
    axes.set_ylabel("% of flash")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.08), ncols=3, frameon=False)
    label_lines(axes, [(height, label, TEXT) for label, height in lines.items()])


def _number(
    axes: Axes, value: float, point: tuple[float, float], color: str, points_above: int
) -> None:
    axes.annotate(
        f"{value:.0f}",
        point,
        xytext=(0, points_above),
        textcoords="offset points",
        ha="center",
        color=color,
        fontsize=9.5,
    )


def _draw_seq_len(axes: Axes, numbers: Numbers) -> None:
    lengths, lines = numbers["seq_lens"], numbers["lines"]
    positions = range(len(lengths))
    titles = {title: name for name, title in LIBRARY_NAMES.items()}
    n_steps = 0
    ends: list[tuple[float, str, str]] = []
    style: str | tuple[int, tuple[int, int]]
    for label, speeds in lines.items():
        if label in titles:
            color, style = _LIBRARY_COLORS[titles[label]], (0, (5, 3))
        else:
            color, style = _STEP_COLORS[n_steps % len(_STEP_COLORS)], "solid"
            n_steps += 1
        heights = [float("nan") if value is None else value for value in speeds]
        axes.plot(
            positions,
            heights,
            color=color,
            linestyle=style,
            linewidth=2,
            marker="o",
            markersize=4,
            clip_on=False,
        )
        ends.append(([value for value in speeds if value is not None][-1], label, color))
    for label, rate in numbers["rates"].items():
        axes.axhline(rate, color=TEXT, linewidth=1, linestyle=(0, (1, 2)))
        ends.append((rate, label, TEXT))
    axes.set_ylim(0, 1.08 * max(height for height, _, _ in ends) or 1.0)
    axes.set_xlim(-0.3, len(lengths) - 1)
    axes.set_xticks(positions, [str(n) for n in lengths])
    axes.set_xlabel("sequence length")
    axes.set_ylabel("TFLOP/s")
    label_lines(axes, ends)


def label_lines(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write labels to the right of the axes, spaced apart, with a line from each curve to its own.

    ends: height at the right edge, label and colour of each curve. The axes' limits must not change
    afterwards.
    """
    bottom, top = axes.get_ylim()
    inches = axes.bbox.height / axes.figure.dpi
    distance = _LABEL_LEADING / 72 / inches * (top - bottom)
    places = _apart([height for height, _, _ in ends], distance)
    beside = axes.get_yaxis_transform()  # 1 is the right edge, heights are data
    for (height, label, color), place in zip(ends, places, strict=True):
        leader = (1, 1.015), (height, place)
        axes.plot(*leader, color=color, linewidth=0.8, clip_on=False, transform=beside)
        axes.text(1.02, place, label, color=color, va="center", fontsize=10, transform=beside)


def _apart(heights: Sequence[float], distance: float) -> list[float]:
    """Heights moved so that neighbours are at least `distance` apart; close ones become a group
    around their mean."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    groups: list[list[int]] = []

    def bottom(group: list[int]) -> float:
        mean = sum(heights[index] for index in group) / len(group)
        return mean - distance * (len(group) - 1) / 2

    for index in order:
        groups.append([index])
        while len(groups) > 1 and bottom(groups[-1]) < bottom(groups[-2]) + distance * len(
            groups[-2]
        ):
            last = groups.pop()
            groups[-1] += last
    placed = list(heights)
    for group in groups:
        for place, index in enumerate(group):
            placed[index] = bottom(group) + distance * place
    return placed


_DRAW: Mapping[str, Callable[[Any, Numbers], None]] = MappingProxyType(
    {PROGRESSION: _draw_progression, SEQ_LEN: _draw_seq_len}
)
