"""Host time per call: the records, their measurement, and their table."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.console.tables import Table, number
from flash_helpers.measure.results import CUDNN, FLASH, LIBRARY_NAMES, Provenance, RecordFile

FLASH_TRANSPOSED = f"{FLASH}_transposed"
FLASH_COMPILED = f"{FLASH}_compiled"
ADD_COMPILED = "add_compiled"  # the least time that a compiled call can take
CUDNN_TRANSPOSED = f"{CUDNN}_transposed"
LOGGED = {level: f"attention_logged_{level}" for level in (1, 3, 5)}  # by level of the log
_TRANSPOSING = "transposing q, k, v and o"  # needed for tensors in the layout of our kernels
_TRANSPOSED = "given transposed q, k, v"
CALL_NAMES = {
    "forward": "`forward(config, q, k, v)`",
    "forward_out": "`forward(config, q, k, v, o)`",
    "attention": "`attention(q, k, v)`",
    **{name: f"`attention(q, k, v)`, log level {level}" for level, name in LOGGED.items()},
    FLASH: f"{LIBRARY_NAMES[FLASH]}, {_TRANSPOSING}",
    FLASH_TRANSPOSED: f"{LIBRARY_NAMES[FLASH]}, {_TRANSPOSED}",
    CUDNN: f"{LIBRARY_NAMES[CUDNN]}, {_TRANSPOSING}",
    CUDNN_TRANSPOSED: f"{LIBRARY_NAMES[CUDNN]}, {_TRANSPOSED}",
    "forward_compiled": "`forward` under `torch.compile`",
    "attention_compiled": "`attention` under `torch.compile`",
    ADD_COMPILED: "`q + k` under `torch.compile`",
    FLASH_COMPILED: f"{LIBRARY_NAMES[FLASH]}, {_TRANSPOSING}, under `torch.compile`",
}


@dataclass(frozen=True)
class CallRecord:
    """Times of one contender's calls.

    name: a key of CALL_NAMES. samples_us: microseconds of host time per call, one value per round,
    each the mean over a sample's calls.
    """

    name: str
    samples_us: tuple[float, ...]

    @property
    def quiet_us(self) -> float:
        """Lower quartile over the rounds, in microseconds per call.

        Other work of the host makes a sample slower and never faster, so that samples have two
        modes. The quartile lies in the fast mode if a quarter of the samples do, and unlike the
        minimum it does not depend on a single sample.
        """
        return sorted(self.samples_us)[(len(self.samples_us) - 1) // 4]

    def ratio_to(self, other: CallRecord) -> float:
        """Median over the rounds of the ratio to the other contender's sample in the same round,
        when the host was equally busy."""
        pairs = zip(self.samples_us, other.samples_us, strict=True)
        return statistics.median(own / theirs for own, theirs in pairs)


@dataclass(frozen=True)
class CallOverhead(RecordFile):
    """Everything that one run measured.

    shape: (batch, seq, heads, d_head), so small that the GPU finishes before the host.
    calls_per_sample: number of calls in a row, without waiting for the GPU.
    """

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "times of calls"

    provenance: Provenance
    shape: tuple[int, int, int, int]
    dtype: str
    calls_per_sample: int
    calls: tuple[CallRecord, ...]

    def find(self, name: str) -> CallRecord | None:
        """The record of a contender; None if there is none."""
        return next((record for record in self.calls if record.name == name), None)

    def table(self) -> Table:
        """One row per contender; the last column compares it to PyTorch's flash backend, called
        with the same tensors."""
        flash = self.find(FLASH)
        rows = [
            [
                CALL_NAMES[record.name],
                number(record.quiet_us, 1),
                number(record.ratio_to(flash) if flash else None, 2),
            ]
            for record in self.calls
        ]
        return Table(["call", "µs of the host", "of flash, transposing"], rows)

    def markdown(self) -> str:
        """Markdown of the table, and of the machine and software of the measurement."""
        rounds = sorted({len(record.samples_us) for record in self.calls})
        sentence = self.provenance.sentence(
            self.provenance.built_with,
            f"PyTorch {self.provenance.torch}, Python {self.provenance.python}",
            f"{self.dtype}, shape {self.shape}",
            f"{' to '.join(map(str, rounds))} rounds of {self.calls_per_sample} calls: µs is the "
            "lower quartile over the rounds, the ratio is the median over the rounds",
        )
        return f"{self.table().markdown()}\n\n{sentence}"


@dataclass(frozen=True)
class Contender:
    """A function to call. around: context of each sample, such as the choice of a backend."""

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
    """Take samples of all contenders, interleaved. Each pair of rounds has another order, and the
    second round of a pair reverses the first, so that a drift affects all alike.

    clock: gives nanoseconds. synchronize: waits for the device, outside of the timed span.
    """
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for done in range(-1, rounds):  # the first round only warms up
        order = [*contenders]
        random.Random(done // 2).shuffle(order)
        for name in order[::-1] if done % 2 else order:
            contender = contenders[name]
            with contender.around():
                contender.call()  # the context may have changed what a first call does
                synchronize()
                began = clock()
                for _ in range(calls):
                    contender.call()
                ended = clock()
                synchronize()
            if done >= 0:
                taken[name].append((ended - began) / calls / 1e3)
    return tuple(CallRecord(name, tuple(samples)) for name, samples in taken.items())
