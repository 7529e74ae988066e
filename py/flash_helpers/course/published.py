"""What was published of these ideas for other GPUs: percent of the official FlashAttention-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.measure.results import RecordFile


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
class Published(RecordFile):
    """source: who published it, and where. seq_len: of `PublishedStep.percent`.
    shortest, longest: sequence lengths of the mean."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "published figures"

    source: str
    seq_len: int
    shortest: int
    longest: int
    gpus: tuple[PublishedGpu, ...]
    steps: tuple[PublishedStep, ...]

    def find(self, step: str, gpu: str) -> PublishedStep | None:
        """What was published of a step for the GPU of that key, if anything was."""
        return next((s for s in self.steps if (s.step, s.gpu) == (step, gpu)), None)
