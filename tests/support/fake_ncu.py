"""A stand-in for the program ncu."""

import itertools
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from flash_helpers.measure.nsight import NsightCompute


def symbol_of(name: str) -> str:
    """The name that ncu gives the kernel of a short form."""
    return f"void {name.partition('_')[0]}::forward_kernel<{name}>(ForwardKernelArgs)"


class FakeNcu:
    """Counts `cell(name, metric)` for each kernel of the command, or answers with `tables` by the
    pattern of the kernels' names; refuses a command that names a metric that it `lacks`, as ncu
    does, and `says` which.

    metrics: of this GPU. commands: all that it was given, but for queries.
    """

    def __init__(
        self,
        metrics: Sequence[str],
        cell: Callable[[str, str], str] = lambda name, metric: "7",
        tables: dict[str, str] | None = None,
        lacks: Sequence[str] = (),
        says: str = "==ERROR== Failed to find metric {}",
    ) -> None:
        self.metrics, self.cell, self.tables = metrics, cell, tables
        self.lacks, self.says = lacks, says
        self.commands: list[Sequence[str]] = []

    def profiler(self, raw: Path | None = None) -> NsightCompute:
        """The command line that runs this program."""
        return NsightCompute("ncu", raw, self)

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if "--query-metrics" in command:
            names = {m.partition(".")[0] for m in self.metrics if m not in self.lacks}
            listed = sorted(name for name in names if not name.startswith("launch__"))
            return subprocess.CompletedProcess(command, 0, "\n".join(listed), "")
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0, "NVIDIA Nsight\nVersion 2025.3\n", "")
        self.commands.append(command)
        options = dict(itertools.pairwise(command))
        metrics = options["--metrics"].split(",")
        log = Path(options["--log-file"])
        if missing := [metric for metric in metrics if metric in self.lacks]:
            log.write_text(f"==PROF== hello\n{self.says.format(missing[0])}\n")
            return subprocess.CompletedProcess(command, 1, "", f"ran with --metrics {metrics}")
        if self.tables is not None:
            log.write_text(self.tables[options["--kernel-name"].removeprefix("regex:")])
            return subprocess.CompletedProcess(command, 0, "", "")
        rows = [["ID", "Kernel Name", *metrics]]
        for n, name in enumerate(command[command.index("--kernel") + 1 :]):
            rows.append([str(n), symbol_of(name), *(self.cell(name, m) for m in metrics)])
        lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
        log.write_text("==PROF== hello\n" + "\n".join(lines) + "\n")
        return subprocess.CompletedProcess(command, 0, "", "")
