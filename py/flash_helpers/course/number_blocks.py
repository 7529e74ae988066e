"""Blocks with a few rows of the evidence's tables, to support the sentences beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from flash_helpers.console.tables import number, percent
from flash_helpers.course.arguments import Arguments, compiled_pattern
from flash_helpers.course.columns import columns_table, row, with_owners
from flash_helpers.course.counter_blocks import counter_rows
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.metric import metric_of, share, speed
from flash_helpers.course.sass_blocks import PHASES, bound_rows, count_rows, phase_counts
from flash_helpers.course.step_blocks import shared_memory_row
from flash_helpers.kernel_configs import Config
from flash_helpers.measure.benchmark_tables import TABLE_SEQ_LEN
from flash_helpers.measure.machine_code import ConfigFacts
from flash_helpers.registry.selection import UsageError

Rows = Iterator[Sequence[str]]


def _sass_rows(evidence: Evidence, configs: Sequence[Config], architecture: str) -> Rows:
    """Rows of `build:sass`, and one per phase and opcode, such as "main loop, FMNMX"."""
    found = [evidence.facts(config, architecture) for config in configs]
    yield from with_owners(count_rows(found))
    yield shared_memory_row(configs)
    for phase, title in PHASES.items():
        counts = [_opcodes(facts, phase) for facts in found]
        for base in sorted({base for of in counts for base in of}):
            label = f"{title.replace('_', ' ')}, {base}"
            yield row(label, [of.get(base, 0) for of in counts])


def _opcodes(facts: ConfigFacts, phase: str) -> Mapping[str, int]:
    return phase_counts(facts, phase).by_base


def _bound_rows(evidence: Evidence, configs: Sequence[Config], architecture: str) -> Rows:
    yield from bound_rows([evidence.facts(config, architecture) for config in configs])


def _counter_rows(evidence: Evidence, configs: Sequence[Config], architecture: str) -> Rows:
    yield from with_owners(counter_rows([evidence.counts(config) for config in configs]))


def _clock_rows(evidence: Evidence, configs: Sequence[Config], architecture: str) -> Rows:
    metric = metric_of(configs[-1].family)
    found = [(evidence.results_of(config.step), config) for config in configs]
    for length in (TABLE_SEQ_LEN, None):
        where = f"at {length}" if length else "harmonic mean"
        yield [f"{metric.unit}, {where}", *(number(speed(*own, length)) for own in found)]
        shares = (share(*own, own[1].dtype.short, length) for own in found)
        yield [f"{metric.heading}, {where}", *map(percent, shares)]


SOURCES: Mapping[str, Callable[[Evidence, Sequence[Config], str], Rows]] = {
    "sass": _sass_rows,
    "bound": _bound_rows,
    "counters": _counter_rows,
    "clock": _clock_rows,
}


def numbers_block(evidence: Evidence, arguments: Arguments) -> str:
    """Table of the rows of each source whose label matches the source's option, equal rows too.

    Raises UsageError for an option that matches no row.
    """
    configs = arguments.kernels()
    rows: list[Sequence[str]] = []
    for source, text in arguments.options.items():
        if source not in SOURCES:
            continue
        pattern = compiled_pattern(text)
        found = SOURCES[source](evidence, configs, arguments.architecture())
        chosen = [cells for cells in found if re.search(pattern, cells[0])]
        if not chosen:
            raise UsageError(f"no row of {source} matches {text!r}")
        rows += chosen
    if not rows:
        raise UsageError(f"no row is chosen: give one of {', '.join(SOURCES)}")
    return columns_table(configs, [list(cells) for cells in rows], folds=False)
