"""Client of the measuring process: asks it, waits up to a time limit, replaces it when it dies.

Only that process (flash_helpers.tune.worker) uses the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import msgspec

from flash_helpers.compile.processes import kill_group
from flash_helpers.measure.results import Measurement, Protocol, SkippedRecord

WORKER_COMMAND = (sys.executable, "-m", "flash_helpers.tune.worker")
START_TIMEOUT_S = 300.0  # for PyTorch and CUDA, from a cold disk


class WorkerError(RuntimeError):
    """The process did not answer, or answered with an error; the message says so."""


class WorkerNotStarted(WorkerError):
    """There is no process to ask, and none can be started."""


@dataclass(frozen=True)
class WorkerInfo:
    """GPU and software of a worker. smem_bytes: most shared memory per thread block."""

    gpu: str
    compute_capability: str
    smem_bytes: int
    driver: str
    torch: str

    @property
    def architecture(self) -> int:
        """Compute capability as a number: 90 for 9.0."""
        return int(self.compute_capability.replace(".", ""))


@dataclass(frozen=True)
class KernelFile:
    """A compiled kernel: the library's name for it, its file, and its symbol in the file."""

    name: str
    cubin: str
    symbol: str


@dataclass(frozen=True)
class CompiledConfig:
    """A config's short form and its compiled kernels."""

    config: str
    kernels: tuple[KernelFile, ...]


@dataclass(frozen=True)
class Request:
    """Configs to measure on the same problems, beside the first library of their operation. sizes:
    of the problems."""

    configs: tuple[CompiledConfig, ...]
    sizes: tuple[int, ...]
    protocol: Protocol


@dataclass(frozen=True)
class Answer:
    """Measurements by a worker, and the problems that do not fit in the GPU's memory."""

    measurements: tuple[Measurement, ...]
    skipped: tuple[SkippedRecord, ...]


class WorkerProcess:
    """A context that has a worker from its first question on, and replaces a worker that died."""

    def __init__(
        self, command: Sequence[str] = WORKER_COMMAND, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self._command = list(command)
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 closed by __exit__
        self._unread = b""

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._said.close()

    def start(self) -> WorkerInfo:
        """Start a worker, and end the one before it, if any. Raises WorkerNotStarted."""
        self.end()
        self._said.seek(0)
        self._said.truncate()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,  # Ctrl-C ends the sweep, and the sweep ends the worker
            )
        except OSError as error:
            raise WorkerNotStarted(f"{self._command[0]} cannot be run: {error}") from error
        try:
            return msgspec.convert(self._read_line(self._start_timeout_s), WorkerInfo)
        except WorkerError as error:
            raise WorkerNotStarted(str(error)) from error

    def ask(self, request: Request, timeout_s: float) -> Answer:
        """Return the answer to a request.

        Raises WorkerError without an answer within timeout_s seconds, if the process dies, or if it
        answers with an error. The process is gone then, and the next question starts another.
        Raises WorkerNotStarted if there is no process to ask.
        """
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has died: reading tells how
            self._process.stdin.write(f"{json.dumps(asdict(request))}\n".encode())
            self._process.stdin.flush()
        return msgspec.convert(self._read_line(timeout_s), Answer)

    def _read_line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select(
                [descriptor], [], [], max(0.0, deadline - time.monotonic())
            )
            if not readable:
                self.end()
                raise WorkerError(f"no answer within {timeout_s:g} s")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise WorkerError(self._last_words())
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            self.end()
            raise WorkerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        """Exit of the process that closed its output, in words, with its last line of output."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            status = 0
        self.end()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"the process died ({how}): {lines[-1] if lines else 'it printed nothing'}"

    def end(self) -> None:
        """End the process, if there is one; the next question starts another."""
        if self._process is None:
            return
        kill_group(self._process)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # the last request was not delivered
                    stream.close()
        self._process = None
        self._unread = b""
