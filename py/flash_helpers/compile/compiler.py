"""Compilers that run beside other work, several at a time. Standard library only.

The library is built by ninja. A sweep needs more: it takes each kernel as soon as it is compiled,
gives up one that takes too long, and goes on after one that fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Finished(Generic[T]):
    """Outcome of the command of one item.

    `scratch`: the item's folder, gone when the next item is asked for. `status`: exit status of the
    command; None if it took too long. `log`: output of the command.
    """

    item: T
    scratch: Path
    status: int | None
    log: str


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
    timeout_s: float,
) -> Generator[Finished[T], None, None]:
    """Run a command for each item, `jobs` at a time, in `root`; yield each outcome as it is known.

    `command`: returns the command for an item and a fresh folder, which is made in `folder`.

    All processes are ended and their folders gone when the generator is closed, or left early.
    """
    folder.mkdir(parents=True, exist_ok=True)
    running: set[subprocess.Popen[bytes]] = set()
    is_closed = threading.Event()

    def run(item: T, scratch: Path) -> Finished[T]:
        scratch.mkdir()
        log = scratch / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(item, scratch),
                cwd=root,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that nvcc's own children can be ended with it
            )
        running.add(process)
        if is_closed.is_set():  # too late for the loop that ends what is running
            kill_group(process)
        status: int | None = None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_group(process)
        running.discard(process)
        return Finished(item, scratch, status, log.read_text(errors="replace"))

    with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as scratch:
        pool = ThreadPoolExecutor(max_workers=jobs)
        try:
            futures = [
                pool.submit(run, item, Path(scratch, str(number)))
                for number, item in enumerate(items)
            ]
            for future in as_completed(futures):
                finished = future.result()
                yield finished
                shutil.rmtree(finished.scratch)
        finally:
            is_closed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(running):
                kill_group(process)
            pool.shutdown()
