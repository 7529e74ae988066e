"""From pages with markers to the same pages with what stands between them written anew."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from flash_helpers.course import blocks
from flash_helpers.course.arguments import parse_arguments
from flash_helpers.course.commands import (
    JOBS,
    Command,
    Console,
    Outcome,
    Runner,
    consoles,
    copy_of,
    with_output,
)
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.links import PICTURES
from flash_helpers.course.markers import Block, MarkerError, Prose, parse
from flash_helpers.course.pages import FOLDER, PAGES
from flash_helpers.registry.selection import UsageError

OTHER_PAGES = ("README.md", "CONTRIBUTING.md")

_COMPILER = re.compile(r"\bptxas \d+(?:\.\d+)+")

# outcomes of the commands of a page, by the index of the part that they stand in
Outcomes = Mapping[int, Sequence[Outcome]]


class PageError(ValueError):
    """What is wrong with pages: a line each, with the page and its line."""

    @classmethod
    def at(cls, page: PurePosixPath, line: int, error: Exception) -> PageError:
        """One error, in one place."""
        return cls(f"{page}:{line}: {error}")


@dataclass(frozen=True)
class SourcePage:
    """A page as it was read. path: relative to the root. consoles: by the index of the part that
    they stand in, prose or an output block."""

    path: PurePosixPath
    text: str
    parts: tuple[Prose | Block, ...]
    consoles: Mapping[int, Sequence[Console]]

    @property
    def blocks(self) -> list[Block]:
        """The pairs of markers, in order."""
        return [part for part in self.parts if isinstance(part, Block)]

    def commands(self, at: int) -> list[Command]:
        """Those in a part that run without a GPU, in order."""
        inside = (console for console in self.consoles[at] if not console.is_gpu)
        return [command for console in inside for command in console.commands]

    def places(self, *, until_output: bool) -> list[int]:
        """Indices of the parts with commands to run here. until_output: none after the last output
        block, whose commands may need what those before it left."""
        found = [at for at in self.consoles if self.commands(at)]
        if not until_output:
            return found
        last = max((at for at in found if isinstance(self.parts[at], Block)), default=-1)
        return [at for at in found if at <= last]


@dataclass(frozen=True)
class BuiltPage:
    """A page as it is and as it should be. failures: the commands that did not end as they must.
    missing: pictures that are shown and are not there."""

    path: PurePosixPath
    old: str
    new: str
    failures: tuple[Outcome, ...]
    missing: tuple[PurePosixPath, ...]


def all_pages(root: Path) -> list[PurePosixPath]:
    """The Markdown files that may hold blocks, relative to the root."""
    found = [FOLDER / path.name for path in sorted((root / FOLDER).glob("*.md"))]
    return [*found, *(PurePosixPath(name) for name in OTHER_PAGES if (root / name).is_file())]


def absent_pages(root: Path) -> list[PurePosixPath]:
    """Pages of the list that nobody has written."""
    return [page.path for page in PAGES if not (root / page.path).is_file()]


def read_page(root: Path, path: PurePosixPath) -> SourcePage:
    """Read a page and take it apart. Raises OSError, UnicodeError and PageError."""
    text = (root / path).read_text(encoding="utf-8")
    try:
        parts = parse(text)
        found = {at: _consoles(part) for at, part in enumerate(parts)}
    except MarkerError as error:
        raise PageError.at(path, error.line, error) from error
    return SourcePage(path, text, tuple(parts), {at: c for at, c in found.items() if c})


def _consoles(part: Prose | Block) -> list[Console]:
    """The console blocks of prose and of output blocks; other generated text has no commands."""
    if isinstance(part, Prose):
        return consoles(part.text, part.line)
    if part.kind != blocks.OUTPUT_KIND:
        return []
    found = consoles(part.body, part.line + 1)
    if not found:
        raise MarkerError(part.line, "build:output holds no ```console block: write one into it")
    if any(console.is_gpu for console in found):
        raise MarkerError(
            part.line, "build:output cannot show what runs on a GPU: take the markers away"
        )
    return found


def build_pages(
    pages: Sequence[SourcePage], evidence: Evidence, outcomes: Mapping[PurePosixPath, Outcomes]
) -> list[BuiltPage]:
    """Write every block anew, in memory.

    outcomes: from `run_pages`; an output block whose commands were not run stays as it is.

    Raises PageError with all that is wrong, if something is.
    """
    errors: list[str] = []
    built: list[str] = []
    total = sum(len(page.blocks) for page in pages)
    with tqdm(total=total, desc="blocks", unit="block", leave=False, disable=None) as progress:
        for page in pages:
            texts = []
            for at, part in enumerate(page.parts):
                if isinstance(part, Prose):
                    texts.append(part.text)
                    continue
                try:
                    texts.append(
                        part.written(_text(page, at, part, outcomes.get(page.path, {}), evidence))
                    )
                except (OSError, RuntimeError, ValueError) as error:
                    errors.append(str(PageError.at(page.path, part.line, error)))
                progress.update()
            built.append("".join(texts))
    if errors:
        raise PageError("\n".join(errors))
    return [
        BuiltPage(
            page.path,
            page.text,
            text,
            tuple(o for part in outcomes.get(page.path, {}).values() for o in part if o.failed),
            tuple(_missing_pictures(page, evidence.root)),
        )
        for page, text in zip(pages, built, strict=True)
    ]


def _text(page: SourcePage, at: int, part: Block, outcomes: Outcomes, evidence: Evidence) -> str:
    if part.kind != blocks.OUTPUT_KIND:
        return blocks.render(evidence, part.kind, part.arguments, page.path)
    arguments = parse_arguments(part.arguments, ("lines",), page.path)
    shown = arguments.number("lines", blocks.DEFAULT_OUTPUT_LINES)
    if arguments.words:
        raise UsageError(
            f"build:output: {part.arguments!r}; accepted is `build:output {blocks.OUTPUT_USAGE}`"
        )
    if at not in outcomes:
        return part.body
    return with_output(part.body, page.consoles[at], outcomes[at], shown)


def _missing_pictures(page: SourcePage, root: Path) -> Iterator[PurePosixPath]:
    for block in page.blocks:
        if block.kind == blocks.PICTURE_KIND:
            path = PICTURES / f"{parse_arguments(block.arguments, (), page.path).words[0]}.svg"
            if not (root / path).is_file():
                yield path


def run_pages(
    pages: Sequence[SourcePage], root: Path, *, until_output: bool
) -> dict[PurePosixPath, Outcomes]:
    """Run the commands of pages, each page in a copy of the repository of its own, JOBS pages at a
    time. until_output: as for `SourcePage.places`. Raises OSError where there is no room for a
    copy."""
    places = {page.path: page.places(until_output=until_output) for page in pages}
    n_commands = {
        page.path: sum(len(page.commands(at)) for at in places[page.path]) for page in pages
    }
    total = sum(n_commands.values())
    runner = Runner()
    with (
        tqdm(total=total, desc="commands", unit="command", leave=False, disable=None) as progress,
        ThreadPoolExecutor(JOBS) as pool,
    ):

        def run_page(page: SourcePage) -> Outcomes:
            found: dict[int, list[Outcome]] = {}
            if not places[page.path]:
                return found
            with copy_of(root) as folder:
                for at in places[page.path]:
                    found[at] = []
                    for command in page.commands(at):
                        found[at].append(runner.run(command, folder))
                        progress.update()
            return found

        # the longest first, so that none is left alone at the end
        ordered = sorted(pages, key=lambda page: -n_commands[page.path])
        try:
            found = pool.map(run_page, ordered)
            return dict(zip((page.path for page in ordered), found, strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            runner.stop()
            raise


def compilers_named(text: str) -> set[str]:
    """The releases of ptxas that a page says its numbers are of."""
    return set(_COMPILER.findall(text))
