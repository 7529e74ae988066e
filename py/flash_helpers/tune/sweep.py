"""The search for the fastest configs of a GPU: compile, drop, verify, time, and choose.

Each candidate is compiled on the side and dropped if it spills or does not fit. One that is left is
verified and timed beside PyTorch's flash backend, in turns, in a process of its own
(flash_helpers.tune.process), so that it is ranked by a ratio that a drifting clock leaves alone,
and so that it may hang or crash. Candidates with the same machine code share a measurement. The
fastest few of each version then meet in one run at all lengths, and the harmonic mean decides.

What was measured is in a journal as soon as it is known: a sweep that was stopped goes on there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flash_helpers.compile.cubins import Compiled, Cubin, CubinCompiler, Source
from flash_helpers.files import write_if_different
from flash_helpers.kernel_configs import STEPS, Config, DType, config_from_short_form
from flash_helpers.measure.results import (
    FLASH,
    Measurement,
    Protocol,
    load_measured,
    measured_json,
    read_records,
)
from flash_helpers.tune.process import (
    Answer,
    KernelFile,
    Request,
    WorkerError,
    WorkerInfo,
    WorkerNotStarted,
    WorkerProcess,
)
from flash_helpers.tune.winners import BestConfig

FORMAT = 2
N_FINALISTS = 5
SCREEN_SEQ_LENS = (1024, 4096)
SCREEN_PROTOCOL = Protocol(rounds=5, sample_ms=3.0)
FINAL_PROTOCOL = Protocol(rounds=11, sample_ms=10.0)

TIMED = "timed"
DROPPED = "dropped"  # before it was run
FAILED = "failed"  # when it was run
NOT_RUN = "not run"  # the time was over

Progress = Callable[["SweepRow"], object]


@dataclass(frozen=True)
class SweepRow:
    """What became of one candidate.

    outcome: TIMED, DROPPED, FAILED or NOT_RUN; reason: of all but the first.
    registers, spill_bytes (stores and loads): per thread, as ptxas says; None if it was not
        compiled. smem_bytes: per block.
    code: digest of the machine code; same_as: the candidate of the same code that was run for it.
    of_flash: speed over that of PyTorch's flash backend, of the harmonic means over the lengths of
        the first round; final_of_flash: the same over all lengths, of those that came so far.
    """

    name: str
    step: str
    dtype: str
    outcome: str
    reason: str
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int
    code: str
    same_as: str
    of_flash: float | None
    final_of_flash: float | None
    date: str
    commit: str


@dataclass(frozen=True)
class Limits:
    """What a sweep allows.

    spill_bytes: stores and loads of a thread. kernel_s: seconds that one kernel's measurement may
        take. deadline: of `time.monotonic`, after which no candidate is begun.
    """

    spill_bytes: int
    kernel_s: float
    deadline: float


class Journal:
    """Answers of the measuring process by what was asked, in a file that is only appended to.

    A last line that was not written to its end is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                    self._entries[entry["key"]] = entry
                except (ValueError, KeyError, TypeError):
                    continue

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str) -> tuple[list[Measurement], str] | None:
        """Measurements and failure that were noted under the key, if any were."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:
            return list(read_records(Measurement, entry["measurements"])), entry["failure"]
        except (ValueError, KeyError):
            return None  # of an older format: measure again

    def note(self, key: str, measurements: Iterable[Measurement], failure: str) -> None:
        """Keep what was measured; it is on the disk when this returns."""
        entry = {
            "key": key,
            "failure": failure,
            "measurements": [asdict(m) for m in measurements],
        }
        self._entries[key] = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_whole = not self._path.exists() or self._path.read_bytes()[-1:] in (b"", b"\n")
        with self._path.open("a") as file:
            file.write(f"{'' if is_whole else chr(10)}{json.dumps(entry, allow_nan=False)}\n")
            file.flush()
            os.fsync(file.fileno())


def mean_tflops(measurements: Iterable[Measurement], name: str) -> float | None:
    """Harmonic mean of a contender's speed over all lengths; None if one is missing."""
    own = [m for m in measurements if m.name == name]
    if not own or not all(m.valid for m in own):
        return None
    return statistics.harmonic_mean([m.tflops for m in own])


def _ratio(measurements: Sequence[Measurement], name: str) -> float | None:
    own, flash = (mean_tflops(measurements, n) for n in (name, FLASH))
    return own / flash if own and flash else None


def in_search_order(configs: Iterable[Config], first: Iterable[Config] = ()) -> list[Config]:
    """Every config once: `first`, then the rest in a fixed random order.

    A sweep that is stopped early has then seen some of every corner.
    """
    ahead = list(dict.fromkeys(first))
    rest = sorted(set(configs) - set(ahead))
    random.Random(0).shuffle(rest)
    return [*ahead, *rest]


class Sweep:
    """One search, on the GPU of one worker.

    worker must have been started: info is what it said. seq_lens: of the final round. stamp: the
    date and the commit that rows are marked with.
    """

    def __init__(
        self,
        compiler: CubinCompiler,
        worker: WorkerProcess,
        info: WorkerInfo,
        journal: Journal,
        seq_lens: Sequence[int],
        screen_seq_lens: Sequence[int],
        limits: Limits,
        stamp: tuple[str, str],
    ) -> None:
        self._compiler = compiler
        self._worker = worker
        self._info = info
        self._journal = journal
        self._seq_lens = tuple(seq_lens)
        self._screen_seq_lens = tuple(screen_seq_lens)
        self._limits = limits
        self._date, self._commit = stamp
        self._champions: frozenset[Config] = frozenset()
        self._cubins: dict[Config, Cubin] = {}
        self._by_code: dict[str, SweepRow] = {}
        self._rows: dict[Config, SweepRow] = {}
        self.notes: list[str] = []

    def screen(
        self,
        configs: Iterable[Config],
        progress: Progress,
        champions: Iterable[Config] = (),
    ) -> None:
        """Compile, drop, verify and time the candidates.

        champions: the winners of earlier sweeps; they come first, and may spill.

        Raises WorkerNotStarted if the process that died under one cannot be replaced.
        """
        self._champions = frozenset(champions)
        fitting = []
        for config in in_search_order(configs, first=sorted(self._champions)):
            if config.smem_bytes <= self._info.smem_bytes:
                fitting.append(config)
                continue
            reason = (
                f"needs {config.smem_bytes} bytes of shared memory a block, "
                f"{self._info.gpu} has {self._info.smem_bytes}"
            )
            self._keep(self._row(config, None, DROPPED, reason), progress)
        with contextlib.closing(
            self._compiler.compile_all([Source.of(config) for config in fitting])
        ) as results:
            for compiled in results:
                self._keep(self._screened(compiled), progress)
                if time.monotonic() >= self._limits.deadline:
                    break
        for config in fitting:
            if config not in self._rows:
                reason = "the time budget was spent"
                self._keep(self._row(config, None, NOT_RUN, reason), progress)

    def choose(self, step: str, dtype: DType) -> BestConfig | None:
        """The fastest config of a step in a dtype by a run of the fastest few at all lengths;
        None if none was timed."""
        rows = [
            row
            for config, row in self._rows.items()
            if (config.step.id, config.dtype) == (step, dtype) and row.of_flash is not None
        ]
        fastest: dict[str, Config] = {}
        for row in sorted(rows, key=lambda row: (-(row.of_flash or 0), row.name)):
            if len(fastest) < N_FINALISTS:
                config = config_from_short_form(row.name)
                fastest.setdefault(row.code, config)
        measurements = self._final(list(fastest.values()))
        ratios = {c: _ratio(measurements, c.short_form()) for c in fastest.values()}
        right = {config: ratio for config, ratio in ratios.items() if ratio is not None}
        for config, ratio in right.items():
            self._rows[config] = replace(self._rows[config], final_of_flash=round(ratio, 4))
        if not right:
            return None
        winner = max(right, key=lambda config: right[config])
        name = winner.short_form()
        lengths = sorted({m.seq_len for m in measurements if m.name == name})
        mean = mean_tflops(measurements, name)
        assert mean is not None
        return BestConfig(
            step=step,
            dtype=dtype.short,
            config=name,
            mean_tflops=round(mean, 2),
            of_flash=round(right[winner], 4),
            n_candidates=len({row.code for row in rows}),
            seq_lens=tuple(lengths),
            date=self._date,
            commit=self._commit,
            driver=self._info.driver,
            compiler=".".join(map(str, self._compiler.toolchain.version)),
            torch=self._info.torch,
        )

    def rows(self) -> list[SweepRow]:
        """What became of every candidate, in the order of the configs."""
        return [self._rows[config] for config in sorted(self._rows)]

    def _keep(self, row: SweepRow, progress: Progress) -> None:
        self._rows[config_from_short_form(row.name)] = row
        progress(row)

    def _row(
        self,
        config: Config,
        cubin: Cubin | None,
        outcome: str,
        reason: str = "",
        of_flash: float | None = None,
    ) -> SweepRow:
        report = cubin.report if cubin else None
        return SweepRow(
            name=config.short_form(),
            step=config.step.id,
            dtype=config.dtype.short,
            outcome=outcome,
            reason=reason,
            registers=report.registers if report else None,
            spill_bytes=report.spill_store_bytes + report.spill_load_bytes if report else None,
            smem_bytes=config.smem_bytes,
            code=cubin.code[:16] if cubin else "",
            same_as="",
            of_flash=None if of_flash is None else round(of_flash, 4),
            final_of_flash=None,
            date=self._date,
            commit=self._commit,
        )

    def _screened(self, compiled: Compiled) -> SweepRow:
        config, cubin = compiled.source.config, compiled.cubin
        if cubin is None:
            return self._row(config, None, DROPPED, compiled.failure)
        report, limit = cubin.report, self._limits.spill_bytes
        spilled = report.spill_store_bytes + report.spill_load_bytes
        if spilled > limit and config not in self._champions:
            reason = (
                f"spills: {report.spill_store_bytes} bytes stored and {report.spill_load_bytes} "
                f"loaded a thread, {limit} allowed"
            )
            return self._row(config, cubin, DROPPED, reason)
        self._cubins[config] = cubin
        if (known := self._by_code.get(cubin.code)) is not None:
            return replace(known, name=config.short_form(), same_as=known.name)
        measurements, failure = self._measure([cubin], self._screen_seq_lens, SCREEN_PROTOCOL)
        ratio = None if failure else _ratio(measurements, config.short_form())
        outcome = FAILED if ratio is None else TIMED
        row = self._row(config, cubin, outcome, failure, ratio)
        self._by_code[cubin.code] = row
        return row

    def _final(self, finalists: Sequence[Config]) -> list[Measurement]:
        """Measurements of the finalists, and of PyTorch's flash backend beside them."""
        cubins = [self._cubins[config] for config in finalists]
        if not cubins:
            return []
        measurements, failure = self._measure(cubins, self._seq_lens, FINAL_PROTOCOL)
        if not failure or len(cubins) == 1:
            return self._without_failed(measurements, cubins, failure)
        # One of them took all along: each by itself, beside the flash backend.
        alone: list[Measurement] = []
        for cubin in cubins:
            measurements, failure = self._measure([cubin], self._seq_lens, FINAL_PROTOCOL)
            alone += self._without_failed(measurements, [cubin], failure)
        return alone

    def _without_failed(
        self, measurements: list[Measurement], cubins: Sequence[Cubin], failure: str
    ) -> list[Measurement]:
        for cubin in cubins:
            name = cubin.config.short_form()
            reasons = [failure, *(m.failure for m in measurements if m.name == name)]
            reason = next((reason for reason in reasons if reason), "")
            if reason:
                self._rows[cubin.config] = replace(
                    self._rows[cubin.config], outcome=FAILED, reason=f"final round: {reason}"
                )
        return [] if failure else measurements

    def _key(self, cubins: Sequence[Cubin], seq_lens: Sequence[int], protocol: Protocol) -> str:
        names = [cubin.config.short_form() for cubin in cubins] if len(cubins) > 1 else []
        asked = [
            [cubin.code for cubin in cubins],
            names,
            asdict(self._info),
            list(seq_lens),
            asdict(protocol),
        ]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    def _measure(
        self, cubins: Sequence[Cubin], seq_lens: Sequence[int], protocol: Protocol
    ) -> tuple[list[Measurement], str]:
        """Measurements, and why there are none to trust; from the journal, if it has them."""
        key = self._key(cubins, seq_lens, protocol)
        noted = self._journal.find(key)
        if noted is not None:
            measurements, failure = noted
            if len(cubins) == 1:  # it may have been noted for another name of the same code
                name = cubins[0].config.short_form()
                measurements = [replace(m, name=name) if m.ran else m for m in measurements]
            return measurements, failure
        measurements, failure = self._ask(cubins, seq_lens, protocol)
        if any(m.failure for m in measurements if m.name == FLASH):
            # what the kernel before this one did to memory may be why
            measurements, failure = self._ask(cubins, seq_lens, protocol)
        self._journal.note(key, measurements, failure)
        return measurements, failure

    def _ask(
        self, cubins: Sequence[Cubin], seq_lens: Sequence[int], protocol: Protocol
    ) -> tuple[list[Measurement], str]:
        kernels = tuple(
            KernelFile(cubin.config.short_form(), str(cubin.path), cubin.symbol) for cubin in cubins
        )
        timeout_s = self._limits.kernel_s * (1 + len(cubins) * len(seq_lens))
        try:
            answer = self._worker.ask(Request(kernels, tuple(seq_lens), protocol), timeout_s)
        except WorkerNotStarted:
            raise
        except WorkerError as error:
            return [], str(error)
        self._tell_skipped(answer)
        measurements = list(answer.measurements)
        wrong = [m for m in measurements if m.failure]
        if wrong:
            # a kernel that writes where it should not may have spoilt what the next one reads
            self._worker.end()
        if not measurements:
            return [], "no length fits in the GPU's memory"
        if any(m.name == FLASH for m in wrong):
            return measurements, "the flash backend beside it failed: " + wrong[0].failure
        if wrong and len(cubins) == 1:
            return measurements, wrong[0].failure
        return measurements, ""

    def _tell_skipped(self, answer: Answer) -> None:
        for skipped in answer.skipped:
            note = f"{skipped.dtype} at {skipped.seq_len} skipped: {skipped.reason}"
            if note not in self.notes:
                self.notes.append(note)


@dataclass(frozen=True)
class SweepTable:
    """All that sweeps have found on one GPU."""

    gpu: str
    compute_capability: str
    rows: tuple[SweepRow, ...]

    def updated(self, rows: Iterable[SweepRow]) -> SweepTable:
        """With these in the place of others of their names; by version, dtype and name."""
        by_name = {row.name: row for row in (*self.rows, *rows)}
        ordered = sorted(
            by_name.values(), key=lambda row: (list(STEPS).index(row.step), row.dtype, row.name)
        )
        return replace(self, rows=tuple(ordered))

    def to_json(self) -> str:
        """Text for a file; one line a candidate."""
        head = {"format": FORMAT, "gpu": self.gpu, "compute_capability": self.compute_capability}
        return measured_json(head, {"rows": map(asdict, self.rows)})

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_if_different(path, self.to_json())


def load_sweep(path: Path, gpu: str, compute_capability: str) -> SweepTable:
    """Read what `SweepTable.save` wrote; an empty table if there is no such file.

    Raises OSError, and ValueError for a file of something else or of another GPU.
    """
    if not path.exists():
        return SweepTable(gpu, compute_capability, ())

    def build(data: Mapping[str, Any]) -> SweepTable:
        return SweepTable(
            data["gpu"], data["compute_capability"], read_records(SweepRow, data["rows"])
        )

    table = load_measured(path, "sweep", FORMAT, build)
    if table.gpu != gpu:
        raise ValueError(
            f"{path} is of {table.gpu} and this is {gpu}: results of two GPUs are never mixed, "
            "name another folder"
        )
    return table


def outcomes_text(rows: Iterable[SweepRow]) -> str:
    """How many candidates came to what, e.g. "12 timed, 3 of them by the same code as another; 4
    dropped"."""
    parts = []
    rows = list(rows)
    for outcome in (TIMED, DROPPED, FAILED, NOT_RUN):
        some = [row for row in rows if row.outcome == outcome]
        shared = sum(bool(row.same_as) for row in some)
        note = f", {shared} of them by the same code as another" if shared else ""
        if some:
            parts.append(f"{len(some)} {outcome}{note}")
    return "; ".join(parts)
