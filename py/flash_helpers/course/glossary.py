"""The glossary: its terms, and the links to them from their first use on each page. Standard
library only.

A term is a heading of the third level in GLOSSARY; the line below it may list other spellings. A
spelling stands for its plural too, and a spelling in backticks for a code span.

    ### Bank conflict
    *also:* conflict

    ### Ring
    *as in:* fragment ring · `ring`

"as in": the heading's own word has other meanings elsewhere, and only these spellings are linked.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

from flash_helpers.course.links import relative
from flash_helpers.course.markers import CODE_SPAN, FENCED, Prose, parse
from flash_helpers.course.pages import FOLDER, GLOSSARY

_HEADING = re.compile(
    r"^### (?P<title>.+)\n(?:\*(?P<how>also|as in):\* (?P<spellings>.+)\n)?", re.M
)
_ENTRY = re.compile(r"^(?=### )", re.M)
_NEXT_GROUP = re.compile(r"^## ", re.M)
_SENTENCE = re.compile(r".+?\.(?=\s|$)|.+", re.S)
_SEPARATOR = " · "

_LINK = re.compile(r"!?\[(?P<label>(?:`[^`\n]*`|[^\[\]`])*)\]\((?P<target>[^()\s]*)\)")
# Text that takes no link: it is blanked, in this order, before the search for terms.
_COMMENT = re.compile(r"<!-- (?P<name>\w+):begin -->.*?<!-- (?P=name):end -->|<!--.*?-->", re.S)
_FOLD = re.compile(r"<(?P<end>/?)details\b")
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))(?:(?: {4}|\t).*(?:\n+|\Z))+")
_LINE = re.compile(r"^(?:#{1,6} | *<|\*(?:also|as in):\* ).*", re.M)
_SPACE = re.compile(r"\s+")
_TAG = re.compile(r"<[^<>\n]+>|\bhttps?://\S+")


class GlossaryError(ValueError):
    """A fault in the form of the glossary."""


@dataclass(frozen=True)
class Term:
    """A term of the glossary. title: the heading, as plain text. spellings: texts that are linked,
    in Markdown. definition: in Markdown."""

    title: str
    spellings: tuple[str, ...]
    definition: str

    @property
    def anchor(self) -> str:
        """Anchor of the heading on GitHub and on the site."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    @cached_property
    def sentence(self) -> str:
        """First sentence of the definition, without Markdown."""
        found = _SENTENCE.match(_LINK.sub(r"\g<label>", self.definition))
        return _SPACE.sub(" ", re.sub(r"[`*]", "", found[0])) if found else ""

    @property
    def names(self) -> list[str]:
        """Names that a reader may look for."""
        return list(dict.fromkeys([self.title, *(s.strip("`") for s in self.spellings)]))


def read_terms(root: Path) -> list[Term]:
    """Read the terms of the repository's glossary; none if the repository has no glossary.

    Raises GlossaryError, and OSError.
    """
    path = root / GLOSSARY
    return parse_terms(path.read_text(encoding="utf-8")) if path.is_file() else []


def parse_terms(text: str) -> list[Term]:
    """Parse the terms of a glossary. Raises GlossaryError for a term without a definition, and for
    a name that two terms have."""
    terms = [_term(entry) for entry in _ENTRY.split(text)[1:]]
    owners: dict[str, Term] = {}
    for term in terms:
        for name in {term.anchor, *(name.lower() for name in term.names)}:
            other = owners.setdefault(name, term)
            if other is not term:
                raise GlossaryError(f"{GLOSSARY}: {name!r} is {other.title!r} and {term.title!r}")
    return terms


def _term(entry: str) -> Term:
    heading = _HEADING.match(entry)
    assert heading is not None  # each entry begins with a heading
    definition = _NEXT_GROUP.split(entry[heading.end() :])[0].strip()
    title = heading["title"].strip()
    if not definition:
        raise GlossaryError(f"{GLOSSARY}: {title!r} has no definition")
    told = tuple(heading["spellings"].strip().split(_SEPARATOR)) if heading["spellings"] else ()
    return Term(title, told if heading["how"] == "as in" else (_lowered(title), *told), definition)


def _lowered(title: str) -> str:
    """A title as within a sentence: "bank conflict", but "SM"."""
    return title[0].lower() + title[1:] if title[1:2].islower() else title


def link_first_uses(text: str, page: PurePosixPath, terms: Sequence[Term]) -> str:
    """A page below FOLDER with a link from the first use of each term, and none from later uses;
    other pages unchanged. An unfolded use counts before a folded one. In the glossary each
    definition counts as a page of its own.

    page: relative to the root of the repository.
    """
    if not terms or not page.is_relative_to(FOLDER):
        return text
    if page != GLOSSARY:
        return _linked(text, relative(GLOSSARY, page), terms)
    first, *entries = _ENTRY.split(text)
    linked = (
        _linked(entry, "", terms, own.anchor) for entry, own in zip(entries, terms, strict=True)
    )
    return "".join([first, *linked])


def _linked(text: str, target: str, terms: Sequence[Term], own: str = "") -> str:
    """Text with links from first uses to `target`. own: anchor of the term that the text
    defines."""
    parts = [
        (_unlinked(part.text, target), True)
        if isinstance(part, Prose)
        else (part.written(part.body), False)
        for part in parse(text)
    ]
    whole = "".join(part for part, _ in parts)
    spelled = _spelled(tuple(terms))
    visible, folds = _visible(parts, spelled.code_spans)
    uses: dict[str, re.Match[str]] = {}
    for use in spelled.pattern.finditer(visible):
        anchor = spelled.terms[_SPACE.sub(" ", use[0])].anchor
        before = uses.get(anchor)
        if before is None or (_inside(before, folds) and not _inside(use, folds)):
            uses[anchor] = use
    uses.pop(own, None)
    for anchor, use in sorted(uses.items(), key=lambda item: -item[1].start()):
        link = f"[{whole[use.start() : use.end()]}]({target}#{anchor})"
        whole = whole[: use.start()] + link + whole[use.end() :]
    return whole


def _unlinked(text: str, target: str) -> str:
    """Prose without links to terms, including terms that the glossary no longer has."""

    def label(found: re.Match[str]) -> str:
        return found["label"] if found["target"].startswith(f"{target}#") else found[0]

    last, kept = 0, []
    for code in FENCED.finditer(text):
        kept += [_LINK.sub(label, text[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*kept, _LINK.sub(label, text[last:])])


def _visible(
    parts: Sequence[tuple[str, bool]], spellings: set[str]
) -> tuple[str, list[tuple[int, int]]]:
    """The text with parts that take no link blanked, and the ranges that are folded.

    parts: of the page, and whether each is prose. spellings: code spans among these stay.
    """
    text = "".join(part if is_prose else _blank(part) for part, is_prose in parts)
    for code in (FENCED, _COMMENT):
        text = code.sub(lambda found: _blank(found[0]), text)
    folds = list(_folds(text))
    text = re.sub(CODE_SPAN, lambda f: f[0] if f[0] in spellings else _blank(f[0]), text)
    for other in (_LINK, _INDENTED, _LINE, _TAG):
        text = other.sub(lambda found: _blank(found[0]), text)
    return text, folds


def _blank(text: str) -> str:
    return re.sub(r".", "\0", text)


def _folds(text: str) -> Iterator[tuple[int, int]]:
    depth, begin = 0, 0
    for tag in _FOLD.finditer(text):
        begin = begin if depth else tag.start()
        depth += -1 if tag["end"] else 1
        if not depth:
            yield begin, tag.end()


def _inside(use: re.Match[str], folds: Sequence[tuple[int, int]]) -> bool:
    return any(begin <= use.start() < end for begin, end in folds)


@dataclass(frozen=True)
class _Spelled:
    """Terms by the spellings that are linked. pattern: finds the longest spelling."""

    terms: Mapping[str, Term]
    pattern: re.Pattern[str]

    @property
    def code_spans(self) -> set[str]:
        """Spellings in backticks."""
        return {written for written in self.terms if written.startswith("`")}


@cache
def _spelled(terms: tuple[Term, ...]) -> _Spelled:
    found = {
        written: term
        for term in terms
        for spelling in term.spellings
        for written in _ways_to_write(spelling)
    }
    code = [written for written in found if written.startswith("`")]
    words = [written for written in found if not written.startswith("`")]
    # The lookbehind comes first: at most places no spelling can begin.
    pattern = rf"(?<![\w./@$%`-])(?:{_any_of(words)})(?![\w-]|[./]\w)"
    return _Spelled(found, re.compile(f"{pattern}|{_any_of(code)}" if code else pattern))


def _any_of(spellings: Iterable[str]) -> str:
    """Pattern that finds the longest spelling. It groups more than a thousand spellings by their
    first letter, so that only one group is tried at each place."""
    groups = []
    ordered = sorted(spellings, key=lambda written: (written[0], -len(written)))
    for first, alike in itertools.groupby(ordered, key=lambda written: written[0]):
        rest = "|".join(re.escape(w[1:]).replace(r"\ ", r"(?: |\n *)") for w in alike)
        groups.append(f"{re.escape(first)}(?:{rest})")
    return "|".join(groups)


def _ways_to_write(spelling: str) -> Iterator[str]:
    if spelling.startswith("`"):
        yield spelling
        return
    first = spelling[0]
    for start in (first, first.upper()) if first.islower() else (first,):
        for plural in ("", "s", "es") if spelling[-1].isalpha() else ("",):
            yield f"{start}{spelling[1:]}{plural}"
