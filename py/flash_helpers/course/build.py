"""Rebuild of pages: the text between their markers is written anew, the rest stays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flash_helpers.console.progress import bar
from flash_helpers.course import blocks
from flash_helpers.course.arguments import parse_arguments
from flash_helpers.course.commands import (
    JOBS,
    Command,
    Console,
    Outcome,
    Runner,
    command_environment,
    consoles,
    copies_of,
    with_output,
)
from flash_helpers.course.english import english_errors
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.form import form_errors
from flash_helpers.course.glossary import Term, link_first_uses, read_terms
from flash_helpers.course.links import PICTURES
from flash_helpers.course.markers import Block, MarkerError, Prose, parse
from flash_helpers.course.pages import page_at
from flash_helpers.registry.selection import UsageError

_COMPILER = re.compile(r"\bptxas \d+(?:\.\d+)+")


class PageError(ValueError):
    """Faults of pages: one per line, with the page and its line number."""


@dataclass(frozen=True)
class SourcePage:
    """A page as it was read. path: relative to the root. consoles: console blocks, by the index of
    their part of the page, which is prose or an output block."""

    path: PurePosixPath
    text: str
    parts: Sequence[Prose | Block]
    consoles: Mapping[int, Sequence[Console]]

    @property
    def blocks(self) -> list[Block]:
        """The pairs of markers, in order."""
        return [part for part in self.parts if isinstance(part, Block)]

    def commands(self, until_output: bool = False) -> list[Command]:
        """Commands that run without a GPU, in order. until_output: leave out the commands after the
        last output block. Earlier ones stay, since an output block may need files of theirs."""
        last = len(self.parts)
        if until_output:
            last = max((n for n in self.consoles if isinstance(self.parts[n], Block)), default=-1)
        return [
            command
            for at, inside in self.consoles.items()
            for console in inside
            for command in console.commands
            if at <= last and not console.is_gpu
        ]


def read_page(root: Path, path: PurePosixPath) -> SourcePage:
    """Read a page and take it apart. Raises OSError, UnicodeError and PageError."""
    text = (root / path).read_text(encoding="utf-8")
    try:
        parts = parse(text)
        found = {at: _consoles(part) for at, part in enumerate(parts)}
    except MarkerError as error:
        raise PageError(f"{path}:{error.line}: {error}") from error
    return SourcePage(path, text, parts, {at: inside for at, inside in found.items() if inside})


def _consoles(part: Prose | Block) -> list[Console]:
    """Console blocks of prose and of output blocks; other generated text has no commands."""
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
    pages: Sequence[SourcePage], evidence: Evidence, *, run: bool, check: bool
) -> list[BuiltPage]:
    """Write every block anew, in memory. Meanwhile run the commands of JOBS pages at a time, each
    page's in a copy of the repository.

    run: run the commands; without it output blocks stay unchanged. check: run all commands, not
    only those that an output block needs.

    Raises PageError with all faults, if there are any; GlossaryError; and OSError if there is no
    room for a copy.
    """
    terms = read_terms(evidence.root)
    built = [BuiltPage(page, evidence, terms) for page in pages]
    wanted = {page: page.commands(until_output=not check) if run else [] for page in built}
    total = sum(map(len, wanted.values())) + sum(len(page.blocks) for page in pages)
    runner = Runner(command_environment())
    with (
        bar(total=total, desc="pages", unit="block", leave=False) as progress,
        copies_of(evidence.root) as lend,
        ThreadPoolExecutor(JOBS) as pool,
    ):

        def run_page(page: BuiltPage) -> dict[Command, Outcome]:
            outcomes = {}
            with lend() if wanted[page] else nullcontext(evidence.root) as folder:
                for command in wanted[page]:
                    outcomes[command] = runner.run(command, folder)
                    progress.update()
            return outcomes

        try:
            # The longest page first, so that no long one runs alone at the end.
            ordered = sorted(built, key=lambda page: -len(wanted[page]))
            running = {page: pool.submit(run_page, page) for page in ordered}
            errors = [error for page in built for error in page.write(progress.update)]
            if errors:
                raise PageError("\n".join(errors))
            for page in built:
                page.show_outcomes(running[page].result())
                page.check_form()
            return built
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            runner.stop()
            raise


class BuiltPage:
    """A page as it is and as it should be.

    failures: texts on commands that did not end with the expected status. missing: paths of absent
    pictures. form: faults
    of the English, and of the form of a step's page.
    """

    def __init__(self, source: SourcePage, evidence: Evidence, terms: Sequence[Term]) -> None:
        self.path, self.old = source.path, source.text
        self.failures: list[Outcome] = []
        self.missing: list[PurePosixPath] = []
        self.form: list[str] = []
        self._source, self._evidence = source, evidence
        self._terms = terms
        self._texts: list[str] = []
        self._said: set[str] = set()

    @property
    def new(self) -> str:
        """The written text, with links to the glossary."""
        return link_first_uses("".join(self._texts), self.path, self._terms)

    def commands(self, until_output: bool) -> list[Command]:
        """Commands that are to be run. until_output: as in `SourcePage.commands`."""
        return self._source.commands(until_output)

    def write(self, on_block: Callable[[], object]) -> Iterator[str]:
        """Write all blocks except the output of commands; yields faults."""
        for part in self._source.parts:
            if isinstance(part, Prose):
                self._texts.append(part.text)
                continue
            text = part.body
            try:
                text = self._text(part)
            except (OSError, RuntimeError, ValueError) as error:
                yield f"{self.path}:{part.line}: {error}"
            self._texts.append(part.written(text))
            on_block()

    def check_form(self) -> None:
        """Check the form and the English of the written text."""
        page = page_at(self.path)
        parts = parse(self.new)
        prose = "\n\n".join(part.text for part in parts if isinstance(part, Prose))
        errors = [*english_errors(prose)]
        if page and page.step:
            errors += form_errors(page.place, parts)
        self.form = [f"{self.path}: {error}" for error in errors]

    def _text(self, part: Block) -> str:
        if part.kind == blocks.OUTPUT_KIND:
            _lines_shown(part, self.path)  # reports faults before commands run
            return part.body
        if part.kind == blocks.PICTURE_KIND:
            words = parse_arguments(part.arguments, (), self.path).words
            path = PICTURES / f"{''.join(words[:1])}.svg"
            if not (self._evidence.root / path).is_file():
                self.missing.append(path)
        return blocks.render(self._evidence, part.kind, part.arguments, self.path, self._said)

    def show_outcomes(self, outcomes: Mapping[Command, Outcome]) -> None:
        """Write the output of commands. An output block stays unchanged if one of its commands was
        not run."""
        self.failures = [outcome for outcome in outcomes.values() if outcome.failed]
        for at, inside in self._source.consoles.items():
            part = self._source.parts[at]
            commands = [command for console in inside for command in console.commands]
            found = [outcomes[command] for command in commands if command in outcomes]
            if isinstance(part, Block) and len(found) == len(commands):
                shown = _lines_shown(part, self.path)
                self._texts[at] = part.written(with_output(part.body, inside, found, shown))


def _lines_shown(part: Block, page: PurePosixPath) -> int:
    """Number of lines that an output block shows. Raises UsageError for wrong arguments."""
    arguments = parse_arguments(part.arguments, ("lines",), page)
    if arguments.words:
        raise UsageError(
            f"build:output: {part.arguments!r}; accepted is `build:output {blocks.OUTPUT_USAGE}`"
        )
    return arguments.number("lines", blocks.DEFAULT_OUTPUT_LINES)


def compilers_named(text: str) -> set[str]:
    """Releases of ptxas that a page names as the source of its numbers."""
    return set(_COMPILER.findall(text))
