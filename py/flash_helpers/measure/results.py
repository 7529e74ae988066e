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
from flash_helpers.gpu import SM_COUNTS
from flash_helpers.kernel_configs import (
    FAMILIES,
    AttentionForward,
    Config,
    Element,
    config_from_short_form,
)
from flash_helpers.sass.read.opcodes import tensor_peak

Own = TypeVar("Own", bound="RecordFile")

RESULTS = Path("benchmarks/results/h100.json")  # what tables, plots and pages show

FLASH = "pytorch_flash"
CUDNN = "pytorch_cudnn"
FLASH_ATTN = "flash_attn"
FA3 = "fa3"
CONTROL = "pytorch_flash_again"
LIBRARY_NAMES = {
    FLASH: "PyTorch's flash backend",
    CUDNN: "PyTorch's cuDNN backend",
    FLASH_ATTN: "the flash_attn package",
    FA3: "FlashAttention-3 (fa3_fwd)",
    CONTROL: "PyTorch's flash backend once more, as the control",
}
OTHERS = tuple(name for name in LIBRARY_NAMES if name != CONTROL)
BEST_OTHER = "best_other"  # stands for the fastest of OTHERS, which may be another at each length
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

CSV_COLUMNS = (
    *("name", "step", "load", "dtype"),
    *("batch", "n_heads", "kv_heads", "seq_len", "d_head", "causal"),
    *("median_ms", "tflops", *READINGS),
    *("percent_of_flash", "percent_of_flash_low", "percent_of_flash_high"),
    *(f"percent_of_{name}" for name in (*RATE_NAMES, "tensor_peak", BEST_OTHER)),
    *(BEST_OTHER, "failure"),
)


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


@dataclass(frozen=True)
class Measurement:
    """One contender on one problem under one load.

    name: a kernel's short form, or a key of LIBRARY_NAMES.
    kv_heads, causal: of the problem, as in AttentionForward; in files from before they were
        written, as many as n_heads, and False.
    ran: short form of the config that was launched for it; empty for a library.
    samples_ms: milliseconds per launch, one value a round, each the mean over a sample's launches.
    flash_ms: the same of PyTorch's flash backend, of the sample that stands next to it in its
        round; empty if that backend was not timed.
    sm_mhz, power_w, temperature_c: of the GPU at the end of each sample; empty where the driver
        does not tell.
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
    load: str = SUSTAINED
    flash_ms: tuple[float, ...] = ()
    sm_mhz: tuple[float, ...] = ()
    power_w: tuple[float, ...] = ()
    temperature_c: tuple[float, ...] = ()
    kv_heads: int | None = None
    causal: bool = False

    @property
    def problem(self) -> AttentionForward:
        """The measured problem."""
        return AttentionForward(
            *(self.batch, self.n_heads, self.seq_len, self.d_head, Element.from_name(self.dtype)),
            kv_heads=self.kv_heads,
            causal=self.causal,
        )

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
    def of_flash(self) -> list[float]:
        """Speed over that of the flash backend's sample next to it, one value a round."""
        return [flash / own for flash, own in zip(self.flash_ms, self.samples_ms, strict=True)]

    @property
    def tflops(self) -> float:
        """10^12 floating-point operations a second, at the median time."""
        return self.problem.operations / (self.median_ms * 1e-3) / 1e12


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
class SkippedRecord:
    """A contender that was left out of a problem, and why. name: empty if all were left out."""

    dtype: str
    seq_len: int
    reason: str
    name: str = ""


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


@dataclass(frozen=True, kw_only=True)
class BenchmarkResults(RecordFile):
    """Everything that one run of the benchmark found.

    A speed over another's is formed within each round, between samples that stand next to each
    other, so that a clock that drifts cancels: `pairs`. load: name of one; None stands for
    `main_load`. Of a contender's name BEST_OTHER may take the place.
    """

    FORMAT: ClassVar[int] = 3
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
    def _valid(self) -> Mapping[tuple[str, str, int, str], Measurement]:
        return {(m.name, m.dtype, m.seq_len, m.load): m for m in self.measurements if m.valid}

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
    def seq_lens(self) -> list[int]:
        """Sequence lengths measured, ascending."""
        return sorted({m.seq_len for m in self.measurements})

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
        self, name: str, dtype: str, seq_len: int, load: str | None = None
    ) -> Measurement | None:
        """The valid measurement of a contender at one length, if there is one."""
        if name == BEST_OTHER:
            return self.fastest(OTHERS, dtype, seq_len, load)
        return self._valid.get((name, dtype, seq_len, load or self.main_load))

    def fastest(
        self, names: Iterable[str], dtype: str, seq_len: int, load: str | None = None
    ) -> Measurement | None:
        """The measurement of the fastest of some contenders at one length, if one was measured."""
        found = (self.find(name, dtype, seq_len, load) for name in names)
        return max(filter(None, found), key=lambda m: m.tflops, default=None)

    def tflops(
        self, name: str, dtype: str, seq_len: int | None = None, load: str | None = None
    ) -> float | None:
        """TFLOP/s of a contender at one length, or the harmonic mean over all of them; None if one
        that it takes is missing."""
        lengths = self.seq_lens if seq_len is None else [seq_len]
        found = [m.tflops for n in lengths if (m := self.find(name, dtype, n, load))]
        return statistics.harmonic_mean(found) if found and len(found) == len(lengths) else None

    def pairs(
        self, name: str, other: str, dtype: str, seq_len: int, load: str | None = None
    ) -> list[float]:
        """A contender's speed over another's at one length, one value a round; none unless both
        were measured.

        Each sample's speed is taken over that of the flash backend's sample next to it, if there is
        one, before the two are divided.
        """
        own, base = (self.find(n, dtype, seq_len, load) for n in (name, other))
        if own is None or base is None:
            return []
        beside_flash = bool(own.flash_ms and base.flash_ms)
        speeds = (
            m.of_flash if beside_flash else [1 / ms for ms in m.samples_ms] for m in (own, base)
        )
        return [a / b for a, b in zip(*speeds, strict=True)]

    def ratio(
        self,
        name: str,
        other: str,
        dtype: str,
        seq_len: int | None = None,
        load: str | None = None,
    ) -> float | None:
        """A contender's speed over another's: the median of `pairs` at one length; else of the
        harmonic means over all, when each length has the ratio of its median."""
        if seq_len is not None:
            found = self.pairs(name, other, dtype, seq_len, load)
            return statistics.median(found) if found else None
        own = base = 0.0
        for n in self.seq_lens:
            speed = self.tflops(other, dtype, n, load)
            ratio = self.ratio(name, other, dtype, n, load)
            if speed is None or ratio is None:
                return None
            base += 1 / speed
            own += 1 / (speed * ratio)
        return base / own if own else None

    def noise(
        self, dtype: str, seq_len: int | None = None, load: str | None = None
    ) -> float | None:
        """How far from 1 the `ratio` of two equal kernels lies, told from the control's ratios to
        flash; None without a control.

        At one length, the farther end of the `interval` of the rounds of all lengths: its own are
        too few to tell. Of the mean over lengths, the farthest of the rounds, each with the
        harmonic mean of its ratios at all lengths: what differs from length to length cancels there
        as it does in the mean that is compared.
        """
        lengths = [self.pairs(CONTROL, FLASH, dtype, n, load) for n in self.seq_lens]
        if seq_len is not None:
            ratios = list(itertools.chain.from_iterable(lengths))
            found: Sequence[float] = interval(ratios) if ratios else ()
        else:
            # a round that some lengths had no time for has no mean
            found = [statistics.harmonic_mean(ratios) for ratios in zip(*lengths, strict=False)]
        return max((abs(ratio - 1) for ratio in found), default=None)

    def is_equal(
        self,
        name: str,
        other: str,
        dtype: str,
        seq_len: int | None = None,
        load: str | None = None,
    ) -> bool:
        """Whether the `ratio` of two contenders, at one length or of the means, lies within the
        `noise` of the same; False if one of the two is not known."""
        ratio = self.ratio(name, other, dtype, seq_len, load)
        noise = self.noise(dtype, seq_len, load)
        return ratio is not None and noise is not None and abs(ratio - 1) <= noise

    def of_flash(
        self, name: str, dtype: str, seq_len: int | None = None, load: str | None = None
    ) -> float | None:
        """Speed over that of PyTorch's flash backend: at one length, or of the harmonic means."""
        return self.ratio(name, FLASH, dtype, seq_len, load)

    def of_best_other(
        self, name: str, dtype: str, seq_len: int | None = None, load: str | None = None
    ) -> float | None:
        """Speed over that of the fastest library: at one length, or of the harmonic means, when
        each length has its own fastest."""
        return self.ratio(name, BEST_OTHER, dtype, seq_len, load)

    def of_tensor_peak(
        self, name: str, dtype: str, seq_len: int | None = None, load: str | None = None
    ) -> float | None:
        """Share of the tensor cores' peak at this clock, TFLOP/s / (FLOP per SM and cycle · SMs ·
        SM clock): at one length, or the harmonic mean over all.

        Derived, not counted by the chip: the operations are those of the problem, at the median
        time, and the clock is the median of what the driver told at the end of each sample. An SM
        does 4096 FLOP a cycle on 9.0, by wgmma (flash_helpers.sass.read.opcodes). None where the
        peak or a clock is not known.
        """
        lengths = self.seq_lens if seq_len is None else [seq_len]
        measured = [self.find(name, dtype, n, load) for n in lengths]
        peak = self.provenance.tensor_peak
        if peak is None or not all(m and m.sm_mhz for m in measured):
            return None
        shares = [m.tflops * 1e6 / (peak * statistics.median(m.sm_mhz)) for m in measured if m]
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
        seq_len: int | None = None,
        load: str | None = None,
    ) -> float | None:
        """Speed over one of RATE_NAMES: at one length, or of the harmonic mean over all."""
        own, other = self.tflops(name, dtype, seq_len, load), self.rate(rate, dtype, load)
        return own / other if own and other else None

    def derived(self, m: Measurement) -> dict[str, float | str | None]:
        """Numbers that follow from a valid measurement and its neighbours, by CSV column."""
        place = (m.name, m.dtype, m.seq_len, m.load)
        shares = {"flash": self.of_flash(*place)}
        if found := self.pairs(m.name, FLASH, *place[1:]):
            shares["flash_low"], shares["flash_high"] = interval(found)
        shares |= {rate: self.of_rate(rate, *place) for rate in RATE_NAMES}
        shares["tensor_peak"] = self.of_tensor_peak(*place)
        shares[BEST_OTHER] = self.of_best_other(*place)
        best = self.find(BEST_OTHER, *place[1:])
        return {
            "median_ms": round(m.median_ms, 6),
            "tflops": round(m.tflops, 2),
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
            found |= dict.fromkeys(READINGS)  # of a sample each
            found |= self.derived(m) if m.valid else {}
            return [found.get(column) for column in CSV_COLUMNS]

        return csv_text(CSV_COLUMNS, map(cells, self.measurements))


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
    """Results that tables, plots and pages show for each family, by its name: the given ones,
    unless the repository at root has a file FAMILY_GPU.json for a GPU such as h200.

    Raises as `load_results` does.
    """
    own = {
        family: load_results(path)
        for family in FAMILIES
        for path in sorted((root / RESULTS).parent.glob(f"{family}_*.json"))
        if re.fullmatch(r"[a-z]+\d+", path.stem.removeprefix(f"{family}_"))
    }
    return dict.fromkeys(FAMILIES, results) | own


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
