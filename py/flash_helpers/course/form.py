"""Form of a step's page: its sections in order, and the length of the prose that stands open.
Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from flash_helpers.course.markers import FENCED, Block, Prose

MOST_WORDS = 900  # a person reads a page in ten minutes, code and pictures included

# The sections of a step's page, each with the kind of block that it cannot do without.
SECTIONS = {
    "What you will learn": "",
    "The idea": "",
    "The code": "excerpt",
    "What it gained": "stairs",
    "Verdict": "",
    "Exercises": "",
    "The evidence": "clock",
    "Next": "next",
}
FOLDED_SECTION = "The evidence"
MOST_PICTURES = 1  # in "The idea"

_HEADING = re.compile(r"^## +(.+?) *$", re.MULTILINE)
_FOLDED = re.compile(r"<details\b(?:(?!<details\b).)*?</details>", re.DOTALL)  # the innermost
_NO_PROSE = re.compile(r"<!--(?s:.*?)-->|^\|.*$|^#.*$|^!\[.*$", re.MULTILINE)


def unfolded_prose(parts: Sequence[Prose | Block]) -> str:
    """The text that stands open to a reader: no code, table, picture or heading, and nothing that
    was generated."""
    text = "".join(part.text for part in parts if isinstance(part, Prose))
    text = FENCED.sub("", text)
    while (folded := _FOLDED.sub("", text)) != text:
        text = folded
    return re.sub(r"\n{3,}", "\n\n", _NO_PROSE.sub("", text))


def words(text: str) -> int:
    """How many there are in Markdown; a link counts as its text."""
    return len(re.findall(r"[^\W_]+(?:[-'.,/][^\W_]+)*", re.sub(r"\]\([^)]*\)", "]", text)))


def form_errors(parts: Sequence[Prose | Block]) -> Iterator[str]:
    """Faults of a step's page, a line each."""
    inside: dict[str, list[str]] = {}
    found: list[str] = []
    for part in parts:
        if isinstance(part, Prose):
            for name in _HEADING.findall(FENCED.sub("", part.text)):
                found.append(name)
                inside[name] = []
        elif found:
            inside[found[-1]].append(part.kind)
    if found != [*SECTIONS]:
        yield f"its sections are {', '.join(found)}: they are to be {', '.join(SECTIONS)}"
        return
    for section, kind in SECTIONS.items():
        if kind and kind not in inside[section]:
            yield f'"{section}" needs a block build:{kind}'
    if (n := inside["The idea"].count("picture")) > MOST_PICTURES:
        yield f'"The idea" has {n} pictures: one carries it'
    if (count := words(unfolded_prose(parts))) > MOST_WORDS:
        yield f"{count} words are not folded, and {MOST_WORDS} are read in ten minutes"
    evidence = unfolded_prose(_section(parts, FOLDED_SECTION))
    if evidence.strip():
        yield f'"{FOLDED_SECTION}" is not folded: {evidence.strip().splitlines()[0][:60]!r}'


def _section(parts: Sequence[Prose | Block], name: str) -> list[Prose | Block]:
    """The parts of one section; prose is cut at its headings."""
    found: list[Prose | Block] = []
    is_inside = False
    for part in parts:
        if isinstance(part, Block):
            found += [part] if is_inside else []
            continue
        pieces = re.split(r"^(?=## )", part.text, flags=re.MULTILINE)
        for piece in pieces:
            if piece.startswith("## "):
                is_inside = piece.startswith(f"## {name}\n")
            if is_inside:
                found.append(Prose(piece, part.line))
    return found
