"""The two staircases with one step lit: a picture for the page of each step, drawn from what was
measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from flash_helpers.course.pictures.svg import BLUE, GREEN, ORANGE, Drawing
from flash_helpers.kernel_configs import STEPS, DType
from flash_helpers.measure.plots import progression_numbers
from flash_helpers.measure.results import RESULTS, BenchmarkResults, load_results

FOLDER = PurePosixPath("docs/images/stairs")
HEIGHT = 130  # units, of the highest stair
FLASH = 100


def stairs_path(step: str) -> PurePosixPath:
    """Where the picture of a step lies in the repository."""
    return FOLDER / f"stairs_{step}.svg"


def stairs_picture(step: str, results: BenchmarkResults) -> Drawing:
    """Percent of PyTorch's flash backend by step at both tiles, that of one step with its numbers.

    Raises flash_helpers.measure.plots.PlotError if nothing was measured.
    """
    numbers = progression_numbers(results, DType.BF16.short)
    steps = numbers["steps"]
    heights = {ORANGE: numbers["large"], BLUE: numbers["fixed"]}
    measured = [percent for of in heights.values() for percent in of if percent is not None]
    unit = HEIGHT / max(FLASH, *measured)  # for a percent
    lit = steps.index(step)
    told = "; ".join(
        f"{percents[lit]:.1f}% at the {tile} tile"
        for tile, percents in (("fixed", heights[BLUE]), ("large", heights[ORANGE]))
        if percents[lit] is not None
    )
    d = Drawing(
        f"{step}: {STEPS[step].idea}",
        f"Two staircases, a stair a step, in percent of PyTorch's flash backend. {step}: "
        f"{told or 'not measured'}.",
    )
    width = (d.width - 30) / len(steps)  # the rest is for what stands at the right of the line
    ground = d.y + 26 + HEIGHT
    d.rect(d.left + lit * width, d.y + 8, width, HEIGHT + 18, GREEN, lit=step)
    flash = ground - FLASH * unit
    d.line([(d.left, flash), (d.left + len(steps) * width, flash)], dashed=True)
    d.note(d.right, flash + 4, "flash", "end")
    for colour, percents in heights.items():
        for run in _runs(percents):
            points = [
                (d.left + (place + side) * width, ground - percents[place] * unit)
                for place in run
                for side in (0, 1)
            ]
            d.line(points, colour)
    d.line([(d.left, ground), (d.left + len(steps) * width, ground)])
    for place, name in enumerate(steps):
        at = d.left + (place + 0.5) * width
        d.small(at, ground + 17, name.removeprefix("v"), "middle", bold=place == lit)
    fixed, large = numbers["fixed"][lit], numbers["large"][lit]
    d.y = ground + 26
    x = d.left
    for colour, tile, percent in ((BLUE, "fixed", fixed), (ORANGE, "large", large)):
        text = f"{tile} tile: {'not there' if percent is None else f'{percent:.1f}%'}"
        d.text(x, d.y + 14, text, colour=colour, bold=percent is not None, tile=tile)
        x += d.width / 2
    d.y += 20
    return d


def _runs(percents: Sequence[float | None]) -> Iterator[list[int]]:
    """Indices of neighbours that were measured."""
    run: list[int] = []
    for place, percent in enumerate((*percents, None)):
        if percent is not None:
            run.append(place)
        elif run:
            yield run
            run = []


def stale_stairs(root: Path) -> dict[Path, str]:
    """Files of these pictures that are absent or differ from what would be drawn now, with that
    text. root: of the repository. Raises as `load_results` and `stairs_picture` do."""
    results = load_results(root / RESULTS)
    stale = {}
    for step in STEPS:
        path = root / stairs_path(step)
        drawn = stairs_picture(step, results).to_svg(path.stem)
        if not path.is_file() or path.read_text(encoding="utf-8") != drawn:
            stale[path] = drawn
    return stale
