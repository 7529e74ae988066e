"""Times of the kernels that compete for a problem, on a grid of problems, and of the libraries
beside them; the choice of a kernel follows from them."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from flash_helpers.compile.codegen import CHOICE_PATTERN
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import (
    FAMILIES,
    OPERATIONS,
    STEPS,
    Config,
    Problem,
    config_from_short_form,
)
from flash_helpers.measure.results import (
    LibraryRecord,
    Measurement,
    OfProblem,
    Protocol,
    Provenance,
    RecordFile,
    refuse_mixing,
)

_SHOWN = 4  # kernels in a line


@dataclass(frozen=True)
class MeasuredProblem(OfProblem):
    """One problem of the grid, in a group of the grid.

    kernels: median milliseconds per launch by the config's short form. libraries: the same by the
    library's name. sm_mhz: median clock over all samples; 0 if the driver does not tell. failures:
    reasons by the name of a contender that failed.
    """

    group: str
    problem: dict[str, Any]
    kernels: dict[str, float]
    libraries: dict[str, float]
    sm_mhz: float
    failures: dict[str, str]

    @classmethod
    def of(cls, group: str, problem: Problem, measured: Sequence[Measurement]) -> MeasuredProblem:
        """Return the record of a problem's measurements, in ascending order of time."""
        timed = {m.name: round(m.median_ms, 6) for m in measured if m.valid}
        timed = dict(sorted(timed.items(), key=lambda item: item[1]))
        kernels = {m.name for m in measured if m.ran}
        clocks = [mhz for m in measured for mhz in m.sm_mhz]
        return cls(
            group,
            problem.record(),
            {name: ms for name, ms in timed.items() if name in kernels},
            {name: ms for name, ms in timed.items() if name not in kernels},
            statistics.median(clocks) if clocks else 0.0,
            {m.name: m.failure for m in measured if m.failure},
        )

    def text(self) -> str:
        """Return the fastest kernels beside the fastest library in one line."""
        library = next(iter(self.libraries), "")
        beside = self.libraries.get(library, math.nan)
        ranked = (f"{name} {beside / ms:.3f}" for name, ms in [*self.kernels.items()][:_SHOWN])
        failed = "".join(f"; {name} failed: {text}" for name, text in self.failures.items())
        return f"{self.asked}: {library} {beside:.4f} ms; {', '.join(ranked)}{failed}"

    @functools.cached_property
    def configs(self) -> Mapping[Config, float]:
        """Milliseconds of the configs that the registry still has."""
        found = {}
        for name, ms in self.kernels.items():
            with contextlib.suppress(ValueError):
                found[config_from_short_form(name)] = ms
        return found

    def expected(self, problem: Problem, device: Device) -> dict[Config, float]:
        """Return the milliseconds that configs are expected to take for another problem.

        A measured config stands for the config of its tile that takes the problem, of the same step
        or else of a preferred one of the family. Its time grows with the work (`Config.work`).
        """
        found: dict[Config, float] = {}
        for config, ms in self.configs.items():
            taking = _taking(config, problem)
            if taking is not None:
                of_work = taking.work(problem, device) / config.work(self.asked, device)
                found.setdefault(taking, ms * of_work)
        return found

    def behind(self, config: Config) -> float:
        """Return the time of a config over that of the fastest, less 1; infinite if it was not
        measured."""
        own = self.kernels.get(config.short_form())
        return own / min(self.kernels.values()) - 1 if own else float("inf")


def competitors(problem: Problem) -> list[Config]:
    """Return the configs that compete for a problem of the grid and take it."""
    grid = OPERATIONS[problem.operation].part("grid")
    found = []
    for name, fields in grid.competing(problem):
        family = FAMILIES[name if name in FAMILIES else STEPS[name].family]
        step = family.steps.get(name, [*family.steps.values()][-1])
        fixed = family.fixed_config(step, problem.dtype)
        for base in fixed.variants():
            if all(getattr(problem, n) == size for n, size in base.supports.sizes.items()):
                found.append(_taking(base.replace(**fields), problem))
                break
    return [*dict.fromkeys(config for config in found if config)]


def _taking(config: Config, problem: Problem) -> Config | None:
    for step in (config.step, *config.family.preferred):
        with contextlib.suppress(ValueError):  # a step that cannot have the tile
            for variant in config.replace(dtype=problem.dtype).at_step(step).variants():
                if not variant.refusal(problem):
                    return variant
    return None


@dataclass(frozen=True)
class Choices(RecordFile):
    """All measured problems of a GPU."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "measured choices"

    provenance: Provenance
    protocol: Protocol
    libraries: tuple[LibraryRecord, ...]
    problems: tuple[MeasuredProblem, ...]

    def continued(self, path: Path) -> Choices:
        """Return these results with the problems that a file has of the same commit.

        Raises ValueError if the file is of another GPU.
        """
        if not path.exists():
            return self
        before = self.load(path)
        refuse_mixing(path, before.provenance.gpu, self.provenance.gpu)
        same = before.provenance.commit == self.provenance.commit
        return replace(self, problems=before.problems if same else ())

    def updated(self, row: MeasuredProblem) -> Choices:
        """Return these results with a problem's record in place of an earlier one."""
        others = (other for other in self.problems if other.asked != row.asked)
        return replace(self, problems=(*others, row))

    def ranked(self, problem: Problem, device: Device) -> list[Config]:
        """Return the configs that were measured on the nearest problem and take this one, the
        fastest expected on a device first."""
        nearest = self._nearest(problem)
        expected = nearest.expected(problem, device) if nearest else {}
        return sorted(expected, key=expected.__getitem__)

    def is_ahead(self, problem: Problem) -> bool:
        """Whether a kernel was no slower than all libraries on the nearest problem; True if none
        is of the operation."""
        nearest = self._nearest(problem)
        if nearest is None or not nearest.libraries:
            return True
        return min(nearest.kernels.values()) <= min(nearest.libraries.values())

    def distance(self, problem: Problem) -> float:
        """Return how far the nearest measured problem is, by the operation's grid; infinite if
        none is of the operation."""
        nearest = self._nearest(problem)
        grid = OPERATIONS[problem.operation].part("grid") if nearest else None
        return grid.distance(nearest.asked, problem) if nearest and grid else math.inf

    def tells_of(self, problem: Problem) -> bool:
        """Whether a problem was measured that tells something of this one: with its head sizes."""
        operation = OPERATIONS[problem.operation]
        grid = operation.part("grid") if operation.has_part("grid") else None
        return self.distance(problem) < getattr(grid, "UNRELATED", math.inf)

    def _nearest(self, problem: Problem) -> MeasuredProblem | None:
        own = [m for m in self.problems if m.asked.operation == problem.operation]
        if not own:
            return None
        distance = OPERATIONS[problem.operation].part("grid").distance
        return min(own, key=lambda measured: distance(measured.asked, problem))

    def without(self, problem: Problem) -> Choices:
        """Return the file as if a problem had not been measured."""
        return replace(self, problems=tuple(m for m in self.problems if m.asked != problem))


@functools.cache
def load_choices(folder: Path) -> tuple[Choices, ...]:
    """Read all files of a folder. Raises as `RecordFile.load` does."""
    return tuple(Choices.load(path) for path in sorted(folder.glob(CHOICE_PATTERN)))
