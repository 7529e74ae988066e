"""Questions to the measuring process, and a journal that keeps its answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from flash_helpers.compile.cubins import Cubin, code_of
from flash_helpers.measure.results import Measurement, Protocol
from flash_helpers.registry.operation import Operation
from flash_helpers.tune.process import (
    CompiledConfig,
    KernelFile,
    Request,
    WorkerError,
    WorkerInfo,
    WorkerNotStarted,
    WorkerProcess,
)


@dataclass(frozen=True)
class JournalEntry:
    """Outcome of one question to the measuring process. failure: reason for distrusting the
    measurements, or empty."""

    key: str
    failure: str
    measurements: tuple[Measurement, ...]


class Journal:
    """Answers of the measuring process, by question, in a file that is only appended to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, JournalEntry] = {}
        for line in path.read_text().splitlines() if path.is_file() else ():
            # A line that was cut short or has an older format: measure again.
            with contextlib.suppress(ValueError):
                entry = msgspec.json.decode(line, type=JournalEntry)
                self._entries[entry.key] = entry

    def find(self, key: str) -> JournalEntry | None:
        """The entry under a key; None without one."""
        return self._entries.get(key)

    def note(self, entry: JournalEntry) -> None:
        """Keep an entry; it is on the disk when this returns."""
        self._entries[entry.key] = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_whole = not self._path.exists() or self._path.read_bytes()[-1:] in (b"", b"\n")
        text = json.dumps(asdict(entry), allow_nan=False)
        with self._path.open("a") as file:
            file.write(f"{'' if is_whole else chr(10)}{text}\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True)
class Measurer:
    """One worker and its journal.

    worker: must have been started; info is its answer. kernel_s: most seconds for one config's
    measurement. notes: sizes that were skipped, and the reasons.
    """

    worker: WorkerProcess
    info: WorkerInfo
    journal: Journal
    kernel_s: float
    notes: list[str] = field(default_factory=list, init=False)

    def measure(
        self, compiled: Sequence[Sequence[Cubin]], sizes: Sequence[int], protocol: Protocol
    ) -> JournalEntry:
        """Return the journal's entry, or else the worker's answer, which the journal then keeps.

        compiled: the kernels of each config. Configs are of one operation, and measured on the same
        problems.
        """
        config = compiled[0][0].config
        operation = config.family.operation
        names = [own[0].config.short_form() for own in compiled]
        asked = [
            [code_of(own) for own in compiled],
            names if len(names) > 1 else [],  # a single one may be kept under a name of equal code
            asdict(self.info),
            [config.measured(size).record() for size in sizes],
            asdict(protocol),
        ]
        key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        if (noted := self.journal.find(key)) is not None:
            if len(names) > 1:
                return noted
            own = (replace(m, name=names[0]) if m.ran else m for m in noted.measurements)
            return replace(noted, measurements=tuple(own))
        configs = tuple(
            CompiledConfig(name, tuple(KernelFile(c.name, str(c.path), c.symbol) for c in own))
            for name, own in zip(names, compiled, strict=True)
        )
        request = Request(configs, tuple(sizes), protocol)
        found = self._ask(key, request, operation)
        if any(m.failure for m in found.measurements if m.name == operation.first):
            # The kernel before this one may have damaged memory.
            found = self._ask(key, request, operation)
        self.journal.note(found)
        return found

    def _ask(self, key: str, request: Request, operation: Operation) -> JournalEntry:
        n_configs = len(request.configs)
        timeout_s = self.kernel_s * (1 + n_configs * len(request.sizes))
        try:
            answer = self.worker.ask(request, timeout_s)
        except WorkerNotStarted:
            raise
        except WorkerError as error:
            return JournalEntry(key, str(error), ())
        for skipped in answer.skipped:
            note = f"{skipped.dtype} at {skipped.size} skipped: {skipped.reason}"
            if note not in self.notes:
                self.notes.append(note)
        wrong = [m for m in answer.measurements if m.failure]
        if wrong:
            # A kernel that writes out of bounds may have damaged the next kernel's inputs.
            self.worker.end()
        failure = ""
        if not answer.measurements:
            failure = "no problem fits in the GPU's memory"
        elif any(m.name == operation.first for m in wrong):
            title = operation.libraries[operation.first]
            failure = f"{title} beside it failed: {wrong[0].failure}"
        elif wrong and n_configs == 1:
            failure = wrong[0].failure
        return JournalEntry(key, failure, answer.measurements)
