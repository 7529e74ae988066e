"""Findings of sweeps, a pair of files per GPU: the fastest configs, which the generator
and `flash_attention.best_config` read, and all candidates (flash_helpers.tune.sweep)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import OPERATIONS, STEPS, Config, config_from_short_form
from flash_helpers.measure.results import RecordFile, refuse_mixing
from flash_helpers.registry.problem import Problem

Own = TypeVar("Own", bound="GpuFile")


def gpu_slug(name: str) -> str:
    """A GPU's name as part of a file's: "NVIDIA H100 80GB HBM3" gives "h100_80gb_hbm3"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "_".join(words[1:] if words[:1] == ["nvidia"] else words)


def best_file(folder: Path, gpu: str) -> Path:
    """Where the fastest configs of a GPU are kept."""
    return folder / f"best_{gpu_slug(gpu)}.json"


def sweep_file(folder: Path, gpu: str) -> Path:
    """Where all that a sweep found on a GPU is kept."""
    return folder / f"sweep_{gpu_slug(gpu)}.json"


@dataclass(frozen=True)
class GpuFile(RecordFile):
    """Findings on one GPU; a subclass adds one tuple of records, each of a step and a dtype."""

    gpu: str
    compute_capability: str

    @classmethod
    def load_own(cls: type[Own], path: Path, gpu: str, compute_capability: str) -> Own:
        """`load`, or nothing found on this GPU if there is no such file.

        Raises ValueError if the file is of another GPU.
        """
        if not path.exists():
            return cls(gpu, compute_capability, ())
        found = cls.load(path)
        refuse_mixing(path, found.gpu, gpu)
        return found


@dataclass(frozen=True)
class BestAtLength:
    """The speed of one config, by short form, at one length. of_mean: over that of the config that
    is fastest in the mean."""

    seq_len: int
    config: str
    of_mean: float


@dataclass(frozen=True)
class BestConfig:
    """The fastest config of one step in one dtype, and what it was measured with.

    config: short form. mean_tflops: harmonic mean over seq_lens; of_flash: over that of PyTorch's
    flash backend in the same process. n_candidates: configs that were timed. causal: on causal
    problems, as its configs are. at_lengths: of other configs that are the fastest at one of
    seq_lens, at each of these; in older files where they are the fastest. load: of the last round;
    "turns" was samples of 10 ms, one contender's right after another's.
    """

    step: str
    dtype: str
    config: str
    mean_tflops: float
    of_flash: float
    n_candidates: int
    seq_lens: tuple[int, ...]
    date: str
    commit: str
    driver: str
    compiler: str
    torch: str
    causal: bool = False
    at_lengths: tuple[BestAtLength, ...] = ()
    load: str = "turns"

    def at_length(self, seq_len: int | None = None) -> list[Config]:
        """Configs that the registry still has, the fastest first. seq_len: of problems, which
        `nearest` stands for; None: in the mean, which is one config."""
        return _fastest_first(self._speeds(None if seq_len is None else self.nearest(seq_len)))

    def for_problem(self, problem: Problem, device: Device) -> list[Config]:
        """Return configs that the registry still has, the one that should be the fastest on a
        device first: by its speed at the nearest measured size, and by how much less it computes
        there for each operation that is asked for, since this problem fills tiles better or worse.
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

    def nearest(self, seq_len: int) -> int:
        """The measured length that is nearest, as a ratio; of two as near the longer."""
        return min(self.seq_lens, key=lambda n: (max(n / seq_len, seq_len / n), -n))

    def _speeds(self, seq_len: int | None) -> dict[Config, float]:
        of_mean = {self.config: 1.0}
        of_mean |= {at.config: at.of_mean for at in self.at_lengths if at.seq_len == seq_len}
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

    FORMAT: ClassVar[int] = 2
    HOLDS: ClassVar[str] = "best configs"

    best: tuple[BestConfig, ...]

    def find(self, step: str, dtype: str, causal: bool = False) -> BestConfig | None:
        """The winner of a step in a dtype, on causal problems or on others."""
        wanted = (step, dtype, causal)
        return next((e for e in self.best if (e.step, e.dtype, e.causal) == wanted), None)

    def updated(self, entries: Iterable[BestConfig]) -> BestConfigs:
        """With these in the place of others of their steps, dtypes and masks; in order."""
        by_kernel = {(e.step, e.dtype, e.causal): e for e in (*self.best, *entries)}
        ordered = sorted(by_kernel, key=lambda key: (list(STEPS).index(key[0]), *key[1:]))
        return replace(self, best=tuple(by_kernel[key] for key in ordered))

    def document(self) -> dict[str, Any]:
        """The entries; "configs" is what the generator reads."""
        document = super().document()
        best = document.pop("best")
        names = (
            name
            for entry in self.best
            for name in (entry.config, *(at.config for at in entry.at_lengths))
        )
        return {**document, "configs": tuple(dict.fromkeys(names)), "best": best}


def load_best(path: Path) -> BestConfigs:
    """Read what `BestConfigs.save` wrote. Raises as `RecordFile.load` does."""
    return BestConfigs.load(path)
