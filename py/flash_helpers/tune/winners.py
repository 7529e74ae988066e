"""Results of sweeps, in a pair of files per GPU. One holds the fastest configs, for the generator
and `flash_attention.best_config`, the other all candidates (flash_helpers.tune.sweep)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import (
    FAMILIES,
    OPERATIONS,
    STEPS,
    Config,
    config_from_short_form,
)
from flash_helpers.measure.results import OfProblem, RecordFile, refuse_mixing
from flash_helpers.registry.problem import Problem

Own = TypeVar("Own", bound="GpuFile")


def gpu_slug(name: str) -> str:
    """A GPU's name as part of a file name: "NVIDIA H100 80GB HBM3" gives "h100_80gb_hbm3"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "_".join(words[1:] if words[:1] == ["nvidia"] else words)


def best_file(folder: Path, gpu: str) -> Path:
    """Path of the file with the fastest configs of a GPU."""
    return folder / f"best_{gpu_slug(gpu)}.json"


def sweep_file(folder: Path, gpu: str) -> Path:
    """Path of the file with all candidates of sweeps on a GPU."""
    return folder / f"sweep_{gpu_slug(gpu)}.json"


@dataclass(frozen=True)
class GpuFile(RecordFile):
    """Results on one GPU; a subclass adds one tuple of records, each of a step and a dtype."""

    gpu: str
    compute_capability: str

    @classmethod
    def load_own(cls: type[Own], path: Path, none: Own) -> Own:
        """Load a file of this GPU, or return `none`, which has no records, if the file is absent.

        Raises ValueError if the file is of another GPU.
        """
        if not path.exists():
            return none
        found = cls.load(path)
        refuse_mixing(path, found.gpu, none.gpu)
        return found


@dataclass(frozen=True)
class BestAtSize:
    """Speed of one config, by short form, at one size. of_mean: ratio to the speed of the config
    that is fastest in the mean."""

    size: int
    config: str
    of_mean: float


@dataclass(frozen=True)
class BestConfig(OfProblem):
    """The fastest config of one step on problems of one kind, and facts of its measurement.

    problem: of the first size. The config's `Config.measured` gives the problem of another size.
    config: short form.
    mean_speed: harmonic mean over sizes, in the unit of the operation's metric.
    of_first: ratio of mean_speed to that of the operation's first library in the same process.
    n_candidates: number of configs that were timed.
    at_sizes: speeds at all sizes of other configs that are the fastest at one of them. Older files
    have only the sizes at which these configs are the fastest.
    load: of the last round. "turns" means samples of 10 ms, one contender's right after another's.
    """

    step: str
    problem: dict[str, Any]
    config: str
    mean_speed: float
    of_first: float
    n_candidates: int
    sizes: tuple[int, ...]
    date: str
    commit: str
    driver: str
    compiler: str
    torch: str
    at_sizes: tuple[BestAtSize, ...] = ()
    load: str = "turns"

    @property
    def options(self) -> dict[str, Any]:
        """Fields of the problem that the step's kernels are compiled for, such as causal."""
        step = STEPS[self.step]
        fixed = FAMILIES[step.family].fixed_config(step, self.asked.dtype)
        return {name: getattr(self.asked, name) for name in fixed.supports.options}

    @property
    def contest(self) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
        """Step, dtype and options; each such contest has one winner."""
        return self.step, self.dtype, tuple(sorted(self.options.items()))

    def at_size(self, size: int | None = None) -> list[Config]:
        """Configs that the registry still has, the fastest first. size: of problems; the `nearest`
        measured size stands for it. None takes the one config that is the fastest in the mean."""
        return _fastest_first(self._speeds(None if size is None else self.nearest(size)))

    def for_problem(self, problem: Problem, device: Device) -> list[Config]:
        """Return configs that the registry still has, the fastest expected on a device first.

        The expected speed is the speed at the nearest measured size, corrected for tiles: this
        problem may fill a config's tiles better or worse than the measured problem did.
        """
        operation = OPERATIONS[problem.operation]
        nearest = self.nearest(getattr(problem, operation.swept))
        return _fastest_first(
            {
                config: speed
                * config.work(config.measured(nearest), device)
                / config.work(problem, device)
                for config, speed in self._speeds(nearest).items()
            }
        )

    def nearest(self, size: int) -> int:
        """The nearest measured size, by ratio; the larger of two that are equally near."""
        return min(self.sizes, key=lambda n: (max(n / size, size / n), -n))

    def _speeds(self, size: int | None) -> dict[Config, float]:
        of_mean = {self.config: 1.0}
        of_mean |= {at.config: at.of_mean for at in self.at_sizes if at.size == size}
        found = {}
        for name, speed in of_mean.items():
            with contextlib.suppress(ValueError):
                found[config_from_short_form(name)] = speed
        return found


def _fastest_first(speeds: Mapping[Config, float]) -> list[Config]:
    return sorted(speeds, key=lambda config: -speeds[config])


@dataclass(frozen=True)
class BestConfigs(GpuFile):
    """The fastest configs known for one GPU."""

    FORMAT: ClassVar[int] = 3
    HOLDS: ClassVar[str] = "best configs"

    best: tuple[BestConfig, ...]

    def find(self, step: str, dtype: str, **options: Any) -> BestConfig | None:
        """The winner of a step in a dtype, on problems with these options; an option that is left
        out is False."""
        for entry in self.best:
            if (entry.step, entry.dtype) == (step, dtype):
                asked = {name: options.get(name, False) for name in entry.options}
                if entry.options == asked:
                    return entry
        return None

    def updated(self, entries: Iterable[BestConfig]) -> BestConfigs:
        """A file in which these entries replace those of the same contests, in order."""
        by_kernel = {entry.contest: entry for entry in (*self.best, *entries)}
        ordered = sorted(by_kernel, key=lambda key: (list(STEPS).index(key[0]), *key[1:]))
        return replace(self, best=tuple(by_kernel[key] for key in ordered))

    def document(self) -> dict[str, Any]:
        """Entries of the file; the generator reads "configs"."""
        document = super().document()
        best = document.pop("best")
        names = (
            name
            for entry in self.best
            for name in (entry.config, *(at.config for at in entry.at_sizes))
        )
        return {**document, "configs": tuple(dict.fromkeys(names)), "best": best}


def load_best(path: Path) -> BestConfigs:
    """Read a file of `BestConfigs.save`. Raises as `RecordFile.load` does."""
    return BestConfigs.load(path)
