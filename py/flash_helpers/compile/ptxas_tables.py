"""Messages of ptxas about many kernels, as a table, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from flash_helpers.compile.ptxas import PtxasReport, parse_ptxas_log
from flash_helpers.console.file_kinds import FileKind, mistaken
from flash_helpers.console.tables import Table, csv_text, json_text
from flash_helpers.kernel_configs import Config, find_config

STDIN = "-"

_COLUMNS = {
    "kernel": "kernel",
    "architecture": "arch",
    "registers": "registers",
    "spill_store_bytes": "spill stores",
    "spill_load_bytes": "spill loads",
    "stack_bytes": "stack",
    "smem_bytes": "static smem",
    "cmem_bytes": "cmem",
    "barriers": "barriers",
}


class LogError(ValueError):
    """A log that tells nothing or too little of a kernel: the reason, and a way out."""


@dataclass(frozen=True)
class LogEntry:
    """One kernel compiled for one architecture, and the log that told of it."""

    log: str
    report: PtxasReport

    @property
    def config(self) -> Config | None:
        """The kernel's config; None if it is no kernel of this library."""
        return find_config(self.report.symbol)

    @property
    def kernel(self) -> str:
        """Short form of the kernel's config; its symbol if it is no kernel of this library."""
        config = self.config
        return config.short_form() if config else self.report.symbol

    def row(self) -> dict[str, Any]:
        """The columns of the table; constant memory is the sum over the banks told of."""
        told, cmem = asdict(self.report), self.report.cmem_bytes
        told |= {"kernel": self.kernel, "architecture": self.report.target}
        told["cmem_bytes"] = sum(cmem.values()) if cmem else None
        return {name: told[name] for name in _COLUMNS}


def _logs(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    logs = sorted(path.rglob("*.log"))
    if not logs:
        raise LogError(f"{path} holds no .log file: name a folder of logs, or the log itself")
    return logs


def _entries(name: str, log: bytes) -> list[LogEntry]:
    try:
        reports = parse_ptxas_log(log.decode(errors="replace"))
        return [LogEntry(name, report) for report in reports]
    except ValueError as error:
        raise LogError(
            f"{name}: {error}; the log is cut off or mixed up: compile again with -Xptxas -v, one "
            "file at a time (nvcc --threads 1)"
        ) from error


def read_logs(names: Iterable[str], stdin: BinaryIO) -> list[LogEntry]:
    """Facts of the logs: kernels of this library in the order of their configs, then the others.

    name: a file, a folder of .log files, or "-" for `stdin`.

    Raises OSError for a file that cannot be read, and LogError for a log that is cut off, or for a
    file or folder that tells of no kernel.
    """
    found = []
    for name in names:
        if name == STDIN:
            logs = {"standard input": stdin.read()}
        else:
            logs = {str(log): log.read_bytes() for log in _logs(Path(name))}
        entries = [entry for log, data in logs.items() for entry in _entries(log, data)]
        if not entries:
            others = (mistaken(log, data, FileKind.LOG) for log, data in logs.items())
            unknown = (
                f"{name} has nothing that ptxas -v says of a kernel: compile with -Xptxas -v and "
                "keep what nvcc writes to stderr"
            )
            raise LogError(next(filter(None, others), unknown))
        found += entries
    return sorted(found, key=_order)


def _order(entry: LogEntry) -> tuple[Any, ...]:
    config = entry.config
    return (0, config, entry.report.architecture) if config else (1,)


def entries_as_text(entries: Sequence[LogEntry]) -> str:
    """A table: a row for each kernel and architecture; bytes, "" where ptxas did not tell."""
    rows = [["" if cell is None else str(cell) for cell in e.row().values()] for e in entries]
    return Table(list(_COLUMNS.values()), rows, "ll").text()


def entries_as_csv(entries: Sequence[LogEntry]) -> str:
    """A row for each kernel and architecture, with its symbol and its log."""
    rows = ([*entry.row().values(), entry.report.symbol, entry.log] for entry in entries)
    return csv_text([*_COLUMNS, "symbol", "log"], rows)


def entries_as_json(entries: Sequence[LogEntry]) -> str:
    """The reports, with constant memory by bank."""
    return json_text([{"kernel": e.kernel, "log": e.log, **asdict(e.report)} for e in entries])
