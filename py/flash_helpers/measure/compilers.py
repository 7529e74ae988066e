"""Kernels compiled by nvcc and by NVRTC: both machine codes, and whether they are equally fast."""

from __future__ import annotations

import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from flash_helpers.compile.package import COMPARED_COMPILERS
from flash_helpers.console.tables import Table, number
from flash_helpers.kernel_configs import Config, Problem, config_from_short_form
from flash_helpers.measure.results import (
    READINGS,
    Measurement,
    Protocol,
    Provenance,
    RecordFile,
    interval,
)

CONTROL_EVERY = 8  # kernels of a family
TILED_SHARE = 15, 16  # of a size: tiles of 192 rows and 80 keys divide 3840 and 15360


@dataclass(frozen=True)
class CompiledTwice:
    """One kernel as nvcc and as NVRTC compile it, in this order.

    name: short form. codes: digests of the machine code (flash_helpers.measure.code). registers:
    per thread.
    """

    name: str
    codes: tuple[str, str]
    registers: tuple[int, int]

    @property
    def is_same(self) -> bool:
        """Whether both compilers made the same machine code."""
        return len({*self.codes}) == 1

    @property
    def config(self) -> Config:
        """The kernel's config. Raises ValueError if the registry no longer has it."""
        return config_from_short_form(self.name)


@dataclass(frozen=True)
class Pair:
    """Two contenders that took turns on one problem under one load, round by round. Either they are
    one kernel as nvcc and as NVRTC compile it, or one machine code that was loaded twice."""

    first: Measurement
    second: Measurement

    @property
    def is_control(self) -> bool:
        """Whether both ran the same machine code, so that their ratio is noise."""
        return self.first.code == self.second.code

    @property
    def ratios(self) -> list[float]:
        """Ratio of the second contender's speed to the first one's, one value per round; none after
        a failure."""
        if not (self.first.valid and self.second.valid):
            return []
        times = zip(self.first.samples_ms, self.second.samples_ms, strict=True)
        return [first / second for first, second in times]

    @property
    def place(self) -> tuple[str, str]:
        """The family and the load: pairs with equal ones have the same noise."""
        return config_from_short_form(self.first.name).family.name, self.first.load


@dataclass(frozen=True)
class CompilerComparison(RecordFile):
    """Everything that one run measured. compilers: names and versions of nvcc and NVRTC. pairs:
    only of kernels that were timed."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "kernels of two compilers"

    provenance: Provenance
    compilers: tuple[str, str]
    protocol: Protocol
    kernels: tuple[CompiledTwice, ...]
    pairs: tuple[Pair, ...]

    @property
    def failures(self) -> list[Measurement]:
        """Contenders without a trustworthy time."""
        return [m for pair in self.pairs for m in (pair.first, pair.second) if not m.valid]

    @functools.cached_property
    def noise(self) -> Mapping[tuple[str, str], float]:
        """Distance from 1 that the median ratio of two equally fast codes may have, by family and
        load: the farther end of the `interval` over all rounds of the family's controls under that
        load. A family without a control is left out."""
        ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
        for pair in self.pairs:
            if pair.is_control:
                ratios[pair.place] += pair.ratios
        return {
            place: max(abs(end - 1) for end in interval(found))
            for place, found in ratios.items()
            if found
        }

    def is_equal(self, pair: Pair) -> bool:
        """Whether the median ratio of a pair lies within the noise; False if one is not known."""
        ratio, noise = _median(pair.ratios), self.noise.get(pair.place)
        return ratio is not None and noise is not None and abs(ratio - 1) <= noise

    def verdicts(self) -> dict[frozenset[str], bool]:
        """Whether two machine codes of a kernel were equally fast in all pairs that were timed, by
        their digests."""
        found: dict[frozenset[str], bool] = {}
        for pair in self.pairs:
            if not pair.is_control:
                codes = frozenset((pair.first.code, pair.second.code))
                found[codes] = found.get(codes, True) and self.is_equal(pair)
        return found

    def table(self) -> Table:
        """One row per kernel, problem and load; NVRTC's speed is compared with nvcc's."""
        of_kernel = {kernel.name: kernel for kernel in self.kernels}
        rows = []
        for pair in self.pairs:
            first, second, kernel = pair.first, pair.second, of_kernel[pair.first.name]
            low, high = interval(pair.ratios) if pair.ratios else (None, None)
            is_again = pair.is_control and not kernel.is_same
            rows.append(
                [
                    f"{first.name}{', nvcc twice' if is_again else ''}",
                    "same" if kernel.is_same else " ".join(kernel.codes),
                    " ".join(map(str, kernel.registers)),
                    str(first.size),
                    first.load,
                    *(
                        f"{number(m.speed, 1)} {m.unit}" if m.valid else m.failure
                        for m in (first, second)
                    ),
                    *(number(value, 3) for value in (_median(pair.ratios), low, high)),
                    number(self.noise.get(pair.place), 3),
                    "=" if self.is_equal(pair) else "",
                ]
            )
        return Table(
            [
                *("kernel", "code", "registers", "size", "load", "nvcc", "NVRTC"),
                *("NVRTC/nvcc", "low", "high", "noise", ""),
            ],
            rows,
        )

    def markdown(self) -> str:
        """Markdown of the ratios of kernels with two codes, and of the machine and software."""
        rows = [
            [
                *(pair.first.name, str(pair.first.size), pair.first.load),
                *(number(x, 3) for x in (_median(pair.ratios), self.noise.get(pair.place))),
                "=" if self.is_equal(pair) else "",
            ]
            for pair in self.pairs
            if not pair.is_control
        ]
        header = ["kernel", "length", "load", "NVRTC/nvcc", "noise", ""]
        sentence = self.provenance.sentence(
            " and ".join(self.compilers),
            "ratios of speeds are medians over rounds in turns; noise is that of a code against "
            "itself, and = lies within it",
        )
        return f"{Table(header, rows, align='lrl').markdown()}\n\n{sentence}"

    def summary(self) -> str:
        """Lines below the table: the compilers, and how many kernels have the same code."""
        same: dict[str, list[bool]] = defaultdict(list)
        for kernel in self.kernels:
            same[kernel.config.family.name].append(kernel.is_same)
        parts = [f"{sum(flags)} of {len(flags)} of {family}" for family, flags in same.items()]
        verdicts = self.verdicts().values()
        return (
            f"{' and '.join(self.compilers)} make the same machine code of {', '.join(parts)}\n"
            f"of {len(verdicts)} kernels with two codes, {sum(verdicts)} are equally fast within "
            "noise under each load and at each size"
        )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def timed_kernels(kernels: Iterable[CompiledTwice]) -> list[tuple[CompiledTwice, bool]]:
    """Return the kernels to time, and whether each also runs against its own code as a control.

    All kernels with two codes are timed. Within each family the last of them has a control, and
    every CONTROL_EVERY-th before it. Of the kernels with the same code from both compilers, the
    last of each family is timed, and is a control itself.
    """
    found: list[tuple[CompiledTwice, bool]] = []
    seen: Counter[tuple[str, bool]] = Counter()
    for kernel in reversed([*kernels]):
        kind = kernel.config.family.name, kernel.is_same
        if not kernel.is_same:
            found.append((kernel, seen[kind] % CONTROL_EVERY == 0))
        elif not seen[kind]:
            found.append((kernel, False))
        seen[kind] += 1
    return found[::-1]


def timed_on(config: Config, size: int) -> Problem:
    """Return the problem on which a config is timed: the usual one of a size, or of TILED_SHARE of
    it if the config refuses that.

    Raises ValueError if the config refuses both.
    """
    problem = config.measured(size)
    if refusal := config.refusal(problem):
        problem = config.measured(size * TILED_SHARE[0] // TILED_SHARE[1])
        if config.refusal(problem):
            raise ValueError(f"{config.short_form()} is not timed at size {size}: {refusal}")
    return problem


def without_first_round(measurement: Measurement) -> Measurement:
    """Return a measurement without its first sample, in which the power limiter may still settle on
    the load."""
    names = ("samples_ms", "first_ms", *READINGS)
    return replace(measurement, **{name: getattr(measurement, name)[1:] for name in names})


def equal_codes(root: Path) -> frozenset[frozenset[str]]:
    """Return pairs of digests of machine codes that are equally fast, as `compilers.py` measured
    the sources at `root`.

    A pair is the code of one kernel from nvcc and that from NVRTC. It counts if it was timed, and
    if the median ratio of the speeds lies within the noise (`CompilerComparison.noise`) of the same
    file at each size and under each load, in every file. Raises as `RecordFile.load` does.
    """
    all_equal: dict[frozenset[str], bool] = {}
    for path in sorted(root.glob(COMPARED_COMPILERS)):
        for codes, is_equal in CompilerComparison.load(path).verdicts().items():
            all_equal[codes] = all_equal.get(codes, True) and is_equal
    return frozenset(codes for codes, is_equal in all_equal.items() if is_equal)
