"""A drawing of shapes and text that becomes an SVG file.

A picture is PAGE_WIDTH units wide, a unit being a pixel where it is shown at that width, and as
high as what stands in it. It has no background, takes all colours from variables that follow the
reader's light or dark scheme, and the same calls give the same text. All coordinates are absolute,
so that a test can tell from the file alone what overlaps what.

Each fact that a shape shows may ride along as a data attribute: `data={"lane": 5}` is
data-lane="5".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from xml.etree import ElementTree

from flash_helpers.course.pictures.text_width import ASCENT, DESCENT, text_width

PAGE_WIDTH = 700
MARGIN = 16
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

Data = Mapping[str, object]
Point = tuple[float, float]

# Hues of Okabe and Ito's palette, which colour-blind readers can tell apart ("Color Universal
# Design", 2008), as a dark or light line and as a tint on which text of the colour "ink" reads.
LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "ink": "#1f2328",
        "muted": "#57606a",
        "rule": "#8c959f",
        "blue": "#0067a3",
        "blue-tint": "#cbe4f4",
        "orange": "#8f5b00",
        "orange-tint": "#fbe2ae",
        "green": "#00704f",
        "green-tint": "#c6ebdd",
        "purple": "#934170",
        "purple-tint": "#f3d8e6",
        "red": "#b03a00",
        "red-tint": "#fbd5c2",
        "grey": "#57606a",
        "grey-tint": "#e6eaee",
    }
)
DARK: Mapping[str, str] = MappingProxyType(
    {
        "ink": "#e6edf3",
        "muted": "#a5afba",
        "rule": "#6e7681",
        "blue": "#62b1ea",
        "blue-tint": "#123c5a",
        "orange": "#e9a820",
        "orange-tint": "#4d3806",
        "green": "#35c498",
        "green-tint": "#0b4532",
        "purple": "#df93bb",
        "purple-tint": "#50263d",
        "red": "#f58a55",
        "red-tint": "#5c280c",
        "grey": "#a5afba",
        "grey-tint": "#2b3139",
    }
)


def _variables(scheme: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in scheme.items())


def _style() -> str:
    rules = [
        f".course-picture{{{_variables(LIGHT)}}}",
        f"@media(prefers-color-scheme:dark){{.course-picture{{{_variables(DARK)}}}}}",
        ".course-picture text{fill:var(--ink);font-family:system-ui,-apple-system,'Segoe UI',"
        "Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif}",
        ".course-picture text.bold{font-weight:700}",
        ".course-picture text.muted{fill:var(--muted)}",
        ".course-picture .rule{fill:none;stroke:var(--rule);stroke-width:1}",
        ".course-picture .plain{fill:none;stroke:var(--rule);stroke-width:1}",
        ".course-picture .ink{fill:none;stroke:var(--ink);stroke-width:1.5}",
        ".course-picture .dashed{stroke-dasharray:5 4}",
        ".course-picture .strong{stroke-width:3}",
        ".course-picture polygon.ink{fill:var(--ink)}",
    ]
    for colour in COLOURS:
        rules += [
            f".course-picture .{colour}{{fill:var(--{colour}-tint);stroke:var(--{colour})}}",
            f".course-picture text.{colour}{{fill:var(--{colour});stroke:none}}",
            f".course-picture .{colour}-line{{fill:none;stroke:var(--{colour});stroke-width:2}}",
            f".course-picture polygon.{colour}-line{{fill:var(--{colour})}}",
        ]
    return "".join(rules)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


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

    name: of its file. title: what it shows, in a sentence; it stands above the picture and is its
    name for readers who listen. description: for them, what the picture shows in words.
    """

    def __init__(self, name: str, title: str, description: str) -> None:
        self.name, self.title = name, title
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "class": "course-picture",
                "role": "img",
                "aria-labelledby": f"{name}-title {name}-desc",
            },
        )
        ElementTree.SubElement(self._root, "title", {"id": f"{name}-title"}).text = title
        ElementTree.SubElement(self._root, "desc", {"id": f"{name}-desc"}).text = description
        ElementTree.SubElement(self._root, "style").text = _style()
        self._bottom = 0.0
        self.top = self.paragraph(MARGIN, 8, title, size=HEAD, bold=True) + 6

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = BODY,
        anchor: str = "start",
        colour: str = "",
        bold: bool = False,
        data: Data | None = None,
    ) -> None:
        """A line of text. y: of its baseline. anchor: "start", "middle" or "end" is at x.

        colour: a name of COLOURS or "muted"; the colour of text if empty.
        """
        text = typeset(text)
        text_width(text, size, bold=bold)  # a character of unknown width is told now
        names = " ".join(name for name in (colour, "bold" if bold else "") if name)
        attributes = {"x": _number(x), "y": _number(y), "font-size": _number(size)}
        if anchor != "start":
            attributes["text-anchor"] = anchor
        self._add("text", attributes, names, y + DESCENT * size, data).text = text

    def paragraph(
        self,
        x: float,
        y: float,
        text: str,
        *,
        width: float | None = None,
        size: float = BODY,
        colour: str = "",
        bold: bool = False,
    ) -> float:
        """Text broken into lines from y downwards; returns where it ends.

        width: to the right margin unless given.
        """
        width = PAGE_WIDTH - MARGIN - x if width is None else width
        for line in wrapped(text, width, size, bold=bold):
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
        data: Data | None = None,
    ) -> None:
        """A rectangle. colour: of COLOURS, tinted, or "plain", an outline alone."""
        attributes = {
            "x": _number(x),
            "y": _number(y),
            "width": _number(width),
            "height": _number(height),
        }
        names = colour + (" strong" if strong else "") + (" dashed" if dashed else "")
        self._add("rect", attributes, names, y + height, data)

    def cell(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        label: str,
        colour: str = "plain",
        *,
        size: float = SMALL,
        bold: bool = False,
        strong: bool = False,
        dashed: bool = False,
        data: Data | None = None,
    ) -> None:
        """A rectangle with a line of text in its middle.

        Raises ValueError if the text does not fit.
        """
        if text_width(typeset(label), size, bold=bold) > width - 2 or size > height:
            raise ValueError(f"{self.name}: {label!r} does not fit a cell of {width} x {height}")
        self.rect(x, y, width, height, colour, strong=strong, dashed=dashed, data=data)
        if label:
            middle = y + height / 2 + 0.36 * size
            self.text(x + width / 2, middle, label, size=size, anchor="middle", bold=bold)

    def line(self, points: Sequence[Point], colour: str = "rule", *, dashed: bool = False) -> None:
        """A line through points. colour: "rule", "ink" or a name of COLOURS."""
        name = f"{colour}-line" if colour in COLOURS else colour
        at = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        bottom = max(y for _, y in points)
        self._add("polyline", {"points": at}, name + (" dashed" if dashed else ""), bottom)

    def arrow(self, points: Sequence[Point], colour: str = "ink", *, dashed: bool = False) -> None:
        """A line with a head at its last point."""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        base = (x1 - 8 * ux, y1 - 8 * uy)
        self.line([*points[:-1], base], colour, dashed=dashed)
        corners = [
            (x1, y1),
            (base[0] - 4 * uy, base[1] + 4 * ux),
            (base[0] + 4 * uy, base[1] - 4 * ux),
        ]
        name = f"{colour}-line" if colour in COLOURS else colour
        at = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
        self._add("polygon", {"points": at}, name, max(y for _, y in corners))

    def brace(self, x0: float, x1: float, y: float, *, down: bool = False) -> None:
        """A square bracket over what lies from x0 to x1 below y; with `down`, under what lies
        above y."""
        tick = -6 if down else 6
        self.line([(x0, y + tick), (x0, y), (x1, y), (x1, y + tick)])

    def result(self, y: float, text: str) -> float:
        """The worked number, under a line across the picture; returns where it ends."""
        self.line([(MARGIN, y), (PAGE_WIDTH - MARGIN, y)])
        return self.paragraph(MARGIN, y + 6, text)

    def to_svg(self) -> str:
        """The text of the file."""
        height = _number(round(self._bottom + 8))
        self._root.set("viewBox", f"0 0 {PAGE_WIDTH} {height}")
        self._root.set("width", str(PAGE_WIDTH))
        self._root.set("height", height)
        ElementTree.indent(self._root, " ")
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(
        self,
        tag: str,
        attributes: dict[str, str],
        names: str,
        bottom: float,
        data: Data | None = None,
    ) -> ElementTree.Element:
        self._bottom = max(self._bottom, bottom)
        for key, value in (data or {}).items():
            attributes[f"data-{key}"] = str(value)
        if names:
            attributes["class"] = names
        return ElementTree.SubElement(self._root, tag, attributes)
