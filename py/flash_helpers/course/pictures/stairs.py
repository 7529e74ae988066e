"""The staircases with one step lit: a picture for the page of each step, drawn from what was
measured.

The steps that every GPU runs stand on two, at the tiles that they share. A family for one
architecture has a staircase of its own, at the configs that its steps are about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from flash_helpers.course.pictures.svg import BLUE, GREEN, ORANGE, SMALL, Drawing
from flash_helpers.course.pictures.text_width import text_width
from flash_helpers.kernel_configs import FAMILIES, STEPS, Config, DType
from flash_helpers.measure.results import (
    CUDNN,
    FA3,
    RESULTS,
    BenchmarkResults,
    load_results,
    results_by_family,
)
from flash_helpers.measure.staircases import stair
from flash_helpers.registry.family import Step

FOLDER = PurePosixPath("docs/images/stairs")
HEIGHT = 130  # units, of the highest stair
FULL = 100.0  # percent of flash
TILES = ("fixed", "large")  # fields of Stair
OWN = "of flash"  # the one tile of a family that does not share those

_COLOURS: Mapping[str, str] = MappingProxyType({"fixed": BLUE, "large": ORANGE, OWN: ORANGE})
_DTYPE = DType.BF16


def stairs_path(step: str) -> PurePosixPath:
    """Where the picture of a step lies in the repository."""
    return FOLDER / f"stairs_{step}.svg"


def has_tiles(step: Step) -> bool:
    """Whether its family shares the staircases' tiles."""
    return FAMILIES[step.family].is_portable


def tile_configs(fixed: Config) -> dict[str, Config | None]:
    """The configs of a step's stairs, by tile. fixed: its fixed config."""
    if not has_tiles(fixed.step):
        return {OWN: fixed}
    own = stair(fixed)
    return {tile: getattr(own, tile) for tile in TILES}


def stairs_picture(step: str, results: BenchmarkResults) -> Drawing:
    """Percent of PyTorch's flash backend by step, at both tiles if the step has them, that of one
    step with its numbers."""
    shared = has_tiles(STEPS[step])
    steps = [s.id for s in STEPS.values() if has_tiles(s) == shared]
    found = [tile_configs(FAMILIES[STEPS[s].family].fixed_config(STEPS[s], _DTYPE)) for s in steps]
    heights = {
        tile: [_percent(results, of[tile].short_form()) if of[tile] else None for of in found]
        for tile in found[0]
    }
    lines = {"flash": FULL} if shared else {"flash": FULL, **_best_library(results)}
    lit = steps.index(step)
    own = {tile: percents[lit] for tile, percents in heights.items()}
    told = [f"{p:.1f}%{_at(tile)}" for tile, p in own.items() if p is not None]
    d = Drawing(
        f"{step}: {STEPS[step].idea}",
        f"{'Two staircases' if shared else 'A staircase'}, a stair a step, in percent of PyTorch's "
        f"flash backend. {step}: {'; '.join(told) or 'not measured'}.",
    )
    drawn = [p for of in (lines.values(), *heights.values()) for p in of if p is not None]
    unit = HEIGHT / max(drawn)  # for a percent
    width = (d.width - (30 if shared else 48)) / len(steps)  # the rest is for the lines' names
    ground = d.y + 26 + HEIGHT
    d.rect(d.left + lit * width, d.y + 8, width, HEIGHT + 18, GREEN, lit=step)
    for name, percent in lines.items():
        y = ground - percent * unit
        d.line([(d.left, y), (d.left + len(steps) * width, y)], dashed=True)
        d.note(d.right, y + 4, name, "end")
    for tile, percents in reversed(heights.items()):
        for run in _runs(percents):
            points = [
                (d.left + (place + side) * width, ground - percents[place] * unit)
                for place in run
                for side in (0, 1)
            ]
            d.line(points, _COLOURS[tile])
    d.line([(d.left, ground), (d.left + len(steps) * width, ground)])
    prefix = "v" if shared else FAMILIES[STEPS[step].family].prefix
    labels = [name.removeprefix(prefix) for name in steps]
    widest = max(text_width(label, SMALL, bold=True) for label in labels)
    lines_of_labels = 1 if widest + 2 < width else 2
    for place, label in enumerate(labels):
        y = ground + 17 + 14 * (place % lines_of_labels)
        d.small(d.left + (place + 0.5) * width, y, label, "middle", bold=place == lit)
    d.y = ground + 12 + 14 * lines_of_labels
    x = d.left
    for tile, percent in own.items():
        text = _told(tile, found[lit][tile], percent)
        d.text(x, d.y + 14, text, colour=_COLOURS[tile], bold=percent is not None, tile=tile)
        x += d.width / 2
    d.y += 20
    return d


def _best_library(results: BenchmarkResults) -> dict[str, float]:
    """The fastest of those on Hopper's units, by a short name; none if none was measured."""
    shares = {"cuDNN": _percent(results, CUDNN), "FA3": _percent(results, FA3)}
    measured = {name: share for name, share in shares.items() if share is not None}
    return dict([max(measured.items(), key=lambda found: found[1])]) if measured else {}


def _percent(results: BenchmarkResults, name: str) -> float | None:
    share = results.of_flash(name, _DTYPE.short)
    return None if share is None else round(FULL * share, 1)


def _at(tile: str) -> str:
    return "" if tile == OWN else f" at the {tile} tile"


def _told(tile: str, config: Config | None, percent: float | None) -> str:
    if config is None:
        return f"{tile} tile: not there"
    if tile == OWN:
        return "not measured there" if percent is None else f"{percent:.1f}% {OWN}"
    return f"{tile} tile: {'not measured there' if percent is None else f'{percent:.1f}%'}"


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
    by_family = results_by_family(root, load_results(root / RESULTS))
    stale = {}
    for step in STEPS.values():
        path = root / stairs_path(step.id)
        drawn = stairs_picture(step.id, by_family[step.family]).to_svg(path.stem)
        if not path.is_file() or path.read_text(encoding="utf-8") != drawn:
            stale[path] = drawn
    return stale
