"""A log of calls, which two environment variables switch on.

FLASH_ATTENTION_LOGLEVEL is one of LEVELS, each of which includes those below it.
FLASH_ATTENTION_LOGDEST is stdout, stderr (the default), or a file to append to, with %i for the
process. All of it is written and flushed before a kernel runs, except for what is known later, so
that the inputs of a call that ends the process are in the log.

A log changes no call: what it cannot write or compute is a line in it, or a warning.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from flash_helpers.kernel_configs import Config, Element, Problem
from flash_helpers.registry.call import Call
from flash_helpers.runtime import saved_calls
from flash_helpers.runtime.tensor_statistics import TensorStatistics

LEVEL_VARIABLE = "FLASH_ATTENTION_LOGLEVEL"
DESTINATION_VARIABLE = "FLASH_ATTENTION_LOGDEST"
NAMES, LAUNCHES, STATISTICS, TENSORS = 1, 3, 5, 10
LEVELS = {
    0: "off",
    NAMES: "names and configs",
    LAUNCHES: "tensors' layouts and launches",
    STATISTICS: "statistics of inputs and outputs",
    TENSORS: "tensors saved for replay",
}
WRONG_VALUES_SHOWN = 8  # of a call
CALLS_KEPT = 16
"""Calls of a process whose tensors stay saved, the last ones."""

_STREAMS = ("stdout", "stderr")
_PROCESS = "%i"
_NOT_THE_CALLER = ("flash_attention", "flash_helpers", "torch", "contextlib")


class LogError(ValueError):
    """A variable of the log has a value that it cannot have."""


@dataclass(frozen=True)
class Destination:
    """The place that a log is written to. `name`: "stdout", "stderr", or a file's absolute path
    with %i for the process."""

    name: str

    @classmethod
    def from_text(cls, text: str) -> Destination:
        """Return the destination that the variable's value names. Raises LogError."""
        if text in _STREAMS:
            return cls(text)
        choices = f"use stdout, stderr or a file such as /tmp/calls_{_PROCESS}.log"
        if not Path(text).suffix and Path(text).name == text:
            raise LogError(
                f"{DESTINATION_VARIABLE} {text!r} is no stream, and no file of that name without a "
                f"folder is meant: {choices}, or ./{text}"
            )
        found = cls(str(Path(text).absolute()))
        path = found.path
        if not path.parent.is_dir():
            raise LogError(
                f"{DESTINATION_VARIABLE} {text!r} is in {path.parent}, which is no folder: make "
                f"it, or {choices}"
            )
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise LogError(f"{DESTINATION_VARIABLE} {text!r} cannot be written: {choices}")
        return found

    @property
    def path(self) -> Path:
        """The file of this process."""
        return Path(self.name.replace(_PROCESS, str(os.getpid())))

    @property
    def folder(self) -> Path:
        """The folder of the files beside the log."""
        return Path.cwd() if self.name in _STREAMS else self.path.parent

    def write(self, text: str) -> None:
        """Append whole lines, and hand them to the system. Raises OSError."""
        if self.name in _STREAMS:
            stream = getattr(sys, self.name)
            stream.write(text)
            stream.flush()
            return
        with self.path.open("ab", buffering=0) as file:  # one write, so that processes take turns
            file.write(text.encode())


@dataclass(frozen=True)
class LoggedCall:
    """A call that is about to run. `tensors`: by name, outputs included. `device`: the CUDA
    device's number; None in the simulator. `wanted`: outputs that are computed; None for all."""

    config: Config
    problem: Problem
    call: Call
    tensors: Mapping[str, torch.Tensor]
    device: int | None
    wanted: frozenset[str] | None = None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Tensors that the kernel reads."""
        return {tensor.name: self.tensors[tensor.name] for tensor in self.problem.inputs}

    def integers(self) -> dict[str, Any]:
        """Return the values of integer inputs, as nested lists. Waits for the device."""
        inputs = self.inputs
        names = (x.name for x in self.problem.inputs if x.element is Element.INT32)
        return {name: inputs[name].tolist() for name in names}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """Tensors that the kernel writes, or would if they were wanted."""
        return {tensor.name: self.tensors[tensor.name] for tensor in self.problem.outputs}

    @property
    def computed(self) -> dict[str, torch.Tensor]:
        """The outputs that are computed. Others hold anything."""
        outputs = self.outputs
        return {n: x for n, x in outputs.items() if self.wanted is None or n in self.wanted}


@dataclass
class CallLog:
    """The log of a process. `level`: a key of LEVELS, not 0."""

    level: int
    destination: Destination
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _saved: dict[int, list[Path]] = field(default_factory=dict)  # of each process, after a fork too
    _is_broken: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> CallLog | None:
        """Return the log that the variables ask for; None if they ask for none. Raises LogError for
        values that they cannot have."""
        text = environ.get(LEVEL_VARIABLE) or "0"
        level = {str(level): level for level in LEVELS}.get(text.strip())
        if level is None:
            choices = ", ".join(f"{level} ({meaning})" for level, meaning in LEVELS.items())
            raise LogError(f"{LEVEL_VARIABLE} {text!r} is no level: use one of {choices}")
        destination = Destination.from_text(environ.get(DESTINATION_VARIABLE) or "stderr")
        return cls(level, destination) if level else None

    @contextmanager
    def around(self, call: LoggedCall) -> Iterator[None]:
        """Write about a call, which runs within."""
        number = next(self._numbers)
        is_captured = _is_captured(call.device)
        lines = [_title(call)]
        if self.level >= LAUNCHES:
            lines += _details(call)
        if is_captured:
            lost = ", and no statistics are computed or tensors saved"
            lines.append(
                "captured into a CUDA graph: replays are not logged"
                + (lost if self.level >= STATISTICS else "")
            )
        self._write(number, lines)
        saved = None
        if self.level >= TENSORS and not is_captured:
            saved = self._save(number, call)
        has_statistics = self.level >= STATISTICS and not is_captured
        if has_statistics:
            self._write_statistics(number, call.inputs)
            self._write_wrong_values(number, call)
        try:
            yield
        except BaseException as error:
            self._write(number, [f"raised {type(error).__name__}: {error}"])
            raise
        if has_statistics:
            self._write_statistics(number, call.computed)
        if saved:
            self._save_outputs(number, saved, call)

    @contextmanager
    def without_kernel(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Write about a call whose outputs are known without one. `tensors`: by name, outputs
        included."""
        layouts = _layouts(tensors) if self.level >= LAUNCHES else ()
        self._write(next(self._numbers), [f"{_begin()}, without a kernel", *layouts])
        yield

    def _write(self, number: int, lines: Iterable[str]) -> None:
        if self._is_broken:
            return
        head = f"flash_attention[{os.getpid()}] call {number}: "
        text = "".join(f"{head}{line}\n" for part in lines for line in part.splitlines())
        try:
            self.destination.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._is_broken = True
            warnings.warn(
                f"the log of calls ends, {self.destination.name} cannot be written: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _write_statistics(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            lines = [f"{name}: {TensorStatistics.of(x)}" for name, x in tensors.items()]
        except RuntimeError as error:
            lines = [f"{', '.join(tensors)} cannot be read: {error}"]
        self._write(number, lines)

    def _write_wrong_values(self, number: int, call: LoggedCall) -> None:
        try:
            found = call.problem.wrong_values(call.integers())
        except RuntimeError:  # the statistics have told that
            return
        more = len(found) - WRONG_VALUES_SHOWN
        rest = [f"and {more} more wrong values"] if more > 0 else []
        self._write(number, found[:WRONG_VALUES_SHOWN] + rest)

    def _save(self, number: int, call: LoggedCall) -> Path | None:
        process = os.getpid()
        saved = self._saved.setdefault(process, [])
        try:
            path = self.destination.folder / f"call_{process}_{number}.pt"
            saved_calls.save_call(path, call.config, call.problem, call.inputs, call.outputs)
            saved.append(path)
            while len(saved) > CALLS_KEPT:
                saved_calls.remove(saved.pop(0))
        except (OSError, RuntimeError) as error:
            self._write(number, [f"tensors cannot be saved: {error}"])
            return None
        self._write(number, [f"saved: python -m flash_attention replay {shlex.quote(str(path))}"])
        return path

    def _save_outputs(self, number: int, path: Path, call: LoggedCall) -> None:
        try:
            saved_calls.save_outputs(path, call.computed)
        except (OSError, RuntimeError) as error:
            self._write(number, [f"outputs cannot be saved: {error}"])


def _is_captured(device: int | None) -> bool:
    if device is None:
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _title(call: LoggedCall) -> str:
    operation = call.config.family.operation.name
    device = saved_calls.SIMULATOR if call.device is None else f"cuda:{call.device}"
    return f"{_begin()}, {operation} by {call.config.short_form()} on {device}"


def _begin() -> str:
    return f"{datetime.now().isoformat(' ', 'milliseconds')}, {_caller()}"


def _caller() -> str:
    """Return the function of the library that was called, and the file and line of the call."""
    frame = sys._getframe(1)
    function = ""
    while frame.f_back and _package(frame) in _NOT_THE_CALLER:
        name = frame.f_code.co_name
        if name in frame.f_globals and not name.startswith("_"):
            function = f"{name}() "
        frame = frame.f_back
    return f"{function}at {frame.f_code.co_filename}:{frame.f_lineno}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _details(call: LoggedCall) -> Iterator[str]:
    """Yield lines on the problem, the tensors and the launches."""
    fields = [f"{k} {v}" for k, v in call.problem.record().items() if k != "operation"]
    yield f"problem: {', '.join(fields)}"
    yield from _layouts(call.tensors)
    if unasked := call.outputs.keys() - call.computed.keys():
        yield f"not asked for: {', '.join(sorted(unasked))}"
    for buffer in call.call.buffers:
        zeroed = ", zeroed" if buffer.zeroed else ""
        yield f"{buffer.name}: a buffer of {buffer.bytes} bytes{zeroed}"
    for launch in call.call.launches:
        cluster = "" if math.prod(launch.cluster) == 1 else f", cluster {launch.cluster}"
        yield (
            f"launch of {launch.kernel}: grid {launch.grid}, {launch.block} threads per block"
            f"{cluster}, {launch.shared_bytes} bytes of dynamic shared memory per block"
            f"{', programmatic' if launch.programmatic else ''}"
        )


def _layouts(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, x in tensors.items():
        dtype = str(x.dtype).removeprefix("torch.")
        yield (
            f"{name}: {dtype}, shape {tuple(x.shape)}, strides {x.stride()}, "
            f"address {x.data_ptr():#x}"
        )
