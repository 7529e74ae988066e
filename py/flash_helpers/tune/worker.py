"""The process in which a sweep measures kernels, and which a kernel may crash.

It names its GPU and software, then answers requests: one line of JSON each, on standard input and
output. An error on the GPU ends with the process: a kernel that reads out of bounds breaks the CUDA
context, and a kernel that never ends hangs the process.

    {"gpu": ..., "compute_capability": ..., ...}            the first line: WorkerInfo
    {"configs": [...], "sizes": [...], "protocol": ...}     a request: Request
    {"measurements": [...], "skipped": [...]}               its answer
    {"error": "..."}                                        the last line, if something went wrong
"""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch

from flash_helpers.kernel_configs import Problem, config_from_short_form
from flash_helpers.measure.benchmark import (
    Contender,
    InputSet,
    kernel_contender,
    library_contender,
    make_input_sets,
    measure_problem,
    skipped_record,
)
from flash_helpers.measure.code import cubin_code
from flash_helpers.measure.machine import GpuSensor, driver_version
from flash_helpers.measure.results import Measurement, Protocol, SkippedRecord
from flash_helpers.measure.timing import make_timer
from flash_helpers.runtime.backend import Execute, find_backend
from flash_helpers.runtime.call import register
from flash_helpers.tune.process import Answer, CompiledConfig, KernelFile, Request, WorkerInfo

_registered: dict[str, KernelFile] = {}  # by the library's name for the kernel


def cubin_contender(compiled: CompiledConfig, execute: Execute) -> Contender:
    """Return a contender for a config whose kernels are registered from their cubins, and run like
    any others.

    A config may be compiled several times: its kernels are registered again before they run if
    others of the same names were registered meanwhile.

    Running the contender raises ValueError for inputs that another kernel takes over, and
    RuntimeError if the cubin does not load. Raises OSError, and SassError for a file that is not a
    cubin.
    """
    config = config_from_short_form(compiled.config)
    code = cubin_code(*(Path(kernel.cubin) for kernel in compiled.kernels))
    registered = kernel_contender(config, execute)

    def run(inputs: InputSet) -> Mapping[str, torch.Tensor]:
        if config.runs_as(inputs.problem.strides()) != config:
            raise ValueError(f"{compiled.config} is not for {inputs.problem}")
        for kernel in compiled.kernels:
            if _registered.get(kernel.name) != kernel:
                register(kernel.name, kernel.symbol, Path(kernel.cubin).read_bytes())
                _registered[kernel.name] = kernel
        return registered.run(inputs)

    return Contender(compiled.config, config, run, lambda ran: code)


def worker_info(device: torch.device) -> WorkerInfo:
    """Return the GPU and software of this process."""
    properties = torch.cuda.get_device_properties(device)
    return WorkerInfo(
        gpu=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        # PyTorch has this attribute, its stubs do not.
        smem_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        driver=driver_version(device),
        torch=torch.__version__,
    )


class Worker:
    """A server that measures configs beside the operation's first library on one device.

    Inputs and their float64 results are kept from one request to the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sensor = GpuSensor(device)
        self._sets: dict[tuple[Any, ...], list[InputSet]] = {}

    def answer(self, request: Request) -> Answer:
        """Measure every config of a request at every size."""
        execute = find_backend("cuda").execute
        own = (cubin_contender(compiled, execute) for compiled in request.configs)
        first = config_from_short_form(request.configs[0].config)
        operation = first.family.operation
        contenders = [library_contender(operation.first, operation), *own]
        measurements: list[Measurement] = []
        skipped: list[SkippedRecord] = []
        for problem in map(first.measured, request.sizes):
            try:
                measurements += self._measure(contenders, problem, request.protocol)
            except torch.cuda.OutOfMemoryError as error:
                skipped.append(skipped_record(problem, error))
        return Answer(tuple(measurements), tuple(skipped))

    def _measure(
        self, contenders: Sequence[Contender], problem: Problem, protocol: Protocol
    ) -> list[Measurement]:
        try:
            return self._measure_once(contenders, problem, protocol)
        except torch.cuda.OutOfMemoryError:
            # The inputs of other sizes may be what fills the memory.
            self._sets.clear()
        torch.cuda.empty_cache()
        return self._measure_once(contenders, problem, protocol)

    def _measure_once(
        self, contenders: Sequence[Contender], problem: Problem, protocol: Protocol
    ) -> list[Measurement]:
        timer = make_timer(self._device, protocol)
        key = (problem, protocol.inputs, protocol.seed, protocol.cache)
        if key not in self._sets:
            self._sets[key] = make_input_sets(problem, problem.dtype, self._device, timer, protocol)
        found = measure_problem(
            contenders, self._sets[key], problem, problem.dtype, timer, protocol, self._sensor
        )
        # An error of the GPU is sticky: raise it here, not in the next kernel's measurement.
        torch.cuda.synchronize(self._device)
        return found


def serve(requests: TextIO, answers: TextIO) -> int:
    """Answer requests until the input ends; returns the exit status."""

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line, allow_nan=False), file=answers, flush=True)

    try:
        if not torch.cuda.is_available():
            say({"error": "no CUDA device was found"})
            return 1
        device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=device)  # makes PyTorch's context current
        worker = Worker(device)
        say(asdict(worker_info(device)))
        for line in requests:
            say(asdict(worker.answer(msgspec.json.decode(line, type=Request))))
    except Exception as error:
        text = str(error).strip().splitlines() or ["no message"]
        say({"error": f"{type(error).__name__}: {text[0]}"})
        return 1
    return 0


def main() -> int:
    """Serve standard input; returns the exit status."""
    # Output of a library must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return serve(sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())
