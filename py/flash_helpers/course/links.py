"""Blocks that lead elsewhere: pictures, and the pages before and after."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from flash_helpers.course.arguments import Arguments
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.pages import COURSE, GLOSSARY, Page, neighbours, page_of_step
from flash_helpers.registry.selection import UsageError

PICTURES = PurePosixPath("docs/images/course")


def relative(target: PurePosixPath, page: PurePosixPath) -> str:
    """A path of the repository, as a link on a page has it."""
    return PurePosixPath(os.path.relpath(target, page.parent)).as_posix()


def image(target: PurePosixPath, alt: str, page: PurePosixPath) -> str:
    """Markdown of a picture."""
    return f"![{alt.replace('[', '(').replace(']', ')')}]({relative(target, page)})"


def words_note(arguments: Arguments) -> list[str]:
    """Where the words of a table are told, once a page."""
    return arguments.once(
        f"The words of these tables stand in the [glossary]({relative(GLOSSARY, arguments.page)})."
    )


def picture_block(evidence: Evidence, arguments: Arguments) -> str:
    """A picture of the course."""
    name, alt = arguments.words
    return image(PICTURES / f"{name}.svg", alt, arguments.page)


def nav_block(evidence: Evidence, arguments: Arguments) -> str:
    """Links to the pages before and after this one."""
    page = arguments.page
    own = next((found for found in COURSE if found.path == page), None)
    if own is None:
        raise UsageError(
            f"{page} is no page of the course (py/flash_helpers/course/pages.py): it has no "
            "neighbours"
        )
    before, after = neighbours(own)
    parts = [f"← {_link(before, page)}"] if before else []
    parts += [f"{_link(after, page)} →"] if after else []
    return " · ".join(parts)


def next_block(evidence: Evidence, arguments: Arguments) -> str:
    """A link to the page after that of a step."""
    own = page_of_step(arguments.step().id)
    after = neighbours(own)[1] if own else None
    if after is None:
        raise UsageError(f"there is no page after that of step {arguments.words[0]}")
    return f"Next: {_link(after, arguments.page)}."


def _link(target: Page, page: PurePosixPath) -> str:
    return f"[{target.title}]({relative(target.path, page)})"
