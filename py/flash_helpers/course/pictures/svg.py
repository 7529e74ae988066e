"""A drawing of shapes and text that becomes an SVG file.

A picture is PAGE_WIDTH units wide, a unit being a pixel where it is shown at that width, and as
high as what stands in it. On a phone it is shown at three quarters of that: 12.5 units are 9 pixels
there. The same calls give the same text. All coordinates are absolute, so that a test can tell from
the file alone what overlaps what.

Each element has its colours of the light scheme as plain attributes, and a style sheet replaces
them where the reader's scheme is dark. A viewer that knows no style sheets shows the light picture,
on its own background.

Each fact that a shape shows may ride along as a data attribute: `lane=5` is data-lane="5".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from itertools import chain
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

from flash_helpers.course.pictures.text_width import ASCENT, DESCENT, text_width

PAGE_WIDTH = 480
MARGIN = 10
SMALL, BODY, HEAD = 12.5, 14.0, 17.0  # sizes of text
LINE_HEIGHT = 1.4  # of a paragraph, in sizes of its text

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "blue", "orange", "green", "purple", "red", "grey"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)

_OPERATOR = re.compile(r" ([·/^+\u2212@]|mod) ")  # no line ends beside one,
_EQUALS = re.compile(r" = ")  # nor behind one of these

# A hyphen in the text of a picture is a minus before a number and between spaces, and a dash
# between two numbers.
_MINUS = re.compile(r"(?<![\w)])-(?=[\d∞ ])")
_DASH = re.compile(r"(?<=\d)-(?=\d)")

Point = tuple[float, float]

_LINE_WIDTHS = MappingProxyType({"rule": 1, "ink": 1.5})  # of the others: 2

# Of each colour the one in a light and the one in a dark scheme. A light picture brings its page
# along, for viewers with a dark background; a dark one is shown by browsers, on a dark page. Hues
# of Okabe and Ito's palette, which colour-blind readers can tell apart ("Color Universal Design",
# 2008), as a dark or light line and as a tint on which text of the colour "ink" reads.
_SCHEMES = {
    "page": ("#ffffff", "none"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#57606a", "#a5afba"),
    "rule": ("#8c959f", "#6e7681"),
    "blue": ("#0067a3", "#62b1ea"),
    "blue-tint": ("#cbe4f4", "#123c5a"),
    "orange": ("#8f5b00", "#e9a820"),
    "orange-tint": ("#fbe2ae", "#4d3806"),
    "green": ("#00704f", "#35c498"),
    "green-tint": ("#c6ebdd", "#0b4532"),
    "purple": ("#934170", "#df93bb"),
    "purple-tint": ("#f3d8e6", "#50263d"),
    "red": ("#b03a00", "#f58a55"),
    "red-tint": ("#fbd5c2", "#5c280c"),
    "grey": ("#57606a", "#a5afba"),
    "grey-tint": ("#e6eaee", "#2b3139"),
}
LIGHT, DARK = (
    MappingProxyType({name: pair[n] for name, pair in _SCHEMES.items()}) for n in range(2)
)

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif"


def _paint(fill: str = "", stroke: str = "", width: float = 1) -> dict[str, str | float]:
    """Attributes for colours of LIGHT, and the classes by which DARK replaces them."""
    attributes: dict[str, str | float] = {"fill": LIGHT[fill] if fill else "none"}
    if stroke:
        attributes |= {"stroke": LIGHT[stroke], "stroke-width": width}
    paints = {"fill": fill, "stroke": stroke}
    if names := " ".join(f"{key}-{name}" for key, name in paints.items() if name):
        attributes["class"] = names
    return attributes


def _dark_style(names: Iterable[str]) -> str:
    """A style sheet for the classes of `_paint`."""
    rules = []
    for name in sorted(names):
        key, _, colour = name.partition("-")
        rules.append(f".course-picture .{name}{{{key}:{DARK[colour]}}}")
    return f"@media(prefers-color-scheme:dark){{{''.join(rules)}}}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _dashes(dashed: bool) -> dict[str, str | float]:
    return {"stroke-dasharray": "5 4"} if dashed else {}


def typeset(text: str) -> str:
    """The text with the signs that a printer would set for hyphens."""
    return _DASH.sub("\N{EN DASH}", _MINUS.sub("\N{MINUS SIGN}", text))


def wrapped(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """The lines of a text that are at most `width` wide, broken at spaces."""
    lines: list[str] = []
    text = _OPERATOR.sub("\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", typeset(text))
    for word in _EQUALS.sub(" =\N{NO-BREAK SPACE}", text).split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold=bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


class Drawing:
    """A picture under construction.

    title: what it shows, in a sentence; it stands above the picture and is its name for readers who
    listen. description: for them, what the picture shows in words. introduction: a paragraph below
    the title. y: where what was written so far ends.

    `data` of a text or a shape become its data attributes, with hyphens for underscores.
    """

    left, right, width = MARGIN, PAGE_WIDTH - MARGIN, PAGE_WIDTH - 2 * MARGIN

    def __init__(self, title: str, description: str, introduction: str = "") -> None:
        self.title = title
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "class": "course-picture",
                "role": "img",
                "font-family": FONT,
            },
        )
        self._named = {}
        for tag, text in (("title", title), ("desc", description)):
            self._named[tag] = ElementTree.SubElement(self._root, tag)
            self._named[tag].text = text
        self._style = ElementTree.SubElement(self._root, "style")
        self._page = self._element("rect", _paint("page") | {"x": 0, "y": 0, "width": PAGE_WIDTH})
        self._bottom = 0.0
        self.y = self.paragraph(MARGIN, 8, title, size=HEAD, bold=True) + 6
        if introduction:
            self.y = self.paragraph(MARGIN, self.y, introduction, colour="muted")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        *,
        size: float = BODY,
        colour: str = "",
        bold: bool = False,
        **data: object,
    ) -> None:
        """A line of text. y: of its baseline. anchor: "start", "middle" or "end" is at x.

        colour: a name of COLOURS or "muted"; the colour of text if empty.
        """
        text = typeset(text)
        text_width(text, size, bold=bold)  # a character of unknown width is told now
        attributes = _paint(colour or "ink") | {"x": x, "y": y, "font-size": size}
        if anchor != "start":
            attributes["text-anchor"] = anchor
        if bold:
            attributes["font-weight"] = "bold"
        self._add("text", attributes, y + DESCENT * size, data).text = text

    bold = partialmethod(text, bold=True)
    small = partialmethod(text, size=SMALL)
    note = partialmethod(text, size=SMALL, colour="muted")

    def paragraph(
        self,
        x: float,
        y: float,
        text: str,
        *,
        width: float = 0,
        size: float = BODY,
        bold: bool = False,
        colour: str = "",
    ) -> float:
        """Text broken into lines from y downwards; returns where it ends.

        width: to the right margin unless given.
        """
        for line in wrapped(text, width or self.right - x, size, bold=bold):
            self.text(x, y + ASCENT * size + 2, line, size=size, colour=colour, bold=bold)
            y += LINE_HEIGHT * size
        return y

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str = "plain",
        *,
        strong: bool = False,
        dashed: bool = False,
        **data: object,
    ) -> None:
        """A rectangle. colour: of COLOURS, tinted, or "plain" or "ink", an outline alone."""
        tint = f"{colour}-tint" if colour in COLOURS else ""
        paint = _paint(tint, "rule" if colour == "plain" else colour, 3 if strong else 1)
        sides = {"x": x, "y": y, "width": width, "height": height}
        self._add("rect", paint | sides | _dashes(dashed), y + height, data)

    def cell(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        label: str,
        colour: str = "plain",
        *,
        bold: bool = False,
        **options: Any,
    ) -> None:
        """A rectangle with a line of small text in its middle, which is bold where its edge is
        strong. options: of `rect`.

        Raises ValueError if the text does not fit.
        """
        bold = bold or options.get("strong", False)
        if text_width(typeset(label), SMALL, bold=bold) > width - 2 or height < SMALL:
            raise ValueError(f"{self.title}: {label!r} does not fit a cell of {width} x {height}")
        self.rect(x, y, width, height, colour, **options)
        if label:
            self.small(x + width / 2, y + height / 2 + 0.36 * SMALL, label, "middle", bold=bold)

    def line(self, points: Sequence[Point], colour: str = "rule", *, dashed: bool = False) -> None:
        """A line through points. colour: "rule", "ink" or a name of COLOURS."""
        paint = _paint(stroke=colour, width=_LINE_WIDTHS.get(colour, 2))
        self._add_points("polyline", points, paint | _dashes(dashed))

    def arrow(self, *points: Point, colour: str = "ink") -> None:
        """A line with a head at its last point."""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        x, y = x1 - 8 * ux, y1 - 8 * uy
        self.line([*points[:-1], (x, y)], colour)
        corners = [(x1, y1), (x - 4 * uy, y + 4 * ux), (x + 4 * uy, y - 4 * ux)]
        self._add_points("polygon", corners, _paint(colour))

    def brace(self, x0: float, x1: float, y: float, *, down: bool = False) -> None:
        """A square bracket over what lies from x0 to x1 below y; with `down`, under what lies
        above y."""
        tick = -6 if down else 6
        self.line([(x0, y + tick), (x0, y), (x1, y), (x1, y + tick)])

    def result(self, y: float, text: str) -> Drawing:
        """The worked number, under a line across the picture, which it ends."""
        self.line([(self.left, y), (self.right, y)])
        self.y = self.paragraph(self.left, y + 6, text)
        return self

    def to_svg(self, name: str) -> str:
        """The text of the file of that name."""
        ids = {tag: f"{name}-{tag}" for tag in self._named}
        for tag, element in self._named.items():
            element.set("id", ids[tag])
        height = _number(round(self._bottom + 8))
        self._page.set("height", height)
        self._root.set("aria-labelledby", " ".join(ids.values()))
        self._root.set("viewBox", f"0 0 {PAGE_WIDTH} {height}")
        self._root.set("width", str(PAGE_WIDTH))
        self._root.set("height", height)
        painted = (e.get("class", "").split() for e in self._root)
        self._style.text = _dark_style(set(chain.from_iterable(painted)))
        ElementTree.indent(self._root, " ")
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add_points(
        self, tag: str, points: Sequence[Point], paint: Mapping[str, str | float]
    ) -> None:
        at = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add(tag, {**paint, "points": at}, max(y for _, y in points), {})

    def _add(
        self,
        tag: str,
        attributes: Mapping[str, str | float],
        bottom: float,
        data: Mapping[str, object],
    ) -> ElementTree.Element:
        self._bottom = max(self._bottom, bottom)
        facts = {f"data-{key.replace('_', '-')}": str(value) for key, value in data.items()}
        return self._element(tag, {**attributes, **facts})

    def _element(self, tag: str, attributes: Mapping[str, str | float]) -> ElementTree.Element:
        texts = {key: v if isinstance(v, str) else _number(v) for key, v in attributes.items()}
        return ElementTree.SubElement(self._root, tag, texts)


@dataclass(frozen=True)
class Grid:
    """Cells of one size in rows and columns, counted from 0.

    x, y: of the first one's corner. width, height: from one to the next. gap, below: of these, what
    is free behind each and below it.
    """

    drawing: Drawing
    x: float
    y: float
    width: float
    height: float
    gap: float = 0
    below: float = 0

    def left(self, column: float) -> float:
        """Where a column begins."""
        return self.x + column * self.width

    def middle(self, column: float) -> float:
        """Of the cells of a column."""
        return self.left(column) + (self.width - self.gap) / 2

    def top(self, row: float) -> float:
        """Where a row begins."""
        return self.y + row * self.height

    def cell(
        self, row: float, column: float, /, label: str, colour: str = "plain", **options: Any
    ) -> None:
        """One of the cells. options: of `Drawing.cell`."""
        x, y = self.left(column), self.top(row)
        width, height = self.width - self.gap, self.height - self.below
        self.drawing.cell(x, y, width, height, label, colour, **options)
