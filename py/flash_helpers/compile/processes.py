"""Programs that run beside other work, several at a time. Standard library only."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.compile.toolchain import BuildError


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and its children."""
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Stopped(Exception):
    """The work of a thread was given up, since nobody waits for it any more."""


class Programs:
    """Programs that threads run and wait for, and that end together."""

    def __init__(self) -> None:
        self.is_stopped = threading.Event()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, command: Sequence[str], folder: Path, log: Path, timeout_s: float) -> int | None:
        """Run a command in a folder and return its exit status; None if it took too long.

        `log`: file that receives its output. Raises OSError if that cannot be written, BuildError
        if the program cannot be started, and Stopped.
        """
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that its own children can be ended with it
                )
            except OSError as error:
                raise BuildError(f"{command[0]} cannot be run in {folder}: {error}") from error
        self._running.add(process)
        status = None
        try:
            if self.is_stopped.is_set():  # too late for `stop`
                kill_group(process)
            status = process.wait(None if timeout_s == math.inf else timeout_s)
        except subprocess.TimeoutExpired:
            kill_group(process)
        finally:
            self._running.discard(process)
        if self.is_stopped.is_set():
            raise Stopped
        return status

    def stop(self) -> None:
        """End all that runs, and whatever a thread starts later."""
        self.is_stopped.set()
        for process in tuple(self._running):
            kill_group(process)
