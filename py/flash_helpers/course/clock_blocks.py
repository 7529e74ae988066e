"""Blocks about time: what was measured here, and what was published."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from flash_helpers.course.arguments import DTYPE, Arguments, fixed_config, parse_step
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.links import image
from flash_helpers.course.published import Published
from flash_helpers.course.tables import DASH, markdown_table, number, percent
from flash_helpers.kernel_configs import STEPS, Config, config_from_short_form
from flash_helpers.measure.benchmark_tables import TABLE_SEQ_LEN, progression_table
from flash_helpers.measure.plots import progression_numbers
from flash_helpers.measure.results import FLASH, LIBRARY_NAMES, BenchmarkResults
from flash_helpers.registry.family import Step
from flash_helpers.registry.selection import names_of

STAIRCASE = PurePosixPath("docs/images/progression.svg")


@dataclass(frozen=True)
class Speedup:
    """A kernel's speed against another's at one length, less 1, within each round.

    Both are timed in every round, so that a clock that drifts from round to round cancels. median,
    first_quartile, third_quartile: over the rounds.
    """

    median: float
    first_quartile: float
    third_quartile: float

    @property
    def verdict(self) -> str:
        """In words; a change counts if the middle half of the rounds has it."""
        if self.first_quartile > 0:
            return "faster"
        return "slower" if self.third_quartile < 0 else "no change"


def speedup(
    results: BenchmarkResults,
    before: Config,
    after: Config,
    seq_len: int,
) -> Speedup | None:
    """None unless both were measured at that length."""
    old, new = (
        results.find(config.short_form(), config.dtype.short, seq_len) for config in (before, after)
    )
    if old is None or new is None:
        return None
    # rounds stand in order; one that ran out of time has the first of them
    ratios = [a / b - 1 for a, b in zip(old.samples_ms, new.samples_ms, strict=False)]
    if len(ratios) == 1:
        return Speedup(*ratios * 3)
    first, median, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return Speedup(median, first, third)


def mean_change(results: BenchmarkResults, before: Config, after: Config) -> float | None:
    """The change of the harmonic mean of the speeds, less 1, when each length changes as `speedup`
    says; None unless both were measured at every length."""
    total = changed = 0.0
    for seq_len in results.seq_lens:
        speed, found = _speed(results, before, seq_len), speedup(results, before, after, seq_len)
        if speed is None or found is None:
            return None
        total += 1 / speed
        changed += 1 / (speed * (1 + found.median))
    return total / changed - 1 if changed else None


def clock_block(evidence: Evidence, arguments: Arguments) -> str:
    """The H100's clock by length, then what was published."""
    step = parse_step(arguments.words[0])
    parts = [
        _measured_table(evidence.results, step),
        _measured_note(evidence.results, step),
        *_other_configs(evidence.results, step),
        _published_table(evidence.published, step),
        f"Published: percent of the official FlashAttention-2 at {evidence.published.seq_len}, in "
        f"brackets of the harmonic mean over {evidence.published.shortest} … "
        f"{evidence.published.longest}. Source: {evidence.published.source}.",
    ]
    return "\n\n".join(parts)


def _measured_table(results: BenchmarkResults, step: Step) -> str:
    own = fixed_config(step)
    if step.parent is None:
        headers = ["sequence length", f"{step.id}, TFLOP/s", "of flash"]
        rows = [
            [
                _length(seq_len),
                number(_speed(results, own, seq_len)),
                percent(results.of_flash(own.short_form(), own.dtype.short, seq_len)),
            ]
            for seq_len in (*results.seq_lens, None)
        ]
        return markdown_table(headers, rows)
    before = fixed_config(STEPS[step.parent])
    headers = [
        "sequence length", f"{step.parent}, TFLOP/s", f"{step.id}, TFLOP/s", "change",
        "middle half of the rounds", "verdict", "of flash",
    ]  # fmt: skip
    rows = []
    for seq_len in (*results.seq_lens, None):
        found = speedup(results, before, own, seq_len) if seq_len else None
        changed = found.median if found else None
        if seq_len is None:
            changed = mean_change(results, before, own)
        rows.append(
            [
                _length(seq_len),
                number(_speed(results, before, seq_len)),
                number(_speed(results, own, seq_len)),
                percent(changed, signed=True),
                _range_text(found) if found else "",
                found.verdict if found else "",
                percent(results.of_flash(own.short_form(), own.dtype.short, seq_len)),
            ]
        )
    return markdown_table(headers, rows, "lrrrrlr")


def _length(seq_len: int | None) -> str:
    return "harmonic mean" if seq_len is None else str(seq_len)


def _speed(results: BenchmarkResults, config: Config, seq_len: int | None) -> float | None:
    name, dtype = config.short_form(), config.dtype.short
    return (
        results.mean_tflops(name, dtype)
        if seq_len is None
        else results.tflops(name, dtype, seq_len)
    )


def _range_text(found: Speedup) -> str:
    low, high = (percent(x, signed=True) for x in (found.first_quartile, found.third_quartile))
    return f"{low} … {high}"


def _measured_note(results: BenchmarkResults, step: Step) -> str:
    found = results.provenance
    note = (
        f"Measured on {found.gpu}, {found.date}, CUDA {found.cuda}, PyTorch {found.torch}, "
        f"{DTYPE.short}, at the fixed config; flash is {LIBRARY_NAMES[FLASH]} in the same process."
    )
    if step.parent is not None:
        note += (
            " Both are timed in every round: the change is the median of the ratios within a "
            "round, so that a drifting clock cancels, and counts where the middle half of the "
            "rounds agrees on its sign."
        )
    return note


def _other_configs(results: BenchmarkResults, step: Step) -> Iterator[str]:
    fixed = fixed_config(step)
    dtype = DTYPE.short
    configs = [fixed]
    for name in results.names(dtype):
        if name not in LIBRARY_NAMES:
            config = config_from_short_form(name)
            if config.step is step and config != fixed:
                configs.append(config)
    if len(configs) == 1:
        return
    rows = [
        [
            label,
            number(_speed(results, config, TABLE_SEQ_LEN)),
            number(_speed(results, config, None)),
            percent(results.of_flash(config.short_form(), dtype)),
        ]
        for label, config in zip(names_of(configs), configs, strict=True)
    ]
    headers = ["config", f"TFLOP/s at {TABLE_SEQ_LEN}", "harmonic mean", "of flash, mean"]
    yield "Every config of this step that was measured, the fixed one first:"
    yield markdown_table(headers, rows)


def _published_table(published: Published, step: Step) -> str:
    names = [name for name in (step.parent, step.id) if name is not None]
    rows = []
    for gpu in published.gpus:
        cells = [gpu.name]
        for name in names:
            found = published.find(name, gpu.key)
            cells.append(f"{found.percent}% ({found.percent_mean}%)" if found else DASH)
        rows.append(cells)
    return markdown_table(["published", *(f"step {name}" for name in names)], rows)


def staircase_block(evidence: Evidence, arguments: Arguments, page: PurePosixPath) -> str:
    """The plot of the progression; its text tells the numbers of the first and the last step."""
    numbers = progression_numbers(evidence.results, DTYPE.short)
    steps, fixed, best = numbers["steps"], numbers["fixed"], numbers["best"]
    alt = (
        f"Percent of {LIBRARY_NAMES[FLASH]} by step on {evidence.results.provenance.gpu}: "
        f"{fixed[0]:.0f}% at step {steps[0]}, {fixed[-1]:.0f}% at step {steps[-1]}"
    )
    if best[-1] is not None:
        alt += f", {best[-1]:.0f}% with its best config"
    return image(STAIRCASE, alt, page)


def progression_block(evidence: Evidence, arguments: Arguments) -> str:
    """The table of the README."""
    return progression_table(evidence.results)
