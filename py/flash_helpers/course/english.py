"""Check of the English in pages and docstrings: words that stand for an unnamed subject, openings
without a noun, and long sentences. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flash_helpers.course.markers import CODE_SPAN, FENCED

MOST_WORDS = 45  # per sentence; 30 are already many

_UNNAMED = re.compile(r"\b(?:lest|who(?:m|so)?ever|somebody|someone)\b", re.IGNORECASE)
_OPENING = re.compile(r"^(?:What|Who)\b.*[^?]$")
_SKIPPED = re.compile(
    rf"{FENCED.pattern}|<!--(?s:.*?)-->|^\|.*$|^#.*$|^(?: {{4}}|\t).*$|^!\[.*$"
    r"|<summary>.*?</summary>|</?\w[^>\n]*>",
    re.MULTILINE,
)
_TARGET = re.compile(r"\]\([^)\s]*(?: \"[^\"]*\")?\)")
_PARAGRAPH = re.compile(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", re.MULTILINE)
_END = re.compile(r"(?<=[.!?:;])[)\"*_]*\s+(?=[\"(*_\[]*[A-Z0-9`])")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a Markdown text, without code blocks, tables, pictures, headings and
    comments; a code span is one word, and a link its text."""
    prose = _TARGET.sub("]", _SKIPPED.sub("\n\n", text))
    prose = re.sub(CODE_SPAN, "`x`", prose)
    for paragraph in _PARAGRAPH.split(prose):
        for sentence in _END.split(" ".join(paragraph.split())):
            if sentence:
                yield sentence


def english_errors(text: str) -> Iterator[str]:
    """Faults of a Markdown text, one line each."""
    for sentence in sentences(text):
        beginning = " ".join(sentence.split()[:8])
        if found := _UNNAMED.search(sentence):
            yield f"{found[0]!r} names nothing: {beginning!r} …"
        if _OPENING.match(sentence):
            yield f"the subject of a sentence is a noun: {beginning!r} …"
        if (n := len(sentence.split())) > MOST_WORDS:
            yield f"a sentence of {n} words, {MOST_WORDS} at most: {beginning!r} …"
