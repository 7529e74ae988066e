"""What sweeps have found, a pair of files for each GPU: the fastest configs, which the generator
and `flash_attention.best_config` read, and all candidates (flash_helpers.tune.sweep)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from flash_helpers.kernel_configs import STEPS, Config, config_from_short_form
from flash_helpers.measure.results import RecordFile, refuse_mixing

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
    """What was found on one GPU; a subclass adds one tuple of records, each of a step and a
    dtype."""

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
    """The fastest config at one length, by short form. of_mean: its speed there over that of the
    config that is fastest in the mean."""

    seq_len: int
    config: str
    of_mean: float


@dataclass(frozen=True)
class BestConfig:
    """The fastest config of one step in one dtype, and what it was measured with.

    config: short form. mean_tflops: harmonic mean over seq_lens; of_flash: over that of PyTorch's
    flash backend in the same process. n_candidates: configs that were timed. causal: on causal
    problems, as its configs are. at_lengths: of seq_lens those at which another config is faster.
    load: of the last round; "turns" was samples of 10 ms, one contender's right after another's.
    """

    MAY_LACK: ClassVar[tuple[str, ...]] = ("causal", "at_lengths", "load")

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

    def names(self, seq_len: int | None = None) -> list[str]:
        """Short forms, the preferred one first. seq_len: of a problem, which the measured length
        nearest to it, as a ratio, stands for, of two as near the longer; None stands for all."""
        if seq_len is None:
            return [self.config]
        nearest = min(self.seq_lens, key=lambda n: (max(n / seq_len, seq_len / n), -n))
        return [*(at.config for at in self.at_lengths if at.seq_len == nearest), self.config]


@dataclass(frozen=True)
class BestConfigs(GpuFile):
    """The fastest configs known for one GPU."""

    FORMAT: ClassVar[int] = 2
    HOLDS: ClassVar[str] = "best configs"
    NOT_READ: ClassVar[tuple[str, ...]] = (*RecordFile.NOT_READ, "configs")

    best: tuple[BestConfig, ...]

    def find(
        self, step: str, dtype: str, causal: bool = False, seq_len: int | None = None
    ) -> Config | None:
        """The fastest config of a step in a dtype, at one length or in the mean, if one is known
        and the registry still has it."""
        for entry in self.best:
            if (entry.step, entry.dtype, entry.causal) == (step, dtype, causal):
                for name in entry.names(seq_len):
                    with contextlib.suppress(ValueError):
                        return config_from_short_form(name)
        return None

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
