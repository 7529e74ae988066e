"""Contents of a picture's file: texts, rectangles and lines, with the space that they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from matplotlib import font_manager, ft2font

SVG = "{http://www.w3.org/2000/svg}"
ASCENT, DESCENT = 0.76, 0.24  # in sizes of the text: letters and digits reach no further


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Width of a text in DejaVu Sans, the widest of the fonts that the pictures name."""
    return size / 1000 * sum(_advance(character, bold) for character in text)


@cache
def _advance(character: str, bold: bool) -> float:
    """Width of a character at size 1000."""
    glyph = _font(bold).load_char(ord(character), flags=ft2font.LoadFlags.NO_HINTING)
    return glyph.linearHoriAdvance / 65536


@cache
def _font(bold: bool) -> ft2font.FT2Font:
    weight = "bold" if bold else "normal"
    properties = font_manager.FontProperties(family="DejaVu Sans", weight=weight)
    font = ft2font.FT2Font(font_manager.findfont(properties))
    font.set_size(1000, 72)
    return font


@dataclass(frozen=True)
class Box:
    """An upright rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box, slack: float = 0.0) -> bool:
        """Whether the two share more than `slack` in both directions."""
        return (
            min(self.right, other.right) - max(self.left, other.left) > slack
            and min(self.bottom, other.bottom) - max(self.top, other.top) > slack
        )

    def holds(self, other: Box, slack: float = 0.0) -> bool:
        """Whether the other lies inside, but for `slack` on each side."""
        return (
            other.left >= self.left - slack
            and other.top >= self.top - slack
            and other.right <= self.right + slack
            and other.bottom <= self.bottom + slack
        )


@dataclass(frozen=True)
class Shape:
    """A text or a rectangle. data: its data attributes. size: of a text, else 0. strong: of a
    rectangle with a thick edge."""

    box: Box
    text: str
    size: float
    classes: tuple[str, ...]
    data: dict[str, str]
    strong: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Line:
    """A stretch of a line."""

    start: tuple[float, float]
    end: tuple[float, float]

    def crosses(self, box: Box) -> bool:
        """Whether it has points inside the box (Liang and Barsky's clipping)."""
        (x0, y0), (x1, y1) = self.start, self.end
        low, high = 0.0, 1.0
        for step, room_before, room_behind in (
            (x1 - x0, x0 - box.left, box.right - x0),
            (y1 - y0, y0 - box.top, box.bottom - y0),
        ):
            if step == 0:
                if room_before <= 0 or room_behind <= 0:
                    return False
                continue
            ends = sorted((-room_before / step, room_behind / step))
            low, high = max(low, ends[0]), min(high, ends[1])
        return low < high


class DrawnPicture:
    """An SVG file."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        self.root = ElementTree.fromstring(self.source)
        _, _, width, height = map(float, self.root.attrib["viewBox"].split())
        self.page = Box(0, 0, width, height)
        self.texts = [self._text(e) for e in self.root.iter(f"{SVG}text")]
        self.rects = [self._rect(e) for e in self.root.iter(f"{SVG}rect")]
        self.lines = [Line(a, b) for points in self._points() for a, b in pairwise(points)]

    @property
    def words(self) -> str:
        """All its text, in the order of the file, with plain spaces."""
        return " ".join(text.text for text in self.texts).replace("\N{NO-BREAK SPACE}", " ")

    def with_data(self, *names: str) -> list[Shape]:
        """Rectangles that carry all of these data attributes."""
        return [r for r in self.rects if all(name in r.data for name in names)]

    def label(self, rect: Shape) -> str:
        """The text inside a rectangle, "" without one."""
        inside = [t.text for t in self.texts if rect.box.holds(t.box, 1.5)]
        assert len(inside) <= 1, inside
        return inside[0] if inside else ""

    def _points(self) -> Iterator[list[tuple[float, float]]]:
        for element in self.root.iter(f"{SVG}polyline"):
            pairs = (pair.split(",") for pair in element.attrib["points"].split())
            yield [(float(x), float(y)) for x, y in pairs]

    @staticmethod
    def _data(element: ElementTree.Element) -> dict[str, str]:
        return {k[5:]: v for k, v in element.attrib.items() if k.startswith("data-")}

    def _text(self, element: ElementTree.Element) -> Shape:
        classes = tuple(element.get("class", "").split())
        size, x, y = (float(element.attrib[k]) for k in ("font-size", "x", "y"))
        text = element.text or ""
        width = text_width(text, size, bold=element.get("font-weight") == "bold")
        left = (
            x - {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor", "start")] * width
        )
        box = Box(left, y - ASCENT * size, left + width, y + DESCENT * size)
        return Shape(box, text, size, classes, self._data(element))

    def _rect(self, element: ElementTree.Element) -> Shape:
        x, y, width, height = (float(element.attrib[k]) for k in ("x", "y", "width", "height"))
        classes = tuple(element.get("class", "").split())
        strong = float(element.get("stroke-width", 1)) > 2
        dashed = "stroke-dasharray" in element.attrib
        box = Box(x, y, x + width, y + height)
        return Shape(box, "", 0, classes, self._data(element), strong, dashed)
