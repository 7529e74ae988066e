"""How fast is each kernel, beside PyTorch's own, in one process.

Every contender is captured in a CUDA graph, so that no launch costs host time; the graph goes round
several sets of inputs, so that none is found in the L2 cache. Every contender is timed once a round
and the order turns round after each, so that a drifting clock harms all alike. The graph that is
timed is also the one whose outputs are compared with float64, before and after.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol as Interface

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_helpers.backend import Backend, Forward
from flash_helpers.inputs import QKV, AttentionShape, make_inputs
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig
from flash_helpers.machine import clock_record
from flash_helpers.reference import (
    AttentionError,
    AttentionReference,
    attention_reference,
    measure_error,
)
from flash_helpers.results import CUDNN, FLASH, ClockRecord, Measurement, Protocol
from flash_helpers.selection import config_that_runs

DEFAULT_SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
N_HEADS = 16
MAX_BATCH = 16
MAX_TOKENS = 65536  # batch * seq_len
LIBRARY_BACKENDS = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}

Work = Callable[[], None]


class Timer(Interface):
    """What measures time on a device.

    cache_bytes: size of its last cache.
    """

    @property
    def cache_bytes(self) -> int: ...

    def record(self, work: Work) -> Work:
        """Something that repeats the work that `work` puts on the device, with less host time."""

    def start(self, work: Work) -> Callable[[], float]:
        """Put the work on the device; the result gives its milliseconds after `synchronize`."""

    def synchronize(self) -> None:
        """Wait until the device has done all work."""


class CudaTimer:
    """Graphs and events of one CUDA device, which must be the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def cache_bytes(self) -> int:
        return torch.cuda.get_device_properties(self._device).L2_cache_size

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def start(self, work: Work) -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        return lambda: begin.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True)
class InputSet:
    """Inputs, a buffer for the output, and the right result."""

    inputs: QKV
    output: torch.Tensor
    reference: AttentionReference


@dataclass(frozen=True)
class Contender:
    """Something that computes attention.

    run: computes it for a set and returns the output, the set's own buffer or a new tensor.
    config: None for a library.
    """

    name: str
    config: FlashForwardKernelConfig | None
    run: Callable[[InputSet], torch.Tensor]


def kernel_contender(config: FlashForwardKernelConfig, forward: Forward) -> Contender:
    """One of the kernels, run by `forward`."""

    def run(inputs: InputSet) -> torch.Tensor:
        forward(config, *inputs.inputs, inputs.output)
        return inputs.output

    return Contender(config.short_form(), config, run)


def library_contender(name: str) -> Contender:
    """A backend of PyTorch's scaled_dot_product_attention, one of LIBRARY_BACKENDS.

    It gets the same memory as the kernels do, as (batch, heads, seq, d_head) views.
    """

    def run(inputs: InputSet) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs.inputs)
        with sdpa_kernel(LIBRARY_BACKENDS[name]):
            output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return output.transpose(1, 2)

    return Contender(name, None, run)


def default_shape(seq_len: int) -> AttentionShape:
    """The problem of one length: 16 heads, a batch of 16 or what MAX_TOKENS leaves."""
    return AttentionShape(max(1, min(MAX_BATCH, MAX_TOKENS // seq_len)), N_HEADS, seq_len)


def n_input_sets(shape: AttentionShape, element_bytes: int, cache_bytes: int) -> int:
    """Sets of inputs to go round: between two uses of one, twice the cache is touched."""
    set_bytes = 4 * math.prod(shape.size) * element_bytes
    return 1 + math.ceil(2 * cache_bytes / set_bytes)


def interleaved_rounds(
    works: Sequence[Work],
    timer: Timer,
    rounds: int,
    may_continue: Callable[[int], bool] = lambda done: True,
) -> list[list[float]]:
    """Milliseconds of each work, one value a round; the order turns round after each round.

    may_continue: called with the number of rounds done before each round.
    """
    samples: list[list[float]] = [[] for _ in works]
    for done in range(rounds):
        if not may_continue(done):
            break
        order = range(len(works)) if done % 2 == 0 else reversed(range(len(works)))
        started = [(index, timer.start(works[index])) for index in order]
        timer.synchronize()
        for index, milliseconds in started:
            samples[index].append(milliseconds())
    return samples


@dataclass(frozen=True)
class _Recorded:
    """A contender ready to be timed.

    outputs: where a replay leaves the result of each input set.
    """

    sample: Work
    outputs: list[torch.Tensor]
    n_launches: int


@dataclass(frozen=True)
class _Verification:
    error: AttentionError
    bound: AttentionError

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
        return f"wrong output: {self.error} is over {self.bound}"


def _record(
    contender: Contender, sets: Sequence[InputSet], timer: Timer, sample_ms: float
) -> _Recorded:
    def rotate() -> list[torch.Tensor]:
        return [contender.run(inputs) for inputs in sets]

    def repeat(work: Work, times: int) -> Work:
        def repeated() -> None:
            for _ in range(times):
                work()

        return repeated

    outputs: list[torch.Tensor] = []

    def rotate_and_keep() -> None:
        outputs[:] = rotate()

    rotate()  # the first call may load code or choose an algorithm
    timer.synchronize()
    rotation = timer.start(rotate_and_keep)
    timer.synchronize()
    n_rotations = max(1, math.ceil(sample_ms / max(rotation(), 1e-6)))
    replay = timer.record(repeat(rotate_and_keep, n_rotations))
    # the host may have been what the rotation took its time for
    replayed = timer.start(replay)
    timer.synchronize()
    n_replays = max(1, round(sample_ms / max(replayed(), 1e-6)))
    return _Recorded(repeat(replay, n_replays), outputs, len(sets) * n_rotations * n_replays)


def _verify(recorded: _Recorded, sets: Sequence[InputSet], timer: Timer) -> _Verification:
    """Poison the outputs, take one sample, and return the worst set's errors."""
    for output in recorded.outputs:
        output.fill_(torch.nan)
    recorded.sample()
    timer.synchronize()
    checks = [
        _Verification(measure_error(output, inputs.reference.expected), inputs.reference.bound)
        for output, inputs in zip(recorded.outputs, sets, strict=True)
    ]
    return max(checks, key=lambda check: check.severity)


class _Entry:
    """What is known of one contender on one problem so far."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.recorded: _Recorded | None = None
        self.worst: _Verification | None = None
        self.samples_ms: list[float] = []
        self.failure = ""

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step; whatever goes wrong is this contender's failure and no other's."""
        try:
            step()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {str(error).strip() or 'no message'}"

    def verify(self, sets: Sequence[InputSet], timer: Timer) -> None:
        assert self.recorded is not None
        found = _verify(self.recorded, sets, timer)
        if self.worst is None or found.severity > self.worst.severity:
            self.worst = found
        self.failure = self.failure or found.failure

    def measurement(self, shape: AttentionShape, dtype: DType, n_sets: int) -> Measurement:
        config, worst, recorded = self.contender.config, self.worst, self.recorded
        return Measurement(
            name=self.contender.name,
            ran=config_that_runs(config, shape).short_form() if config else "",
            dtype=dtype.short,
            batch=shape.batch,
            n_heads=shape.n_heads,
            seq_len=shape.seq_len,
            d_head=shape.d_head,
            input_sets=n_sets,
            launches_per_sample=recorded.n_launches if recorded else 0,
            samples_ms=tuple(ms / recorded.n_launches for ms in self.samples_ms)
            if recorded
            else (),
            max_abs_error=_finite(worst.error.max_abs) if worst else None,
            relative_error=_finite(worst.error.relative) if worst else None,
            max_abs_bound=worst.bound.max_abs if worst else None,
            relative_bound=worst.bound.relative if worst else None,
            failure=self.failure,
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _input_sets(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    timer: Timer,
    protocol: Protocol,
) -> list[InputSet]:
    sets = []
    for index in range(n_input_sets(shape, dtype.itemsize, timer.cache_bytes)):
        inputs = make_inputs(protocol.inputs, shape, dtype, device, protocol.seed + index)
        sets.append(InputSet(inputs, torch.empty_like(inputs[0]), attention_reference(*inputs)))
    return sets


def measure_problem(
    contenders: Sequence[Contender],
    shape: AttentionShape,
    dtype: DType,
    device: torch.device,
    timer: Timer,
    protocol: Protocol,
    monitor: AbstractContextManager[object],
    deadline: float = math.inf,
    advance: Work = lambda: None,
) -> list[Measurement]:
    """Verify, time and verify again every contender on one problem.

    monitor: entered while the rounds are timed. deadline: of `time.monotonic`, after which no round
    is begun once protocol.min_rounds are done. advance: called after each step, of which there are
    two a contender and one a round.

    A contender that raises, or whose output is wrong, gets a Measurement with the failure.
    """
    sets = _input_sets(shape, getattr(torch, dtype.torch_name), device, timer, protocol)
    entries = [_Entry(contender) for contender in contenders]

    def prepare(entry: _Entry) -> None:
        entry.recorded = _record(entry.contender, sets, timer, protocol.sample_ms)
        entry.verify(sets, timer)

    for entry in entries:
        entry.attempt(lambda entry=entry: prepare(entry))
        advance()

    timed = [entry for entry in entries if entry.recorded is not None and not entry.failure]
    works = [entry.recorded.sample for entry in timed if entry.recorded is not None]

    def may_continue(done: int) -> bool:
        advance()
        return done < protocol.min_rounds or time.monotonic() < deadline

    interleaved_rounds(works, timer, protocol.warmup_rounds)
    with monitor:
        samples = interleaved_rounds(works, timer, protocol.rounds, may_continue)
    for entry, milliseconds in zip(timed, samples, strict=True):
        entry.samples_ms = milliseconds
    for entry in entries:
        if entry in timed:
            entry.attempt(lambda entry=entry: entry.verify(sets, timer))
        advance()
    return [entry.measurement(shape, dtype, len(sets)) for entry in entries]


class Monitor(AbstractContextManager["Monitor"], Interface):
    """Reads (SM clock in MHz, power in W, temperature in degrees C) while its block runs."""

    readings: list[tuple[float, ...]]


def n_steps(n_contenders: int, protocol: Protocol) -> int:
    """How often `measure_problem` calls `advance`, unless a deadline ends it early."""
    return 2 * n_contenders + protocol.rounds


def contenders_for(
    configs: Sequence[FlashForwardKernelConfig], dtype: DType, backend: Backend
) -> list[Contender]:
    """The libraries, then the configs of one dtype."""
    return [
        *(library_contender(name) for name in LIBRARY_BACKENDS),
        *(kernel_contender(c, backend.forward) for c in configs if c.dtype == dtype),
    ]


def run_benchmark(
    configs: Sequence[FlashForwardKernelConfig],
    seq_lens: Sequence[int],
    backend: Backend,
    timer: Timer,
    protocol: Protocol,
    make_monitor: Callable[[], Monitor],
    time_budget_s: float = math.inf,
    advance: Work = lambda: None,
    shape_for: Callable[[int], AttentionShape] = default_shape,
) -> tuple[list[Measurement], list[ClockRecord]]:
    """Measure the configs, beside PyTorch's own kernels, at every length in every dtype they have.

    time_budget_s: seconds for the whole run; what is left is shared out evenly, and a problem whose
    share is spent stops at protocol.min_rounds rounds.
    advance: called as `measure_problem` does.
    """
    begin = time.monotonic()
    problems = [
        (dtype, shape_for(seq_len))
        for dtype in sorted({config.dtype for config in configs})
        for seq_len in seq_lens
    ]
    measurements: list[Measurement] = []
    clocks: list[ClockRecord] = []
    for index, (dtype, shape) in enumerate(problems):
        now = time.monotonic()
        share = (begin + time_budget_s - now) / (len(problems) - index)
        monitor = make_monitor()
        measurements += measure_problem(
            contenders_for(configs, dtype, backend),
            shape,
            dtype,
            backend.device,
            timer,
            protocol,
            monitor,
            deadline=now + share,
            advance=advance,
        )
        record = clock_record(dtype.short, shape.seq_len, monitor.readings)
        if record is not None:
            clocks.append(record)
    return measurements, clocks
