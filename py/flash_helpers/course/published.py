"""What was published of these ideas for other GPUs: percent of the official FlashAttention-2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_helpers.measure.results import load_measured, read_records

FORMAT = 1


@dataclass(frozen=True)
class PublishedGpu:
    """key: in names of values. official_tflops: of the official FlashAttention-2 at `seq_len`."""

    key: str
    name: str
    official_tflops: float


@dataclass(frozen=True)
class PublishedStep:
    """Percent of the official FlashAttention-2, at the one length and of the harmonic means."""

    step: str
    gpu: str
    percent: float
    percent_mean: float


@dataclass(frozen=True)
class Published:
    """source: who published it, and where. seq_len: of `PublishedStep.percent`.
    shortest, longest: sequence lengths of the mean."""

    source: str
    seq_len: int
    shortest: int
    longest: int
    gpus: tuple[PublishedGpu, ...]
    steps: tuple[PublishedStep, ...]

    def find(self, step: str, gpu: str) -> PublishedStep | None:
        """What was published of a step for the GPU of that key, if anything was."""
        return next((s for s in self.steps if (s.step, s.gpu) == (step, gpu)), None)


def load_published(path: Path) -> Published:
    """Read the file. Raises OSError, and ValueError if it holds something else."""

    def build(data: dict[str, Any]) -> Published:
        return Published(
            source=data["source"],
            seq_len=data["seq_len"],
            shortest=data["shortest"],
            longest=data["longest"],
            gpus=read_records(PublishedGpu, data["gpus"]),
            steps=read_records(PublishedStep, data["steps"]),
        )

    return load_measured(path, "published figures", FORMAT, build)
