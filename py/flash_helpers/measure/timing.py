"""Time on a device: samples of launches, from CUDA graphs or one by one, in interleaved rounds.
The load is bursts after rests, or sustained without a pause."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flash_helpers.measure.machine import GpuSensor, Reading
from flash_helpers.measure.results import Load, Protocol

# Most works in a sample that times them one by one: each costs two events and a flush.
MAX_FLUSHED_WORKS = 100
GRAPH_MS = 10.0  # duration of a graph's launches; a longer sample replays the graph
HEAT = 11  # most samples that share one sample of the reference
WARM_UP_MS = 1000.0  # duration of load, whose speed is compared with the second before it
MAX_WARM_UPS = 10
STEADY = 0.01  # a smaller relative change of speed counts as none
COOL_DOWN_S = 1.0  # before the first burst
SHORTEST_MS = 1e-6

Work = Callable[[], object]


class CudaTimer:
    """Graphs and events that measure time on one CUDA device, which must be the current one.

    timing: one of TIMING_CHOICES; "events" records no graph. flushes: whether the timer overwrites
    the L2 cache before each launch.
    """

    flushes = False

    def __init__(self, device: torch.device, timing: str = "graph") -> None:
        self._device = device
        self._has_graphs = timing == "graph"

    @property
    def cache_bytes(self) -> int:
        """Size of the L2 cache."""
        return torch.cuda.get_device_properties(self._device).L2_cache_size

    @functools.cached_property
    def _overwritten(self) -> torch.Tensor:
        return torch.empty(2 * self.cache_bytes, dtype=torch.uint8, device=self._device)

    def record(self, work: Work) -> Work:
        """Return a work that repeats `work` on the device with less host time."""
        if not self._has_graphs:
            return work
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.graph(graph):
            work()

        def replay(keep: Work = work) -> None:  # a graph keeps addresses, not the tensors there
            graph.replay()

        return replay

    def start(self, work: Work, times: int = 1) -> Callable[[], float]:
        """Put the work on the device `times` times. Return a function that waits for the end and
        gives the milliseconds of all repetitions.

        The L2 cache is overwritten first. Meanwhile the host enqueues the work, so that the timed
        span contains no pause of the device.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._overwritten.zero_()
        begin.record()
        for _ in range(times):
            work()
        end.record()

        def finish() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return finish

    def synchronize(self) -> None:
        """Wait until the device has done all work."""
        torch.cuda.synchronize(self._device)


class FlushingTimer(CudaTimer):
    """A timer that overwrites the L2 cache before each work, and times the work alone."""

    flushes = True

    def start(self, work: Work, times: int = 1) -> Callable[[], float]:
        parts = [super(FlushingTimer, self).start(work) for _ in range(times)]
        return lambda: sum(part() for part in parts)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection: destroying an older graph would invalidate the graph that is
    being captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_timer(device: torch.device, protocol: Protocol) -> CudaTimer:
    """The timer of a CUDA device that the protocol asks for."""
    kind = FlushingTimer if protocol.cache == "flush" else CudaTimer
    return kind(device, protocol.timing)


@dataclass(frozen=True)
class Sample:
    """A timed unit: a work repeated `times` times.

    n_launches: launches of the measured kernel in all repetitions. lead: untimed repetitions of the
    work before.
    """

    work: Work
    times: int = 1
    n_launches: int = 1
    lead: int = 0

    def start_lead(self) -> None:
        """Put the untimed repetitions on the device."""
        for _ in range(self.lead):
            self.work()


@dataclass(frozen=True)
class Taken:
    """A sample that was taken. ms: milliseconds per launch. reference_ms: milliseconds per launch
    of the reference's sample next to it, if there is a reference. reading: of the GPU at the
    sample's end."""

    ms: float
    reference_ms: float | None
    reading: Reading | None


def heats(n: int, done: int, reference: int | None, seed: int = 0) -> list[list[int]]:
    """Order of the `done`-th round of samples 0 … n - 1: groups of HEAT at most, each with the
    reference in its middle.

    Every second round reverses the order of the round before it, so that a drifting clock affects
    all alike. Each pair of rounds and each seed has another order, the same in every run. With
    fixed neighbours, a contender that follows one that heats the chip would always find a slower
    clock.
    """
    order = [index for index in range(n) if index != reference]
    random.Random(f"{seed} {done // 2}").shuffle(order)
    if done % 2:
        order.reverse()
    if reference is None:
        return [order]
    n_heats = max(1, math.ceil(len(order) / HEAT))
    ends = [len(order) * k // n_heats for k in range(n_heats + 1)]
    groups = [order[begin:end] for begin, end in itertools.pairwise(ends)]
    return [[*g[: len(g) // 2], reference, *g[len(g) // 2 :]] for g in groups]


def interleaved_rounds(
    samples: Sequence[Sample],
    timer: CudaTimer,
    load: Load,
    rounds: int,
    sensor: GpuSensor,
    reference: int | None = None,
    seed: int = 0,
    may_continue: Callable[[int], bool] = lambda done: True,
) -> list[list[Taken]]:
    """Take the samples in rounds, in the order of `heats`; return each sample's results by round.

    reference: index of the sample that is taken in each heat. Its result for a round is the mean
    over the round's heats, with the last reading. may_continue: called before each round with the
    number of rounds done.
    """
    taken: list[list[Taken]] = [[] for _ in samples]
    if samples and load.lead_ms:
        warm_up(samples[reference or 0], timer, load)
    if load.rest:
        sensor.rest(COOL_DOWN_S)
    for done in range(rounds):
        if not may_continue(done):
            break
        groups = heats(len(samples), done, reference, seed)
        order = [samples[index] for group in groups for index in group]
        in_turn = _take_in_turn(order, timer, load, sensor)
        own: list[list[Taken]] = [[] for _ in samples]
        for group in groups:
            found = {index: next(in_turn) for index in group}
            beside = None if reference is None else found[reference][0]
            for index, (ms, reading) in found.items():
                own[index].append(Taken(ms, beside, reading))
        for index, parts in enumerate(own):
            ms = statistics.fmean(part.ms for part in parts)
            beside = ms if index == reference else parts[-1].reference_ms
            taken[index].append(Taken(ms, beside, parts[-1].reading))
    return taken


def _take_in_turn(
    samples: Iterable[Sample], timer: CudaTimer, load: Load, sensor: GpuSensor
) -> Iterator[tuple[float, Reading | None]]:
    """Milliseconds per launch of each sample, taken one after the other, and the reading at its
    end."""

    def finish(sample: Sample, wait: Callable[[], float]) -> tuple[float, Reading | None]:
        ms = wait()
        reading = sensor.read()
        if load.rest:
            sensor.rest(load.rest * ms / 1000)
        return ms / sample.n_launches, reading

    running = None
    for sample in samples:
        sample.start_lead()  # runs while the host waits for the sample before
        if running is not None:
            yield finish(*running)
        running = sample, timer.start(sample.work, sample.times)
    if running is not None:
        yield finish(*running)


def warm_up(sample: Sample, timer: CudaTimer, load: Load) -> None:
    """Keep the device busy until its speed is steady from one second of load to the next."""
    times = max(1, round(sample.times * WARM_UP_MS / load.sample_ms))
    before = math.inf
    for _ in range(MAX_WARM_UPS):
        now = timer.start(sample.work, times)()
        if abs(now - before) <= STEADY * now:
            return
        before = now


@dataclass(frozen=True)
class Recording:
    """A work in the form that its timer repeats. ms: milliseconds per repetition. n_launches:
    launches of the measured kernel in it. most: how often a sample may repeat it."""

    work: Work
    ms: float
    n_launches: int
    most: int | None

    def sample(self, load: Load) -> Sample:
        """Return a sample that takes about as long as the load asks for."""
        times = max(1, round(load.sample_ms / self.ms))
        lead = math.ceil(load.lead_ms / self.ms)
        if self.most:
            times, lead = min(times, self.most), min(lead, self.most)
        return Sample(self.work, times, self.n_launches * times, lead)


def record(work: Work, n_launches: int, timer: CudaTimer, protocol: Protocol) -> Recording:
    """Record a work, so that it can be timed under each of the protocol's loads.

    n_launches: per work. The work runs three times or more.
    """

    def repeated() -> None:
        for _ in range(n_works):
            work()

    work()  # The first call may load code or choose an algorithm.
    timer.synchronize()
    once = max(timer.start(work)(), SHORTEST_MS)
    shortest_ms = min(GRAPH_MS, *(load.sample_ms for load in protocol.loads))
    # A timer that flushes does so before each launch.
    n_works = 1 if timer.flushes else max(1, math.ceil(shortest_ms / once))
    replay = timer.record(repeated)
    # The time may have been the host's instead of the device's.
    replayed_ms = max(timer.start(replay)(), SHORTEST_MS)
    most = MAX_FLUSHED_WORKS if timer.flushes else None
    return Recording(replay, replayed_ms, n_launches * n_works, most)
