"""Blocks of links and pictures: pictures, the head of a page, the path, and the next page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from flash_helpers.course.arguments import Arguments
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.form import reading_minutes
from flash_helpers.course.markers import parse
from flash_helpers.course.pages import (
    COURSE,
    GLOSSARY,
    MAP,
    REFERENCE,
    Page,
    neighbours,
    page_at,
    page_of_step,
)
from flash_helpers.registry.family import CORE, LOGBOOK
from flash_helpers.registry.selection import UsageError

PICTURES = PurePosixPath("docs/images/course")


def relative(target: PurePosixPath, page: PurePosixPath) -> str:
    """A path of the repository, relative to a page, for a link."""
    return PurePosixPath(os.path.relpath(target, page.parent)).as_posix()


def image(target: PurePosixPath, alt: str, page: PurePosixPath) -> str:
    """Markdown of a picture."""
    return f"![{alt.replace('[', '(').replace(']', ')')}]({relative(target, page)})"


def words_note(arguments: Arguments) -> list[str]:
    """Note on the glossary below the first table with its terms; none after a page's first
    table."""
    return arguments.once(
        f"The [glossary]({relative(GLOSSARY, arguments.page)}) explains the words of these tables."
    )


def picture_block(evidence: Evidence, arguments: Arguments) -> str:
    """A picture of the course."""
    name, alt = arguments.words
    return image(PICTURES / f"{name}.svg", alt, arguments.page)


def nav_block(evidence: Evidence, arguments: Arguments) -> str:
    """Head of a page: its place, its reading time, the GPU of its figures, and links to the pages
    before and after it."""
    page = arguments.page
    own = page_at(page)
    if own is None:
        raise UsageError(f"{page} is not in the list of pages (py/flash_helpers/course/pages.py)")
    head = [f"**{own.part or REFERENCE}**"]
    if own.place == CORE:
        path = [other for other in COURSE if other.part == own.part]
        head.append(f"page {path.index(own) + 1} of {len(path)}")
    head.append(minutes_text(_minutes(evidence.root, own)))
    if own.step:
        head.append(f"measured on {evidence.results.provenance.gpu} unless another GPU is named")
    lines = [" · ".join(head)]
    if own.in_course:
        before, after = neighbours(own)
        parts = [f"← {_link(before, page)}"] if before else []
        parts += [f"{_link(after, page)} →"] if after else []
        lines.append(" · ".join(parts))
    return "\n\n".join(lines)


def path_block(evidence: Evidence, arguments: Arguments) -> str:
    """The path: the core pages of each evening with their reading times, and links to the other
    pages."""
    minutes = {page: _minutes(evidence.root, page) for page in COURSE}

    def total(pages: Sequence[Page]) -> str:
        count = f"{len(pages)} page{'s' * (len(pages) > 1)}"
        return f"{count}, {minutes_text(sum(minutes[page] for page in pages))}"

    def listed(pages: Sequence[Page]) -> str:
        return " · ".join(f"{_link(page, arguments.page)} ({minutes[page]})" for page in pages)

    lines = []
    for part in dict.fromkeys(page.part for page in COURSE if page.place not in ("", LOGBOOK)):
        pages = [page for page in COURSE if page.part == part]
        lines.append(f"- **{part}**, {total(pages)}: {listed(pages)}.")
    logbook = [page for page in COURSE if page.place == LOGBOOK]
    lines.append(f"- Logbook, {total(logbook)}: on the [map]({relative(MAP, arguments.page)}).")
    return "\n".join(
        [
            *lines,
            "",
            "The number after a page is its reading time in minutes, without the exercises.",
        ]
    )


def minutes_text(minutes: int) -> str:
    """Duration in words: "1 minute", "7 minutes", "1 hour 5 minutes"."""
    hours, rest = divmod(minutes, 60)
    parts = [f"{n} {unit}{'s' * (n > 1)}" for n, unit in ((hours, "hour"), (rest, "minute")) if n]
    return " ".join(parts)


def _minutes(root: Path, page: Page) -> int:
    return reading_minutes(parse((root / page.path).read_text(encoding="utf-8")))


def next_block(evidence: Evidence, arguments: Arguments) -> str:
    """A link to the page after a step's page."""
    own = page_of_step(arguments.step().id)
    after = neighbours(own)[1] if own else None
    if after is None:
        raise UsageError(f"there is no page after the page of step {arguments.words[0]}")
    return f"Next: {_link(after, arguments.page)}."


def _link(target: Page, page: PurePosixPath) -> str:
    return f"[{target.title}]({relative(target.path, page)})"
