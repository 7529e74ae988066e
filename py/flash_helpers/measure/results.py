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

RESULTS = Path("benchmarks/results/h100.json")  # what tables, plots and pages show


def control_name(operation: Operation) -> str:
    """Return the name of the first library's second contender, which tells the noise."""
    return f"{operation.first}_again"


# Of attention's libraries.
FLASH = "pytorch_flash"
CUDNN = "pytorch_cudnn"
FLASH_ATTN = "flash_attn"
FA3 = "fa3"
CONTROL = "pytorch_flash_again"
# Of every operation: contenders that are no kernels.
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
BEST_OTHER = "best_other"  # stands for the fastest library, which may be another at each size
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
    """A JSON file of ours: a few entries, and lists of records, each on a line, so that differences
    can be read.

    FORMAT: its number. HOLDS: its contents, in words. A field with a default may be absent, as in
    older files; entries that are no fields, such as those that follow from others, are not read.
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
        """Read what `save` wrote. Raises OSError, and ValueError that names the file for anything
        else."""
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

    Raises ValueError where that is no record.
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
    samples_ms: milliseconds per launch, one value a round, each the mean over a sample's launches.
    first_ms: the same of the operation's first library, of the sample that stands next to it in its
        round; empty if that was not timed.
    sm_mhz, power_w, temperature_c: of the GPU at the end of each sample; empty where the driver
        does not tell.
    max_abs_error, relative_error: the worst of all verifications, before and after timing;
        max_abs_bound, relative_bound: what was allowed there; None of what was not verified.
    failure: why there are no samples to trust; empty if the output was right before and after.
    code: digest of the machine code that was launched (flash_helpers.measure.code); empty for a
        library, and where it is not known.
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
        """The contender, the whole problem and the load: no two results share it."""
        return self.name, self.asked, self.load

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
    def of_first(self) -> list[float]:
        """Speed over that of the first library's sample next to it, one value a round."""
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
        """Whether the output was compared: a copy, which only bounds a speed, has none."""
        return self.relative_bound is not None


@dataclass(frozen=True)
class RateRecord:
    """How fast the chip multiplies matrices, measured in the process that timed the kernels.

    name: a key of RATE_NAMES: a square matrix product of the library, or mma.sync back to back on
        registers. operations: floating-point operations of one launch.
    samples_ms: milliseconds per launch, one value a round. failure: why there are none, or empty.
    """

    name: str
    dtype: str
    operations: int
    samples_ms: tuple[float, ...]
    failure: str
    load: str = SUSTAINED

    @property
    def tflops(self) -> float | None:
        """10^12 floating-point operations a second, at the median time."""
        if not self.samples_ms:
            return None
        return self.operations / (statistics.median(self.samples_ms) * 1e-3) / 1e12


@dataclass(frozen=True)
class LibraryRecord:
    """A package that was measured beside PyTorch, by the name it is installed by, and its
    version."""

    name: str
    version: str


@dataclass(frozen=True)
class SkippedRecord(OfProblem):
    """A contender that was left out of a problem, and why. name: empty if all were left out."""

    problem: dict[str, Any]
    reason: str
    name: str = ""

    @property
    def key(self) -> tuple[str, Problem]:
        """The contender and the whole problem: no two records share it."""
        return self.name, self.asked


@dataclass(frozen=True)
class ResourceRecord:
    """Resources of a kernel on the GPU that was measured.

    registers, local_bytes: per thread. smem_bytes: per block. blocks_per_sm: resident at a time.
    """

    name: str
    registers: int
    local_bytes: int
    smem_bytes: int
    blocks_per_sm: int


@dataclass(frozen=True)
class Provenance:
    """Machine, software and date of a measurement. A text is empty where the machine does not tell.

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
        """The GPU; one that `SM_COUNTS` lacks is taken for the largest of its capability."""
        major, minor = map(int, self.compute_capability.split("."))
        largest = largest_device(10 * major + minor)
        return Device(self.gpu, (major, minor), SM_COUNTS.get(self.gpu, largest.sms))

    def sentence(self, *facts: str, clock: str = "") -> str:
        """The line below a table: GPU, driver, the facts and the sources, without unknown ones.
        clock: its place is behind the GPU."""
        driver = f"driver {self.driver}" if self.driver else ""
        commit = f"commit {self.commit}" if self.commit else ""
        parts = (self.gpu, clock, driver, *facts, self.date, commit)
        return "; ".join(filter(None, parts)) + "."

    @property
    def tensor_peak(self) -> int | None:
        """Operations that the tensor cores of all SMs do in a cycle at most, in 16 bits; None if
        the GPU's number of SMs is not known."""
        sms = SM_COUNTS.get(self.gpu)
        rate = sms and tensor_peak(int(self.compute_capability.replace(".", "")))
        return sms * rate if sms and rate else None

    @property
    def built_with(self) -> str:
        """The compiler of the kernels, as one of the facts."""
        return f"kernels built with {self.library}" if self.library else ""


@dataclass(frozen=True)
class Load:
    """How busy the chip is when a sample is taken.

    sample_ms: a sample launches often enough to take at least so long.
    lead_ms: right before it the contender runs for so long untimed, while the host waits for the
        sample before it: the chip is never idle. Before the first round it is kept busy until its
        speed is steady.
    rest: after a sample the chip idles for so many times the sample's time at least, and until it
        draws little power (flash_helpers.measure.machine.GpuSensor.rest).
    """

    name: str
    sample_ms: float
    lead_ms: float = 0.0
    rest: float = 0.0

    @property
    def slice_ms(self) -> float:
        """Wall-clock milliseconds of a sample, if no launch is longer."""
        return self.lead_ms + self.sample_ms * (1 + self.rest)


# A power-limited chip is faster in the first milliseconds after a pause than under load that stays:
# on an H100 cuDNN at 4096 by a quarter. A burst is few launches of a chip that idles for two thirds
# of the time. Under sustained load the limiter needs longer than a tenth of a second to settle on a
# contender: with a lead of 80 ms, flash behind step 1, which draws little, ran 10% fast.
LOADS: Mapping[str, Load] = MappingProxyType(
    {
        BURST: Load(BURST, sample_ms=10.0, rest=2.0),
        SUSTAINED: Load(SUSTAINED, sample_ms=250.0, lead_ms=500.0),
    }
)


@dataclass(frozen=True)
class Protocol:
    """How each number was taken.

    rounds: samples of a contender under each load, at most.
    min_rounds: samples that are taken even if the time budget is spent.
    loads: in order.
    timing: one of TIMING_CHOICES: launches are replayed from a CUDA graph, or issued one by one.
    cache: one of CACHE_CHOICES: launches go round several sets of inputs, or the L2 cache is
        overwritten before each launch, outside of its time.
    mantissa_bits: of inputs, at most; fp16 has 10, bf16 has 7.
    """

    rounds: int = 7
    min_rounds: int = 3
    loads: tuple[Load, ...] = tuple(LOADS.values())
    inputs: str = "normal"
    seed: int = 0
    timing: str = "graph"
    cache: str = "rotate"
    mantissa_bits: int = FP16_MANTISSA_BITS


# A size, or a problem, which is needed where results have several problems of one size.
Place = int | Problem


@dataclass(frozen=True, kw_only=True)
class BenchmarkResults(RecordFile):
    """Everything that one run of the benchmark found.

    A speed over another's is formed within each round, between samples that stand next to each
    other, so that a clock that drifts cancels: `pairs`. load: name of one; None stands for
    `main_load`. Of a contender's name BEST_OTHER may take the place. size: of a problem
    (`OfProblem.size`), or the problem itself where the results have several of one size and dtype.
    Speeds are in the unit of the operation's metric.
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
        """Raise ValueError unless the other's measurements could stand beside these, as of one run.

        path: of the file that these were read from.
        """
        own, others = asdict(self.provenance), asdict(other.provenance)
        for name in own:
            if name not in ("date", "command") and own[name] != others[name]:
                raise ValueError(
                    f"{path} was measured with {name} {own[name]!r} and this is {others[name]!r}: "
                    "go on with that, or name another file"
                )
        for name, what in (
            ("protocol", "options"),
            ("libraries", "libraries"),
            ("resources", "kernels"),
        ):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"{path} was measured with other {what}: go on with those, or name another file"
                )

    @functools.cached_property
    def operation(self) -> Operation:
        """The operation that was measured. Raises ValueError unless it is one."""
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
        """The library that is 100%; "" if nothing was measured."""
        return next(iter(self.library_names), "")

    @property
    def first_short(self) -> str:
        """Its name in tables."""
        return self.operation.short_name(self.first) if self.measurements else ""

    @property
    def control(self) -> str:
        """The first library once more; "" if nothing was measured."""
        return control_name(self.operation) if self.measurements else ""

    @functools.cached_property
    def _valid(self) -> Mapping[tuple[str, Problem, str], Measurement]:
        return {m.key: m for m in self.measurements if m.valid}

    @functools.cached_property
    def _problems(self) -> Mapping[tuple[str, int], Problem]:
        """The problem of each dtype at each size. Raises ValueError where there are several."""
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

    @property
    def loads(self) -> list[str]:
        """Names of the loads measured under, in order of appearance."""
        return list(dict.fromkeys(m.load for m in self.measurements))

    @property
    def main_load(self) -> str:
        """The load that is meant where none is named: bursts if they were measured.

        Steps are compared where the clock does not move: in bursts every contender runs at the
        highest one, and flash differs least from itself.
        """
        return BURST if BURST in self.loads else next(iter(self.loads), BURST)

    @property
    def failures(self) -> list[Measurement]:
        """Kernels without a trustworthy time; a library that does not run here is no failure."""
        return [m for m in self.measurements if m.failure and m.name not in LIBRARY_NAMES]

    @property
    def dtypes(self) -> list[str]:
        """Element types measured, in order of appearance."""
        return list(dict.fromkeys(m.dtype for m in self.measurements))

    @property
    def sizes(self) -> list[int]:
        """Sizes of the problems measured, ascending."""
        return sorted({m.size for m in self.measurements})

    def of_steps(self, steps: Collection[str]) -> BenchmarkResults:
        """Without the kernels of all other steps. steps: ids."""

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
        """The valid measurement of a contender at one size, if there is one.

        Raises ValueError for a size of which the results have several problems.
        """
        if name == BEST_OTHER:
            return self.fastest(self.library_names, dtype, size, load)
        problem = size if isinstance(size, Problem) else self._problems.get((dtype, size))
        return self._valid.get((name, problem, load or self.main_load)) if problem else None

    def fastest(
        self, names: Iterable[str], dtype: str, size: Place, load: str | None = None
    ) -> Measurement | None:
        """The measurement of the fastest of some contenders at one size, if one was measured; of
        those whose outputs were compared."""
        found = (self.find(name, dtype, size, load) for name in names)
        right = (m for m in found if m is not None and m.is_verified)
        return max(right, key=lambda m: m.speed, default=None)

    def speed(
        self, name: str, dtype: str, size: Place | None = None, load: str | None = None
    ) -> float | None:
        """Speed of a contender at one size, or the harmonic mean over all of them; None if one that
        it takes is missing."""
        sizes = self.sizes if size is None else [size]
        found = [m.speed for n in sizes if (m := self.find(name, dtype, n, load))]
        return statistics.harmonic_mean(found) if found and len(found) == len(sizes) else None

    def pairs(
        self, name: str, other: str, dtype: str, size: Place, load: str | None = None
    ) -> list[float]:
        """A contender's speed over another's at one size, one value a round; none unless both
        were measured.

        Each sample's speed is taken over that of the first library's sample next to it, if there is
        one, before the two are divided.
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
        """A contender's speed over another's: the median of `pairs` at one size; else of the
        harmonic means over all, when each size has the ratio of its median."""
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
        """How far from 1 the `ratio` of two equal kernels lies, told from the control's ratios to
        the first library; None without a control.

        At one size, the farther end of the `interval` of the rounds of all sizes: its own are too
        few to tell. Of the mean over sizes, the farthest of the rounds, each with the harmonic mean
        of its ratios at all sizes: what differs from size to size cancels there as it does in the
        mean that is compared.
        """
        each = [self.pairs(self.control, self.first, dtype, n, load) for n in self.sizes]
        if size is not None:
            ratios = list(itertools.chain.from_iterable(each))
            found: Sequence[float] = interval(ratios) if ratios else ()
        else:
            # a round that some sizes had no time for has no mean
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
        `noise` of the same; False if one of the two is not known."""
        ratio = self.ratio(name, other, dtype, size, load)
        noise = self.noise(dtype, size, load)
        return ratio is not None and noise is not None and abs(ratio - 1) <= noise

    def of_first(
        self, name: str, dtype: str, size: Place | None = None, load: str | None = None
    ) -> float | None:
        """Speed over that of the first library, which is PyTorch's flash backend for attention: at
        one size, or of the harmonic means."""
        return self.ratio(name, self.first, dtype, size, load)

    def of_best_other(
        self, name: str, dtype: str, size: Place | None = None, load: str | None = None
    ) -> float | None:
        """Speed over that of the fastest library: at one size, or of the harmonic means, when
        each size has its own fastest."""
        return self.ratio(name, BEST_OTHER, dtype, size, load)

    def of_tensor_peak(
        self, name: str, dtype: str, size: Place | None = None, load: str | None = None
    ) -> float | None:
        """Share of the tensor cores' peak at this clock, TFLOP/s / (FLOP per SM and cycle · SMs ·
        SM clock): at one size, or the harmonic mean over all.

        Derived, not counted by the chip: the operations are those of the problem, at the median
        time, and the clock is the median of what the driver told at the end of each sample. An SM
        does 4096 FLOP a cycle on 9.0, by wgmma (flash_helpers.sass.read.opcodes). None where the
        peak or a clock is not known, and for an operation that is not measured in TFLOP/s.
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
        """TFLOP/s of one of RATE_NAMES, if it was measured."""
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
        """Speed over one of RATE_NAMES: at one size, or of the harmonic mean over all; None for an
        operation that is not measured in TFLOP/s."""
        if not self.measurements or self.operation.metric != TFLOPS:
            return None
        own, other = self.speed(name, dtype, size, load), self.rate(rate, dtype, load)
        return own / other if own and other else None

    def derived(self, m: Measurement) -> dict[str, float | str | None]:
        """Numbers that follow from a valid measurement and its neighbours, by CSV column."""
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
        """The speed's name in columns, its unit: tflops, gbs."""
        return re.sub(r"\W", "", self.operation.metric.unit).lower()

    def document(self) -> dict[str, Any]:
        """The entries; a valid measurement also has the derived numbers, which are not read
        back."""
        rows = (
            asdict(m) | ({"derived": self.derived(m)} if m.valid else {}) for m in self.measurements
        )
        return super().document() | {"measurements": tuple(rows)}

    def to_csv(self) -> str:
        """One row a measurement, with the problem's fields and the derived numbers."""
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
            found |= dict.fromkeys(READINGS)  # of a sample each
            found |= self.derived(m) if m.valid else {}
            return [found.get(column) for column in columns]

        return csv_text(columns, map(cells, self.measurements))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the middle 80% of the values.

    Of few rounds that is nearly all of them: a dip of one in three is shown, while one in twenty
    does not make the interval. The quartiles of three rounds would hide it.
    """
    if len(values) == 1:
        return values[0], values[0]
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def load_results(path: Path) -> BenchmarkResults:
    """Read what `BenchmarkResults.save` wrote. Raises as `RecordFile.load` does."""
    return BenchmarkResults.load(path)


def results_by_family(root: Path, results: BenchmarkResults) -> dict[str, BenchmarkResults]:
    """Results that tables, plots and pages show for each family, by its name, all of one GPU: the
    given ones, unless the repository at root has a file FAMILY_GPU.json of that GPU.

    Raises as `load_results` does, and ValueError for a family that was measured on other GPUs only.
    """
    gpu = results.provenance.gpu
    found = dict.fromkeys(FAMILIES, results)
    for family in FAMILIES:
        paths = (root / RESULTS).parent.glob(f"{family}_*.json")
        own = [
            load_results(path)
            for path in sorted(paths)
            if re.fullmatch(r"[a-z]+\d+", path.stem.removeprefix(f"{family}_"))
        ]
        same = [of for of in own if of.provenance.gpu == gpu]
        if own and not same:
            others = ", ".join(sorted({of.provenance.gpu for of in own}))
            raise ValueError(
                f"family {family} was measured on {others}, and the other families on {gpu}: "
                "speeds of two GPUs are not compared, measure it on that one "
                "(benchmarks/measure_family.py)"
            )
        found[family] = same[-1] if same else results
    return found


def best_files(root: Path) -> list[Path]:
    """The files below the repository of what a call gets that names no kernel, FAMILY_best_*.json,
    by GPU."""
    return sorted((root / RESULTS).parent.glob("*_best_*.json"))


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
