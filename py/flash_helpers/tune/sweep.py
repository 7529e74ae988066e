"""The search for the fastest configs of a GPU: compile, drop, verify, time, and choose.

Each candidate is compiled in the background and dropped if it spills or does not fit. A candidate
that is left is verified and timed in turns with the operation's first library, so that the ratio
which ranks it does not depend on a drifting clock. This happens in a separate process
(flash_helpers.tune.process), which a candidate may crash or hang. Candidates with the same machine
code share a measurement. The fastest few of each step then meet in one run at all sizes, and the
harmonic mean decides.

A journal keeps each measurement at once, so that an interrupted sweep can continue.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from flash_helpers.compile.cache import Compiled
from flash_helpers.compile.cubins import Cubin, code_of, read_cubin
from flash_helpers.compile.jit import Jit, units_of
from flash_helpers.compile.sources import Unit
from flash_helpers.kernel_configs import STEPS, Config, Element, config_from_short_form
from flash_helpers.measure.results import (
    LOADS,
    SUSTAINED,
    Load,
    Measurement,
    Protocol,
)
from flash_helpers.registry.selection import first_refusal
from flash_helpers.tune.measurer import Measurer
from flash_helpers.tune.winners import BestAtSize, BestConfig, GpuFile

N_FINALISTS = 5
AT_LENGTH_GAIN = 1.01
SCREEN_SIZES = (1024, 4096)
# Short samples, one after the other, since candidates are ranked by a ratio within a round. Samples
# so close together share one clock, and a contender that draws more power does not pay for it. In
# the last round the power limiter settles on each contender.
SCREEN_PROTOCOL = Protocol(rounds=5, loads=(Load("turns", sample_ms=3.0),))
FINAL_PROTOCOL = Protocol(rounds=3, loads=(LOADS[SUSTAINED],))

TIMED = "timed"
DROPPED = "dropped"  # before it was run
FAILED = "failed"  # when it was run
NOT_RUN = "not run"  # the time budget was spent

Progress = Callable[["SweepRow"], object]


@dataclass(frozen=True)
class SweepRow:
    """Outcome of one candidate.

    outcome: TIMED, DROPPED, FAILED or NOT_RUN. reason: of every outcome except TIMED.
    registers, spill_bytes (stores and loads): per thread, as ptxas reports, the most of its kernels
    and the sum over them; None if the candidate was not compiled. smem_bytes: per thread block.
    code: digest of the machine code. same_as: the candidate of the same code that was run for it.
    of_first: ratio of the harmonic mean of the speed to that of the operation's first library, over
        the sizes of the first round.
    final_of_first: the ratio over all sizes; only of candidates that reached the last round.
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
    of_first: float | None
    final_of_first: float | None
    date: str
    commit: str


def mean_speed(measurements: Iterable[Measurement], name: str) -> float | None:
    """Harmonic mean of a contender's speed over all sizes; None if a size is missing."""
    own = [m for m in measurements if m.name == name]
    if not own or not all(m.valid for m in own):
        return None
    return statistics.harmonic_mean([m.speed for m in own])


def _ratio(measurements: Sequence[Measurement], config: Config) -> float | None:
    names = config.short_form(), config.family.operation.first
    own, first = (mean_speed(measurements, name) for name in names)
    return own / first if own and first else None


def _at_sizes(
    measurements: Iterable[Measurement], winner: Config, configs: Iterable[Config]
) -> Iterator[BestAtSize]:
    """Speeds at all sizes of the configs that are the fastest at one of them. A config counts only
    if it is faster there than the winner of the mean by more than AT_LENGTH_GAIN, so that no kernel
    is kept for a gain within the noise."""
    names = {config.short_form() for config in configs}
    speeds: dict[int, dict[str, float]] = {}
    for m in measurements:
        if m.name in names:
            speeds.setdefault(m.size, {})[m.name] = m.speed
    of_mean = {
        size: {name: speed / found[winner.short_form()] for name, speed in found.items()}
        for size, found in sorted(speeds.items())
    }
    fastest = (max(found.items(), key=lambda item: item[1]) for found in of_mean.values())
    kept = {name for name, gain in fastest if gain > AT_LENGTH_GAIN}
    for size, found in of_mean.items():
        for name in sorted(kept):
            yield BestAtSize(size, name, round(found[name], 4))


# A step, a dtype, and the options of problems that configs are compiled for, by name.
Contest = tuple[str, Element, tuple[tuple[str, Any], ...]]


def kernel_of(config: Config, step: str = "") -> Contest:
    """The contest of one config: its step or another step that it competes for, its dtype, and the
    options of its problems, such as causal."""
    return step or config.step.id, config.dtype, tuple(sorted(config.supports.options.items()))


def in_search_order(configs: Iterable[Config], first: Iterable[Config] = ()) -> list[Config]:
    """Every config once: `first`, then the rest in a fixed random order.

    A sweep that is stopped early has then covered the space evenly.
    """
    ahead = list(dict.fromkeys(first))
    rest = sorted(set(configs) - set(ahead))
    random.Random(0).shuffle(rest)
    return [*ahead, *rest]


@dataclass
class Sweep:
    """One search, on the GPU of one worker.

    sizes: of the final round. spill_bytes: allowed stores and loads per thread. compile_s: most
    seconds for the compilation of a candidate. deadline: on the clock of `time.monotonic`; no
    candidate is begun after it. date, commit: recorded in the rows. step: the one that all configs
    compete for; "" if each competes for its own.
    """

    jit: Jit
    measurer: Measurer
    sizes: Sequence[int]
    screen_sizes: Sequence[int]
    spill_bytes: int
    compile_s: float
    deadline: float
    date: str
    commit: str
    step: str = ""
    _champions: frozenset[Config] = field(default_factory=frozenset, init=False)
    _cubins: dict[Config, list[Cubin]] = field(default_factory=dict, init=False)
    _by_code: dict[str, SweepRow] = field(default_factory=dict, init=False)
    _rows: dict[Config, SweepRow] = field(default_factory=dict, init=False)

    def screen(
        self, configs: Iterable[Config], progress: Progress, champions: Iterable[Config] = ()
    ) -> None:
        """Compile, drop, verify and time the candidates.

        champions: the winners of earlier sweeps; they come first, and may spill.

        Raises WorkerNotStarted if a process that a candidate killed cannot be replaced.
        """
        self._champions = frozenset(champions)
        fitting = []
        for config in in_search_order(configs, first=sorted(self._champions)):
            if reason := self._obstacle(config):
                self._keep(self._row(config, (), DROPPED, reason), progress)
            else:
                fitting.append(config)
        architecture = self.measurer.info.architecture
        by_unit = {unit: config for config in fitting for unit in units_of(config)}
        targets = [f"sm_{c.family.targets_for([architecture])[0]}" for c in by_unit.values()]
        compiled: defaultdict[Config, dict[Unit, Compiled]] = defaultdict(dict)
        with contextlib.closing(self.jit.each([*by_unit], targets, self.compile_s)) as outcomes:
            for found in outcomes:
                config = by_unit[found.unit]
                if config in self._rows:  # another of its kernels does not compile
                    continue
                units = units_of(config)
                if found.compiled is None:
                    self._keep(self._row(config, (), DROPPED, found.reason), progress)
                else:
                    compiled[config][found.unit] = found.compiled
                    if len(compiled[config]) < len(units):
                        continue
                    own = [compiled[config][unit] for unit in units]
                    self._keep(self._screened(config, own), progress)
                if time.monotonic() >= self.deadline:
                    break
        for config in fitting:
            if config not in self._rows:
                reason = "the time budget was spent"
                self._keep(self._row(config, (), NOT_RUN, reason), progress)

    def _obstacle(self, config: Config) -> str:
        """Reason why a config cannot be measured here; "" if it can."""
        capability = divmod(self.measurer.info.architecture, 10)
        if reason := config.family.refusal_on(self.measurer.info.gpu, capability):
            return reason
        if config.smem_bytes > self.measurer.info.smem_bytes:
            return (
                f"needs {config.smem_bytes} bytes of shared memory per block, "
                f"{self.measurer.info.gpu} has {self.measurer.info.smem_bytes}"
            )
        shapes = (config.measured(n) for n in {*self.sizes, *self.screen_sizes})
        return first_refusal(config, shapes)

    def choose(self, *contest: Any) -> BestConfig | None:
        """Choose the fastest config of a contest (`kernel_of`) by a run of the fastest few at all
        sizes; None if no config was timed."""
        rows = [
            row
            for config, row in self._rows.items()
            if kernel_of(config, self.step) == contest and row.of_first is not None
        ]
        fastest: dict[str, Config] = {}  # by digest of the machine code
        for row in sorted(rows, key=lambda row: (-(row.of_first or 0), row.name)):
            if len(fastest) < N_FINALISTS:
                fastest.setdefault(row.code, config_from_short_form(row.name))
        measurements = self._final(list(fastest.values()))
        ratios = {config: _ratio(measurements, config) for config in fastest.values()}
        right = {config: ratio for config, ratio in ratios.items() if ratio is not None}
        for config, ratio in right.items():
            self._rows[config] = replace(self._rows[config], final_of_first=round(ratio, 4))
        if not right:
            return None
        winner = max(right, key=lambda config: right[config])
        name = winner.short_form()
        sizes = sorted({m.size for m in measurements if m.name == name})
        mean = mean_speed(measurements, name)
        assert mean is not None
        return BestConfig(
            step=contest[0],
            problem=winner.measured(sizes[0]).record(),
            config=name,
            mean_speed=round(mean, 2),
            of_first=round(right[winner], 4),
            n_candidates=len({row.code for row in rows}),
            sizes=tuple(sizes),
            date=self.date,
            commit=self.commit,
            driver=self.measurer.info.driver,
            compiler=".".join(map(str, self.jit.compiler.version)),
            torch=self.measurer.info.torch,
            at_sizes=tuple(_at_sizes(measurements, winner, right)),
            load=FINAL_PROTOCOL.loads[0].name,
        )

    def rows(self) -> list[SweepRow]:
        """Outcomes of all candidates, in the order of the configs."""
        return [self._rows[config] for config in sorted(self._rows)]

    def _keep(self, row: SweepRow, progress: Progress) -> None:
        self._rows[config_from_short_form(row.name)] = row
        progress(row)

    def _row(
        self,
        config: Config,
        cubins: Sequence[Cubin],
        outcome: str,
        reason: str = "",
        of_first: float | None = None,
    ) -> SweepRow:
        return SweepRow(
            name=config.short_form(),
            step=config.step.id,
            dtype=config.dtype.short,
            outcome=outcome,
            reason=reason,
            registers=max((cubin.report.registers for cubin in cubins), default=None),
            spill_bytes=_spilled(cubins) if cubins else None,
            smem_bytes=config.smem_bytes,
            code=code_of(cubins)[:16] if cubins else "",
            same_as="",
            of_first=None if of_first is None else round(of_first, 4),
            final_of_first=None,
            date=self.date,
            commit=self.commit,
        )

    def _screened(self, config: Config, compiled: Sequence[Compiled]) -> SweepRow:
        """Verify and time a config, given its compiled kernels."""
        try:
            cubins = [read_cubin(kernel, config) for kernel in compiled]
        except (OSError, ValueError) as error:
            return self._row(config, (), DROPPED, f"its machine code cannot be read: {error}")
        if _spilled(cubins) > self.spill_bytes and config not in self._champions:
            stores, loads = (
                sum(getattr(cubin.report, f"spill_{way}_bytes") for cubin in cubins)
                for way in ("store", "load")
            )
            reason = (
                f"spills: {stores} bytes stored and {loads} loaded per thread, {self.spill_bytes} "
                "allowed"
            )
            return self._row(config, cubins, DROPPED, reason)
        self._cubins[config] = cubins
        code = code_of(cubins)
        if (known := self._by_code.get(code)) is not None:
            return replace(known, name=config.short_form(), same_as=known.name)
        entry = self.measurer.measure([cubins], self.screen_sizes, SCREEN_PROTOCOL)
        ratio = None if entry.failure else _ratio(entry.measurements, config)
        outcome = FAILED if ratio is None else TIMED
        row = self._row(config, cubins, outcome, entry.failure, ratio)
        self._by_code[code] = row
        return row

    def _final(self, finalists: Sequence[Config]) -> list[Measurement]:
        """Measurements of the finalists, and of the first library beside them."""
        if not finalists:
            return []
        compiled = [self._cubins[config] for config in finalists]
        found = self.measurer.measure(compiled, self.sizes, FINAL_PROTOCOL)
        if found.failure and len(finalists) > 1:
            # A finalist broke the common run: measure each by itself, beside the library.
            return [m for config in finalists for m in self._final([config])]
        for config in finalists:
            own = [m.failure for m in found.measurements if m.name == config.short_form()]
            if reason := next(filter(None, [found.failure, *own]), ""):
                self._rows[config] = replace(
                    self._rows[config], outcome=FAILED, reason=f"final round: {reason}"
                )
        return [] if found.failure else list(found.measurements)


def _spilled(cubins: Iterable[Cubin]) -> int:
    """Return the bytes that a thread of each kernel stores and loads for lack of registers."""
    reports = [cubin.report for cubin in cubins]
    return sum(report.spill_store_bytes + report.spill_load_bytes for report in reports)


@dataclass(frozen=True)
class SweepTable(GpuFile):
    """Outcomes of all candidates of sweeps on one GPU."""

    FORMAT: ClassVar[int] = 2
    HOLDS: ClassVar[str] = "sweep"

    rows: tuple[SweepRow, ...]

    def updated(self, rows: Iterable[SweepRow]) -> SweepTable:
        """A table in which these rows replace those of the same names, sorted by step, dtype and
        name."""
        by_name = {row.name: row for row in (*self.rows, *rows)}
        ordered = sorted(
            by_name.values(), key=lambda row: (list(STEPS).index(row.step), row.dtype, row.name)
        )
        return replace(self, rows=tuple(ordered))


def load_sweep(path: Path, gpu: str, compute_capability: str) -> SweepTable:
    """Read a file of `SweepTable.save`; an empty table if the file is absent.

    Raises OSError, and ValueError for a file with other contents or of another GPU.
    """
    return SweepTable.load_own(path, SweepTable(gpu, compute_capability, ()))


def outcomes_text(rows: Sequence[SweepRow]) -> str:
    """Number of candidates by outcome, e.g. "12 timed, 3 of them by the same code as another; 4
    dropped"."""
    parts = []
    for outcome in (TIMED, DROPPED, FAILED, NOT_RUN):
        some = [row for row in rows if row.outcome == outcome]
        shared = sum(bool(row.same_as) for row in some)
        note = f", {shared} of them by the same code as another" if shared else ""
        parts += [f"{len(some)} {outcome}{note}"] if some else []
    return "; ".join(parts)
