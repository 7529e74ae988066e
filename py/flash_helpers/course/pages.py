"""The pages of the course, in the order in which they are read. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

FOLDER = PurePosixPath("docs")


@dataclass(frozen=True)
class Page:
    """One Markdown file below FOLDER.

    title: as links and the site's menu show it. step: the version that the page is about, if it is
    about one. in_course: it has a neighbour before and after; otherwise it is for looking things
    up.
    """

    name: str
    title: str
    step: int | None = None
    in_course: bool = True

    @property
    def path(self) -> PurePosixPath:
        """Relative to the root of the repository."""
        return FOLDER / self.name


PAGES: tuple[Page, ...] = (
    Page("00_start.md", "Before step 1"),
    Page("01_base.md", "Step 1: base", 1),
    Page("02_swizzle.md", "Step 2: swizzle", 2),
    Page("03_eager_copies.md", "Step 3: eager copies", 3),
    Page("04_interleaved_fragments.md", "Step 4: interleaved fragments", 4),
    Page("05_double_buffered_fragments.md", "Step 5: double-buffered fragments", 5),
    Page("06_fp32_throughput.md", "Step 6: fp32 throughput", 6),
    Page("07_autotuning.md", "Step 7: auto-tuning", 7),
    Page("08_integer_instructions.md", "Step 8: integer instructions", 8),
    Page("09_moves.md", "Step 9: moves", 9),
    Page("10_first_block_peeled.md", "Step 10: first block peeled", 10),
    Page("11_output_swizzle.md", "Step 11: output swizzle", 11),
    Page("12_indexed_blocks.md", "Step 12: indexed blocks", 12),
    Page("13_walked_backwards.md", "Step 13: walked backwards", 13),
    Page("14_cache_policy.md", "Step 14: cache policy", 14),
    Page("15_pieces.md", "Step 15: pieces", 15),
    Page("16_static_stride.md", "Step 16: static stride", 16),
    Page("17_what_next.md", "What comes next"),
    Page("own_kernel.md", "Your own kernel"),
    Page("tuning.md", "Tuning", in_course=False),
    Page("simulator.md", "The simulator", in_course=False),
    Page("sass.md", "The machine code", in_course=False),
)
COURSE: tuple[Page, ...] = tuple(page for page in PAGES if page.in_course)


def page_named(name: str) -> Page | None:
    """The page with that file name, if the list has it."""
    return next((page for page in PAGES if page.name == name), None)


def page_of_step(step: int) -> Page | None:
    """The page about a version, if there is one."""
    return next((page for page in PAGES if page.step == step), None)


def neighbours(page: Page) -> tuple[Page | None, Page | None]:
    """The pages of the course before and after one; None at its ends, and for both if the page is
    not of the course."""
    if page not in COURSE:
        return None, None
    at = COURSE.index(page)
    return (
        COURSE[at - 1] if at else None,
        COURSE[at + 1] if at + 1 < len(COURSE) else None,
    )
