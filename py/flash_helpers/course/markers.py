"""Pairs of HTML comments in a Markdown page, and the text between them. Standard library only.

    <!-- build:KIND ARGUMENTS -->
    ...
    <!-- /build -->

Each marker stands on a line of its own, at the margin. Markers in fenced code blocks and in code
spans are plain text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

END = "<!-- /build -->"
# A fenced code block; the end of the text closes an open one.
FENCED = re.compile(
    r"^ {0,3}(?P<mark>`{3,}(?=[^`\n]*$)|~{3,})(?P<info>.*)\n?"
    r"(?P<inside>(?s:.*?))(?:^ {0,3}(?P=mark)[`~]*[ \t]*$|\Z)",
    re.MULTILINE,
)

CODE_SPAN = r"(?<!`)(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"
_CODE = re.compile(f"{FENCED.pattern}|{CODE_SPAN}", re.MULTILINE)
_BEGIN = re.compile(r"<!-- build:(?P<kind>\w+)(?: +(?P<arguments>(?:(?!-->).)*?))? *-->")
_ALONE = re.compile(rf"^(?:{_BEGIN.pattern}|{END})[ \t]*$", re.MULTILINE)
_APART = re.compile(
    rf"^{_BEGIN.pattern}[ \t]*\n(?P<body>(?:(?!<!-- /?build\b).*\n)*){END}[ \t]*$", re.MULTILINE
)
_TRACE = re.compile(r".*<!--[ \t]*/?[ \t]*build\b.*")


class MarkerError(ValueError):
    """A fault of a marker. line: counted from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Block:
    """A pair of markers. body: text between them. line: of the first marker, from 1."""

    kind: str
    arguments: str
    body: str
    line: int

    def written(self, text: str) -> str:
        """The markers with `text` between them."""
        begin = f"<!-- build:{' '.join(part for part in (self.kind, self.arguments) if part)} -->"
        return f"{begin}\n\n{text.strip()}\n\n{END}"


@dataclass(frozen=True)
class Prose:
    """Text outside of markers. line: of its beginning, from 1."""

    text: str
    line: int


def parse(text: str) -> list[Prose | Block]:
    """Parse the parts of a page, in order.

    Raises MarkerError for a marker without its partner, inside another pair, or out of place.
    """
    # Markers in code do not count: search a copy of the text in which code is blank.
    visible = _CODE.sub(lambda code: re.sub(".", "\0", code[0]), text)
    parts: list[Prose | Block] = []
    at = 0
    for pair in _APART.finditer(visible):
        _refuse_traces(visible, at, pair.start())
        line = _line(visible, pair.start())
        kind, arguments, body = (text[slice(*pair.span(n))] for n in ("kind", "arguments", "body"))
        parts.append(Prose(text[at : pair.start()], _line(visible, at)))
        parts.append(Block(kind, arguments, body.removesuffix("\n"), line))
        at = pair.end()
    _refuse_traces(visible, at, len(visible))
    return [*parts, Prose(text[at:], _line(visible, at))]


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _refuse_traces(visible: str, begin: int, end: int) -> None:
    """Raise MarkerError for a marker without a partner between two pairs."""
    trace = _TRACE.search(visible, begin, end)
    if trace is None:
        return
    found, line = trace[0].replace("\0", " ").strip(), _line(visible, trace.start())
    if found == END:
        raise MarkerError(line, f"{END} closes nothing: no marker before it is open")
    if _ALONE.match(visible, trace.start()):
        following = _ALONE.search(visible, trace.end())
        if following and following["kind"]:
            raise MarkerError(
                _line(visible, following.start()),
                f"a marker inside the pair that line {line} opens: close the pair with {END}",
            )
        raise MarkerError(line, f"{found} is never closed: add a line {END}")
    raise MarkerError(
        line,
        f"{found!r} is no pair of markers: write <!-- build:KIND ARGUMENTS --> and {END} on "
        "lines of their own, at the margin",
    )
