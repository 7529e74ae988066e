"""Benchmark results: records, their statistics, and the JSON and CSV that keep them."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from flash_helpers.codegen import write_if_different
from flash_helpers.kernel_configs import FlashForwardKernelConfig

T = TypeVar("T")

FORMAT = 1
FLASH = "pytorch_flash"
CUDNN = "pytorch_cudnn"
LIBRARY_NAMES = {FLASH: "PyTorch's flash backend", CUDNN: "PyTorch's cuDNN backend"}

CSV_COLUMNS = (
    "name",
    "version",
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
    "failure",
)


def attention_flops(batch: int, n_heads: int, seq_len: int, d_head: int) -> int:
    """Floating-point operations of Q @ K^T and P @ V, a multiplication and an addition each."""
    return 4 * batch * n_heads * seq_len**2 * d_head


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
    def config(self) -> FlashForwardKernelConfig | None:
        """The kernel's config; None for a library. Raises ValueError if there is none any more."""
        if self.name in LIBRARY_NAMES:
            return None
        return FlashForwardKernelConfig.from_short_form(self.name)

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
        flops = attention_flops(self.batch, self.n_heads, self.seq_len, self.d_head)
        return flops / (self.median_ms * 1e-3) / 1e12


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
    """

    rounds: int = 7
    warmup_rounds: int = 1
    min_rounds: int = 3
    sample_ms: float = 10.0
    inputs: str = "normal"
    seed: int = 0


@dataclass(frozen=True)
class BenchmarkResults:
    """Everything that one run of the benchmark found."""

    provenance: Provenance
    protocol: Protocol
    clocks: tuple[ClockRecord, ...]
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

    def to_json(self) -> str:
        """Text for a file; one line a measurement, so that differences can be read."""
        head = {
            "format": FORMAT,
            "provenance": asdict(self.provenance),
            "protocol": asdict(self.protocol),
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        for key in ("clocks", "resources", "measurements"):
            records = getattr(self, key)
            rows = ",\n".join(f"    {json.dumps(asdict(r), allow_nan=False)}" for r in records)
            lines.append(f'  "{key}": [\n{rows}\n  ]')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def to_csv(self) -> str:
        """One row a measurement, with the derived numbers."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for m in self.measurements:
            config = m.config
            row: list[Any] = [
                m.name,
                config.version if config else "",
                m.dtype,
                m.batch,
                m.n_heads,
                m.seq_len,
                m.d_head,
            ]
            if m.valid:
                first, third = m.quartiles_ms
                percent = self.of_flash(m.name, m.dtype, m.seq_len)
                row += [f"{m.median_ms:.6f}", f"{first:.6f}", f"{third:.6f}", f"{m.tflops:.2f}"]
                row += [f"{100 * percent:.1f}" if percent else "", ""]
            else:
                row += ["", "", "", "", "", m.failure]
            writer.writerow(row)
        return text.getvalue()

    def save_json(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_if_different(path, self.to_json())

    def save_csv(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_if_different(path, self.to_csv())


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
    return load_measured(
        path,
        "benchmark results",
        FORMAT,
        lambda data: BenchmarkResults(
            provenance=read_record(Provenance, data["provenance"]),
            protocol=read_record(Protocol, data["protocol"]),
            clocks=read_records(ClockRecord, data["clocks"]),
            resources=read_records(ResourceRecord, data["resources"]),
            measurements=read_records(Measurement, data["measurements"]),
        ),
    )
