"""Form of a step's page by its place in the course: its sections in order, and the length of its
unfolded prose. Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flash_helpers.course.markers import FENCED, Block, Prose
from flash_helpers.course.pages import FOLDER, page_at
from flash_helpers.registry.family import CORE, LAB, LIBRARY, LOGBOOK

FOLDED_SECTION = "The evidence"
MOST_PICTURES = 1  # in "The idea"
MOST_IDEA_SENTENCES = 4  # of a logbook page, the expectation included
MOST_MOTIVATION_WORDS = 120
# A reader's pace, for the reading times: words of technical prose per minute, and half a minute per
# picture, table, or piece of code.
WORDS_PER_MINUTE = 150
MINUTES_PER_BLOCK = 0.5
_NOT_READ = ("nav", "next")  # kinds of blocks that hold only links


@dataclass(frozen=True)
class Form:
    """The form that pages of one place have.

    sections: in order, each with the kinds of block of which it needs one. most_words,
    most_minutes: of the unfolded text. is_self_contained: whether the unfolded text must not link
    to pages of the lab or the logbook.
    """

    sections: Mapping[str, str]
    most_words: int
    most_minutes: int = 10
    is_self_contained: bool = False

    @property
    def motivation(self) -> str:
        """Name of the first section if it is one paragraph of motivation, else ""."""
        first = next(iter(self.sections))
        return "" if first == "The idea" else first


_LONG = {
    "The idea": "",
    "The code": "excerpt",
    "What it gained": "stairs",
    "Verdict": "",
    "Exercises": "",
    FOLDED_SECTION: "clock",
    "Next": "next",
}
_WHY = {"Why is this slow?": "", **_LONG}
_SHORT = {
    "The idea": "",
    "The diff": "diff|excerpt",  # a step without a parent has no diff
    "What it gained": "stairs",
    "Verdict": "",
    FOLDED_SECTION: "clock",
    "Next": "next",
}
FORMS: Mapping[str, Form] = {
    CORE: Form(_WHY, 900, is_self_contained=True),
    LIBRARY: Form({"What a model needs": "", **_LONG}, 900),
    LAB: Form(_WHY, 900),
    LOGBOOK: Form(_SHORT, 250),
}

_HEADING = re.compile(r"^## +(.+?) *$", re.MULTILINE)
_FOLDED = re.compile(r"<details\b(?:(?!<details\b).)*?</details>", re.DOTALL)  # the innermost
_NO_PROSE = re.compile(r"<!--(?s:.*?)-->|^\|.*$|^#.*$|^!\[.*$", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?](?:\*\*)?(?=\s|$)")
_LINK = re.compile(r"\]\((?P<page>[\w/.-]+\.md)(?:#[^)]*)?\)")
_BLOCK = "\0"  # stands for an open block


def _open_text(parts: Sequence[Prose | Block]) -> str:
    """Unfolded text, with `_BLOCK` for each block to read and each piece of code."""
    text = "".join(
        part.text if isinstance(part, Prose) else _BLOCK * (part.kind not in _NOT_READ)
        for part in parts
    )
    text = FENCED.sub(_BLOCK, text)
    while (folded := _FOLDED.sub("", text)) != text:
        text = folded
    return text


def unfolded_prose(parts: Sequence[Prose | Block]) -> str:
    """Unfolded prose: no code, table, picture or heading, and no generated text."""
    text = _NO_PROSE.sub("", _open_text(parts).replace(_BLOCK, ""))
    return re.sub(r"\n{3,}", "\n\n", text)


def words(text: str) -> int:
    """Number of words in Markdown; a link counts as its text."""
    return len(re.findall(r"[^\W_]+(?:[-'.,/][^\W_]+)*", re.sub(r"\]\([^)]*\)", "]", text)))


def reading_minutes(parts: Sequence[Prose | Block]) -> int:
    """Reading time of a page in minutes, without folded text and without doing the exercises."""
    minutes = words(unfolded_prose(parts)) / WORDS_PER_MINUTE
    return max(1, math.ceil(minutes + MINUTES_PER_BLOCK * _open_text(parts).count(_BLOCK)))


def form_errors(place: str, parts: Sequence[Prose | Block]) -> Iterator[str]:
    """Faults of a step's page, one line each. place: of the page, a key of FORMS."""
    form = FORMS[place]
    found = [*_sections(parts)]
    names = [section.name for section in found]
    if names != [*form.sections]:
        yield (
            f"its sections are {', '.join(names)}: those of a page of the {place} are "
            f"{', '.join(form.sections)}"
        )
        return
    inside = {section.name: section.parts for section in found}
    for name, kind in form.sections.items():
        if kind and not set(kind.split("|")) & {*_kinds(inside[name])}:
            yield f'"{name}" needs a block build:{kind}'
    if (n := _kinds(inside["The idea"]).count("picture")) > MOST_PICTURES:
        yield f'"The idea" has {n} pictures: {MOST_PICTURES} at most'
    if (count := words(unfolded_prose(parts))) > form.most_words:
        yield f"{count} words are not folded: at most {form.most_words} on a page of the {place}"
    if (minutes := reading_minutes(parts)) > form.most_minutes:
        yield f"the page takes {minutes} minutes: {form.most_minutes} at most"
    if evidence := unfolded_prose(inside[FOLDED_SECTION]).strip():
        yield f'"{FOLDED_SECTION}" is not folded: {evidence.splitlines()[0][:60]!r}'
    if form.motivation:
        yield from _motivation_errors(form.motivation, inside[form.motivation])
    else:
        idea = unfolded_prose(inside["The idea"])
        if (n := len(_SENTENCE_END.findall(idea))) > MOST_IDEA_SENTENCES:
            yield f'"The idea" has {n} sentences: {MOST_IDEA_SENTENCES} at most'
    if form.is_self_contained:
        for link in _LINK.finditer(unfolded_prose(parts)):
            page = page_at(FOLDER / link["page"])
            if page and page.place in (LAB, LOGBOOK):
                yield f"a link leads to {page.name}, which is not on the path: fold or drop it"


def _motivation_errors(name: str, parts: Sequence[Prose | Block]) -> Iterator[str]:
    text = unfolded_prose(parts).strip()
    if (n := len(text.split("\n\n"))) > 1:
        yield f'"{name}" has {n} paragraphs: 1 at most'
    if not 0 < (n := words(text)) <= MOST_MOTIVATION_WORDS:
        yield f'"{name}" has {n} words: 1 to {MOST_MOTIVATION_WORDS}'


@dataclass
class _Section:
    name: str
    parts: list[Prose | Block] = field(default_factory=list)


def _kinds(parts: Sequence[Prose | Block]) -> list[str]:
    return [part.kind for part in parts if isinstance(part, Block)]


def _sections(parts: Sequence[Prose | Block]) -> Iterator[_Section]:
    """Sections of a page, one per heading of the second level; prose is cut at the headings."""
    section: _Section | None = None
    for part in parts:
        if isinstance(part, Block):
            if section:
                section.parts.append(part)
            continue
        visible = FENCED.sub(lambda code: re.sub(".", " ", code[0]), part.text)
        at = 0
        for heading in _HEADING.finditer(visible):
            if section:
                section.parts.append(Prose(part.text[at : heading.start()], part.line))
                yield section
            section, at = _Section(heading[1]), heading.end()
        if section:
            section.parts.append(Prose(part.text[at:], part.line))
    if section:
        yield section
