"""Speed of each kernel beside the operation's libraries, in one process.

Every contender is captured in a CUDA graph, so that no launch costs host time (or launched one by
one, as a program without graphs would); launches go round several sets of inputs, or the L2 cache
is overwritten before each, so that no inputs are found there. Every contender is timed once a
round, in an order that changes from round to round and from length to length, with a sample of
the first library among every few, so that a drifting clock harms all alike; first in bursts
of a rested chip, then under load that is never let off. What is timed is also what is compared with
float64, before and after.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.check.errors import OutputError, Reference, measure_error
from flash_helpers.check.inputs import with_mantissa_bits
from flash_helpers.kernel_configs import OPERATIONS, Config, Element, Problem
from flash_helpers.measure.machine import GpuSensor
from flash_helpers.measure.rates import MakeRateWork, measure_rates
from flash_helpers.measure.results import (
    FP16_MANTISSA_BITS,
    LibraryRecord,
    Load,
    Measurement,
    Protocol,
    RateRecord,
    SkippedRecord,
    control_name,
)
from flash_helpers.measure.timing import (
    CudaTimer,
    Recording,
    Taken,
    Work,
    interleaved_rounds,
    record,
)
from flash_helpers.registry.operation import Operation
from flash_helpers.runtime.backend import Backend, Execute
from flash_helpers.runtime.tensors import torch_dtype


@dataclass(frozen=True)
class InputSet:
    """Inputs of a problem, buffers for the outputs, and the right results, by name."""

    problem: Problem
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    reference: Reference


@dataclass(frozen=True)
class Contender:
    """A kernel or a library that computes an operation.

    run: computes it for a set and returns the first output, the set's own buffer or a new tensor.
    config: None for a library. code: digest of the machine code of the config that is launched; ""
    where it is not known. is_verified: the output is compared; that of a copy, which computes
    nothing, is not.
    """

    name: str
    config: Config | None
    run: Callable[[InputSet], torch.Tensor]
    code: Callable[[Config | None], str] = lambda ran: ""
    is_verified: bool = True

    def refusal(self, problem: Problem) -> str:
        """Return why it is left out of a problem; "" if it is not."""
        if self.config is not None:
            return self.config.refusal(problem)
        package = _packages(problem).get(self.name)
        if package is None or package.is_installed:
            return ""
        return f"the package {package.name} is not installed"


def _packages(problem: Problem) -> Mapping[str, Any]:
    """Return the operation's libraries that are packages of their own."""
    return OPERATIONS[problem.operation].part("baselines").PACKAGES


def kernel_contender(
    config: Config, execute: Execute, codes: Mapping[Config, str] = MappingProxyType({})
) -> Contender:
    """Return a contender for one of the kernels, run by `execute`. codes: digests of the machine
    code of configs that it may be launched as."""

    def run(inputs: InputSet) -> torch.Tensor:
        tensors = [*inputs.inputs.values(), *inputs.outputs.values()]
        execute(config, tensors, inputs.problem.call_options())
        return next(iter(inputs.outputs.values()))

    return Contender(
        config.short_form(), config, run, lambda ran: codes.get(ran, "") if ran else ""
    )


def library_contender(name: str, operation: Operation) -> Contender:
    """Return a contender for a library of the operation, or for the control."""
    library = operation.first if name == control_name(operation) else name
    baselines = operation.part("baselines")

    def run(inputs: InputSet) -> torch.Tensor:
        outputs = baselines.run(library, inputs.problem, inputs.inputs)
        return outputs[inputs.problem.outputs[0].name]

    return Contender(name, None, run, is_verified=library != operation.ceiling)


def library_contenders(operation: Operation) -> list[Contender]:
    """Return contenders for the operation's libraries, and the control.

    A package that is not installed refuses every problem; a library that is there but does not run
    fails when it is called, with the reason.
    """
    names = (*operation.libraries, control_name(operation))
    return [library_contender(name, operation) for name in names]


def library_records(
    contenders: Sequence[Contender], operation: Operation
) -> tuple[LibraryRecord, ...]:
    """Return the versions of the contenders that are packages of their own, and installed."""
    known = operation.part("baselines").PACKAGES
    packages = (known.get(contender.name) for contender in contenders)
    return tuple(
        LibraryRecord(package.name, importlib.metadata.version(package.name))
        for package in packages
        if package and package.is_installed
    )


def n_input_sets(shape: Problem, cache_bytes: int) -> int:
    """Sets of inputs to go round: between two uses of one, twice the cache is touched."""
    return 1 + math.ceil(2 * cache_bytes / shape.bytes)


@dataclass(frozen=True)
class _Verification:
    error: OutputError
    bound: OutputError

    @property
    def severity(self) -> float:
        """The larger share of its bound; infinite for an output that is not finite."""
        share = max(
            self.error.max_abs / self.bound.max_abs, self.error.relative / self.bound.relative
        )
        return share if math.isfinite(share) else math.inf

    @property
    def failure(self) -> str:
        if self.error.within(self.bound):
            return ""
        return f"wrong output: {self.error.excess(self.bound)}"


def _verification(output: torch.Tensor, inputs: InputSet) -> _Verification:
    name = inputs.problem.outputs[0].name
    error = measure_error(output, inputs.reference.expected[name])
    return _Verification(error, inputs.reference.bounds[name])


class _Entry:
    """State of one contender on one problem. outputs: where the work that is timed
    leaves the result of each input set. taken: by name of the load."""

    def __init__(self, contender: Contender, sets: Sequence[InputSet], timer: CudaTimer) -> None:
        self.contender, self.sets, self.timer = contender, sets, timer
        self.outputs: list[torch.Tensor] = []
        self.recording: Recording | None = None
        self.worst: _Verification | None = None
        self.taken: dict[str, list[Taken]] = {}
        self.failure = ""

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step; whatever goes wrong is this contender's failure and no other's.

        Raises torch.cuda.OutOfMemoryError: the problem is too large for every contender.
        """
        try:
            step()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            self.failure = f"{type(error).__name__}: {str(error).strip() or 'no message'}"

    def record(self, protocol: Protocol) -> None:
        """Record the work that is timed, which goes round all sets of inputs."""

        # without self: what refers to itself keeps its tensors until Python looks for cycles
        outputs, run, sets = self.outputs, self.contender.run, self.sets

        def rotate() -> None:
            outputs[:] = [run(inputs) for inputs in sets]

        self.recording = record(rotate, len(sets), self.timer, protocol)

    def verify(self) -> None:
        """Poison the outputs, repeat the timed work, and compare; the worst ever is kept."""
        assert self.recording is not None
        if not self.contender.is_verified:
            self.recording.work()
            self.timer.synchronize()
            return
        for output in self.outputs:
            output.fill_(torch.nan)
        self.recording.work()
        self.timer.synchronize()
        found = max(
            (
                _verification(output, own)
                for output, own in zip(self.outputs, self.sets, strict=True)
            ),
            key=lambda check: check.severity,
        )
        if self.worst is None or found.severity > self.worst.severity:
            self.worst = found
        self.failure = self.failure or found.failure

    def measurement(self, problem: Problem, load: Load) -> Measurement:
        config, worst = self.contender.config, self.worst
        ran = config.runs_as(problem.strides()) if config else None
        taken = self.taken.get(load.name, [])
        readings = [sample.reading for sample in taken if sample.reading is not None]
        clocks, powers, temperatures = zip(*readings, strict=True) if readings else ((), (), ())
        return Measurement(
            name=self.contender.name,
            ran=ran.short_form() if ran else "",
            problem=problem.record(),
            input_sets=len(self.sets),
            launches_per_sample=self.recording.sample(load).n_launches if self.recording else 0,
            samples_ms=tuple(sample.ms for sample in taken),
            max_abs_error=_finite(worst.error.max_abs) if worst else None,
            relative_error=_finite(worst.error.relative) if worst else None,
            max_abs_bound=worst.bound.max_abs if worst else None,
            relative_bound=worst.bound.relative if worst else None,
            failure=self.failure,
            load=load.name,
            first_ms=tuple(s.reference_ms for s in taken if s.reference_ms is not None),
            sm_mhz=clocks,
            power_w=powers,
            temperature_c=temperatures,
            code=self.contender.code(ran),
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def make_input_sets(
    shape: Problem,
    dtype: Element,
    device: torch.device,
    timer: CudaTimer,
    protocol: Protocol,
) -> list[InputSet]:
    """The inputs that launches go round: one set if the timer flushes the cache."""
    n_sets = 1 if timer.flushes else n_input_sets(shape, timer.cache_bytes)
    problem = shape.in_dtype(dtype)
    operation = OPERATIONS[problem.operation]
    sets = []
    for index in range(n_sets):
        drawn = operation.part("inputs").draw(
            protocol.inputs, problem, device, protocol.seed + index
        )
        inputs = dict(drawn)
        if protocol.mantissa_bits < FP16_MANTISSA_BITS:  # else all, also of 32 bits
            bits = protocol.mantissa_bits
            inputs = {name: with_mantissa_bits(x, bits) for name, x in drawn.items()}
        reference = operation.part("reference").reference(problem, inputs)
        outputs = {
            tensor.name: torch.empty(tensor.shape, dtype=torch_dtype(tensor.element), device=device)
            for tensor in problem.outputs
        }
        sets.append(InputSet(problem, inputs, outputs, reference))
    return sets


def measure_problem(
    contenders: Sequence[Contender],
    sets: Sequence[InputSet],
    shape: Problem,
    dtype: Element,
    timer: CudaTimer,
    protocol: Protocol,
    sensor: GpuSensor,
    deadline: float = math.inf,
    advance: Work = lambda: None,
) -> list[Measurement]:
    """Verify every contender on one problem, time it under each load, and verify it again.

    sets: made by `make_input_sets` of the same shape, dtype, timer and protocol. deadline: of
    `time.monotonic`: what is left until then is shared out by the time that a round takes under
    each load, and no round of one is begun after its share, once protocol.min_rounds are done.
    advance: called after each step, of which there are two per contender and one per round.

    A contender that raises, or whose output is wrong, gets a Measurement with the failure. Raises
    torch.cuda.OutOfMemoryError if the problem does not fit in the device's memory.
    """
    entries = [_Entry(contender, sets, timer) for contender in contenders]

    def prepare(entry: _Entry) -> None:
        entry.record(protocol)
        entry.verify()

    for entry in entries:
        entry.attempt(functools.partial(prepare, entry))
        advance()

    timed = [entry for entry in entries if not entry.failure]
    recordings = [entry.recording for entry in timed if entry.recording is not None]
    operation = OPERATIONS[shape.operation]
    names = [entry.contender.name for entry in timed]
    first = operation.first
    for index, load in enumerate(protocol.loads):
        now = time.monotonic()
        left_ms = sum(other.slice_ms for other in protocol.loads[index:])
        end = now + (deadline - now) * load.slice_ms / left_ms

        def may_continue(done: int, end: float = end) -> bool:
            advance()
            return done < protocol.min_rounds or time.monotonic() < end

        rounds = interleaved_rounds(
            [recording.sample(load) for recording in recordings],
            *(timer, load, protocol.rounds, sensor),
            reference=names.index(first) if first in names else None,
            # no contender follows the same neighbour at every size
            seed=getattr(shape, operation.swept),
            may_continue=may_continue,
        )
        for entry, taken in zip(timed, rounds, strict=True):
            entry.taken[load.name] = taken
    for entry in entries:
        if entry in timed:
            entry.attempt(entry.verify)
        advance()
    problem = shape.in_dtype(dtype)
    return [entry.measurement(problem, load) for load in protocol.loads for entry in entries]


def skipped_record(problem: Problem, error: torch.cuda.OutOfMemoryError) -> SkippedRecord:
    """Record of a problem that `measure_problem` found no room for."""
    reason = f"does not fit in the GPU's memory ({str(error).splitlines()[0]})"
    return SkippedRecord(problem.record(), reason)


def n_steps(n_contenders: int, protocol: Protocol) -> int:
    """How often `measure_problem` calls `advance`, unless a deadline ends it early."""
    return 2 * n_contenders + len(protocol.loads) * protocol.rounds


def contenders_for(
    configs: Sequence[Config],
    dtype: Element,
    backend: Backend,
    operation: Operation,
    codes: Mapping[Config, str] = MappingProxyType({}),
) -> list[Contender]:
    """The libraries, then the configs of one dtype. codes: as for `kernel_contender`."""
    own = (config for config in configs if config.dtype == dtype)
    kernels = (kernel_contender(config, backend.execute, codes) for config in own)
    return [*library_contenders(operation), *kernels]


@dataclass(frozen=True)
class BenchmarkRun:
    """Findings of one run, in the order of measurement, named as in BenchmarkResults."""

    rates: tuple[RateRecord, ...] = ()
    skipped: tuple[SkippedRecord, ...] = ()
    measurements: tuple[Measurement, ...] = ()

    @property
    def problems(self) -> set[Problem]:
        """The problems that are done."""
        empty = {s.asked for s in self.skipped if not s.name}
        return empty | {m.asked for m in self.measurements}

    def require_problems(self, shape_for: Callable[[int], Problem]) -> None:
        """Raise ValueError unless the measured problem of each size is the given one."""
        for found in (*self.skipped, *self.measurements):
            asked = shape_for(found.size).in_dtype(found.asked.dtype)
            if found.asked != asked:
                raise ValueError(
                    f"what was measured is {found.asked}, and this is {asked}: go on with that, "
                    "or name another file"
                )


def run_benchmark(
    contenders: Mapping[Element, Sequence[Contender]],
    sizes: Sequence[int],
    device: torch.device,
    timer: CudaTimer,
    protocol: Protocol,
    sensor: GpuSensor,
    shape_for: Callable[[int], Problem],
    rate_works: Mapping[str, MakeRateWork] = MappingProxyType({}),
    time_budget_s: float = math.inf,
    advance: Callable[[int], object] = lambda steps: None,
    measured: BenchmarkRun | None = None,
    keep: Callable[[BenchmarkRun], object] = lambda run: None,
) -> BenchmarkRun:
    """Measure the contenders of each dtype at every size under each load; dtypes of one size one
    after the other, so that a change during the run does not look like one of them.

    shape_for: the problem of a size, in any dtype.

    rate_works: what the chip's rates are measured with, once for each dtype, by name.
    time_budget_s: seconds for the whole run; what is left is shared out evenly, and a problem whose
    share is spent stops at protocol.min_rounds rounds.
    advance: called with the number of steps done; a problem has `n_steps` of them.
    measured: by an earlier run that was ended; its problems are not measured again. keep: called
    after each problem with all that there is by then. Raises ValueError if its problems are others.

    A contender is left out of the problems that it refuses; a problem that does not fit in the
    device's memory is skipped.
    """
    begin = time.monotonic()
    run = measured or BenchmarkRun(
        rates=tuple(
            rate
            for dtype in contenders
            for rate in measure_rates(rate_works, dtype, timer, protocol, sensor)
        )
    )
    run.require_problems(shape_for)
    done = run.problems
    problems = [(dtype, shape_for(size)) for size in sizes for dtype in contenders]
    new = [(dtype, shape) for dtype, shape in problems if shape.in_dtype(dtype) not in done]
    for dtype, _ in set(problems) - set(new):
        advance(n_steps(len(contenders[dtype]), protocol))
    for index, (dtype, shape) in enumerate(new):
        now = time.monotonic()
        share = (begin + time_budget_s - now) / (len(new) - index)
        left = n_steps(len(contenders[dtype]), protocol)
        problem = shape.in_dtype(dtype)
        reasons = {c.name: c.refusal(problem) for c in contenders[dtype]}
        taking = [c for c in contenders[dtype] if not reasons[c.name]]
        measurements: list[Measurement] = []
        skipped = [
            SkippedRecord(problem.record(), reason, name)
            for name, reason in reasons.items()
            if reason
        ]

        def step() -> None:
            nonlocal left
            left -= 1
            advance(1)

        try:
            measurements = measure_problem(
                taking,
                make_input_sets(shape, dtype, device, timer, protocol),
                *(shape, dtype, timer, protocol, sensor),
                deadline=now + share,
                advance=step,
            )
        except torch.cuda.OutOfMemoryError as error:
            skipped.append(skipped_record(problem, error))
        run = BenchmarkRun(run.rates, (*run.skipped, *skipped), (*run.measurements, *measurements))
        keep(run)
        advance(left)
    return run
