"""Hardware counters of launches, as Nsight Compute's command line reports them."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flash_helpers.kernel_configs import FAMILIES, Config

_OWN_KERNELS = dict.fromkeys(name for family in FAMILIES.values() for name in family.kernels)
EXECUTED_METRICS = ("smsp__inst_executed.sum", "sm__inst_executed.sum")
TIMEOUT_SECONDS = 600
_ATTEMPTS = 4
_PLACES = ("opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/bin/ncu")
_REFUSED = re.compile(r"metric\w*\W+(?:regex:)?\^?([a-z]\w*__\w+)", flags=re.IGNORECASE)
# A cell of instances may hold a number per instruction of the kernel, more than csv's limit allows.
_MAX_CELL = 2**31 - 1
_DENIED = "ERR_NVGPUCTRPERM"
_INSTANCE = re.compile(r"([A-Za-z_][\w.]*)\s*[:=]\s*(\d[\d,]*(?:\.\d+)?)")

Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class ProfilerError(RuntimeError):
    """Nsight Compute gave no numbers; the message holds its output."""


class ProfilerDenied(ProfilerError):
    """This user may not read the GPU's performance counters."""


def operation_metrics(name: str) -> tuple[str, ...]:
    """Metrics that count executed instructions of a kind, such as "ldsm"."""
    return (f"smsp__inst_executed_op_{name}.sum", f"smsp__sass_inst_executed_op_{name}.sum")


@dataclass(frozen=True)
class ProfiledLaunch:
    """One launch. values: number by metric; None for a metric without a number.

    instances: for each metric the parts of its value by name, such as by opcode. Only metrics that
        have parts are in it, and only if parts were asked for.
    """

    kernel: str
    values: Mapping[str, float | None]
    instances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def _number(text: str) -> float | None:
    """The number in a cell such as "1,024 (HMMA: 512)"; None for a cell without one, such as
    n/a."""
    try:
        found = float(text.partition(" (")[0].replace(",", ""))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _instances(text: str) -> dict[str, float]:
    """The named numbers in a cell such as "96 (HMMA: 64; LDSM: 32)"."""
    found = _INSTANCE.findall(text.partition(" (")[2])
    return {name: float(value.replace(",", "")) for name, value in found}


def _rows(text: str) -> list[list[str]]:
    """Rows of the table in ncu's output, without its messages ("==PROF== ...")."""
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    start = next((n for n, line in enumerate(lines) if line.lstrip('"').startswith("ID")), None)
    if start is None:
        return []
    csv.field_size_limit(_MAX_CELL)
    return [row for row in csv.reader(io.StringIO("\n".join(lines[start:]))) if row]


def parse_csv(text: str) -> list[ProfiledLaunch]:
    """Parse the launches in a table of `ncu --csv`, in order.

    The table may have one row per launch and one column per metric (--page raw, with units in the
    second row), or one row per metric (--page details).

    Raises ProfilerError if there is no such table.
    """
    header, *rows = _rows(text) or [[]]
    if "Kernel Name" not in header:
        raise ProfilerError(f"no table of launches in: {text.strip()[:2000] or '(nothing)'}")
    launches: dict[str, tuple[str, dict[str, str]]] = {}
    for row in rows:
        cells = dict(zip(header, row, strict=False))
        if not cells["ID"].strip().isdigit():
            continue  # the units
        _, texts = launches.setdefault(cells["ID"], (cells["Kernel Name"], {}))
        if "Metric Name" in cells:
            texts[cells["Metric Name"]] = cells.get("Metric Value", "")
        else:
            texts.update((name, cell) for name, cell in cells.items() if "__" in name)
    return [
        ProfiledLaunch(
            kernel,
            {name: _number(text) for name, text in texts.items()},
            {name: found for name, text in texts.items() if (found := _instances(text))},
        )
        for kernel, texts in launches.values()
    ]


def parse_metric_names(text: str) -> frozenset[str]:
    """Names in the output of `ncu --query-metrics`, without suffixes such as ".sum"."""
    return frozenset(re.findall(r"^\s*([a-z]\w*__\w+)", text, flags=re.MULTILINE))


def kernel_pattern(configs: Iterable[Config]) -> str:
    """Regular expression that matches the names of these configs' kernels."""
    return "|".join(dict.fromkeys(name for config in configs for name in config.functions))


def launched_config(kernel: str) -> str | None:
    """Short form in ncu's name of a kernel; None unless the kernel is of this library."""
    # config_from_symbol will not do: ncu leaves out the namespace of an unambiguous name.
    found = re.search(rf"(?:{'|'.join(_OWN_KERNELS)})<\s*(\w+)", kernel)
    return found[1] if found else None


def find_launch(config: str, launches: Iterable[ProfiledLaunch]) -> ProfiledLaunch | None:
    """The first launch of the config with this short form; None without one."""
    return next((launch for launch in launches if launched_config(launch.kernel) == config), None)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfilerError(f"{command[0]} did not run to its end: {error}") from error


@dataclass(frozen=True)
class NsightCompute:
    """The command line of Nsight Compute.

    executable: its path. raw: a folder that keeps its output, for diagnosis; or None.
    """

    executable: str
    raw: Path | None = None
    run: Runner = _run

    @classmethod
    def find(cls, raw: Path | None = None) -> NsightCompute:
        """Find Nsight Compute in PATH or beside CUDA. Raises ProfilerError if it is in neither."""
        found = shutil.which("ncu")
        beside = [path for pattern in _PLACES for path in sorted(Path("/").glob(pattern))]
        if found is None and not beside:
            raise ProfilerError("ncu (Nsight Compute) was found neither in PATH nor beside CUDA")
        return cls(found or str(beside[-1]), raw)

    def _keep(self, name: str, text: str) -> None:
        if self.raw is not None:
            self.raw.mkdir(parents=True, exist_ok=True)
            (self.raw / name).write_text(text)

    def version(self) -> str:
        """Version as Nsight Compute prints it; "" if it prints none."""
        lines = self.run([self.executable, "--version"]).stdout.strip().splitlines()
        return lines[-1].strip() if lines else ""

    def metric_names(self) -> frozenset[str]:
        """All metrics of this GPU, without suffixes; empty if Nsight Compute does not list them."""
        text = self.run([self.executable, "--query-metrics"]).stdout
        self._keep("query_metrics.txt", text)
        return parse_metric_names(text)

    def available(self, metrics: Iterable[str]) -> list[str]:
        """The metrics that this GPU has; all of `metrics` if Nsight Compute lists none.

        Nsight Compute never lists a launch's own numbers and metrics counted by patching the code:
        these are assumed to exist.
        """
        known = self.metric_names()

        def is_there(metric: str) -> bool:
            return _base(metric) in known or metric.startswith("launch__") or "sass" in metric

        return [metric for metric in metrics if not known or is_there(metric)]

    def profile(
        self,
        target: Sequence[str],
        kernel: str,
        metrics: Sequence[str],
        name: str = "profile",
        *,
        instances: bool = False,
    ) -> list[ProfiledLaunch]:
        """Run a program and profile its launches of kernels whose name matches `kernel`.

        Clocks are left as they are. A metric that this GPU does not have is left out of the values.

        target: the command. kernel: a regular expression. name: of the files in `raw`.
        instances: also collect the parts of a metric's value, such as counts by opcode.

        Raises ProfilerError if no launch could be counted, ProfilerDenied if that is not allowed.
        """
        wanted, said = list(metrics), ""
        for attempt in range(_ATTEMPTS):
            if not wanted:
                break
            table, said = self._attempt(target, kernel, wanted, f"{name}_{attempt}", instances)
            with contextlib.suppress(ProfilerError):
                if launches := parse_csv(table):
                    return launches
            if _DENIED in said:
                raise ProfilerDenied(
                    f"ncu may not read the GPU's performance counters ({_DENIED}): run as root, or "
                    f"let all users read them, https://developer.nvidia.com/{_DENIED}"
                )
            bases = {_base(metric) for metric in wanted}
            dropped = bases & _refused(said) or bases - self.metric_names()
            if not dropped:
                break
            wanted = [metric for metric in wanted if _base(metric) not in dropped]
        raise ProfilerError(f"ncu counted nothing: {said.strip()[-2000:] or '(it said nothing)'}")

    def _attempt(
        self, target: Sequence[str], kernel: str, metrics: Sequence[str], name: str, instances: bool
    ) -> tuple[str, str]:
        """The table that Nsight Compute wrote, and all of its output."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log.csv"
            command = [
                *(self.executable, "--csv", "--page", "raw", "--print-units", "base"),
                *(("--print-metric-instances", "details") if instances else ()),
                # Count only: the GPU may be shared, so the clocks stay as they are.
                *("--clock-control", "none", "--cache-control", "none"),
                *("--target-processes", "all", "--log-file", str(log)),
                *("--kernel-name", f"regex:{kernel}", "--metrics", ",".join(metrics)),
            ]
            result = self.run([*command, *target])
            table = log.read_text() if log.is_file() else ""
        said = "\n".join((*_messages(table), result.stderr, result.stdout))
        self._keep(f"{name}.csv", table)
        self._keep(f"{name}.txt", said)
        return table, said


def _base(metric: str) -> str:
    """A metric's name without its suffix."""
    return metric.partition(".")[0]


def _refused(said: str) -> set[str]:
    """Names of the metrics that ncu refuses."""
    # A line that repeats the command names all metrics.
    lines = [line for line in said.splitlines() if "--metrics" not in line]
    return {name for line in lines for name in _REFUSED.findall(line)}


def _messages(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("==")]
