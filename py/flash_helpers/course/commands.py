"""Commands on a page, and their execution.

A fenced block whose language is `console` holds commands in its lines that begin with "$ "; a line
that ends in a backslash continues in the next one. The other lines are the commands' output. After
the language may stand `gpu` (the commands are never run here) or `exit=N` (the status that each
command must have; 0 otherwise).
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from flash_helpers.course.markers import FENCED, MarkerError

LANGUAGE = "console"
PROMPT = "$ "
TIME_LIMIT = 120.0  # seconds per command
JOBS = len(os.sched_getaffinity(0))

_COMMAND = re.compile(rf"^{re.escape(PROMPT)}((?:.*\\\n)*.*)", re.MULTILINE)
# `python FILE ...` or `python -m ...`, perhaps before a pipe: the text up to the pipe has the same
# meaning without a shell.
_PYTHON = re.compile(
    r"""python\ (?P<words>(?:[\w./-]+\.py|-m\ )
    (?:[^'"\\\n|&;<>()$`*?{}\[\]~\#!]|'[^']*'|"[^"\\$`!]*"|\\\n)*)
    (?:\|(?P<rest>[^|&;][^&;]*))?""",
    re.VERBOSE,
)
_COLUMNS = "100"
_SHOWN_LINES = 12  # of a failed command's last output
# Names that a copy of the repository for commands leaves out: at its root, and anywhere.
_LEFT_OUT = (".git", ".venv", "venv", "build", "dist", "site", "*.egg-info", ".*_cache")
_LEFT_OUT_ANYWHERE = ("__pycache__",)


class StoppedError(RuntimeError):
    """The runner was stopped, and runs nothing more."""


@dataclass(frozen=True)
class Command:
    """One command of a page. line: of its prompt, from 1. status: expected exit status."""

    text: str
    line: int
    status: int


@dataclass(frozen=True)
class Console:
    """A console block. begin, end: offsets of the lines between its fences, in the text that it was
    read from."""

    begin: int
    end: int
    is_gpu: bool
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command. output: text that a reader sees. errors: further messages."""

    command: Command
    status: int
    output: str
    errors: str
    timed_out: bool

    @property
    def failed(self) -> bool:
        """Whether the command ended with another status than the page says."""
        return self.timed_out or self.status != self.command.status

    def failure_text(self, page: str) -> str:
        """Text of the command, its place on the page, and its last lines of output."""
        said = (self.output + self.errors).splitlines()[-_SHOWN_LINES:]
        ended = f"ended with status {self.status}, not {self.command.status}"
        if self.timed_out:
            ended = f"was killed at the time limit of {TIME_LIMIT:g} s"
        return "\n".join(
            [
                f"{page}:{self.command.line}: $ {self.command.text}",
                f"  {ended}, and printed {'last:' if said else 'nothing'}",
                *(f"  | {line}" for line in said),
            ]
        )


def consoles(text: str, first_line: int) -> list[Console]:
    """Console blocks of a text. first_line: number of its first line in the page.

    Raises MarkerError for a block whose attributes or first line are wrong.
    """
    found = []
    for block in FENCED.finditer(text):
        language, *attributes = block["info"].split() or [""]
        if language == LANGUAGE:
            line = first_line + text.count("\n", 0, block.start())
            found.append(_console(block, line, attributes))
    return found


def _console(block: re.Match[str], line: int, attributes: Sequence[str]) -> Console:
    status, inside = 0, block["inside"]
    for attribute in attributes:
        name, _, value = attribute.partition("=")
        if name == "exit" and value.isdecimal():
            status = int(value)
        elif attribute != "gpu":
            raise MarkerError(
                line, f"{attribute!r} does not go with {LANGUAGE}: it takes gpu or exit=N"
            )
    commands = tuple(
        Command(found[1], line + 1 + inside.count("\n", 0, found.start()), status)
        for found in _COMMAND.finditer(inside)
    )
    if not commands:
        raise MarkerError(line, f"a {LANGUAGE} block needs a line that begins with {PROMPT!r}")
    return Console(*block.span("inside"), "gpu" in attributes, commands)


def with_output(
    text: str, blocks: Sequence[Console], outcomes: Sequence[Outcome], lines_shown: int
) -> str:
    """The text with the first lines of each command's output below the command.

    blocks: `consoles` of the text. outcomes: of all their commands, in order.
    """
    following = iter(outcomes)
    parts, at = [], 0
    for block in blocks:
        parts.append(text[at : block.begin])
        for command in block.commands:
            printed = next(following).output.rstrip().splitlines()
            shown = [line.rstrip() for line in printed[:lines_shown]]
            if len(printed) > lines_shown:
                shown.append("...")
            parts += [f"{line}\n" for line in (PROMPT + command.text, *shown)]
        at = block.end
    return "".join([*parts, text[at:]])


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """Make a copy of the repository, in which commands may write files. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        copy = Path(folder) / root.name
        shutil.copytree(
            root, copy, symlinks=True, ignore=_left_out(root), copy_function=_copy_or_link
        )
        yield copy


@contextmanager
def copies_of(root: Path) -> Iterator[Callable[[], AbstractContextManager[Path]]]:
    """Lend such copies to several threads. A copy that comes back unchanged is lent again, since
    ext4 is slow after many files were deleted. Raises OSError."""
    spare: list[tuple[Path, dict[Path, int]]] = []
    with ExitStack() as stack:

        @contextmanager
        def lend() -> Iterator[Path]:
            try:
                copy, before = spare.pop()
            except IndexError:
                copy = stack.enter_context(copy_of(root))
                before = _changed_at(copy)
            yield copy
            if _changed_at(copy) == before:
                spare.append((copy, before))
            else:
                shutil.rmtree(copy)

        yield lend


def _changed_at(folder: Path) -> dict[Path, int]:
    """Time of the last change of each file and folder below a folder, in nanoseconds."""
    return {path: path.lstat().st_ctime_ns for path in folder.rglob("*")}


def _left_out(root: Path) -> Callable[[str, list[str]], set[str]]:
    at_root = shutil.ignore_patterns(*_LEFT_OUT, *_LEFT_OUT_ANYWHERE)
    below = shutil.ignore_patterns(*_LEFT_OUT_ANYWHERE)
    return lambda folder, names: (at_root if Path(folder) == root else below)(folder, names)


def _copy_or_link(source: str, target: str) -> None:
    """Copy a file, or link it if it is the library, which is large and which no command writes."""
    if source.endswith(".so"):
        Path(target).symlink_to(source)
    else:
        shutil.copy2(source, target)


class Runner:
    """Runs commands, from several threads, until it is stopped. environment: of the commands.

    The pages start Python some hundred times, and most commands would take longer to import torch
    than to do their work. `python FILE ...` and `python -m ...` therefore run in a fork of a
    process that has imported `preloaded`. The fork's output goes into a file, and from there into
    the pipe.
    """

    def __init__(self, environment: Mapping[str, str], time_limit: float = TIME_LIMIT) -> None:
        self._environment = dict(environment)
        self._time_limit = time_limit
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes] | BaseProcess] = set()
        self._stopped = False
        self._python = multiprocessing.get_context("forkserver")
        self._python.set_forkserver_preload(["flash_helpers.course.preloaded"])

    def run(self, command: Command, folder: Path) -> Outcome:
        """Run one command by bash in a folder. At the time limit the command is killed, with its
        children. In a pipe any failure counts. Raises StoppedError once `stop` was called.
        """
        python = _PYTHON.fullmatch(command.text)
        if python is not None and python["rest"] and command.status:
            python = None  # its messages would go into the pipe
        with tempfile.TemporaryDirectory(prefix="printed-") as name:
            piped, output, errors = (Path(name, file) for file in ("piped", "output", "errors"))
            for path in (piped, output, errors):
                path.touch()
            # If a command must fail, the page shows its error messages too.
            said = output if command.status else errors
            first: int | None = 0
            last: int | None = 0
            text = command.text
            if python is not None:
                words = shlex.split(python["words"].replace("\\\n", " "))
                text = python["rest"]
                into = piped if text else output
                first = self._status(lambda: self._fork(words, folder, into, said))
            if text and first is not None:
                last = self._status(lambda: self._shell(text, folder, piped, output, said))
            return Outcome(
                command,
                status=last or first or 0,
                output=output.read_text("utf-8", "replace"),
                errors=errors.read_text("utf-8", "replace"),
                timed_out=None in (first, last),
            )

    def _fork(self, words: list[str], folder: Path, output: Path, errors: Path) -> BaseProcess:
        process = self._python.Process(
            target=_run_file, args=(words, folder, self._environment, output, errors)
        )
        process.start()
        return process

    def _shell(
        self, text: str, folder: Path, piped: Path, output: Path, errors: Path
    ) -> subprocess.Popen[bytes]:
        with piped.open("rb") as stdin, output.open("ab") as stdout, errors.open("ab") as stderr:
            return subprocess.Popen(
                ["bash", "-c", f"set -o pipefail\n{text}"],
                cwd=folder,
                env=self._environment,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def _status(self, begin: Callable[[], subprocess.Popen[bytes] | BaseProcess]) -> int | None:
        """Exit status of a process; None if it was killed at the time limit."""
        with self._lock:
            if self._stopped:
                raise StoppedError
            process = begin()
            self._running.add(process)
        try:
            status = self._wait(process, self._time_limit)
            if status is None:
                _kill(process)
                self._wait(process)
            return status
        finally:
            with self._lock:
                self._running.discard(process)

    def _wait(
        self, process: subprocess.Popen[bytes] | BaseProcess, time_limit: float | None = None
    ) -> int | None:
        """Exit status of a process; None if it is still running at the deadline."""
        if isinstance(process, BaseProcess):
            wait([process.sentinel], time_limit)
            # A status can be read once, and each start of a process reads the other statuses.
            with self._lock:
                return process.exitcode
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(time_limit)
        return process.returncode

    def stop(self) -> None:
        """Kill all running commands, and start no more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill(process)


def _run_file(
    words: list[str], folder: Path, environment: dict[str, str], output: Path, errors: Path
) -> None:
    """Run the words of a command as `python` does, in this forked process."""
    os.setsid()
    for stream, path in ((sys.stdout, output), (sys.stderr, errors)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(folder))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _kill(process: subprocess.Popen[bytes] | BaseProcess) -> None:
    """Kill a process and its children; it leads a session of its own."""
    process.kill()
    assert process.pid is not None  # the process has started
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def command_environment() -> dict[str, str]:
    """Environment in which `python` is this interpreter, and no GPU is visible."""
    scripts = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # others run at the same time
        "PYTEST_ADDOPTS": "-n 0",
        "COLUMNS": _COLUMNS,
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
