"""Benchmark results: records, their statistics, and the JSON and CSV that keep them."""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import msgspec

from flash_helpers.console.files import write_if_different
from flash_helpers.console.tables import csv_text
from flash_helpers.gpu import SM_COUNTS, Device, largest_device
from flash_helpers.kernel_configs import (
    FAMILIES,
    OPERATIONS,
    Config,
    Problem,
    config_from_short_form,
)
from flash_helpers.registry.families import problem_from_record
from flash_helpers.registry.operation import TFLOPS, Operation
from flash_helpers.sass.read.opcodes import tensor_peak

Own = TypeVar("Own", bound="RecordFile")

RESULTS = Path("benchmarks/results/h100.json")  # shown in tables, plots and pages


def control_name(operation: Operation) -> str:
    """Return the name of the first library's second contender, which measures the noise."""
    return f"{operation.first}_again"


# Of attention's libraries.
FLASH = "pytorch_flash"
CUDNN = "pytorch_cudnn"
FLASH_ATTN = "flash_attn"
FA3 = "fa3"
CONTROL = "pytorch_flash_again"
# Contenders of every operation that are not kernels. Operations may have libraries of one name, so
# that the title of a library is asked of its operation.
LIBRARY_NAMES: Mapping[str, str] = MappingProxyType(
    {
        name: title
        for operation in OPERATIONS.values()
        for name, title in (
            *operation.libraries.items(),
            (
                control_name(operation),
                f"{operation.libraries[operation.first]} once more, as the control",
            ),
        )
    }
)
BEST_OTHER = "best_other"  # stands for the fastest library at each size
MATMUL = "matmul"
MMA_SYNC = "mma_sync"
RATE_NAMES = {MATMUL: "matmul", MMA_SYNC: "mma.sync"}
FP16_MANTISSA_BITS = 10
TIMING_CHOICES = ("graph", "events")
CACHE_CHOICES = ("rotate", "flush")
BURST = "burst"
SUSTAINED = "sustained"
LOAD_TEXTS = {BURST: "in bursts", SUSTAINED: "sustained"}

READINGS = ("sm_mhz", "power_w", "temperature_c")  # of the GPU, at each sample


# -- files of records ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Head:
    format: int | None = None


@dataclass(frozen=True)
class RecordFile:
    """A JSON file of a few entries and lists of records, one record per line, so that a diff is
    readable.

    FORMAT: number of the format. HOLDS: the file's contents, in words. A field with a default may
    be absent, as in older files. Entries that are not fields, such as derived numbers, are not
    read.
    """

    FORMAT: ClassVar[int]
    HOLDS: ClassVar[str]

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
        """Read a file of `save`. Raises OSError, and ValueError with the file's name for other
        contents."""
        try:
            text = path.read_bytes()
            found = msgspec.json.decode(text, type=_Head).format
            if found != cls.FORMAT:
                raise ValueError(f"format {found} is not {cls.FORMAT}: measure again")
            return msgspec.json.decode(text, type=cls)
        except ValueError as error:
            raise ValueError(f"{path} holds no {cls.HOLDS}: {error}") from error


# -- records ---------------------------------------------------------------------------------------


def size_of(problem: Problem) -> int:
    """Return the field of a problem that benchmarks vary, such as the sequence length."""
    return getattr(problem, OPERATIONS[problem.operation].swept)


class OfProblem:
    """A record of one problem. problem: `Problem.record()`.

    Raises ValueError if `problem` is not the record of a problem.
    """

    problem: dict[str, Any]

    def __post_init__(self) -> None:
        _ = self.asked

    @functools.cached_property
    def asked(self) -> Problem:
        """The problem."""
        return problem_from_record(self.problem)

    @property
    def operation(self) -> Operation:
        """The problem's operation."""
        return OPERATIONS[self.asked.operation]

    @property
    def dtype(self) -> str:
        """Short name of the problem's element type."""
        return self.asked.dtype.short

    @property
    def size(self) -> int:
        """The field of the problem that benchmarks vary, such as the sequence length."""
        return size_of(self.asked)


@dataclass(frozen=True)
class Measurement(OfProblem):
    """One contender on one problem under one load.

    name: a kernel's short form, or a key of LIBRARY_NAMES.
    ran: short form of the config that was launched for it; empty for a library.
    samples_ms: milliseconds per launch, one value per round, each the mean over the launches of a
        sample.
    first_ms: milliseconds per launch of the operation's first library, from the sample next to this
        one in the same round; empty if the library was not timed.
    sm_mhz, power_w, temperature_c: of the GPU at the end of each sample; empty if the driver does
        not tell.
    max_abs_error, relative_error: the worst of all verifications, before and after timing.
    max_abs_bound, relative_bound: limits of these errors. All four are None without verification.
    failure: reason for missing samples; empty if the output was right before and after timing.
    code: digest of the launched machine code (flash_helpers.measure.code); empty for a library and
        where it is unknown.
    """

    name: str
    ran: str
    problem: dict[str, Any]
    input_sets: int
    launches_per_sample: int
    samples_ms: tuple[float, ...]
    max_abs_error: float | None
    relative_error: float | None
    max_abs_bound: float | None
    relative_bound: float | None
    failure: str
    load: str = SUSTAINED
    first_ms: tuple[float, ...] = ()
    sm_mhz: tuple[float, ...] = ()
    power_w: tuple[float, ...] = ()
    temperature_c: tuple[float, ...] = ()
    code: str = ""

    @property
    def key(self) -> tuple[str, Problem, str]:
        """The contender, the whole problem and the load; unique among results."""
        return self.name, self.asked, self.load

    @property
    def config(self) -> Config | None:
        """The kernel's config; None for a library. Raises ValueError if the registry no longer has
        the config."""
        return None if self.name in LIBRARY_NAMES else config_from_short_form(self.name)

    @property
    def valid(self) -> bool:
        """True if the output was right and was timed."""
        return not self.failure and bool(self.samples_ms)

    @property
    def median_ms(self) -> float:
        """Median over the rounds, in milliseconds per launch."""
        return statistics.median(self.samples_ms)

    @property
    def of_first(self) -> list[float]:
        """Ratio of speeds to the first library's sample next to each sample, one value per
        round."""
        return [first / own for first, own in zip(self.first_ms, self.samples_ms, strict=True)]

    @property
    def speed(self) -> float:
        """Speed at the median time, in the unit of the operation's metric."""
        return self.operation.metric.speed(self.asked, self.median_ms)

    @property
    def unit(self) -> str:
        """The unit of the speed, such as TFLOP/s."""
        return self.operation.metric.unit

    @property
    def is_verified(self) -> bool:
        """Whether the output was compared. A copy, which only bounds a speed, is not."""
        return self.relative_bound is not None


@dataclass(frozen=True)
class RateRecord:
    """Rate at which the chip multiplies matrices, measured in the process that timed the kernels.

    name: a key of RATE_NAMES: a square matrix product of the library, or mma.sync back to back on
        registers. operations: floating-point operations per launch.
    samples_ms: milliseconds per launch, one value per round. failure: reason for missing samples,
        or empty.
    """

    name: str
    dtype: str
    operations: int
    samples_ms: tuple[float, ...]
    failure: str
    load: str = SUSTAINED

    @property
    def tflops(self) -> float | None:
        """10^12 floating-point operations per second, at the median time; None after a failure."""
        if not self.samples_ms:
            return None
        return self.operations / (statistics.median(self.samples_ms) * 1e-3) / 1e12


@dataclass(frozen=True)
class LibraryRecord:
    """A package that was measured beside PyTorch. name: as pip knows it."""

    name: str
    version: str


@dataclass(frozen=True)
class SkippedRecord(OfProblem):
    """A contender that was left out of a problem, and the reason. name: empty if all contenders
    were left out."""

    problem: dict[str, Any]
    reason: str
    name: str = ""

    @property
    def key(self) -> tuple[str, Problem]:
        """The contender and the whole problem; unique among records."""
        return self.name, self.asked


@dataclass(frozen=True)
class ResourceRecord:
    """Resources of a kernel on the GPU that was measured.

    registers, local_bytes: per thread. smem_bytes: per thread block. blocks_per_sm: thread blocks
    resident at a time.
    """

    name: str
    registers: int
    local_bytes: int
    smem_bytes: int
    blocks_per_sm: int


@dataclass(frozen=True)
class Provenance:
    """Machine, software and date of a measurement. A text is empty where it is unknown.

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

    @property
    def device(self) -> Device:
        """The GPU. A GPU that `SM_COUNTS` lacks counts as the largest of its compute
        capability."""
        major, minor = map(int, self.compute_capability.split("."))
        largest = largest_device(10 * major + minor)
        return Device(self.gpu, (major, minor), SM_COUNTS.get(self.gpu, largest.sms))

    def sentence(self, *facts: str, clock: str = "") -> str:
        """Line below a table: GPU, driver, the facts and the sources, without unknown ones. clock:
        text that follows the GPU."""
        driver = f"driver {self.driver}" if self.driver else ""
        commit = f"commit {self.commit}" if self.commit else ""
        parts = (self.gpu, clock, driver, *facts, self.date, commit)
        return "; ".join(filter(None, parts)) + "."

    @property
    def tensor_peak(self) -> int | None:
        """Most 16-bit operations per cycle of the tensor cores of all SMs; None if the GPU's number
        of SMs is not known."""
        sms = SM_COUNTS.get(self.gpu)
        rate = sms and tensor_peak(int(self.compute_capability.replace(".", "")))
        return sms * rate if sms and rate else None

    @property
    def built_with(self) -> str:
        """The compiler of the kernels, in words for `sentence`; "" if unknown."""
        return f"kernels built with {self.library}" if self.library else ""


@dataclass(frozen=True)
class Load:
    """Work of the chip around a sample.

    sample_ms: least duration of a sample, which launches as often as that takes.
    lead_ms: milliseconds that the contender runs untimed right before its sample, while the host
        waits for the sample before it, so that the chip is never idle. Before the first round the
        chip is kept busy until its speed is steady.
    rest: least idle time of the chip after a sample, as a multiple of the sample's time. The chip
        idles until it draws little power (flash_helpers.measure.machine.GpuSensor.rest).
    """

    name: str
    sample_ms: float
    lead_ms: float = 0.0
    rest: float = 0.0

    @property
    def slice_ms(self) -> float:
        """Wall-clock milliseconds per sample, if no launch is longer."""
        return self.lead_ms + self.sample_ms * (1 + self.rest)


# A power-limited chip is faster in the first milliseconds after a pause than under sustained load:
# cuDNN at 4096 on an H100 by a quarter. A burst is a few launches on a chip that idles for two
# thirds of the time. Under sustained load the power limiter needs more than a tenth of a second to
# settle on a contender. With a lead of 80 ms, flash ran 10% fast after step 1, which draws little.
LOADS: Mapping[str, Load] = MappingProxyType(
    {
        BURST: Load(BURST, sample_ms=10.0, rest=2.0),
        SUSTAINED: Load(SUSTAINED, sample_ms=250.0, lead_ms=500.0),
    }
)


@dataclass(frozen=True)
class Protocol:
    """Protocol of a measurement.

    rounds: most samples per contender and load.
    min_rounds: samples per contender and load that are taken even if the time budget is spent.
    loads: in order.
    timing: one of TIMING_CHOICES. Launches are replayed from a CUDA graph, or issued one by one.
    cache: one of CACHE_CHOICES. Launches rotate through several sets of inputs, or the L2 cache is
        overwritten before each launch, outside of the timed span.
    mantissa_bits: most mantissa bits of inputs; fp16 has 10, bf16 has 7.
    """

    rounds: int = 7
    min_rounds: int = 3
    loads: tuple[Load, ...] = tuple(LOADS.values())
    inputs: str = "normal"
    seed: int = 0
    timing: str = "graph"
    cache: str = "rotate"
    mantissa_bits: int = FP16_MANTISSA_BITS


# A size, or a problem, which is needed if results have several problems of one size.
Place = int | Problem


@dataclass(frozen=True, kw_only=True)
class BenchmarkResults(RecordFile):
    """Results of one run of the benchmark.

    Ratios of speeds are formed within each round, between neighbouring samples, so that a drifting
    clock cancels (`pairs`). Speeds are in the unit of the operation's metric.

    Arguments of the methods:
    load: name of a load; None stands for `main_load`.
    name: of a contender; BEST_OTHER stands for the fastest library.
    size: of a problem (`OfProblem.size`), or the problem itself if the results have several of one
    size and dtype.
    """

    FORMAT: ClassVar[int] = 4
    HOLDS: ClassVar[str] = "benchmark results"

    provenance: Provenance
    protocol: Protocol
    rates: tuple[RateRecord, ...] = ()
    libraries: tuple[LibraryRecord, ...] = ()
    skipped: tuple[SkippedRecord, ...] = ()
    resources: tuple[ResourceRecord, ...]
    measurements: tuple[Measurement, ...]

    def require_same_run(self, other: BenchmarkResults, path: Path) -> None:
        """Raise ValueError unless the other results can be added to these, as if of one run.

        path: of the file that holds these results.
        """
        own, others = asdict(self.provenance), asdict(other.provenance)
        for name in own:
            if name not in ("date", "command") and own[name] != others[name]:
                raise ValueError(
                    f"{path} was measured with {name} {own[name]!r} and this run has "
                    f"{others[name]!r}: use the file's {name}, or name another file"
                )
        for name, what in (
            ("protocol", "options"),
            ("libraries", "libraries"),
            ("resources", "kernels"),
        ):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"{path} was measured with other {what}: use those, or name another file"
                )

    @functools.cached_property
    def operation(self) -> Operation:
        """The measured operation. Raises ValueError unless there is exactly one."""
        found = {m.operation.name: m.operation for m in self.measurements}
        if not found:
            raise ValueError("the results hold no measurement: run the benchmark first")
        if len(found) > 1:
            raise ValueError(
                f"the results are of {', '.join(found)}: keep each operation in a file of its own"
            )
        return next(iter(found.values()))

    @property
    def library_names(self) -> tuple[str, ...]:
        """Names of the operation's libraries, without the control; none if nothing was measured."""
        return tuple(self.operation.libraries) if self.measurements else ()

    @property
    def first(self) -> str:
        """Name of the library that is 100%; "" if nothing was measured."""
        return next(iter(self.library_names), "")

    @property
    def first_short(self) -> str:
        """Name of the first library in tables."""
        return self.operation.short_name(self.first) if self.measurements else ""

    @property
    def control(self) -> str:
        """Name of the control, the first library's second contender; "" if nothing was measured."""
        return control_name(self.operation) if self.measurements else ""

    @functools.cached_property
    def _valid(self) -> Mapping[tuple[str, Problem, str], Measurement]:
        return {m.key: m for m in self.measurements if m.valid}

    @functools.cached_property
    def _problems(self) -> Mapping[tuple[str, int], Problem]:
        """The problem of each dtype at each size. Raises ValueError if a dtype and a size have
        several problems."""
        found: dict[tuple[str, int], Problem] = {}
        for m in self.measurements:
            known = found.setdefault((m.dtype, m.size), m.asked)
            if known != m.asked:
                raise ValueError(
                    f"the results hold two problems of {m.operation.name} in {m.dtype} at "
                    f"{m.size}, {known} and {m.asked}: name the problem, or keep each in a file of "
                    "its own"
                )
        return found

    @functools.cached_property
    def loads(self) -> list[str]:
        """Names of the loads of the measurements, in order of appearance."""
        return list(dict.fromkeys(m.load for m in self.measurements))

    @functools.cached_property
    def main_load(self) -> str:
        """The default load: bursts if they were measured.

        In bursts every contender runs at the highest clock, and the first library differs least
        from itself, so steps are compared there.
        """
        return BURST if BURST in self.loads else next(iter(self.loads), BURST)

    @property
    def failures(self) -> list[Measurement]:
        """Kernels without a trustworthy time. A library that does not run here is not a failure."""
        return [m for m in self.measurements if m.failure and m.name not in LIBRARY_NAMES]

    @functools.cached_property
    def dtypes(self) -> list[str]:
        """Element types measured, in order of appearance."""
        return list(dict.fromkeys(m.dtype for m in self.measurements))

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Sizes of the problems measured, ascending."""
        return sorted({m.size for m in self.measurements})

    def of_steps(self, steps: Collection[str]) -> BenchmarkResults:
        """Results of some steps: without the kernels of all other steps. steps: ids."""

        def stays(name: str) -> bool:
            return name in ("", *LIBRARY_NAMES) or config_from_short_form(name).step.id in steps

        return replace(
            self,
            skipped=tuple(s for s in self.skipped if stays(s.name)),
            measurements=tuple(m for m in self.measurements if stays(m.name)),
        )

    def names(self, dtype: str) -> list[str]:
        """Contenders of one dtype, in order of appearance."""
        return list(dict.fromkeys(m.name for m in self.measurements if m.dtype == dtype))

    def find(
        self, name: str, dtype: str, size: Place, load: str | None = None
    ) -> Measurement | None:
        """The valid measurement of a contender at one size; None without one.

        Raises ValueError for a size of which the results have several problems.
        """
        if name == BEST_OTHER:
            return self.fastest(self.library_names, dtype, size, load)
        problem = size if isinstance(size, Problem) else self._problems.get((dtype, size))
        return self._valid.get((name, problem, load or self.main_load)) if problem else None

    def fastest(
        self, names: Iterable[str], dtype: str, size: Place, load: str | None = None
    ) -> Measurement | None:
        """The measurement of the fastest contender of some at one size, among those whose outputs
        were compared; None if none was measured."""
        found = (self.find(name, dtype, size, load) for name in names)
        right = (m for m in found if m is not None and m.is_verified)
        return max(right, key=lambda m: m.speed, default=None)

    def speed(
        self, name: str, dtype: str, size: Place | None = None, load: str | None = None
    ) -> float | None:
        """Speed of a contender at one size, or the harmonic mean over all sizes; None if a
        measurement that it needs is missing."""
        sizes = self.sizes if size is None else [size]
        found = [m.speed for n in sizes if (m := self.find(name, dtype, n, load))]
        return statistics.harmonic_mean(found) if found and len(found) == len(sizes) else None

    def microseconds(
        self, name: str, dtype: str, size: Place | None = None, load: str | None = None
    ) -> float | None:
        """Median time of a contender's launch at one size; None for all sizes, which have no common
        time, and if it was not measured."""
        found = None if size is None else self.find(name, dtype, size, load)
        return None if found is None else 1000 * found.median_ms

    def pairs(
        self, name: str, other: str, dtype: str, size: Place, load: str | None = None
    ) -> list[float]:
        """Ratios of a contender's speed to another's at one size, one value per round; none unless
        both were measured.

        Each sample's speed is first divided by the speed of the first library's sample next to it,
        if there is one.
        """
        own, base = (self.find(n, dtype, size, load) for n in (name, other))
        if own is None or base is None:
            return []
        beside_first = bool(own.first_ms and base.first_ms)
        speeds = (
            m.of_first if beside_first else [1 / ms for ms in m.samples_ms] for m in (own, base)
        )
        return [a / b for a, b in zip(*speeds, strict=True)]

    def ratio(
        self,
        name: str,
        other: str,
        dtype: str,
        size: Place | None = None,
        load: str | None = None,
    ) -> float | None:
        """Ratio of a contender's speed to another's: at one size the median of `pairs`; else the
        ratio of the harmonic means over all sizes, each size at its median ratio."""
        if size is not None:
            found = self.pairs(name, other, dtype, size, load)
            return statistics.median(found) if found else None
        own = base = 0.0
        for n in self.sizes:
            speed = self.speed(other, dtype, n, load)
            ratio = self.ratio(name, other, dtype, n, load)
            if speed is None or ratio is None:
                return None
            base += 1 / speed
            own += 1 / (speed * ratio)
        return base / own if own else None

    def noise(self, dtype: str, size: Place | None = None, load: str | None = None) -> float | None:
        """Distance from 1 that the `ratio` of two equal kernels may have, according to the
        control's ratios to the first library; None without a control.

        At one size it is the farther end of the `interval` over the rounds of all sizes, since the
        rounds of one size are too few. For the mean over sizes it is the farthest round, where each
        round has the harmonic mean of its ratios at all sizes. Differences between sizes cancel in
        that mean, as they do in the compared mean.
        """
        each = [self.pairs(self.control, self.first, dtype, n, load) for n in self.sizes]
        if size is not None:
            ratios = list(itertools.chain.from_iterable(each))
            found: Sequence[float] = interval(ratios) if ratios else ()
        else:
            # A round that some sizes had no time for has no mean.
            found = [statistics.harmonic_mean(ratios) for ratios in zip(*each, strict=False)]
        return max((abs(ratio - 1) for ratio in found), default=None)

    def is_equal(
        self,
        name: str,
        other: str,
        dtype: str,
        size: Place | None = None,
        load: str | None = None,
    ) -> bool:
        """Whether the `ratio` of two contenders, at one size or of the means, lies within the
        `noise` there; False if ratio or noise is not known."""
        ratio = self.ratio(name, other, dtype, size, load)
        noise = self.noise(dtype, size, load)
        return ratio is not None and noise is not None and abs(ratio - 1) <= noise

    def of_first(
        self, name: str, dtype: str, size: Place | None = None, load: str | None = None
    ) -> float | None:
        """Ratio of the speed to the first library's, which is PyTorch's flash backend for
        attention: at one size, or of the harmonic means."""
        return self.ratio(name, self.first, dtype, size, load)

    def of_best_other(
        self, name: str, dtype: str, size: Place | None = None, load: str | None = None
    ) -> float | None:
        """Ratio of the speed to the fastest library's: at one size, or of the harmonic means, where
        each size has its own fastest library."""
        return self.ratio(name, BEST_OTHER, dtype, size, load)

    def of_tensor_peak(
        self, name: str, dtype: str, size: Place | None = None, load: str | None = None
    ) -> float | None:
        """Share of the tensor cores' peak at this clock, TFLOP/s / (FLOP per SM and cycle · SMs ·
        SM clock): at one size, or the harmonic mean over all.

        The share is derived, not counted by the chip. The operations are those of the problem, at
        the median time, and the clock is the median of the driver's readings at the end of each
        sample. An SM of compute capability 9.0 does 4096 FLOP per cycle by wgmma
        (flash_helpers.sass.read.opcodes). The result is None if the peak or a clock is not known,
        and for an operation that is not measured in TFLOP/s.
        """
        sizes = self.sizes if size is None else [size]
        measured = [self.find(name, dtype, n, load) for n in sizes]
        peak = self.provenance.tensor_peak
        if peak is None or not all(m and m.sm_mhz for m in measured):
            return None
        if self.operation.metric != TFLOPS:
            return None
        shares = [m.speed * 1e6 / (peak * statistics.median(m.sm_mhz)) for m in measured if m]
        return statistics.harmonic_mean(shares) if shares else None

    def rate(self, name: str, dtype: str, load: str | None = None) -> float | None:
        """TFLOP/s of one of RATE_NAMES; None if it was not measured."""
        key = (name, dtype, load or self.main_load)
        found = (r.tflops for r in self.rates if (r.name, r.dtype, r.load) == key)
        return next(found, None)

    def of_rate(
        self,
        rate: str,
        name: str,
        dtype: str,
        size: Place | None = None,
        load: str | None = None,
    ) -> float | None:
        """Ratio of the speed to one of RATE_NAMES: at one size, or for the harmonic mean over all
        sizes; None for an operation that is not measured in TFLOP/s."""
        if not self.measurements or self.operation.metric != TFLOPS:
            return None
        own, other = self.speed(name, dtype, size, load), self.rate(rate, dtype, load)
        return own / other if own and other else None

    def derived(self, m: Measurement) -> dict[str, float | str | None]:
        """Numbers derived from a valid measurement and its neighbours, by CSV column."""
        place = (m.name, m.dtype, m.asked, m.load)
        first = self.first
        shares = {first: self.of_first(*place)}
        if found := self.pairs(m.name, self.first, *place[1:]):
            shares[f"{first}_low"], shares[f"{first}_high"] = interval(found)
        shares |= {rate: self.of_rate(rate, *place) for rate in RATE_NAMES}
        shares["tensor_peak"] = self.of_tensor_peak(*place)
        shares[BEST_OTHER] = self.of_best_other(*place)
        best = self.find(BEST_OTHER, *place[1:])
        return {
            "median_ms": round(m.median_ms, 6),
            self._speed_column: round(m.speed, 2),
            **{
                name: statistics.median(getattr(m, name)) if getattr(m, name) else None
                for name in READINGS
            },
            **{
                f"percent_of_{name}": None if share is None else round(100 * share, 1)
                for name, share in shares.items()
            },
            BEST_OTHER: best.name if best else None,
        }

    @property
    def _speed_column(self) -> str:
        """Name of the speed's column, after its unit: tflops, gbs."""
        return re.sub(r"\W", "", self.operation.metric.unit).lower()

    def document(self) -> dict[str, Any]:
        """Entries of the file. A valid measurement also has the derived numbers, which are not read
        back."""
        rows = (
            asdict(m) | ({"derived": self.derived(m)} if m.valid else {}) for m in self.measurements
        )
        return super().document() | {"measurements": tuple(rows)}

    def to_csv(self) -> str:
        """CSV of one row per measurement, with the problem's fields and the derived numbers."""
        first = self.first
        columns = (
            *("name", "step", "load", "code"),
            *dict.fromkeys(field for m in self.measurements for field in m.problem),
            *("median_ms", self._speed_column, *READINGS),
            *(f"percent_of_{name}" for name in (first, f"{first}_low", f"{first}_high")),
            *(f"percent_of_{name}" for name in (*RATE_NAMES, "tensor_peak", BEST_OTHER)),
            *(BEST_OTHER, "failure"),
        )

        def cells(m: Measurement) -> list[Any]:
            config = m.config
            found = asdict(m) | m.problem | {"step": config.step.id if config else None}
            found |= dict.fromkeys(READINGS)  # columns with a reading per sample
            found |= self.derived(m) if m.valid else {}
            return [found.get(column) for column in columns]

        return csv_text(columns, map(cells, self.measurements))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval that holds the middle 80% of the values.

    With few rounds it covers nearly all of them: it shows one slow round in three, which quartiles
    would hide, but not one in twenty.
    """
    if len(values) == 1:
        return values[0], values[0]
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def load_results(path: Path) -> BenchmarkResults:
    """Read a file of `BenchmarkResults.save`. Raises as `RecordFile.load` does."""
    return BenchmarkResults.load(path)


def results_for(path: Path | None, root: Path) -> BenchmarkResults | None:
    """The results in a file; without a path those of the repository at `root`, if they exist.

    Raises as `load_results` does.
    """
    if path is not None:
        return load_results(path)
    path = root / RESULTS
    return load_results(path) if path.is_file() else None


def results_by_family(root: Path, results: BenchmarkResults) -> dict[str, BenchmarkResults]:
    """Results that tables, plots and pages show for each family, by the family's name. All families
    of an operation are of one GPU: that of the given results, or where these measure no kernel of
    the operation, another one. A family has the given results, or its own file FAMILY_GPU.json
    below `root`, the last by name. A family of an operation that was not measured has results
    without measurements.

    Raises as `load_results` does, and ValueError for a family that was measured on other GPUs only
    than another of its operation.
    """
    measured = {m.operation.name for m in results.measurements}
    gpus = dict.fromkeys(measured, results.provenance.gpu)
    found = {}
    for name, family in FAMILIES.items():
        operation = family.operation.name
        paths = (root / RESULTS).parent.glob(f"{name}_*.json")
        own = [
            load_results(path)
            for path in sorted(paths)
            if re.fullmatch(r"[a-z]+\d+", path.stem.removeprefix(f"{name}_"))
        ]
        if own:
            gpus.setdefault(operation, own[-1].provenance.gpu)
        same = [of for of in own if of.provenance.gpu == gpus[operation]]
        if own and not same:
            others = ", ".join(sorted({of.provenance.gpu for of in own}))
            raise ValueError(
                f"family {name} was measured on {others}, and other families of {operation} on "
                f"{gpus[operation]}: speeds of two GPUs are not compared, measure {name} on "
                f"{gpus[operation]} (benchmarks/measure_family.py)"
            )
        without = replace(results, measurements=(), libraries=())
        found[name] = same[-1] if same else results if operation in measured else without
    return found


def refuse_another_gpu(path: Path, gpu: str) -> None:
    """Raise ValueError if the file holds results of another GPU, or no results. An absent file
    passes.

    gpu: name of this GPU.
    """
    if path.exists():
        refuse_mixing(path, load_results(path).provenance.gpu, gpu)


def refuse_mixing(path: Path, measured: str, gpu: str) -> None:
    """Raise ValueError unless a file's GPU, `measured`, is this one."""
    if measured != gpu:
        raise ValueError(
            f"{path} holds results of {measured} and this is {gpu}: results of two GPUs are never "
            "mixed, name another file or move the old one away"
        )
