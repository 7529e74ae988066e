"""What a call takes of the host's time: the records, how they are taken, and their table."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.measure.results import CUDNN, FLASH, LIBRARY_NAMES, Provenance, RecordFile
from flash_helpers.tables import Table, number

MARKERS = ("<!-- calls:begin -->", "<!-- calls:end -->")
CALL_NAMES = {
    "forward": "`forward(config, q, k, v)`",
    "forward_out": "`forward(config, q, k, v, o)`",
    "attention": "`attention(q, k, v)`",
    "forward_compiled": "`forward` under `torch.compile`",
    "attention_compiled": "`attention` under `torch.compile`",
    FLASH: LIBRARY_NAMES[FLASH],
    CUDNN: LIBRARY_NAMES[CUDNN],
}


@dataclass(frozen=True)
class CallRecord:
    """The calls of one contender.

    name: a key of CALL_NAMES. samples_us: microseconds of the host a call, one value a round, each
    the mean over a sample's calls.
    """

    name: str
    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.samples_us)


@dataclass(frozen=True)
class CallOverhead(RecordFile):
    """Everything that one run measured.

    shape: (batch, seq, heads, d_head), so small that the GPU is done sooner than the host.
    calls_per_sample: one after another, without waiting for the GPU.
    """

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "times of calls"

    provenance: Provenance
    shape: tuple[int, int, int, int]
    dtype: str
    calls_per_sample: int
    calls: tuple[CallRecord, ...]

    def find(self, name: str) -> CallRecord | None:
        """The record of a contender, if there is one."""
        return next((record for record in self.calls if record.name == name), None)

    def table(self) -> Table:
        """A row a contender; the last column tells how much PyTorch's flash backend takes."""
        flash = self.find(FLASH)
        rows = [
            [
                CALL_NAMES[record.name],
                number(record.median_us, 1),
                number(record.median_us / flash.median_us if flash else None, 2),
            ]
            for record in self.calls
        ]
        return Table(["call", "µs of the host", "of flash"], rows)

    def markdown(self) -> str:
        """The table and what it was measured with, for a page."""
        rounds = sorted({len(record.samples_us) for record in self.calls})
        sentence = self.provenance.sentence(
            self.provenance.built_with,
            f"PyTorch {self.provenance.torch}, Python {self.provenance.python}",
            f"{self.dtype}, shape {self.shape}",
            f"median of {' to '.join(map(str, rounds))} rounds of {self.calls_per_sample} calls",
        )
        return f"{self.table().markdown()}\n\n{sentence}"


@dataclass(frozen=True)
class Contender:
    """Something to call. around: what a sample is taken in, such as the choice of a backend."""

    call: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]]


def measure_calls(
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    calls: int,
    synchronize: Callable[[], None],
    clock: Callable[[], int] = time.perf_counter_ns,
) -> tuple[CallRecord, ...]:
    """Samples of all contenders, interleaved; each pair of rounds has another order, the second of
    the two the reverse of the first, so that a drift harms all alike.

    clock: nanoseconds. synchronize: waits for the device, outside of the time that is taken.
    """
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for done in range(-1, rounds):  # the first round only warms up
        order = [*contenders]
        random.Random(done // 2).shuffle(order)
        for name in order[::-1] if done % 2 else order:
            contender = contenders[name]
            with contender.around():
                synchronize()
                began = clock()
                for _ in range(calls):
                    contender.call()
                ended = clock()
                synchronize()
            if done >= 0:
                taken[name].append((ended - began) / calls / 1e3)
    return tuple(CallRecord(name, tuple(samples)) for name, samples in taken.items())
