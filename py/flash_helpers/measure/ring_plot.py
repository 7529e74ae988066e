"""Speeds of sequences that several GPUs share as SVG, by length, in the style of `plots`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
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
from flash_helpers.measure.ring_speeds import BOTH, FORWARD, ONE, PYTORCH, RING, RingSpeeds
from flash_helpers.measure.training_plot import picture_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILES = "long_sequences_*.json"  # beside RESULTS; each has a picture of its own

_SIZE = (9.0, 2.6)  # of a row of panels, in inches
_MARGIN = 1.5  # beside the shortest and the longest sequence, as a factor
_FLASH, _CUDNN = PYTORCH
_COLOURS: Mapping[str, str] = MappingProxyType(
    {ONE: TEXT, RING: ORANGE, _CUDNN: BLUE, _FLASH: "#8957e5"}
)
_MARKS: Mapping[str, str] = MappingProxyType({ONE: "s", RING: "o", _CUDNN: "^", _FLASH: "v"})


def ring_numbers(found: RingSpeeds) -> Numbers:
    """Numbers of the picture, by mask and passes: TFLOP/s of each GPU by contender, with the tokens
    of a GPU."""
    panels: dict[str, dict[str, dict[str, int]]] = {}
    for speed in found.speeds:
        if speed.tflops is not None:
            title = f"{'causal' if speed.causal else 'no mask'}, {speed.passes}"
            own = panels.setdefault(title, {}).setdefault(speed.name, {})
            own[str(speed.tokens)] = round(speed.tflops)
    return {"gpu": found.provenance.gpu, "panels": panels}


def ring_svg(numbers: Numbers) -> str:
    """Text of the picture's SVG file. Raises PlotError without matplotlib."""
    return figure_svg(ring_figure(numbers), json.dumps(numbers))


def ring_figure(numbers: Numbers) -> Figure:
    """Draw the picture: a column per mask, the forward pass above both passes. Raises PlotError
    without matplotlib."""
    panels = numbers["panels"]
    order = [f"{mask}, {passes}" for passes in (FORWARD, BOTH) for mask in ("causal", "no mask")]
    titles = [title for title in order if title in panels]

    def draw(*axes: Axes) -> None:
        for panel, title in zip(axes, titles, strict=True):
            panel.set_title(title, loc="left", fontsize=11.5)
            tokens: list[int] = []
            for name, own in panels[title].items():
                tokens = [*map(int, own)]
                (line,) = panel.plot(tokens, [*own.values()], linewidth=2, label=name)
                line.set_color(_COLOURS[name])
                line.set_marker(_MARKS[name])
            panel.set_xscale("log", base=2)
            panel.set_xticks(tokens, [f"{n:,}" for n in tokens])
            panel.minorticks_off()
            panel.set_xlim(tokens[0] / _MARGIN, tokens[-1] * _MARGIN)
            panel.set_ylim(0, 1.1 * max(max(own.values()) for own in panels[title].values()))
        axes[0].set_ylabel("TFLOP/s per GPU")
        for panel in axes[-2:]:
            panel.set_xlabel("tokens per GPU")
        lines, names = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(
            lines, names, loc="outside lower center", ncols=len(names), frameon=False
        )

    return drawn_figure(draw, _SIZE, -(-len(titles) // 2), min(2, len(titles)))


def stale_rings(root: Path) -> dict[Path, Numbers]:
    """Files of pictures that are absent or whose numbers differ from the measurements, with the
    numbers to draw. root: of the repository. Raises as `RingSpeeds.load` does."""
    return stale_pictures(
        (root / picture_path(file.stem), ring_numbers(RingSpeeds.load(file)))
        for file in sorted((root / RESULTS).parent.glob(FILES))
    )
