"""The staircase of a family: one picture of all its steps, drawn from measurements.

The page of a step refers to the picture by the step's name (`hopper.svg#step-h12`), and a style
sheet in the picture lights the named step (CSS Selectors Level 4, ":target"). A viewer that drops
the name shows the staircase without a lit step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from string import ascii_lowercase
from typing import TYPE_CHECKING

from flash_helpers.course.arguments import DTYPE, fixed_config
from flash_helpers.course.metric import metric_of, share
from flash_helpers.kernel_configs import FAMILIES, Config
from flash_helpers.measure.plots import (
    BLUE,
    ORANGE,
    TEXT,
    Numbers,
    drawn_figure,
    figure_svg,
    label_lines,
    stale_pictures,
)
from flash_helpers.measure.results import RESULTS, BenchmarkResults, load_results, results_by_family
from flash_helpers.measure.staircases import large_tile, stair
from flash_helpers.registry.family import Family, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = PurePosixPath("docs/images/stairs")
FIXED, LARGE = "fixed", "large"  # tiles of a family that takes both; fields of Stair
OWN = "own"  # the one tile of a family that takes no large one

_SIZE = (6.0, 2.1)  # inches
CROWDED = 18  # steps; of more the labels are numbers alone
_LIT = "#2ea04359"
_COLOURS: Mapping[str, str] = {FIXED: BLUE, LARGE: ORANGE, OWN: ORANGE}
_STYLE = '<style>[id^="step-"]{opacity:0}[id^="step-"]:target{opacity:1}</style>'


def stairs_path(family: str) -> PurePosixPath:
    """Path of a family's picture in the repository."""
    return FOLDER / f"{family}.svg"


def stairs_link(step: Step) -> PurePosixPath:
    """Link to the picture of a step's family with that step lit."""
    return FOLDER / f"{step.family}.svg#step-{step.id}"


def has_tiles(family: Family) -> bool:
    """Whether some of a family's steps take the large tile besides the fixed one."""
    return any(large_tile(fixed_config(step)) for step in family.steps.values())


def tile_configs(step: Step) -> dict[str, Config | None]:
    """The configs of a step's stairs, by tile."""
    fixed = fixed_config(step)
    if not has_tiles(FAMILIES[step.family]):
        return {OWN: fixed}
    own = stair(fixed)
    return {FIXED: own.fixed, LARGE: own.large}


def stairs_numbers(family: Family, results: BenchmarkResults) -> Numbers:
    """Percent of the reference's speed, by step and tile and for the libraries.

    A number is None if a step does not take a tile or was not measured there.
    """

    metric = metric_of(family)

    def percent(contender: Config | str | None) -> float | None:
        found = contender and share(results, contender, DTYPE.short)
        return round(100 * found, 1) if found else None

    found = [tile_configs(step) for step in family.steps.values()]
    heights = {}
    for tile in found[0]:
        configs = [of[tile] for of in found]
        if any(configs):  # no step of the overlap family is at the fixed tile
            heights[tile] = [percent(config) for config in configs]
    lines = {metric.short: 100.0}
    if not family.is_portable:
        beside = {short: percent(name) for name, short in metric.beside.items()}
        if measured := {short: p for short, p in beside.items() if p}:
            best = max(measured, key=lambda short: measured[short])
            lines[best] = measured[best]
    return {"steps": [*family.steps], "heights": heights, "lines": lines}


def is_measured(numbers: Numbers) -> bool:
    """Whether a family's picture would show a step: one that was measured."""
    return any(any(heights) for heights in numbers["heights"].values())


def stairs_svg(numbers: Numbers) -> str:
    """Text of the picture's SVG file. Raises PlotError without matplotlib."""
    text = figure_svg(stairs_figure(numbers), json.dumps(numbers))
    return text.replace("<defs>", f"{_STYLE}\n <defs>", 1)


def stairs_figure(numbers: Numbers) -> Figure:
    """Draw the picture. Raises PlotError without matplotlib."""

    def draw(axes: Axes) -> None:
        steps, lines = numbers["steps"], numbers["lines"]
        edges = [place - 0.5 for place in range(len(steps) + 1)]
        measured = [p for of in numbers["heights"].values() for p in of if p is not None]
        for place, step in enumerate(steps):
            axes.axvspan(place - 0.5, place + 0.5, color=_LIT, lw=0).set_gid(f"step-{step}")
        for tile, percents in numbers["heights"].items():
            heights = [float("nan") if p is None else p for p in percents]
            label = "" if tile == OWN else f"{tile} tile"
            axes.stairs(
                heights, edges, color=_COLOURS[tile], linewidth=2, baseline=None, label=label
            )
        for percent in lines.values():
            axes.axhline(percent, color=TEXT, linewidth=1, linestyle=(0, (5, 3)))
        if len(numbers["heights"]) > 1:
            axes.legend(loc="lower right", frameon=False, ncols=2)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, 1.08 * max([*measured, *lines.values()]))
        is_crowded = len(steps) > CROWDED
        labels = [step.lstrip(ascii_lowercase) if is_crowded else step for step in steps]
        axes.set_xticks(range(len(steps)), labels, fontsize=8 if is_crowded else 10)
        axes.set_ylabel(f"% of {next(iter(lines))}")
        label_lines(axes, [(percent, name, TEXT) for name, percent in lines.items()])

    return drawn_figure(draw, _SIZE)


def stale_stairs(root: Path) -> dict[Path, Numbers]:
    """Files of pictures that are absent or whose numbers differ from the measurements, with the
    numbers to draw; none of families that were not measured. root: of the repository. Raises as
    `load_results` does."""
    by_family = results_by_family(root, load_results(root / RESULTS))
    pictures = (
        (root / stairs_path(name), stairs_numbers(family, by_family[name]))
        for name, family in FAMILIES.items()
    )
    return stale_pictures((path, numbers) for path, numbers in pictures if is_measured(numbers))
