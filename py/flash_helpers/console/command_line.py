"""Parts that the command lines of the tools share. Standard library only."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flash_helpers.console.errors import UserError
from flash_helpers.console.files import text_diff, write_if_different


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Write the message to stderr; exit with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser(
    description: str, examples: str, prog: str | None = None
) -> argparse.ArgumentParser:
    """Return a parser whose --help shows both texts unwrapped, the examples last.

    prog: the tool's name, if it differs from the name of the running file.
    """
    return Parser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def make_command_parser(
    description: str, examples: str, program: str, command: str
) -> argparse.ArgumentParser:
    """The parser of a program that is a command of another one, too.

    `program`: the program as the examples call it. `command`: what the user called.
    """
    prog = None if command == program else command
    return make_parser(description, examples.replace(program, command), prog)


def add_commit_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--commit`, for the provenance of what is measured."""
    parser.add_argument(
        "--commit", metavar="HASH", help="commit of the sources (default: asked from git)"
    )


def add_architecture_argument(
    parser: argparse.ArgumentParser, meaning: str, **options: Any
) -> None:
    """Add `--arch`. `meaning`: its help. `options`: further arguments of `add_argument`."""
    parser.add_argument("--arch", type=architecture_name, metavar="sm_NN", help=meaning, **options)


def add_lengths_argument(
    parser: argparse.ArgumentParser, option: str, default: Sequence[int], meaning: str
) -> None:
    """Add an option for sequence lengths, positive whole numbers."""
    parser.add_argument(
        option,
        nargs="+",
        type=positive,
        default=list(default),
        metavar="N",
        help=f"{meaning} (default: {' '.join(map(str, default))})",
    )


# -- types of arguments ----------------------------------------------------------------------------


def positive(text: str) -> int:
    """A positive whole number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive: use 1 or more")
    return value


def not_negative(text: str) -> int:
    """A whole number from 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative: use 0 or more")
    return value


def positive_seconds(text: str) -> float:
    """A positive number of seconds."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} seconds are not positive")
    return value


def architecture_name(text: str) -> str:
    """An architecture as in sm_90 or sm_90a; sm_ may be left out."""
    name = f"sm_{text.removeprefix('sm_')}"
    if not re.fullmatch(r"sm_\d+[a-z]?", name):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no architecture: write it as in sm_90, sm_90a or 90a"
        )
    return name


def output_file(text: str) -> Path:
    """A file to write once the work is done; its folder exists."""
    path = Path(text)
    _require_parent(path)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file, such as {path / 'out'}")
    return path


def output_folder(text: str) -> Path:
    """A folder to write into; it may be absent, but its parent exists."""
    path = Path(text)
    _require_parent(path)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file: name a folder")
    return path


def _require_parent(path: Path) -> None:
    """Raise ArgumentTypeError unless the folder of a path exists."""
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{path} cannot be written, there is no folder {path.parent}: make it with "
            f"mkdir -p {shlex.quote(str(path.parent))}"
        )


# -- what a tool does ------------------------------------------------------------------------------


def run_tool(
    work: Callable[[], int | None], *errors: type[Exception], interrupted: str = "interrupted"
) -> int:
    """Run a tool's work and return its exit status: what the work returns, or 0 for None.

    The status is 2 after a UserError or one of `errors`, which wrong usage or bad input raises, and
    130 after Ctrl-C. stderr then has a line with the error or with `interrupted`. Each warning has
    a line on stderr, too. Raises any other exception of the work.
    """
    told: tuple[type[Exception], ...] = (UserError, *errors)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see quiet_start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning  # type: ignore[assignment]
            return work() or 0
    except told as error:
        if isinstance(error, OSError) and error.filename:
            print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        else:
            print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130


def _print_warning(message: Warning | str, *_: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def typed_command(tool: str, argv: Sequence[str] | None) -> str:
    """The command as typed in a shell, for the provenance. argv: None takes the process's own.

    An absolute path is reduced to the file's name, since the folders of the measuring machine mean
    nothing to a reader of the file.
    """
    return shlex.join([tool, *map(_without_folders, sys.argv[1:] if argv is None else argv)])


def _without_folders(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def print_text(text: str) -> None:
    """Write to stdout, until the reader closes it, as `head` does."""
    print_texts([text])


def print_texts(texts: Iterable[str]) -> None:
    """Write texts one after the other, as `print_text` does. Once the reader has closed stdout, no
    further text is made."""
    try:
        for text in texts:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        # Python would write the rest of the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_or_check(path: Path, old: str, new: str, check: bool) -> int:
    """Write a generated file and tell whether it was stale; with `check`, only print the diff.

    Returns the exit status: 1 if a check finds a difference. Raises OSError.
    """
    if check:
        diff = text_diff(str(path), old, new)
        print_text(diff)
        return 1 if diff else 0
    written = write_if_different(path, new)
    print(f"{path} {'written' if written else 'is up to date'}")
    return 0
