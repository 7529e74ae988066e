"""Losses of trainings as SVG, and their distances from the losses with attention in float32.

The picture is in the style of `plots`: it has no background, reads on light and dark pages, and
holds its numbers in its description.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING

from flash_helpers.measure.plots import (
    BLUE,
    ORANGE,
    TEXT,
    Numbers,
    drawn_figure,
    figure_svg,
    stale_pictures,
)
from flash_helpers.measure.results import RESULTS
from flash_helpers.measure.training_runs import (
    FLOAT32,
    LAB,
    PYTORCH,
    TrainingRuns,
    root_mean_square,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILES = "training_*.json"  # beside RESULTS; each has a picture of its own
FOLDER = PurePosixPath("docs/images")
STRETCH = 10  # steps whose distances make one point

_SIZE = (9.0, 2.6)  # of a row of panels, in inches
_COLOURS: Mapping[str, str] = MappingProxyType({LAB: ORANGE, PYTORCH: BLUE, FLOAT32: TEXT})
_WIDTHS: Mapping[str, float] = MappingProxyType({FLOAT32: 5.0, PYTORCH: 2.4, LAB: 1.0})


def picture_path(name: str) -> PurePosixPath:
    """Path in the repository of the picture of a file, which has that name without its end."""
    return FOLDER / f"{name}.svg"


def training_numbers(runs: TrainingRuns) -> Numbers:
    """Numbers of the picture, by head size: the loss of each step with each attention, from the
    unchanged weights; and the distances from those in float32, as the root mean square over each
    STRETCH of steps. Of all trainings with an attention it has the smallest distance, the median,
    and the largest."""
    panels = {}
    for d_head in runs.d_heads:
        named = runs.by_attention(d_head)
        losses = {name: [round(x, 4) for x in found[0].losses] for name, found in named.items()}
        distances = {
            name: _spread([_stretches(steps) for steps in found])
            for name, found in runs.distances(d_head).items()
            if found
        }
        panels[str(d_head)] = {"losses": losses, "distances": distances}
    return {"gpu": runs.provenance.gpu, "dtype": runs.dtype, "d_heads": panels}


def _stretches(distances: Sequence[float]) -> list[float]:
    starts = range(0, len(distances), STRETCH)
    return [root_mean_square(distances[at : at + STRETCH]) for at in starts]


def _spread(trainings: Sequence[Sequence[float]]) -> list[list[float]]:
    by_stretch = [*zip(*trainings, strict=True)]
    ends = (min, statistics.median, max)
    return [[float(f"{end(found):.3g}") for found in by_stretch] for end in ends]


def training_svg(numbers: Numbers) -> str:
    """Text of the picture's SVG file. Raises PlotError without matplotlib."""
    return figure_svg(training_figure(numbers), json.dumps(numbers))


def training_figure(numbers: Numbers) -> Figure:
    """Draw the picture: losses above, distances below, a column per head size. Raises PlotError
    without matplotlib."""
    panels = numbers["d_heads"]

    def draw(*axes: Axes) -> None:
        upper, lower = axes[: len(panels)], axes[len(panels) :]
        for above, below, (d_head, own) in zip(upper, lower, panels.items(), strict=True):
            title = f"d_head {d_head}: {numbers['gpu']}, {numbers['dtype']}"
            above.set_title(title, loc="left", fontsize=11.5)
            _draw_losses(above, own["losses"])
            _draw_distances(below, own["distances"])
            steps = len(own["losses"][FLOAT32])
            for panel in (above, below):
                panel.set_xlim(-0.03 * steps, steps)
                panel.set_xticks([place * steps / 4 for place in range(5)])
        for row in (upper, lower):
            _share_heights(row)
        upper[0].set_ylabel("loss, nats per sign")
        lower[0].set_ylabel("distance from float32")
        lines, names = upper[0].get_legend_handles_labels()
        upper[0].figure.legend(
            lines, names, loc="outside lower center", ncols=len(names), frameon=False
        )

    return drawn_figure(draw, _SIZE, 2, len(panels))


def _share_heights(row: Sequence[Axes]) -> None:
    """Give the panels of a row the same limits, and labels within these."""
    low = min(panel.get_ylim()[0] for panel in row)
    high = max(panel.get_ylim()[1] for panel in row)
    for panel in row:
        panel.set_ylim(low, high)
        panel.set_yticks([place for place in panel.get_yticks() if low < place < high])
        panel.minorticks_off()


def _draw_losses(axes: Axes, losses: Mapping[str, Sequence[float]]) -> None:
    for name, width in _WIDTHS.items():  # the widest lies below the others
        places = range(1, len(losses[name]) + 1)
        (line,) = axes.plot(places, losses[name], color=_COLOURS[name], linewidth=width, label=name)
        line.set_alpha(0.4 if name == FLOAT32 else 1.0)


def _draw_distances(axes: Axes, distances: Mapping[str, Sequence[Sequence[float]]]) -> None:
    for name, (low, median, high) in distances.items():
        middles = [STRETCH * place + (STRETCH + 1) / 2 for place in range(len(median))]
        axes.plot(middles, median, color=_COLOURS[name], linewidth=2)
        if low != high:
            axes.fill_between(middles, low, high, color=_COLOURS[name], alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    axes.set_xlabel("step")


def stale_trainings(root: Path) -> dict[Path, Numbers]:
    """Files of pictures that are absent or whose numbers differ from the measurements, with the
    numbers to draw. root: of the repository. Raises as `TrainingRuns.load` does."""
    return stale_pictures(
        (root / picture_path(file.stem), training_numbers(TrainingRuns.load(file)))
        for file in sorted((root / RESULTS).parent.glob(FILES))
    )
