#!/usr/bin/env python3
"""Write the text between the markers of the pages, and check it."""

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
from flash_helpers.course.arguments import DEFAULT_ARCHITECTURE, fixed_config
from flash_helpers.course.blocks import FACTS_KIND, kinds_text
from flash_helpers.course.build import (
    BuiltPage,
    SourcePage,
    build_pages,
    compilers_named,
    read_page,
)
from flash_helpers.course.commands import TIME_LIMIT
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.pages import absent_pages, all_pages, page_at
from flash_helpers.kernel_configs import STEPS
from flash_helpers.registry.selection import UsageError

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = f"""\
Write the text between the markers of docs/*.md, README.md and CONTRIBUTING.md: diffs, counts of the
simulator, tables of the machine code, timings, links. A page without a change is not touched. If
one block cannot be made, no page is written.

Two markers stand on lines of their own, at the margin. The text between them is replaced:

  <!-- build:KIND ARGUMENTS -->
  <!-- /build -->

Kinds (N is a step, 9 or v9; KERNEL is a step, 7:large or 16:large, or a short form; a word with
blanks is written in quotation marks, and there are no escapes):

{kinds_text()}

Commands are lines of ```console blocks that begin with "$ "; a backslash at the end continues the
command in the next line. The other lines are the output of the commands, which is written anew if
the block is between the markers of build:output. --check runs all commands by bash with pipefail
and without a GPU, {TIME_LIMIT:.0f} seconds each at most. `python` is the tool's own Python. The
commands of a page run one after the other in a temporary copy of the repository. A block
```console gpu is not run, and the commands of ```console exit=1 must end with that
status. Blocks of any other language are text.

A table that names two kernels shows the change. A page does not need another page's files, and a
command does not need a network. For an answer that a reader opens, write <details markdown="1">, an
empty line, then Markdown.
"""

EXAMPLES = """\
examples:
  after a change to a page, a kernel or a measurement:
    python tools/docs/build_docs.py
  one page, without running its commands:
    python tools/docs/build_docs.py docs/08_integer_instructions.md --no-commands
  is every page up to date, and does every command run? (a diff and exit 1 if not)
    python tools/docs/build_docs.py --check

exit status: 0 all pages are up to date, 1 --check found a stale page or a command failed, 2 a
marker, a page or an argument is wrong, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="(default: all pages)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="write nothing, run the commands; print a diff and exit 1 if a page is stale",
    )
    mode.add_argument("--list", action="store_true", help="print the pages and their blocks")
    parser.add_argument(
        "--no-commands", action="store_true", help="run no command: output blocks stay unchanged"
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="the repository (default: this one)"
    )
    return parser.parse_args(argv)


def choose_pages(root: Path, names: Sequence[str]) -> list[PurePosixPath]:
    """The named pages, or all pages. Raises UsageError for a page that does not exist."""
    there = all_pages(root)
    if not names:
        return there
    chosen = []
    for name in names:
        path = Path(name).resolve()
        inside = path.relative_to(root) if path.is_relative_to(root) else Path(name)
        page = PurePosixPath(inside.as_posix())
        if page not in there:
            raise UsageError(f"{name} is not a page: pages are {', '.join(map(str, there))}")
        chosen.append(page)
    return list(dict.fromkeys(chosen))


def list_text(pages: Sequence[SourcePage]) -> str:
    """Text of all pages with their blocks and commands, in order."""
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
    """Print the differences; returns whether a page is stale."""
    stale = [page for page in built if page.old != page.new]
    for page in stale:
        print(text_diff(str(page.path), page.old, page.new), end="")
    compilers = [
        set().union(*(compilers_named(getattr(page, of)) for page in stale))
        for of in ("old", "new")
    ]
    if compilers[1] - compilers[0] and compilers[0]:
        print(
            f"the pages have figures of {', '.join(sorted(compilers[0]))}, and the kernels were "
            f"compiled by {', '.join(sorted(compilers[1]))}: install the compiler of the pages, "
            "or build the pages again"
        )
    return bool(stale)


def check(built: Sequence[BuiltPage], absent: Sequence[PurePosixPath]) -> int:
    """Print all faults, and all blocks that could not be checked; returns the exit status."""
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
    if not is_wrong and not absent:
        print("all is up to date")
    return int(is_wrong or bool(absent))


def write(root: Path, built: Sequence[BuiltPage]) -> int:
    """Write the changed pages, unless a command failed; returns the exit status."""
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
    """Write, check or list; returns the exit status. Raises ValueError and OSError."""
    root = arguments.root.resolve()
    pages = [read_page(root, path) for path in choose_pages(root, arguments.pages)]
    if arguments.list:
        print_text(list_text(pages))
        return 0
    evidence = Evidence(root)
    with_facts = (p.path for p in pages if any(block.kind == FACTS_KIND for block in p.blocks))
    steps = [page.step for page in map(page_at, with_facts) if page and page.step]
    evidence.read((fixed_config(STEPS[step]) for step in steps), DEFAULT_ARCHITECTURE)
    built = build_pages(pages, evidence, run=not arguments.no_commands, check=arguments.check)
    if arguments.check:
        return check(built, [] if arguments.pages else absent_pages(root))
    return write(root, built)


def main(argv: Sequence[str] | None = None) -> int:
    """Write, check or list; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: build(arguments), ValueError, OSError)


if __name__ == "__main__":
    # Commands run in sessions of their own: a kill must end them as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
