"""Benchmark results: records, their statistics, and the JSON and CSV that keep them."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from flash_helpers.files import write_if_different
from flash_helpers.kernel_configs import AttentionForward, Config, config_from_short_form
from flash_helpers.tables import csv_text

T = TypeVar("T")
Own = TypeVar("Own", bound="RecordFile")

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
    *("name", "step", "dtype", "batch", "n_heads", "seq_len", "d_head"),
    *("median_ms", "first_quartile_ms", "third_quartile_ms", "tflops", "percent_of_flash"),
    *(f"percent_of_{name}" for name in RATE_NAMES),
    "failure",
)


# -- files of records ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordFile:
    """A JSON file of ours: a few entries, and lists of records, each on a line, so that differences
    can be read.

    FORMAT: its number. HOLDS: what it holds, in words. NOT_READ, of any record: entries that follow
    from others.
    """

    FORMAT: ClassVar[int]
    HOLDS: ClassVar[str]
    NOT_READ: ClassVar[tuple[str, ...]] = ("format",)

    def document(self) -> dict[str, Any]:
        """The entries, in order."""
        return {"format": self.FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """The text. Raises ValueError for NaN and infinity, which JSON does not have."""
        entries = []
        for key, value in self.document().items():
            text = json.dumps(value, allow_nan=False)
            if isinstance(value, tuple) and value:
                rows = ",\n".join(f"    {json.dumps(row, allow_nan=False)}" for row in value)
                text = f"[\n{rows}\n  ]"
            entries.append(f"  {json.dumps(key)}: {text}")
        return "{\n" + ",\n".join(entries) + "\n}\n"

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_if_different(path, self.to_json())

    @classmethod
    def load(cls: type[Own], path: Path) -> Own:
        """Read what `save` wrote. Raises OSError, and ValueError that names the file for anything
        else."""
        try:
            data = json.loads(path.read_text(), parse_constant=_refuse_constant)
            found = data.get("format") if isinstance(data, dict) else None
            if found != cls.FORMAT:
                raise ValueError(f"format {found} is not {cls.FORMAT}: measure again")
            return read_record(cls, data)
        except ValueError as error:
            raise ValueError(f"{path} holds no {cls.HOLDS}: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def read_record(kind: type[T], value: Any, place: str = "$") -> T:
    """What JSON has of a dataclass, as that, and all that it is made of.

    Raises ValueError, which says where, for a field that is missing, unknown or of another type.
    """
    arguments = get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        names = [field.name for field in fields(kind)]
        if odd := {*names} ^ ({*value} - {*getattr(kind, "NOT_READ", ())}):
            raise ValueError(f"{place} lacks or does not know the fields {', '.join(sorted(odd))}")
        kinds = _kinds(kind)
        return kind(**{n: read_record(kinds[n], value[n], f"{place}.{n}") for n in names})
    if get_origin(kind) is tuple and isinstance(value, list):
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(kinds) == len(value):
            items = enumerate(zip(kinds, value, strict=True))
            return tuple(read_record(k, item, f"{place}[{n}]") for n, (k, item) in items)
    if get_origin(kind) is Mapping and isinstance(value, dict):
        return {key: read_record(arguments[1], v, f"{place}.{key}") for key, v in value.items()}
    if NoneType in arguments:
        return None if value is None else read_record(arguments[0], value, place)
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{place} is {json.dumps(value)[:50]}, which is no {kind.__name__}")


@functools.cache
def _kinds(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


# -- records ---------------------------------------------------------------------------------------


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

    NOT_READ: ClassVar[tuple[str, ...]] = ("derived",)

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
        return None if self.name in LIBRARY_NAMES else config_from_short_form(self.name)

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
    """The GPU while one problem was timed, read n_readings times.

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

    def sentence(self, *facts: str, clock: str = "") -> str:
        """What stands below a table: GPU, driver, the facts and the sources, those that are
        known. clock: its place is behind the GPU."""
        driver = f"driver {self.driver}" if self.driver else ""
        commit = f"commit {self.commit}" if self.commit else ""
        parts = (self.gpu, clock, driver, *facts, self.date, commit)
        return "; ".join(filter(None, parts)) + "."

    @property
    def built_with(self) -> str:
        """What the kernels were built with, as one of the facts."""
        return f"kernels built with {self.library}" if self.library else ""


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


@dataclass(frozen=True, kw_only=True)
class BenchmarkResults(RecordFile):
    """Everything that one run of the benchmark found."""

    FORMAT: ClassVar[int] = 2
    HOLDS: ClassVar[str] = "benchmark results"

    provenance: Provenance
    protocol: Protocol
    clocks: tuple[ClockRecord, ...]
    rates: tuple[RateRecord, ...] = ()
    libraries: tuple[LibraryRecord, ...] = ()
    skipped: tuple[SkippedRecord, ...] = ()
    resources: tuple[ResourceRecord, ...]
    measurements: tuple[Measurement, ...]

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

    def tflops(self, name: str, dtype: str, seq_len: int | None = None) -> float | None:
        """TFLOP/s of a contender at one length, or the harmonic mean over all of them; None if one
        that it takes is missing."""
        lengths = self.seq_lens if seq_len is None else [seq_len]
        found = [m.tflops for n in lengths if (m := self.find(name, dtype, n))]
        return statistics.harmonic_mean(found) if found and len(found) == len(lengths) else None

    def mean_tflops(self, name: str, dtype: str) -> float | None:
        """Harmonic mean of the TFLOP/s over all lengths; None if one of them is missing."""
        return self.tflops(name, dtype)

    def of_flash(self, name: str, dtype: str, seq_len: int | None = None) -> float | None:
        """Speed over that of PyTorch's flash backend: at one length, or of the harmonic means."""
        return _share(self.tflops(name, dtype, seq_len), self.tflops(FLASH, dtype, seq_len))

    def rate(self, name: str, dtype: str) -> float | None:
        """TFLOP/s of one of RATE_NAMES, if it was measured."""
        found = (r.tflops for r in self.rates if (r.name, r.dtype) == (name, dtype))
        return next(found, None)

    def of_rate(self, rate: str, name: str, dtype: str, seq_len: int | None = None) -> float | None:
        """Speed over one of RATE_NAMES: at one length, or of the harmonic mean over all."""
        return _share(self.tflops(name, dtype, seq_len), self.rate(rate, dtype))

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

    def document(self) -> dict[str, Any]:
        """The entries; a valid measurement also has the derived numbers, which are not read
        back."""
        rows = (
            asdict(m) | ({"derived": self.derived(m)} if m.valid else {}) for m in self.measurements
        )
        return super().document() | {"measurements": tuple(rows)}

    def to_csv(self) -> str:
        """One row a measurement, with the derived numbers."""

        def cells(m: Measurement) -> list[Any]:
            config = m.config
            found = asdict(m) | {"step": config.step.id if config else None}
            found |= self.derived(m) if m.valid else {}
            return [found.get(column) for column in CSV_COLUMNS]

        return csv_text(CSV_COLUMNS, map(cells, self.measurements))


def _share(own: float | None, other: float | None) -> float | None:
    return own / other if own and other else None


def load_results(path: Path) -> BenchmarkResults:
    """Read what `BenchmarkResults.save` wrote. Raises as `RecordFile.load` does."""
    return BenchmarkResults.load(path)


def refuse_another_gpu(path: Path, gpu: str) -> None:
    """Raise ValueError if the file holds results of another GPU; one that is absent holds none.

    gpu: the name of this one. A file that holds no results is refused too.
    """
    if path.exists():
        refuse_mixing(path, load_results(path).provenance.gpu, gpu)


def refuse_mixing(path: Path, measured: str, gpu: str) -> None:
    """Raise ValueError unless the GPU that a file holds results of is this one."""
    if measured != gpu:
        raise ValueError(
            f"{path} holds results of {measured} and this is {gpu}: results of two GPUs are never "
            "mixed, name another file or move that one away"
        )
