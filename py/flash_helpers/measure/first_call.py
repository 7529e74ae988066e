"""Host time of a process's first calls of a kernel, with an empty cache of compiled kernels and
with a filled one: the records and their table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.console.tables import Table, number
from flash_helpers.measure.results import Provenance, RecordFile

CALLS = 100  # of each process
EMPTY, FILLED, LIBRARY = "empty cache", "filled cache", "in the library"


@dataclass(frozen=True)
class ProcessTimes:
    """Host times in one process. import_ms: milliseconds to import flash_attention after PyTorch.
    calls_us: microseconds of each call, the first one first. compiler: name and version of the
    compiler that it would use."""

    import_ms: float
    calls_us: tuple[float, ...]
    compiler: str


@dataclass(frozen=True)
class FirstCallRecord:
    """Times of one kernel, one value per process.

    kernel: short form. state: EMPTY, FILLED, or LIBRARY for a kernel that is not compiled at first
    use. first_us, second_us, last_us: microseconds of the first, the second and the CALLS-th call.
    """

    kernel: str
    state: str
    import_ms: tuple[float, ...]
    first_us: tuple[float, ...]
    second_us: tuple[float, ...]
    last_us: tuple[float, ...]

    @classmethod
    def of(cls, kernel: str, state: str, processes: list[ProcessTimes]) -> FirstCallRecord:
        """Return the record of several processes."""
        return cls(
            kernel,
            state,
            tuple(process.import_ms for process in processes),
            *(tuple(process.calls_us[n] for process in processes) for n in (0, 1, -1)),
        )


@dataclass(frozen=True)
class FirstCalls(RecordFile):
    """Everything that one run measured.

    is_simulated: whether a call is not forward() on a GPU, but the look-up of the PTX of a call on
    CPU tensors, which compiles it if need be. shape: (batch, seq, heads, d_head).
    """

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "times of first calls"

    provenance: Provenance
    compiler: str
    is_simulated: bool
    shape: tuple[int, int, int, int]
    dtype: str
    records: tuple[FirstCallRecord, ...]

    def table(self) -> Table:
        """One row per kernel and state of the cache, with medians over the processes."""
        rows = [
            [
                record.kernel,
                record.state,
                *(
                    number(statistics.median(samples) / scale, 1)
                    for samples, scale in (
                        (record.import_ms, 1),
                        (record.first_us, 1e3),
                        (record.second_us, 1),
                        (record.last_us, 1),
                    )
                ),
            ]
            for record in self.records
        ]
        call = "PTX" if self.is_simulated else "call"
        header = ["kernel", "state", "import, ms", f"first {call}, ms", f"second {call}, µs"]
        return Table([*header, f"{CALLS}th {call}, µs"], rows, align="ll")

    def markdown(self) -> str:
        """Markdown of the table, and of the machine and software of the measurement."""
        n = len(self.records[0].first_us)
        sentence = self.provenance.sentence(
            self.compiler,
            f"PyTorch {self.provenance.torch}, Python {self.provenance.python}",
            f"{self.dtype}, shape {self.shape}",
            f"medians of {n} processes",
        )
        return f"{self.table().markdown()}\n\n{sentence}"
