"""Time on a device: samples of launches, from CUDA graphs or one by one, in interleaved rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flash_helpers.measure.results import Protocol

# A sample of works timed one by one has at most so many: each costs two events and a flush.
MAX_FLUSHED_WORKS = 100

Work = Callable[[], object]


class CudaTimer:
    """What measures time: graphs and events of one CUDA device, which must be the current one.

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

    def record(self, work: Work) -> Work:
        """Something that repeats the work that `work` puts on the device, with less host time."""
        if not self._has_graphs:
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

        def replay(keep: Work = work) -> None:  # a graph keeps addresses, not the tensors there
            graph.replay()

        return replay

    def start(self, work: Work, times: int = 1) -> Callable[[], float]:
        """Put the work on the device `times` times; the result gives the milliseconds of all after
        `synchronize`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        return lambda: begin.elapsed_time(end)

    def synchronize(self) -> None:
        """Wait until the device has done all work."""
        torch.cuda.synchronize(self._device)


class FlushingTimer(CudaTimer):
    """Overwrites the L2 cache before each work, and times the work alone."""

    flushes = True

    def __init__(self, device: torch.device, timing: str = "graph") -> None:
        super().__init__(device, timing)
        self._overwritten = torch.empty(2 * self.cache_bytes, dtype=torch.uint8, device=device)

    def start(self, work: Work, times: int = 1) -> Callable[[], float]:
        parts = []
        for _ in range(times):
            self._overwritten.zero_()
            parts.append(super().start(work))
        return lambda: sum(part() for part in parts)


def make_timer(device: torch.device, protocol: Protocol) -> CudaTimer:
    """The timer of a CUDA device that the protocol asks for."""
    kind = FlushingTimer if protocol.cache == "flush" else CudaTimer
    return kind(device, protocol.timing)


@dataclass(frozen=True)
class Sample:
    """What is timed together: a work so many times.

    n_launches: of what is measured, in all of it.
    """

    work: Work
    times: int = 1
    n_launches: int = 1

    def run(self) -> None:
        """Put it on the device without taking its time."""
        for _ in range(self.times):
            self.work()


def interleaved_rounds(
    samples: Sequence[Sample],
    timer: CudaTimer,
    rounds: int,
    may_continue: Callable[[int], bool] = lambda done: True,
) -> list[list[float]]:
    """Milliseconds of each sample, one value a round.

    Every second round has the order of the one before it reversed, so that a drifting clock harms
    all alike; each pair of rounds has another order, the same in every run. With neighbours that
    never change, who comes after a contender that heats the chip would always find a slower clock.

    may_continue: called with the number of rounds done before each round.
    """
    taken: list[list[float]] = [[] for _ in samples]
    for done in range(rounds):
        if not may_continue(done):
            break
        order = list(range(len(samples)))
        random.Random(done // 2).shuffle(order)
        if done % 2:
            order.reverse()
        started = [(n, timer.start(samples[n].work, samples[n].times)) for n in order]
        timer.synchronize()
        for index, milliseconds in started:
            taken[index].append(milliseconds())
    return taken


def record_sample(work: Work, n_launches: int, timer: CudaTimer, sample_ms: float) -> Sample:
    """A sample of a work that lasts about sample_ms, as the timer repeats it best.

    n_launches: in one work. The work is done three times or more to find that out.
    """

    def repeated() -> None:
        for _ in range(n_works):
            work()

    work()  # the first call may load code or choose an algorithm
    timer.synchronize()
    once = timer.start(work)
    timer.synchronize()
    # whoever flushes the cache does so before each launch
    n_works = 1 if timer.flushes else max(1, math.ceil(sample_ms / max(once(), 1e-6)))
    replay = timer.record(repeated)
    # the host may have been what the work took its time for
    replayed = timer.start(replay)
    timer.synchronize()
    times = max(1, round(sample_ms / max(replayed(), 1e-6)))
    if timer.flushes:
        times = min(times, MAX_FLUSHED_WORKS)
    return Sample(replay, times, n_launches * n_works * times)
