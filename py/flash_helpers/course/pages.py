"""The pages of the course, in the order in which they are read. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flash_helpers.kernel_configs import FAMILIES
from flash_helpers.registry.family import Step

FOLDER = PurePosixPath("docs")
README = PurePosixPath("README.md")
CONTRIBUTING = PurePosixPath("CONTRIBUTING.md")
START, END = "Start", "And then"  # parts beside those of the families
GLOSSARY = FOLDER / "glossary.md"


@dataclass(frozen=True)
class Page:
    """One Markdown file below FOLDER.

    title: as links and the site's menu show it. part: of the course, below which the menu has it.
    step: id of the step that the page is about, if it is about one.
    """

    name: str
    title: str
    part: str = ""
    step: str | None = None

    @property
    def in_course(self) -> bool:
        """Whether it stands in a part."""
        return bool(self.part)

    @property
    def path(self) -> PurePosixPath:
        """Relative to the root of the repository."""
        return FOLDER / self.name


def file_stem(step: Step) -> str:
    """Beginning of the names of files about a step: "09" for v9, as for all steps of the first
    family, "o3" for one of another."""
    return f"{step.number:02}" if step.family == next(iter(FAMILIES)) else step.id


def _of_step(step: Step) -> Page:
    stem = file_stem(step)
    return Page(
        name=f"{stem}_{step.slug}.md",
        title=f"Step {stem.lstrip('0')}: {step.slug.replace('_', ' ')}",
        part=step.family.capitalize(),
        step=step.id,
    )


PAGES: tuple[Page, ...] = (
    Page("00_start.md", "Before step 1", START),
    Page("quickstart.md", "Quick start", START),
    Page("map.md", "The map", START),
    *(_of_step(step) for family in FAMILIES.values() for step in family.steps.values()),
    Page("public_designs.md", "Beside the public designs", END),
    Page("what_next.md", "What comes next", END),
    Page("own_kernel.md", "Your own kernel", END),
    Page(GLOSSARY.name, "Glossary"),
    Page("tuning.md", "Tuning"),
    Page("simulator.md", "The simulator"),
    Page("sass.md", "The machine code"),
)
COURSE: tuple[Page, ...] = tuple(page for page in PAGES if page.in_course)


def page_of_step(step: str) -> Page | None:
    """The page about the step of that id, if there is one."""
    return next((page for page in PAGES if page.step == step), None)


def neighbours(page: Page) -> tuple[Page | None, Page | None]:
    """The pages of the course before and after one of them; None at its ends."""
    around = (None, *COURSE, None)
    at = around.index(page)
    return around[at - 1], around[at + 1]


def all_pages(root: Path) -> list[PurePosixPath]:
    """The Markdown files that may hold blocks, relative to the root."""
    found = [FOLDER / path.name for path in sorted((root / FOLDER).glob("*.md"))]
    return [*found, *(path for path in (README, CONTRIBUTING) if (root / path).is_file())]


def absent_pages(root: Path) -> list[PurePosixPath]:
    """Pages of the list that nobody has written."""
    return [page.path for page in PAGES if not (root / page.path).is_file()]
