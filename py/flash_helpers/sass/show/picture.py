"""A matrix as a picture: instructions by group, registers, and bound beside measured time, with one
column per kernel. It is SVG that takes its colours from the style sheet around it."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flash_helpers.sass.analyse.matrix import GROUP_NAMES, MEANING, KernelFacts, Matrix

_WIDTH = 1200
_LEFT, _RIGHT = 120, 16
_COUNTS_HEIGHT, _STRIP_HEIGHT, _GAP, _NAMES_HEIGHT = 150, 44, 24, 18
_TOP = 14


@dataclass(frozen=True)
class _Panel:
    """A strip of the picture. `top`, `height`: units of the picture. `most`: value at its top."""

    top: float
    height: float
    most: float

    def y(self, value: float) -> float:
        """The y coordinate of a value."""
        return self.top + self.height * (1 - value / self.most)

    @property
    def bottom(self) -> float:
        return self.top + self.height


def _text(x: float, y: float, text: str, anchor: str = "middle", name: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{name}">'
        f"{html.escape(text)}</text>"
    )


def _label(panel: _Panel, *lines: str) -> str:
    """The label of a strip, left of it."""
    return "".join(
        _text(_LEFT - 14, panel.top + 12 + 14 * n, line, "end", "" if n else "strong")
        for n, line in enumerate(lines)
    )


def _axis(panel: _Panel) -> str:
    return (
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{panel.bottom:.1f}" '
        f'y2="{panel.bottom:.1f}"/>'
    )


def _stack(facts: KernelFacts, x: float, width: float, panel: _Panel) -> str:
    """The main loop's instructions per HMMA, with groups stacked on each other."""
    parts, below = [], 0.0
    for group in GROUP_NAMES:
        value = facts.per_hmma(facts.groups[group]) or 0.0
        if not value:
            continue
        top = panel.y(below + value)
        parts.append(
            f'<rect class="bar-part c-{group}" x="{x - width / 2:.1f}" y="{top:.1f}" '
            f'width="{width:.1f}" height="{panel.y(below) - top:.1f}">'
            f"<title>{group}: {value:.2f} for each HMMA</title></rect>"
        )
        below += value
    if below:
        parts.append(_text(x, panel.y(below) - 5, f"{below:.2f}", name="strong"))
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]], name: str) -> str:
    if len(points) < 2:
        return ""
    return f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _dots(
    matrix: Matrix,
    xs: Sequence[float],
    panel: _Panel,
    value: Callable[[KernelFacts], float | None],
    below: Callable[[KernelFacts], str] = lambda facts: "",
    text_dy: float = -7,
) -> str:
    """A value of each kernel as a dot with its number, joined by a line."""
    found = [(x, f, value(f)) for x, f in zip(xs, matrix.rows, strict=True)]
    points = [(x, panel.y(v), f, v) for x, f, v in found if v is not None]
    dots = "".join(
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        + _text(x, y + text_dy, f"{v:.0f}", name="strong")
        + _text(x, y + 15, below(f))
        for x, y, f, v in points
    )
    return _path([(x, y) for x, y, _, _ in points], "path") + dots


def _bounds(matrix: Matrix, xs: Sequence[float], width: float, panel: _Panel) -> str:
    parts = []
    for x, facts in zip(xs, matrix.rows, strict=True):
        if (most := _most(facts)) is not None and facts.prediction is not None:
            y = panel.y(most)
            parts.append(
                f'<line class="bound" x1="{x - width / 2:.1f}" x2="{x + width / 2:.1f}" '
                f'y1="{y:.1f}" y2="{y:.1f}"><title>at most {most:.0f} TFLOP/s, by '
                f"{facts.prediction.binding}</title></line>"
            )
    return "".join(parts)


def _most(facts: KernelFacts) -> float | None:
    return facts.prediction.most_tflops if facts.prediction else None


def _speed(facts: KernelFacts) -> float | None:
    return facts.measurement.speed if facts.measurement else None


def picture_svg(matrix: Matrix) -> str:
    """The picture. Elements of class "version" carry the index of their kernel as data-kernel."""
    step = (_WIDTH - _LEFT - _RIGHT) / len(matrix.rows)
    width = min(46.0, step * 0.62)
    xs = [_LEFT + step * (n + 0.5) for n in range(len(matrix.rows))]
    totals = [facts.per_hmma(sum(facts.groups.values())) or 0.0 for facts in matrix.rows]
    counts = _Panel(_TOP, _COUNTS_HEIGHT, 1.06 * max(*totals, 1.0))
    registers = _Panel(counts.bottom + _GAP, _STRIP_HEIGHT, 300)
    panels = [counts, registers]
    speeds = [v for facts in matrix.rows for v in (_speed(facts), _most(facts)) if v is not None]
    parts = [
        _label(counts, "instructions", "of the main loop", "for each HMMA"),
        _axis(counts),
        _label(registers, "registers", "per thread; below:", "blocks per SM"),
        _axis(registers),
        _dots(
            matrix,
            xs,
            registers,
            lambda facts: facts.kernel.resources.registers,
            lambda facts: str(facts.occupancy.blocks) if facts.occupancy else "",
        ),
    ]
    if speeds:
        speed = _Panel(registers.bottom + _GAP, 1.5 * _STRIP_HEIGHT, 1.05 * max(speeds))
        panels.append(speed)
        units = dict.fromkeys(f.measurement.unit for f in matrix.rows if f.measurement)
        parts += [
            _label(
                speed,
                " or ".join(units) or "TFLOP/s",
                "measured (dot),",
                "bound (line)",
                matrix.timed,
            ),
            _axis(speed),
            _bounds(matrix, xs, width, speed),
            _dots(matrix, xs, speed, _speed, text_dy=15),
        ]
    height = panels[-1].bottom + _NAMES_HEIGHT + 12
    columns = []
    for n, (x, (name, facts)) in enumerate(zip(xs, matrix.named, strict=True)):
        columns.append(
            f'<g class="version" data-kernel="{n}" tabindex="0" role="button" '
            f'aria-label="{html.escape(name)}">'
            f"<title>{html.escape(facts.note)}</title>"
            f'<rect class="hit" x="{x - step / 2:.1f}" y="0" width="{step:.1f}" '
            f'height="{height:.0f}"/>'
            f"{_stack(facts, x, width, counts)}"
            f"{_text(x, panels[-1].bottom + 24, name, name='name')}</g>"
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="group" aria-label="The kernels compared">'
        f'{"".join(columns)}<g pointer-events="none">{"".join(parts)}</g></svg>'
    )


def overview_html(matrix: Matrix) -> str:
    """The picture with its legend, to stand above the panes of a page."""
    legend = "".join(f'<span class="key c-{name}">{name}</span>' for name in GROUP_NAMES)
    note = f"{MEANING[0].upper()}{MEANING[1:]}."
    if matrix.measured_on:
        note += f" Measured on {matrix.measured_on}."
    return (
        '<section id="overview"><details><summary>The kernels compared</summary>'
        f'<div class="picture"><div class="scroll">{picture_svg(matrix)}</div>'
        f'<div><div class="legend">{legend}</div>'
        f'<p class="note-text">{html.escape(note)}</p></div></div></details></section>'
    )
