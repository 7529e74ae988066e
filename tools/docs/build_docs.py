#!/usr/bin/env python3
"""Write what stands between the markers of the pages, and check it."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from flash_helpers.console.command_line import make_parser, print_text, run_tool
from flash_helpers.console.files import text_diff, write_if_different
from flash_helpers.course.blocks import kinds_text
from flash_helpers.course.build import (
    BuiltPage,
    SourcePage,
    build_pages,
    compilers_named,
    read_page,
)
from flash_helpers.course.commands import TIME_LIMIT
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.pages import absent_pages, all_pages
from flash_helpers.registry.selection import UsageError

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = f"""\
Write what stands between the markers of docs/*.md, README.md and CONTRIBUTING.md: diffs, counts of
the simulator, tables of the machine code, timings, links. A page without a change is not touched,
and if one block cannot be made, no page is.

On lines of their own, at the margin, with nothing or what was written before between them:

  <!-- build:KIND ARGUMENTS -->
  <!-- /build -->

Kinds (N is a step, 9 or v9; KERNEL is a step, 7:large or 16:large, or a short form; a word with
blanks stands in quotation marks, and there are no escapes):

{kinds_text()}

Commands stand in ```console blocks, in lines that begin with "$ " (a backslash at the end goes on
in the next line); the other lines are what they print, and are written anew if the block stands
between the markers of build:output. --check runs them all by bash with pipefail, {TIME_LIMIT:.0f}
seconds each at most, a page's one after the other in a copy of the repository that is thrown away,
with the Python that runs this, and with no GPU. What needs an architecture that the installed
library was not built for is left out, and told. ```console gpu is not run, and the commands of
```console exit=1 must end with that status. Blocks of any other language are text.

A table that names two kernels shows the change. No two pages need another's files; no command
needs a network. Answers that a reader opens: <details markdown="1">, an empty line, then Markdown.
"""

EXAMPLES = """\
examples:
  after a change to a page, a kernel or a measurement:
    python tools/docs/build_docs.py
  one page, without running its commands:
    python tools/docs/build_docs.py docs/08_integer_instructions.md --no-commands
  is everything up to date, and does every command run? (a diff and exit 1 if not)
    python tools/docs/build_docs.py --check

exit status: 0 all is up to date, 1 --check found something stale or a command failed, 2 a marker,
a page or an argument is wrong, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="(default: all of them)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="write nothing, run the commands; print a diff and exit 1 if something is stale",
    )
    mode.add_argument("--list", action="store_true", help="print the pages and their blocks")
    parser.add_argument(
        "--no-commands", action="store_true", help="run no command: output blocks stay as they are"
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="the repository (default: this one)"
    )
    return parser.parse_args(argv)


def choose_pages(root: Path, names: Sequence[str]) -> list[PurePosixPath]:
    """The pages that are meant. Raises UsageError for one that is not there."""
    there = all_pages(root)
    if not names:
        return there
    chosen = []
    for name in names:
        path = Path(name).resolve()
        inside = path.relative_to(root) if path.is_relative_to(root) else Path(name)
        page = PurePosixPath(inside.as_posix())
        if page not in there:
            raise UsageError(f"{name} is no page: pages are {', '.join(map(str, there))}")
        chosen.append(page)
    return list(dict.fromkeys(chosen))


def list_text(pages: Sequence[SourcePage]) -> str:
    """Every page, its blocks and its commands, in order."""
    lines = []
    for page in pages:
        rows = [(b.line, f"{b.kind} {b.arguments}".strip()) for b in page.blocks]
        rows += [
            (command.line, f"{'(gpu) ' if console.is_gpu else ''}$ {command.text}")
            for inside in page.consoles.values()
            for console in inside
            for command in console.commands
        ]
        lines += [str(page.path), *(f"  {line:4}  {what}" for line, what in sorted(rows))]
    return "\n".join([*lines, ""])


def report_stale(built: Sequence[BuiltPage]) -> bool:
    """Print what differs; True if something does."""
    stale = [page for page in built if page.old != page.new]
    for page in stale:
        print(text_diff(str(page.path), page.old, page.new), end="")
    compilers = [
        set().union(*(compilers_named(getattr(page, of)) for page in stale))
        for of in ("old", "new")
    ]
    if compilers[1] - compilers[0] and compilers[0]:
        print(
            f"the pages tell of {', '.join(sorted(compilers[0]))}, and the library was compiled by "
            f"{', '.join(sorted(compilers[1]))}: build it with that, or build the pages again"
        )
    return bool(stale)


def check(built: Sequence[BuiltPage], absent: Sequence[PurePosixPath]) -> int:
    """Print everything that is wrong, and what could not be checked; the exit status."""
    is_wrong = report_stale(built)
    for page in built:
        for path in page.missing:
            print(f"{page.path}: {path} is not there")
        for outcome in page.failures:
            print(outcome.failure_text(str(page.path)))
        for error in page.form:
            print(error)
        is_wrong = is_wrong or bool(page.missing or page.failures or page.form)
    for path in absent:
        print(f"{path} is not there, and py/flash_helpers/course/pages.py lists it")
    unchecked = [line for page in built for line in page.unchecked]
    if unchecked:
        print("\n".join(unchecked))
    if not is_wrong and not absent:
        print("all that can be checked is up to date" if unchecked else "all is up to date")
    return int(is_wrong or bool(absent))


def write(root: Path, built: Sequence[BuiltPage]) -> int:
    """Write the pages that changed, unless a command failed; the exit status."""
    failures = [outcome.failure_text(str(page.path)) for page in built for outcome in page.failures]
    if failures:
        print("\n".join([*failures, "nothing was written"]), file=sys.stderr)
        return 1
    for page in built:
        for path in page.missing:
            print(f"{page.path}: {path} is not there yet", file=sys.stderr)
        for error in page.form:
            print(error, file=sys.stderr)
        if write_if_different(root / page.path, page.new):
            print(f"{page.path} written")
    return 0


def build(arguments: argparse.Namespace) -> int:
    """Write, check or list; the exit status. Raises ValueError and OSError."""
    root = arguments.root.resolve()
    pages = [read_page(root, path) for path in choose_pages(root, arguments.pages)]
    if arguments.list:
        print_text(list_text(pages))
        return 0
    evidence = Evidence(root)
    built = build_pages(pages, evidence, run=not arguments.no_commands, check=arguments.check)
    if arguments.check:
        return check(built, [] if arguments.pages else absent_pages(root))
    return write(root, built)


def main(argv: Sequence[str] | None = None) -> int:
    """Write, check or list; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: build(arguments), ValueError, OSError)


if __name__ == "__main__":
    # commands run in sessions of their own: a kill must end them as Ctrl-C does
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
