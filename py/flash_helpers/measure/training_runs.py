"""Losses of trainings with one attention or another, and their distances from the losses of the
same training with attention in float32. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flash_helpers.console.tables import Table, number
from flash_helpers.measure.results import Provenance, RecordFile

LAB, PYTORCH, FLOAT32 = "attention()", "PyTorch's attention", "PyTorch's attention in float32"
MOVED = 2**-20  # a weight changes by this part of it, 8 to 16 times its last bit
EARLY = 25  # steps, before differences in rounding have grown
LAST = 20  # steps whose mean loss is that of the end


@dataclass(frozen=True)
class Training:
    """A training. `width`: of the model, in heads of `d_head`. `seed`: of weights and sums.
    `moved`: seed of a change of each weight by MOVED before the first step; 0 changes none."""

    d_head: int
    steps: int = 200
    batch: int = 16
    seq: int = 256
    width: int = 256
    learning_rate: float = 1e-3
    seed: int = 0
    moved: int = 0


@dataclass(frozen=True)
class TrainingRecord:
    """The losses of one training, in nats per sign. `attention`: LAB, PYTORCH or FLOAT32."""

    training: Training
    attention: str
    losses: tuple[float, ...]


@dataclass(frozen=True)
class TrainingRuns(RecordFile):
    """Everything that one run measured: each training with each attention, once or more often, from
    weights that differ by MOVED."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "losses of trainings"

    provenance: Provenance
    dtype: str
    records: tuple[TrainingRecord, ...]

    @property
    def d_heads(self) -> list[int]:
        """The measured head sizes, in order."""
        return [*dict.fromkeys(record.training.d_head for record in self.records)]

    @property
    def times(self) -> int:
        """Number of trainings with each attention and head size."""
        return 1 + max(record.training.moved for record in self.records)

    def by_attention(self, d_head: int) -> dict[str, list[TrainingRecord]]:
        """The records of a head size; the first of each attention has the unchanged weights."""
        found: dict[str, list[TrainingRecord]] = {}
        for record in sorted(self.records, key=lambda record: record.training.moved):
            if record.training.d_head == d_head:
                found.setdefault(record.attention, []).append(record)
        return found

    def distances(self, d_head: int) -> dict[str, list[list[float]]]:
        """How far the loss of each step is from that with FLOAT32 and unchanged weights: a list for
        each record of `by_attention`, except for the one that the others are compared with."""
        named = self.by_attention(d_head)
        right, *_ = named[FLOAT32]
        return {
            name: [
                [abs(own - other) for own, other in zip(found.losses, right.losses, strict=True)]
                for found in records
                if found is not right
            ]
            for name, records in named.items()
        }

    def table(self) -> Table:
        """One row per head size and attention: the loss at the beginning and in the end, and the
        distances from the losses in float32; of several trainings the smallest and the largest
        figure."""
        rows = []
        for d_head in self.d_heads:
            distances = self.distances(d_head)
            for name, records in self.by_attention(d_head).items():
                own = distances[name]
                rows.append(
                    [
                        str(d_head),
                        name,
                        _span([record.losses[0] for record in records], 3),
                        _span([statistics.fmean(record.losses[-LAST:]) for record in records], 3),
                        _span([root_mean_square(steps[:EARLY]) for steps in own], 5),
                        _span([root_mean_square(steps) for steps in own], 4),
                        _span([max(steps) for steps in own], 4),
                    ]
                )
        header = ["d_head", "attention", "first loss", f"mean of the last {LAST}"]
        header += [f"off float32, first {EARLY} steps", "all steps", "most of a step"]
        return Table(header, rows, align="rl")

    def markdown(self) -> str:
        """Markdown of the table, and of the machine and software of the measurement."""
        training = self.records[0].training
        often = ""
        if self.times > 1:
            often = (
                f"Each row has {self.times} trainings, from weights that differ by a millionth; "
                "two figures are the smallest and the largest. "
            )
        sentence = self.provenance.sentence(
            self.provenance.built_with,
            f"PyTorch {self.provenance.torch}",
            f"{self.dtype}, {training.steps} steps of {training.batch} texts of {training.seq} "
            "signs",
        )
        return (
            f"{self.table().markdown()}\n\nLosses in nats per sign. {often}Off float32 is the "
            "distance from the loss with attention in float32, as root mean square over the steps. "
            f"{sentence}"
        )


def root_mean_square(values: Sequence[float]) -> float:
    """The root of the mean of the squares."""
    return math.sqrt(statistics.fmean(value * value for value in values))


def _span(values: Sequence[float], digits: int) -> str:
    """The only figure, or the smallest and the largest one; a dash without any."""
    ends = (min(values), max(values)) if values else (None,)
    return " to ".join(dict.fromkeys(number(value, digits) for value in ends))
