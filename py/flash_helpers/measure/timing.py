"""Time on a device: samples of launches, from CUDA graphs or one by one, in interleaved rounds,
under a given load: bursts of a rested chip, or without a pause."""

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

# A sample of works timed one by one has at most so many: each costs two events and a flush.
MAX_FLUSHED_WORKS = 100
GRAPH_MS = 10.0  # a graph holds enough launches to take so long; a longer sample replays it
HEAT = 11  # samples that share one of the reference, at most
WARM_UP_MS = 1000.0  # of load, then its speed is compared with that of the second before
MAX_WARM_UPS = 10
STEADY = 0.01  # a change of speed that is none
COOL_DOWN_S = 1.0  # before the first burst
SHORTEST_MS = 1e-6

Work = Callable[[], object]


class CudaTimer:
    """Graphs and events that measure time on one CUDA device, which must be the current one.

    timing: one of TIMING_CHOICES; "events" records no graph. flushes: it overwrites the last cache
    before each launch.
    """

    flushes = False

    def __init__(self, device: torch.device, timing: str = "graph") -> None:
        self._device = device
        self._has_graphs = timing == "graph"

    @property
    def cache_bytes(self) -> int:
        """Size of the last cache."""
        return torch.cuda.get_device_properties(self._device).L2_cache_size

    @functools.cached_property
    def _overwritten(self) -> torch.Tensor:
        return torch.empty(2 * self.cache_bytes, dtype=torch.uint8, device=self._device)

    def record(self, work: Work) -> Work:
        """Something that repeats the work that `work` puts on the device, with less host time."""
        if not self._has_graphs:
            return work
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.graph(graph):
            work()

        def replay(keep: Work = work) -> None:  # a graph keeps addresses, not the tensors there
            graph.replay()

        return replay

    def start(self, work: Work, times: int = 1) -> Callable[[], float]:
        """Put the work on the device `times` times; the result waits for the last one's end, and
        gives the milliseconds of all.

        The last cache is overwritten before: meanwhile the host puts the work in line, so that its
        time has no pause of the device in it.
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
    """Overwrites the L2 cache before each work, and times the work alone."""

    flushes = True

    def start(self, work: Work, times: int = 1) -> Callable[[], float]:
        parts = [super(FlushingTimer, self).start(work) for _ in range(times)]
        return lambda: sum(part() for part in parts)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """An older graph that the collector destroys would invalidate the one that is captured."""
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
    """A timed unit: a work so many times.

    n_launches: of what is measured, in all of it. lead: times that the work is done untimed before.
    """

    work: Work
    times: int = 1
    n_launches: int = 1
    lead: int = 0

    def start_lead(self) -> None:
        """Put what comes before it on the device."""
        for _ in range(self.lead):
            self.work()


@dataclass(frozen=True)
class Taken:
    """A sample that was taken. ms: milliseconds per launch. reference_ms: the same of the
    reference's sample next to it, if there is a reference. reading: of the GPU at its end."""

    ms: float
    reference_ms: float | None
    reading: Reading | None


def heats(n: int, done: int, reference: int | None, seed: int = 0) -> list[list[int]]:
    """The order of the `done`-th round of samples 0 … n - 1: groups of HEAT at most, each with the
    reference in its middle.

    Every second round has the order of the one before it reversed, so that a drifting clock harms
    all alike; each pair of rounds and each seed has another order, the same in every run. With
    neighbours that never change, who comes after a contender that heats the chip would always find
    a slower clock.
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
    """Each sample as it was taken in each round, in the order of `heats`.

    reference: index of the sample that is taken in each heat; its result is the mean of a
    round's, and its last reading. may_continue: called with the number of rounds done before each
    round.
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
    """Milliseconds per launch of each sample, one after the other, and what was read at its end."""

    def finish(sample: Sample, wait: Callable[[], float]) -> tuple[float, Reading | None]:
        ms = wait()
        reading = sensor.read()
        if load.rest:
            sensor.rest(load.rest * ms / 1000)
        return ms / sample.n_launches, reading

    running = None
    for sample in samples:
        sample.start_lead()  # the device does this while the host waits for the one before
        if running is not None:
            yield finish(*running)
        running = sample, timer.start(sample.work, sample.times)
    if running is not None:
        yield finish(*running)


def warm_up(sample: Sample, timer: CudaTimer, load: Load) -> None:
    """Keep the device busy until a second of load takes as long as the one before it."""
    times = max(1, round(sample.times * WARM_UP_MS / load.sample_ms))
    before = math.inf
    for _ in range(MAX_WARM_UPS):
        now = timer.start(sample.work, times)()
        if abs(now - before) <= STEADY * now:
            return
        before = now


@dataclass(frozen=True)
class Recording:
    """A work as its timer repeats it best. ms: milliseconds that it takes. n_launches: of what is
    measured, in it. most: how often a sample may repeat it."""

    work: Work
    ms: float
    n_launches: int
    most: int | None

    def sample(self, load: Load) -> Sample:
        """One that lasts about as long as the load says."""
        times = max(1, round(load.sample_ms / self.ms))
        lead = math.ceil(load.lead_ms / self.ms)
        if self.most:
            times, lead = min(times, self.most), min(lead, self.most)
        return Sample(self.work, times, self.n_launches * times, lead)


def record(work: Work, n_launches: int, timer: CudaTimer, protocol: Protocol) -> Recording:
    """A work recorded, so that it can be timed under each of the protocol's loads.

    n_launches: in one work. The work is done three times or more.
    """

    def repeated() -> None:
        for _ in range(n_works):
            work()

    work()  # the first call may load code or choose an algorithm
    timer.synchronize()
    once = max(timer.start(work)(), SHORTEST_MS)
    shortest_ms = min(GRAPH_MS, *(load.sample_ms for load in protocol.loads))
    # a flushed cache is flushed before each launch
    n_works = 1 if timer.flushes else max(1, math.ceil(shortest_ms / once))
    replay = timer.record(repeated)
    # the host may have been what the work took its time for
    replayed_ms = max(timer.start(replay)(), SHORTEST_MS)
    most = MAX_FLUSHED_WORKS if timer.flushes else None
    return Recording(replay, replayed_ms, n_launches * n_works, most)
