"""Benchmark results: records, their statistics, and the JSON and CSV that keep them."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from flash_helpers.files import write_if_different
from flash_helpers.kernel_configs import AttentionForward, Config, config_from_short_form

T = TypeVar("T")

FORMAT = 2
FLASH = "pytorch_flash"
CUDNN = "pytorch_cudnn"
FLASH_ATTN = "flash_attn"
LIBRARY_NAMES = {
    FLASH: "PyTorch's flash backend",
    CUDNN: "PyTorch's cuDNN backend",
    FLASH_ATTN: "the flash_attn package",
}
MATMUL = "matmul"
MMA_SYNC = "mma_sync"
RATE_NAMES = {MATMUL: "matmul", MMA_SYNC: "mma.sync"}
TIMING_CHOICES = ("graph", "events")
CACHE_CHOICES = ("rotate", "flush")

CSV_COLUMNS = (
    "name",
    "step",
    "dtype",
    "batch",
    "n_heads",
    "seq_len",
    "d_head",
    "median_ms",
    "first_quartile_ms",
    "third_quartile_ms",
    "tflops",
    "percent_of_flash",
    *(f"percent_of_{name}" for name in RATE_NAMES),
    "failure",
)


@dataclass(frozen=True)
class Measurement:
    """One contender on one problem.

    name: a kernel's short form, or a key of LIBRARY_NAMES.
    ran: short form of the config that was launched for it; empty for a library.
    samples_ms: milliseconds a launch, one value a round, each the mean over a sample's launches.
    max_abs_error, relative_error: the worst of all verifications, before and after timing;
        max_abs_bound, relative_bound: what was allowed there.
    failure: why there are no samples to trust; empty if the output was right before and after.
    """

    name: str
    ran: str
    dtype: str
    batch: int
    n_heads: int
    seq_len: int
    d_head: int
    input_sets: int
    launches_per_sample: int
    samples_ms: tuple[float, ...]
    max_abs_error: float | None
    relative_error: float | None
    max_abs_bound: float | None
    relative_bound: float | None
    failure: str

    @property
    def config(self) -> Config | None:
        """The kernel's config; None for a library. Raises ValueError if there is none any more."""
        if self.name in LIBRARY_NAMES:
            return None
        return config_from_short_form(self.name)

    @property
    def valid(self) -> bool:
        """True if the output was right and there is a time."""
        return not self.failure and bool(self.samples_ms)

    @property
    def median_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.samples_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """First and third quartile over the rounds."""
        if len(self.samples_ms) == 1:
            return self.samples_ms[0], self.samples_ms[0]
        first, _, third = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        first, third = self.quartiles_ms
        return (third - first) / self.median_ms

    @property
    def tflops(self) -> float:
        """10^12 floating-point operations a second, at the median time."""
        problem = AttentionForward(self.batch, self.n_heads, self.seq_len, self.d_head)
        return problem.operations / (self.median_ms * 1e-3) / 1e12


@dataclass(frozen=True)
class ClockRecord:
    """The GPU while one problem was timed, as nvidia-smi read it n_readings times.

    sm_mhz, power_w: lowest, median, highest. temperature_c: highest.
    """

    dtype: str
    seq_len: int
    n_readings: int
    sm_mhz: tuple[float, float, float]
    power_w: tuple[float, float, float]
    temperature_c: float


@dataclass(frozen=True)
class RateRecord:
    """How fast the chip multiplies matrices, measured in the process that timed the kernels.

    name: a key of RATE_NAMES: a square matrix product of the library, or mma.sync back to back on
        registers. operations: floating-point operations of one launch.
    samples_ms: milliseconds a launch, one value a round. failure: why there are none, or empty.
    """

    name: str
    dtype: str
    operations: int
    samples_ms: tuple[float, ...]
    failure: str

    @property
    def tflops(self) -> float | None:
        """10^12 floating-point operations a second, at the median time."""
        if not self.samples_ms:
            return None
        return self.operations / (statistics.median(self.samples_ms) * 1e-3) / 1e12


@dataclass(frozen=True)
class LibraryRecord:
    """A package that was measured beside PyTorch, and its version."""

    name: str
    version: str


@dataclass(frozen=True)
class SkippedRecord:
    """A problem that nothing was measured of, and why."""

    dtype: str
    seq_len: int
    reason: str


@dataclass(frozen=True)
class ResourceRecord:
    """What a kernel takes on the GPU that was measured.

    registers, local_bytes: per thread. smem_bytes: per block. blocks_per_sm: resident at a time.
    """

    name: str
    registers: int
    local_bytes: int
    smem_bytes: int
    blocks_per_sm: int


@dataclass(frozen=True)
class Provenance:
    """What was measured, on what, when. A text is empty where the machine does not tell.

    commit: of the sources, with "-dirty" if they differ from it. max_sm_mhz, power_limit_w: as
    nvidia-smi prints them.
    """

    date: str
    commit: str
    command: str
    gpu: str
    compute_capability: str
    driver: str
    max_sm_mhz: str
    power_limit_w: str
    cuda: str
    cudnn: str
    torch: str
    python: str
    library: str


@dataclass(frozen=True)
class Protocol:
    """How each number was taken.

    rounds: samples a contender, at most; warmup_rounds come before and are dropped.
    min_rounds: samples that are taken even if the time budget is spent.
    sample_ms: a sample launches often enough to take at least so long.
    timing: one of TIMING_CHOICES: launches are replayed from a CUDA graph, or issued one by one.
    cache: one of CACHE_CHOICES: launches go round several sets of inputs, or the L2 cache is
        overwritten before each launch, outside of its time.
    """

    rounds: int = 7
    warmup_rounds: int = 1
    min_rounds: int = 3
    sample_ms: float = 10.0
    inputs: str = "normal"
    seed: int = 0
    timing: str = "graph"
    cache: str = "rotate"


@dataclass(frozen=True)
class BenchmarkResults:
    """Everything that one run of the benchmark found."""

    provenance: Provenance
    protocol: Protocol
    clocks: tuple[ClockRecord, ...]
    resources: tuple[ResourceRecord, ...]
    measurements: tuple[Measurement, ...]
    rates: tuple[RateRecord, ...] = ()
    libraries: tuple[LibraryRecord, ...] = ()
    skipped: tuple[SkippedRecord, ...] = ()

    @property
    def failures(self) -> list[Measurement]:
        """Kernels without a trustworthy time; a library that does not run here is no failure."""
        return [m for m in self.measurements if m.failure and m.name not in LIBRARY_NAMES]

    @property
    def dtypes(self) -> list[str]:
        """Element types measured, in order of appearance."""
        return list(dict.fromkeys(m.dtype for m in self.measurements))

    @property
    def seq_lens(self) -> list[int]:
        """Sequence lengths measured, ascending."""
        return sorted({m.seq_len for m in self.measurements})

    def names(self, dtype: str) -> list[str]:
        """Contenders of one dtype, in order of appearance."""
        return list(dict.fromkeys(m.name for m in self.measurements if m.dtype == dtype))

    def find(self, name: str, dtype: str, seq_len: int) -> Measurement | None:
        """The valid measurement of a contender at one length, if there is one."""
        for m in self.measurements:
            if (m.name, m.dtype, m.seq_len) == (name, dtype, seq_len) and m.valid:
                return m
        return None

    def tflops(self, name: str, dtype: str, seq_len: int) -> float | None:
        """TFLOP/s of a contender at one length."""
        found = self.find(name, dtype, seq_len)
        return found.tflops if found else None

    def mean_tflops(self, name: str, dtype: str) -> float | None:
        """Harmonic mean of the TFLOP/s over all lengths; None if one of them is missing."""
        speeds = [self.tflops(name, dtype, seq_len) for seq_len in self.seq_lens]
        if not speeds or None in speeds:
            return None
        return statistics.harmonic_mean([speed for speed in speeds if speed is not None])

    def of_flash(self, name: str, dtype: str, seq_len: int | None = None) -> float | None:
        """Speed over that of PyTorch's flash backend: at one length, or of the harmonic means."""
        if seq_len is None:
            own, flash = self.mean_tflops(name, dtype), self.mean_tflops(FLASH, dtype)
        else:
            own, flash = self.tflops(name, dtype, seq_len), self.tflops(FLASH, dtype, seq_len)
        return own / flash if own and flash else None

    def rate(self, name: str, dtype: str) -> float | None:
        """TFLOP/s of one of RATE_NAMES, if it was measured."""
        for record in self.rates:
            if (record.name, record.dtype) == (name, dtype):
                return record.tflops
        return None

    def of_rate(self, rate: str, name: str, dtype: str, seq_len: int | None = None) -> float | None:
        """Speed over one of RATE_NAMES: at one length, or of the harmonic mean over all."""
        peak = self.rate(rate, dtype)
        if seq_len is None:
            own = self.mean_tflops(name, dtype)
        else:
            own = self.tflops(name, dtype, seq_len)
        return own / peak if own and peak else None

    def derived(self, m: Measurement) -> dict[str, float | None]:
        """The numbers that follow from a valid measurement and its neighbours, by CSV column."""
        first, third = m.quartiles_ms
        shares = {"flash": self.of_flash(m.name, m.dtype, m.seq_len)}
        shares |= {rate: self.of_rate(rate, m.name, m.dtype, m.seq_len) for rate in RATE_NAMES}
        return {
            "median_ms": round(m.median_ms, 6),
            "first_quartile_ms": round(first, 6),
            "third_quartile_ms": round(third, 6),
            "tflops": round(m.tflops, 2),
            **{
                f"percent_of_{name}": None if share is None else round(100 * share, 1)
                for name, share in shares.items()
            },
        }

    def _row(self, record: Any) -> dict[str, Any]:
        row = asdict(record)
        if isinstance(record, Measurement) and record.valid:
            row[_DERIVED] = self.derived(record)
        return row

    def to_json(self) -> str:
        """Text for a file; one line a measurement, so that differences can be read.

        A valid measurement also has the derived numbers, which are not read back.
        """
        head = {
            "format": FORMAT,
            "provenance": asdict(self.provenance),
            "protocol": asdict(self.protocol),
        }
        return measured_json(head, {k: map(self._row, getattr(self, k)) for k in _RECORDS})

    def to_csv(self) -> str:
        """One row a measurement, with the derived numbers."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for m in self.measurements:
            config = m.config
            row: list[Any] = [
                m.name,
                config.step.id if config else "",
                m.dtype,
                m.batch,
                m.n_heads,
                m.seq_len,
                m.d_head,
            ]
            derived = self.derived(m) if m.valid else dict.fromkeys(_DERIVED_COLUMNS)
            row += ["" if derived[name] is None else derived[name] for name in _DERIVED_COLUMNS]
            writer.writerow([*row, m.failure])
        return text.getvalue()

    def save_json(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_if_different(path, self.to_json())

    def save_csv(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_if_different(path, self.to_csv())


_RECORDS: Mapping[str, type] = {
    "clocks": ClockRecord,
    "rates": RateRecord,
    "libraries": LibraryRecord,
    "skipped": SkippedRecord,
    "resources": ResourceRecord,
    "measurements": Measurement,
}
_DERIVED = "derived"
_DERIVED_COLUMNS = CSV_COLUMNS[CSV_COLUMNS.index("median_ms") : -1]


def read_record(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass from its JSON object. Raises ValueError unless the fields are just its own."""
    names = {field.name for field in fields(kind)}
    if set(values) != names:
        raise ValueError(
            f"a {kind.__name__} has the fields {sorted(names)}, found {sorted(values)}"
        )
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def read_records(kind: type, rows: Iterable[dict[str, Any]]) -> tuple[Any, ...]:
    """`read_record` of each row."""
    return tuple(read_record(kind, row) for row in rows)


def measured_json(head: Mapping[str, Any], records: Mapping[str, Iterable[Any]]) -> str:
    """Text for a JSON file of measurements: the head's entries and then lists of records, each on a
    line, so that differences can be read. Raises ValueError for a record with NaN or infinity."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, found in records.items():
        rows = [f"    {json.dumps(record, allow_nan=False)}" for record in found]
        text = "[\n" + ",\n".join(rows) + "\n  ]" if rows else "[]"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load_measured(path: Path, kind: str, number: int, build: Callable[[dict[str, Any]], T]) -> T:
    """What `build` makes of a JSON file of measurements, in format `number`.

    Raises OSError if the file cannot be read, and ValueError if it holds something else than kind.
    """
    try:
        data = json.loads(path.read_text())
        if data["format"] != number:
            raise ValueError(f"format {data['format']} is not {number}: measure again")
        return build(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no {kind}: {error}") from error


def load_results(path: Path) -> BenchmarkResults:
    """Read what `BenchmarkResults.save_json` wrote. Raises as `load_measured` does."""

    def build(data: dict[str, Any]) -> BenchmarkResults:
        for row in data["measurements"]:
            row.pop(_DERIVED, None)
        return BenchmarkResults(
            provenance=read_record(Provenance, data["provenance"]),
            protocol=read_record(Protocol, data["protocol"]),
            **{key: read_records(kind, data[key]) for key, kind in _RECORDS.items()},
        )

    return load_measured(path, "benchmark results", FORMAT, build)


def refuse_another_gpu(path: Path, gpu: str) -> None:
    """Raise ValueError if the file holds results of another GPU; one that is absent holds none.

    gpu: the name of this one. A file that holds no results is refused too.
    """
    if not path.exists():
        return
    measured = load_results(path).provenance.gpu
    if measured != gpu:
        raise ValueError(
            f"{path} holds results of {measured} and this is {gpu}: results of two GPUs are never "
            "mixed, name another file"
        )
