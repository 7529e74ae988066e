"""Runs compilers, several at a time. Standard library only."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

_POLL_SECONDS = 0.02

T = TypeVar("T")


@dataclass(frozen=True)
class Finished(Generic[T]):
    """What became of one item.

    scratch: the folder that its command was told, gone when the next item is asked for.
    command: as it was run. status: its exit status; None if it took too long. log: what it said.
    """

    item: T
    scratch: Path
    command: list[str]
    status: int | None
    log: str
    seconds: float


@dataclass(frozen=True)
class _Running(Generic[T]):
    item: T
    scratch: Path
    command: list[str]
    process: subprocess.Popen[bytes]
    started: float


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and its children."""
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_compilers(
    items: Iterable[T],
    command: Callable[[T, Path], list[str]],
    root: Path,
    folder: Path,
    jobs: int,
    timeout_s: float = math.inf,
) -> Generator[Finished[T], None, None]:
    """Run a command for each item, `jobs` at a time, in `root`; what became of each, as it ends.

    command: of an item and a fresh folder for it, which is made in `folder`.

    All processes are ended and their folders gone when the iterator is closed, or left early.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = list(reversed(list(items)))
    running: list[_Running[T]] = []

    def is_late(job: _Running[T]) -> bool:
        return time.monotonic() - job.started > timeout_s

    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(), command, root, folder))
            job = next((j for j in running if j.process.poll() is not None or is_late(j)), None)
            if job is None:
                time.sleep(_POLL_SECONDS)
                continue
            status = job.process.poll()
            if status is None:
                kill_group(job.process)
            log = (job.scratch / "log").read_text(errors="replace")
            seconds = time.monotonic() - job.started
            yield Finished(job.item, job.scratch, job.command, status, log, seconds)
            running.remove(job)
            shutil.rmtree(job.scratch)
    finally:
        for job in running:
            kill_group(job.process)
            shutil.rmtree(job.scratch, ignore_errors=True)


def _start(
    item: T, command: Callable[[T, Path], list[str]], root: Path, folder: Path
) -> _Running[T]:
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".compiling-"))
    try:
        words = command(item, scratch)
        with (scratch / "log").open("wb") as log:
            process = subprocess.Popen(
                words,
                cwd=root,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that nvcc's own children can be ended with it
            )
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return _Running(item, scratch, words, process, time.monotonic())
