"""The fastest configs of a GPU: the file that a sweep writes, and that the generator and
`flash_attention.best_config` read. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flash_helpers.files import write_if_different
from flash_helpers.kernel_configs import STEPS, Config, config_from_short_form
from flash_helpers.measure.results import load_measured, measured_json, read_records

FORMAT = 2


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
class BestConfig:
    """The fastest config of one step in one dtype, and what it was measured with.

    config: short form. mean_tflops: harmonic mean over seq_lens; of_flash: over that of PyTorch's
    flash backend in the same process. n_candidates: configs that were timed.
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


@dataclass(frozen=True)
class BestConfigs:
    """The fastest configs known for one GPU."""

    gpu: str
    compute_capability: str
    best: tuple[BestConfig, ...]

    def find(self, step: str, dtype: str) -> Config | None:
        """The fastest config of a step in a dtype ("bf16"), if one is known.

        Raises ValueError if the registry has no such config any more.
        """
        for entry in self.best:
            if (entry.step, entry.dtype) == (step, dtype):
                return config_from_short_form(entry.config)
        return None

    def updated(self, entries: Iterable[BestConfig]) -> BestConfigs:
        """With these in the place of others of their steps and dtypes; in order."""
        by_kernel = {(e.step, e.dtype): e for e in (*self.best, *entries)}
        ordered = sorted(by_kernel, key=lambda key: (list(STEPS).index(key[0]), key[1]))
        return replace(self, best=tuple(by_kernel[key] for key in ordered))

    def to_json(self) -> str:
        """Text for a file; one line a config. "configs" is what the generator reads."""
        head = {"format": FORMAT, "gpu": self.gpu, "compute_capability": self.compute_capability}
        configs = [entry.config for entry in self.best]
        return measured_json(head, {"configs": configs, "best": map(asdict, self.best)})

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_if_different(path, self.to_json())


def load_best(path: Path) -> BestConfigs:
    """Read what `BestConfigs.save` wrote. Raises OSError, and ValueError for anything else."""

    def build(data: dict[str, Any]) -> BestConfigs:
        return BestConfigs(
            data["gpu"], data["compute_capability"], read_records(BestConfig, data["best"])
        )

    return load_measured(path, "best configs", FORMAT, build)


def load_own(path: Path, gpu: str, compute_capability: str) -> BestConfigs:
    """The file's configs, or none of this GPU if there is no such file.

    Raises ValueError if they are of another GPU.
    """
    if not path.exists():
        return BestConfigs(gpu, compute_capability, ())
    found = load_best(path)
    if found.gpu != gpu:
        raise ValueError(
            f"{path} is of {found.gpu} and this is {gpu}: results of two GPUs are never mixed, "
            "name another folder"
        )
    return found
