"""Pairs of HTML comments in a Markdown page, and the text between them. Standard library only.

    <!-- build:KIND ARGUMENTS -->
    ...
    <!-- /build -->

The two stand on lines of their own, at the margin; a pair of the kind `value` stands within a line.
Markers in fenced code blocks and in code spans are text like any other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

INLINE_KIND = "value"
END = "<!-- /build -->"

_BEGIN = re.compile(r"<!-- build:(?P<kind>\w+)(?: +(?P<arguments>(?:(?!-->).)*?))? *-->")
_INLINE = re.compile(rf"{_BEGIN.pattern}(?P<body>(?:(?!<!--).)*){re.escape(END)}")
_TRACE = re.compile(r"<!--\s*/?\s*build\b")
_FENCE = re.compile(r" {0,3}(?P<mark>`{3,}|~{3,})(?P<info>.*)")
_CODE_SPAN = re.compile(r"(?<!`)(?P<mark>`+)(?!`).*?(?<!`)(?P=mark)(?!`)")


class MarkerError(ValueError):
    """A marker that will not do. line: counted from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Block:
    """A pair of markers. body: what stands between them. line: of the first marker, from 1."""

    kind: str
    arguments: str
    body: str
    line: int

    def written(self, text: str) -> str:
        """The markers with `text` between them."""
        begin = f"<!-- build:{' '.join(part for part in (self.kind, self.arguments) if part)} -->"
        if self.kind == INLINE_KIND:
            return f"{begin}{text}{END}"
        return f"{begin}\n\n{text.strip()}\n\n{END}"


@dataclass(frozen=True)
class Prose:
    """What stands outside of markers. line: that it begins in, from 1."""

    text: str
    line: int


def code_blocks(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Indices of the fences of each fenced code block; the end of the text where it has no second
    one."""
    begin, mark = -1, ""
    for at, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if begin < 0 and not ("`" in fence["mark"] and "`" in fence["info"]):
            begin, mark = at, fence["mark"]
        elif begin >= 0 and fence["mark"].startswith(mark) and not fence["info"].strip():
            yield begin, at
            begin = -1
    if begin >= 0:
        yield begin, len(lines)


def parse(text: str) -> list[Prose | Block]:
    """The parts of a page, in order.

    Raises MarkerError for a marker without its partner, inside another pair, or out of place.
    """
    lines = text.split("\n")
    in_code = {at for begin, end in code_blocks(lines) for at in range(begin, end + 1)}
    parts: list[Prose | Block] = []
    at = 0
    while at < len(lines):
        begin = None if at in in_code else _BEGIN.fullmatch(lines[at].rstrip())
        if begin is not None:
            if begin["kind"] == INLINE_KIND:
                raise MarkerError(
                    at + 1, f"a {INLINE_KIND} and its {END} stand within one line of text"
                )
            end = _end_of(lines, at)
            body = "\n".join(lines[at + 1 : end])
            parts.append(Block(begin["kind"], begin["arguments"] or "", body, at + 1))
            at = end
        elif at in in_code:
            parts.append(Prose(lines[at], at + 1))
        else:
            parts += _parts_of_line(lines[at], at + 1)
        at += 1
        if at < len(lines):
            parts.append(Prose("\n", at))
    return _joined(parts)


def _end_of(lines: list[str], begin: int) -> int:
    """Index of the line that closes the pair that line `begin` opens."""
    for at in range(begin + 1, len(lines)):
        if lines[at].rstrip() == END:
            return at
        if _BEGIN.fullmatch(lines[at].rstrip()):
            raise MarkerError(
                at + 1,
                f"a marker inside the pair that line {begin + 1} opens: close that with {END}",
            )
    raise MarkerError(begin + 1, f"{lines[begin].strip()} is never closed: add a line {END}")


def _parts_of_line(line: str, number: int) -> Iterator[Prose | Block]:
    # what is quoted in a code span is no marker: search a copy in which it is blank
    visible = _CODE_SPAN.sub(lambda match: " " * len(match[0]), line)
    at = 0
    for found in _INLINE.finditer(visible):
        if found["kind"] != INLINE_KIND:
            raise MarkerError(
                number,
                f"build:{found['kind']} and its {END} stand on lines of their own; within a line "
                f"there is only build:{INLINE_KIND}",
            )
        _refuse_traces(visible[at : found.start()], number)
        yield Prose(line[at : found.start()], number)
        yield Block(INLINE_KIND, found["arguments"] or "", found["body"], number)
        at = found.end()
    _refuse_traces(visible[at:], number)
    yield Prose(line[at:], number)


def _refuse_traces(text: str, number: int) -> None:
    if not _TRACE.search(text):
        return
    if text.strip() == END:
        raise MarkerError(number, f"{END} closes nothing: no marker before it is open")
    raise MarkerError(
        number,
        f"{text.strip()!r} is no pair of markers: write <!-- build:KIND ARGUMENTS --> and {END} on "
        f"lines of their own, at the margin, or <!-- build:{INLINE_KIND} KEY -->{END} within a "
        "line",
    )


def _joined(parts: list[Prose | Block]) -> list[Prose | Block]:
    """The same with neighbouring prose put together."""
    found: list[Prose | Block] = []
    for is_prose, run in itertools.groupby(parts, lambda part: isinstance(part, Prose)):
        pieces = list(run)
        if is_prose:
            pieces = [Prose("".join(piece.text for piece in pieces), pieces[0].line)]
        found += pieces
    return found
