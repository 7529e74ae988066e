"""Measurements by Nsight Compute: time, cycles and hardware counters of kernels."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flash_helpers.console.tables import DASH, Table, csv_text, number
from flash_helpers.kernel_configs import Config, Problem
from flash_helpers.measure.asked import problem_options
from flash_helpers.measure.nsight import (
    EXECUTED_METRICS,
    NsightCompute,
    ProfiledLaunch,
    ProfilerDenied,
    ProfilerError,
    kernel_pattern,
    launched_config,
)
from flash_helpers.measure.results import (
    CUDNN,
    FLASH,
    FLASH_ATTN,
    OfProblem,
    Provenance,
    RecordFile,
)

SHOWN_STALLS = 3

# Names that `--library` takes for libraries of attention, each with its name among the benchmark's
# contenders and the pattern of its kernels' names.
LIBRARY_KERNELS: Mapping[str, tuple[str, str]] = {
    "flash": (FLASH, "flash_fwd"),
    "cudnn": (CUDNN, "cudnn|sdpa|fprop"),
    "flash_attn": (FLASH_ATTN, "flash_fwd"),
}


@dataclass(frozen=True)
class Counter:
    """A number of one launch.

    key: in CSV and JSON, with its unit. title: in tables.
    metrics: of Nsight Compute; the first that the GPU has is taken. factor: from the metric's unit
    to the key's.
    """

    key: str
    title: str
    metrics: tuple[str, ...]
    factor: float = 1.0
    digits: int = 0


_SHARE = "avg.pct_of_peak_sustained_active"

# Nsight Compute's documentation, "Metrics Reference". Where a GPU has both, the pipe of mma.sync is
# counted apart from the pipe of Hopper's own instructions.
COUNTERS = (
    Counter("duration_us", "us", ("gpu__time_duration.sum",), 1e-3, 1),
    Counter("cycles", "cycles", ("gpc__cycles_elapsed.max", "sm__cycles_elapsed.max")),
    Counter("registers_per_thread", "registers", ("launch__registers_per_thread",)),
    Counter("occupancy_percent", "occupancy %", (f"sm__warps_active.{_SHARE}",), digits=1),
    Counter("l2_hit_percent", "L2 hit %", ("lts__t_sector_hit_rate.pct",), digits=1),
    # A sector has 32 bytes. Requests of several SMs that meet on the way to L2 count once.
    Counter("l2_sectors", "sectors of L2", ("lts__t_sectors_srcunit_tex_op_read.sum",)),
    Counter(
        "tensor_pipe_percent",
        "tensor pipe %",
        (
            f"sm__pipe_tensor_op_hmma_cycles_active.{_SHARE}",
            f"sm__pipe_tensor_cycles_active.{_SHARE}",
            f"sm__inst_executed_pipe_tensor.{_SHARE}",
        ),
        digits=1,
    ),
    Counter(
        "bank_conflicts", "bank conflicts", ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",)
    ),
    Counter("instructions", "instructions", EXECUTED_METRICS),
)
# Reasons why a warp did not issue: the same document, "Warp Stall Reasons".
STALL_REASONS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle"),
    *("long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction"),
    *("not_selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
)


def _stall_metric(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


METRICS = (
    *dict.fromkeys(metric for counter in COUNTERS for metric in counter.metrics),
    *map(_stall_metric, STALL_REASONS),
)


@dataclass(frozen=True)
class KernelCounters(OfProblem):
    """One kernel on one problem: means over its launches.

    name: a short form or a library's name, as asked for. kernel: the one that was launched for it.
    values: by key of COUNTERS; None where the GPU has no such number.
    spread: largest over smallest duration, minus 1; None without a duration.
    stalls: cycles that a warp waited for each reason, per issued instruction; largest first.
    """

    name: str
    kernel: str
    problem: dict[str, Any]
    runs: int
    values: Mapping[str, float | None]
    spread: float | None
    stalls: Mapping[str, float]

    @property
    def speed(self) -> float | None:
        """Speed at the mean duration, in the unit of the operation's metric."""
        duration_us = self.values["duration_us"]
        if not duration_us:
            return None
        return self.operation.metric.speed(self.asked, duration_us * 1e-3)

    def stall_text(self) -> str:
        """The SHOWN_STALLS largest stalls, in words; a dash if there are none."""
        shown = [f"{name} {v:.2f}" for name, v in self.stalls.items() if v >= 0.005]
        return ", ".join(shown[:SHOWN_STALLS]) or DASH


@dataclass(frozen=True)
class NcuResults(RecordFile):
    """Results of one run. profiler: its version."""

    FORMAT: ClassVar[int] = 2
    HOLDS: ClassVar[str] = "counters of kernels"

    provenance: Provenance
    profiler: str
    kernels: tuple[KernelCounters, ...]

    def to_csv(self) -> str:
        """CSV of one row per kernel, with a column for each field of its problem, each counter, its
        speed and each stall reason."""
        problem = tuple(dict.fromkeys(name for k in self.kernels for name in k.problem))
        counters = [counter.key for counter in COUNTERS]

        def cells(kernel: KernelCounters) -> list[Any]:
            values = [
                *(kernel.values[key] for key in counters),
                kernel.speed,
                *(kernel.stalls.get(reason) for reason in STALL_REASONS),
            ]
            texts = (None if value is None else f"{value:.6g}" for value in values)
            asked = [kernel.problem.get(name) for name in problem]
            return [kernel.name, kernel.kernel, *asked, kernel.runs, *texts]

        stalls = (f"stall_{reason}" for reason in STALL_REASONS)
        header = ["name", "kernel", *problem, "runs", *counters, "speed", *stalls]
        return csv_text(header, map(cells, self.kernels))


def ncu_table(results: NcuResults) -> str:
    """Table of one row per kernel, and lines on the problems and the machine."""
    titles = [counter.title for counter in COUNTERS]
    units = dict.fromkeys(kernel.operation.metric.unit for kernel in results.kernels)
    header = ["kernel", " or ".join(units), *titles, "stalled warp cycles per instruction"]
    rows = [
        [
            kernel.name,
            number(kernel.speed),
            *(number(kernel.values[c.key], c.digits) for c in COUNTERS),
            kernel.stall_text(),
        ]
        for kernel in results.kernels
    ]
    table = Table(header, rows, "l" + "r" * (len(header) - 2) + "l")
    shapes = dict.fromkeys((str(kernel.asked), kernel.runs) for kernel in results.kernels)
    lines = [f"{problem}: mean of {runs} launches" for problem, runs in shapes]
    spreads = [k.spread for k in results.kernels if k.spread is not None]
    if spreads:
        lines.append(f"largest difference between the launches of a kernel: {max(spreads):.1%}")
    return "\n".join([table.text(), "", *lines, results.provenance.sentence(results.profiler)])


def _averages(launches: Sequence[ProfiledLaunch], metric: str) -> float | None:
    values = [launch.values.get(metric) for launch in launches]
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def average_launches(
    name: str, problem: Problem, launches: Sequence[ProfiledLaunch]
) -> KernelCounters:
    """Means over one kernel's launches, of which there is at least one."""
    values: dict[str, float | None] = {}
    for counter in COUNTERS:
        means = (_averages(launches, metric) for metric in counter.metrics)
        mean = next((value for value in means if value is not None), None)
        values[counter.key] = None if mean is None else mean * counter.factor
    stalls = {reason: _averages(launches, _stall_metric(reason)) for reason in STALL_REASONS}
    found = {reason: value for reason, value in stalls.items() if value is not None}
    durations = [launch.values.get(COUNTERS[0].metrics[0]) for launch in launches]
    measured = [duration for duration in durations if duration]
    return KernelCounters(
        name=name,
        kernel=_short_name(launches[0].kernel),
        problem=problem.record(),
        runs=len(launches),
        values=values,
        spread=max(measured) / min(measured) - 1 if measured else None,
        stalls=dict(sorted(found.items(), key=lambda item: -item[1])),
    )


def _short_name(kernel: str) -> str:
    """Function name without the result type, the arguments and, for a library, the template
    arguments."""
    if found := launched_config(kernel):
        return found
    name = re.sub(r"^void\s+", "", kernel)
    return re.split(r"[<(]", name, maxsplit=1)[0]


def profile_kernels(
    configs: Sequence[Config],
    libraries: Sequence[str],
    shape: Problem,
    runs: int,
    profiler: NsightCompute,
    launcher: Sequence[str],
) -> tuple[list[KernelCounters], list[str]]:
    """Count `runs` launches of each library and config. Return the counters, and a line for each
    library or config that was not counted.

    libraries: keys of LIBRARY_KERNELS; each is run in the dtypes of the configs.
    launcher: command of a program that takes --kernel, --library, --dtype, --repeat and the shape.

    Raises ProfilerDenied if counters may not be read.
    """
    metrics = profiler.available(METRICS)
    sizes = [*problem_options(shape), "--repeat", str(runs)]
    counted: list[KernelCounters] = []
    failures: list[str] = []

    def launches_of(what: str, options: Sequence[str], kernel: str) -> list[ProfiledLaunch]:
        try:
            return profiler.profile([*launcher, *sizes, *options], kernel, metrics, what)
        except ProfilerDenied:
            raise
        except ProfilerError as error:
            failures.append(f"{what}: {error}")
            return []

    for dtype in sorted({config.dtype for config in configs}, key=lambda dtype: dtype.short):
        for library in libraries:
            name, pattern = LIBRARY_KERNELS[library]
            options = ["--dtype", dtype.short, "--library", name]
            if launches := launches_of(f"{name}_{dtype.short}", options, pattern):
                found = average_launches(f"{name} {dtype.short}", shape.in_dtype(dtype), launches)
                counted.append(found)
    names = [config.short_form() for config in configs]
    launches = launches_of("kernels", ["--kernel", *names], kernel_pattern(configs))
    for config in configs:
        ran = config.runs_as(shape.strides()).short_form()
        own = [launch for launch in launches if launched_config(launch.kernel) == ran]
        if own:
            problem = shape.in_dtype(config.dtype)
            counted.append(average_launches(config.short_form(), problem, own))
        elif launches:
            failures.append(f"{config.short_form()}: ncu saw no launch of {ran}")
    return counted, failures
