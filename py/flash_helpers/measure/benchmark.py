"""Speed of each kernel beside the operation's libraries, in one process.

Each contender is captured in a CUDA graph, so that no launch costs host time, or launched one by
one, as in a program without graphs. Launches rotate through several sets of inputs, or overwrite
the L2 cache first, so that no launch finds its inputs in L2, but those of tiny problems. Each
contender is timed once per round, in an order that changes from round to round and from length to
length. Every few samples include one of the first library, so that a drifting clock affects all
contenders alike. The chip is measured in bursts after rests, then under sustained load. The timed
launches are also compared with float64, before and after.
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
from flash_helpers.check.tensors import unwritten
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

# Sets of inputs to rotate through. Each has a reference in float64, and every contender is compared
# with all of them.
MOST_SETS = 64


@dataclass(frozen=True)
class InputSet:
    """Inputs of a problem, buffers for the outputs, and the reference results, by name."""

    problem: Problem
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    reference: Reference


@dataclass(frozen=True)
class Contender:
    """A kernel or a library that computes an operation.

    run: computes the operation for an input set and returns its outputs by name, each the set's own
    buffer or a new tensor. A library may lack some.
    config: None for a library. code: digest of the launched config's machine code; "" if unknown.
    is_verified: whether the output is compared. A copy computes nothing, so its output is not.
    """

    name: str
    config: Config | None
    run: Callable[[InputSet], Mapping[str, torch.Tensor]]
    code: Callable[[Config | None], str] = lambda ran: ""
    is_verified: bool = True

    def refusal(self, problem: Problem) -> str:
        """Return the reason why the contender is left out of a problem; "" if it takes part."""
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
    code, by the config that may be launched for it."""

    def run(inputs: InputSet) -> Mapping[str, torch.Tensor]:
        tensors = inputs.problem.arranged({**inputs.inputs, **inputs.outputs})
        execute(config, tensors, inputs.problem.call_options())
        return inputs.outputs

    return Contender(
        config.short_form(), config, run, lambda ran: codes.get(ran, "") if ran else ""
    )


def library_contender(name: str, operation: Operation) -> Contender:
    """Return a contender for a library of the operation, or for the control."""
    library = operation.first if name == control_name(operation) else name
    baselines = operation.part("baselines")

    def run(inputs: InputSet) -> Mapping[str, torch.Tensor]:
        return baselines.run(library, inputs.problem, inputs.inputs)

    return Contender(name, None, run, is_verified=library != operation.ceiling)


def library_contenders(operation: Operation) -> list[Contender]:
    """Return contenders for the operation's libraries, and the control.

    A package that is not installed refuses every problem. An installed library that does not run
    fails with the reason when it is called.
    """
    names = (*operation.libraries, control_name(operation))
    return [library_contender(name, operation) for name in names]


def library_records(
    contenders: Sequence[Contender], operation: Operation
) -> tuple[LibraryRecord, ...]:
    """Return the versions of the contenders that are installed packages of their own."""
    known = operation.part("baselines").PACKAGES
    packages = (known.get(contender.name) for contender in contenders)
    return tuple(
        LibraryRecord(package.name, importlib.metadata.version(package.name))
        for package in packages
        if package and package.is_installed
    )


def n_input_sets(shape: Problem, cache_bytes: int) -> int:
    """Number of input sets to rotate through: between two uses of one set, launches touch twice
    the cache's size. Problems so small that this takes more than MOST_SETS find their inputs in the
    cache, as a kernel finds those of the kernel before it."""
    return min(MOST_SETS, 1 + math.ceil(2 * cache_bytes / shape.bytes))


@dataclass(frozen=True)
class _Verification:
    error: OutputError
    bound: OutputError

    @property
    def severity(self) -> float:
        """The larger of the two errors, each over its bound; infinite if the output is not
        finite."""
        share = max(
            self.error.max_abs / self.bound.max_abs, self.error.relative / self.bound.relative
        )
        return share if math.isfinite(share) else math.inf

    @property
    def failure(self) -> str:
        if self.error.within(self.bound):
            return ""
        return f"wrong output: {self.error.excess(self.bound)}"


def _verification(outputs: Mapping[str, torch.Tensor], inputs: InputSet) -> _Verification:
    """Return that of the worst output."""
    expected, bounds = inputs.reference.expected, inputs.reference.bounds
    found = [
        _Verification(measure_error(outputs[x.name], expected[x.name]), bounds[x.name])
        for x in inputs.problem.outputs
        if x.name in outputs
    ]
    return max(found, key=lambda check: check.severity)


class _Entry:
    """State of one contender on one problem. outputs: tensors that hold the timed work's result
    for each input set. taken: samples by name of the load."""

    def __init__(self, contender: Contender, sets: Sequence[InputSet], timer: CudaTimer) -> None:
        self.contender, self.sets, self.timer = contender, sets, timer
        self.outputs: list[Mapping[str, torch.Tensor]] = []
        self.recording: Recording | None = None
        self.worst: _Verification | None = None
        self.taken: dict[str, list[Taken]] = {}
        self.failure = ""

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step; an exception counts as this contender's failure only.

        Raises torch.cuda.OutOfMemoryError: the problem is too large for every contender.
        """
        try:
            step()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            self.failure = f"{type(error).__name__}: {str(error).strip() or 'no message'}"

    def record(self, protocol: Protocol) -> None:
        """Record the timed work, which rotates through all sets of inputs."""

        # Without self: a cycle of references keeps its tensors until Python collects garbage.
        outputs, run, sets = self.outputs, self.contender.run, self.sets

        def rotate() -> None:
            outputs[:] = [run(inputs) for inputs in sets]

        self.recording = record(rotate, len(sets), self.timer, protocol)

    def verify(self) -> None:
        """Poison the outputs, repeat the timed work, and compare; the worst result is kept."""
        assert self.recording is not None
        if not self.contender.is_verified:
            self.recording.work()
            self.timer.synchronize()
            return
        for output in (x for outputs in self.outputs for x in outputs.values()):
            output.fill_(torch.nan)
        self.recording.work()
        self.timer.synchronize()
        found = max(
            (
                _verification(outputs, own)
                for outputs, own in zip(self.outputs, self.sets, strict=True)
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
    """The input sets that launches rotate through: one set if the timer flushes the cache. Outputs
    are full of `unwritten`, since a call may write a part of one, such as of a cache."""
    n_sets = 1 if timer.flushes else n_input_sets(shape, timer.cache_bytes)
    problem = shape.in_dtype(dtype)
    operation = OPERATIONS[problem.operation]
    sets = []
    for index in range(n_sets):
        drawn = operation.part("inputs").draw(
            protocol.inputs, problem, device, protocol.seed + index
        )
        inputs = dict(drawn)
        if protocol.mantissa_bits < FP16_MANTISSA_BITS:  # else all bits are kept, of fp32 too
            bits = protocol.mantissa_bits
            inputs = {name: with_mantissa_bits(x, bits) for name, x in drawn.items()}
        reference = operation.part("reference").reference(problem, inputs)
        outputs = {
            tensor.name: torch.full(
                tensor.shape, unwritten(tensor), dtype=torch_dtype(tensor.element), device=device
            )
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

    sets: made by `make_input_sets` for the same shape, dtype, timer and protocol.
    deadline: on the clock of `time.monotonic`. The time left until then is divided among the loads
    in proportion to the time of a round under each. No round of a load begins after its share is
    spent, once protocol.min_rounds are done.
    advance: called after each step: two steps per contender and one per round.

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
            # No contender follows the same neighbour at every size.
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
    """Record of a problem that does not fit in the memory of `measure_problem`'s device."""
    reason = f"does not fit in the GPU's memory ({str(error).splitlines()[0]})"
    return SkippedRecord(problem.record(), reason)


def n_steps(n_contenders: int, protocol: Protocol) -> int:
    """Number of times that `measure_problem` calls `advance`, unless a deadline ends it early."""
    return 2 * n_contenders + len(protocol.loads) * protocol.rounds


def contenders_for(
    configs: Sequence[Config],
    dtype: Element,
    backend: Backend,
    operation: Operation,
    codes: Mapping[Config, str] = MappingProxyType({}),
) -> list[Contender]:
    """Contenders for the libraries, then for the configs of one dtype. codes: as for
    `kernel_contender`."""
    own = (config for config in configs if config.dtype == dtype)
    kernels = (kernel_contender(config, backend.execute, codes) for config in own)
    return [*library_contenders(operation), *kernels]


@dataclass(frozen=True)
class BenchmarkRun:
    """Records of one run, in the order of measurement, named as in BenchmarkResults."""

    rates: tuple[RateRecord, ...] = ()
    skipped: tuple[SkippedRecord, ...] = ()
    measurements: tuple[Measurement, ...] = ()

    @property
    def problems(self) -> set[Problem]:
        """The problems that were measured or skipped."""
        empty = {s.asked for s in self.skipped if not s.name}
        return empty | {m.asked for m in self.measurements}

    def require_problems(self, shape_for: Callable[[int], Problem]) -> None:
        """Raise ValueError unless the measured problem of each size is the given one."""
        for found in (*self.skipped, *self.measurements):
            asked = shape_for(found.size).in_dtype(found.asked.dtype)
            if found.asked != asked:
                raise ValueError(
                    f"the file holds measurements of {found.asked}, and the run asks for {asked}: "
                    "go on with the file's problem, or name another file"
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
    """Measure the contenders of each dtype at every size under each load. The dtypes of one size
    follow one another, so that a drift during the run does not look like an effect of the dtype.

    shape_for: gives the problem of a size, in any dtype.
    rate_works: works that measure the chip's rates, by name, each run once per dtype.
    time_budget_s: seconds for the whole run. The time left is divided evenly among the problems. A
    problem whose share is spent stops after protocol.min_rounds rounds.
    advance: called with the number of steps done; a problem has `n_steps` steps.
    measured: records of an earlier run that was interrupted; its problems are not measured again.
    keep: called after each problem with all records so far.

    A contender is left out of the problems that it refuses. A problem that does not fit in the
    device's memory is skipped. Raises ValueError if the problems in `measured` are not those of
    `shape_for`.
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
