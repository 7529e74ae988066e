"""The pages of the course, in the order in which they are read. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flash_helpers.kernel_configs import FAMILIES
from flash_helpers.registry.family import CORE, LAB, LIBRARY, LOGBOOK, Step

FOLDER = PurePosixPath("docs")
README = PurePosixPath("README.md")
CONTRIBUTING = PurePosixPath("CONTRIBUTING.md")
GLOSSARY, MAP = FOLDER / "glossary.md", FOLDER / "map.md"
START, AND_THEN = "Start", "And then"  # parts of no family
REFERENCE = "Reference"  # the part of the reference pages
# Families whose core pages are read in one evening. Other families' core pages have their own part.
EVENINGS: Mapping[str, tuple[str, ...]] = {
    "First evening": ("ampere", "overlap"),
    "Second evening": ("hopper",),
}


@dataclass(frozen=True)
class Page:
    """One Markdown file below FOLDER.

    title: in links and in the site's menu. part: of the course, and heading in the menu; "" for a
    reference page. place: such as CORE, for a page on the path or of a step; "" for any other page.
    step: id of the page's step; "" if the page is not about a step.
    """

    name: str
    title: str
    part: str = ""
    place: str = ""
    step: str | None = None

    @property
    def in_course(self) -> bool:
        """Whether the page is in a part of the course."""
        return bool(self.part)

    @property
    def path(self) -> PurePosixPath:
        """Path relative to the root of the repository."""
        return FOLDER / self.name


def file_stem(step: Step) -> str:
    """Beginning of the names of files about a step: "09" for v9, a step of the first family, and
    "o3" for a step of another family."""
    return f"{step.number:02}" if step.family == next(iter(FAMILIES)) else step.id


def _of_steps(part: str, place: str, families: Iterable[str]) -> Iterator[Page]:
    """Pages of a place about steps of the families."""
    for step in (step for name in families for step in FAMILIES[name].steps.values()):
        if step.place == place:
            stem = file_stem(step)
            title = f"Step {stem.lstrip('0')}: {step.slug.replace('_', ' ')}"
            yield Page(f"{stem}_{step.slug}.md", title, part, place, step.id)


def _cores() -> Iterator[Page]:
    """Core pages, by evenings."""
    for part, families in EVENINGS.items():
        if families[0] == next(iter(FAMILIES)):
            yield Page("quickstart.md", "Quick start", part, CORE)
            yield Page("00_start.md", "Before step 1", part, CORE)
        yield from _of_steps(part, CORE, families)
    with_evening = {name for families in EVENINGS.values() for name in families}
    for name in FAMILIES:
        if name not in with_evening:
            yield from _of_steps(f"Core of {name}", CORE, [name])


PAGES: tuple[Page, ...] = (
    Page("lessons.md", "Five lessons", START),
    Page(MAP.name, "The map", START),
    *_cores(),
    *_of_steps("Library", LIBRARY, FAMILIES),
    *_of_steps("Lab", LAB, FAMILIES),
    *(page for name in FAMILIES for page in _of_steps(f"Logbook of {name}", LOGBOOK, [name])),
    Page("using.md", "Using the library", AND_THEN),
    Page("long_sequences.md", "Sequences longer than one GPU", AND_THEN),
    Page("public_designs.md", "Beside the public designs", AND_THEN),
    Page("what_next.md", "What comes next", AND_THEN),
    Page("own_kernel.md", "Your own kernel", AND_THEN),
    Page(GLOSSARY.name, "Glossary"),
    Page("tuning.md", "Tuning"),
    Page("simulator.md", "The simulator"),
    Page("sass.md", "The machine code"),
)
COURSE: tuple[Page, ...] = tuple(page for page in PAGES if page.in_course)


def page_at(path: PurePosixPath) -> Page | None:
    """The page at a path relative to the root of the repository; None if the list lacks it."""
    return next((page for page in PAGES if page.path == path), None)


def page_of_step(step: str) -> Page | None:
    """The page about the step with an id; None without one."""
    return next((page for page in PAGES if page.step == step), None)


def neighbours(page: Page) -> tuple[Page | None, Page | None]:
    """The pages of the course before and after a page; None at the ends of the course."""
    around = (None, *COURSE, None)
    at = around.index(page)
    return around[at - 1], around[at + 1]


def all_pages(root: Path) -> list[PurePosixPath]:
    """The Markdown files that may hold blocks, relative to the root."""
    found = [FOLDER / path.name for path in sorted((root / FOLDER).glob("*.md"))]
    return [*found, *(path for path in (README, CONTRIBUTING) if (root / path).is_file())]


def absent_pages(root: Path) -> list[PurePosixPath]:
    """Pages of the list that do not exist yet."""
    return [page.path for page in PAGES if not (root / page.path).is_file()]
