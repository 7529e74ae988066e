"""The progression matrix as tables: for a terminal, Markdown, CSV and JSON; one row per kernel."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flash_helpers.console.tables import (
    DASH,
    Table,
    escaped_markdown,
    known,
    number,
    percent,
    records_csv,
)
from flash_helpers.gpu import LIMITS
from flash_helpers.sass.analyse.bound import ISSUE, LATENCY
from flash_helpers.sass.analyse.counts import UNIT_OPERATIONS, Bucket, Counts
from flash_helpers.sass.analyse.matrix import (
    GROUP_NAMES,
    MEANING,
    KernelFacts,
    Matrix,
    changes_text,
)

_WIDTH = 118
_RESOURCE_HEADERS = (
    "", "registers", "spilled bytes\nstored/loaded", "stack\nbytes", "shared memory\nbytes",
    "blocks\nper SM", "warps\nper SM", "limited by", "instructions\nof the text",
)  # fmt: skip
_PER_HMMA = tuple(name for name in GROUP_NAMES if name != "tensor")
_COUNT_HEADERS = ("", "main\nloop", "HMMA", "all per\nHMMA", *_PER_HMMA, "filler")


def _resource_row(name: str, facts: KernelFacts) -> list[str]:
    resources, held = facts.kernel.resources, facts.occupancy
    total = sum(counts.work for counts in facts.phases.named.values())
    return [
        name,
        str(resources.registers),
        f"{known(resources.spill_store_bytes)}/{known(resources.spill_load_bytes)}",
        known(resources.stack_bytes),
        number(facts.smem_bytes),
        *(
            [str(held.blocks), f"{held.warps}/{held.max_warps}", ", ".join(held.limiters)]
            if held
            else [DASH] * 3
        ),
        number(total),
    ]


def _count_row(name: str, facts: KernelFacts) -> list[str]:
    counts = facts.phases.main_loop
    if counts is None:
        return [name, *[DASH] * (len(_COUNT_HEADERS) - 1)]
    return [
        name,
        number(counts.work),
        number(counts.tensor),
        number(facts.per_hmma(counts.work), 2),
        *(number(facts.per_hmma(facts.groups[group]), 2) for group in _PER_HMMA),
        number(facts.per_hmma(counts.by_bucket[Bucket.FILLER]), 2),
    ]


def _bound_columns(matrix: Matrix) -> list[str]:
    """The pipes that any kernel keeps busy, the busiest first, then issue and latency."""
    totals: dict[str, float] = {}
    for facts in matrix.rows:
        for name, cycles in (facts.bound_cycles or {}).items():
            totals[name] = totals.get(name, 0) + cycles
    pipes = sorted((n for n in totals if n not in (ISSUE, LATENCY)), key=lambda n: -totals[n])
    return [*pipes, *(name for name in (ISSUE, LATENCY) if name in totals)]


def _bound_row(name: str, facts: KernelFacts, columns: Sequence[str]) -> list[str]:
    cycles = facts.bound_cycles or {}
    return [
        name,
        *(number(cycles.get(column)) for column in columns),
        next(iter(cycles), DASH),
        number(facts.loop.unknown if facts.loop else None),
    ]


_TIME_HEADERS = (
    "", "least ms", "limited by", "measured ms", "least/measured", "TFLOP/s at most", "measured"
)  # fmt: skip


def _time_row(name: str, facts: KernelFacts) -> list[str]:
    prediction, measurement, share = facts.prediction, facts.measurement, facts.of_bound
    return [
        name,
        number(prediction.least_ms if prediction else None, 3),
        prediction.binding if prediction else DASH,
        number(measurement.median_ms if measurement else None, 3),
        percent(share, 0),
        number(prediction.most_tflops if prediction else None),
        number(measurement.speed if measurement else None),
    ]


def _tables(matrix: Matrix) -> list[Table]:
    columns = _bound_columns(matrix)
    changes = ["", *(changes_text(changed) for changed in matrix.changes)]
    tables = [
        Table(
            _RESOURCE_HEADERS,
            [_resource_row(*row) for row in matrix.named],
            "lrrrrrrl",
            "Resources",
        ),
        Table(
            _COUNT_HEADERS,
            [_count_row(*row) for row in matrix.named],
            title="Main loop: instructions, and how many for each HMMA",
        ),
        Table(
            ("", *columns, "bound by", "of unknown cost"),
            [_bound_row(*row, columns) for row in matrix.named],
            "l" + "r" * len(columns) + "l",
            "Bound: SM cycles for an iteration of all its warps (latency: of one warp alone), and "
            "instructions left out",
        ),
        Table(
            _TIME_HEADERS,
            [_time_row(*row) for row in matrix.named],
            "lrl",
            f"Time of a launch at {matrix.timed}",
        ),
        Table(
            ("", "idea", "changes"),
            [[name, f.note, text] for (name, f), text in zip(matrix.named, changes, strict=True)],
            "lll",
            "Opcodes that changed most, against the row above: of main loops, or else of texts",
        ),
    ]
    return [table for table in tables if matrix.measured_on or table.header != _TIME_HEADERS]


def heading(matrix: Matrix) -> list[str]:
    """Lines above the tables, which name the kernels compared."""
    kernels = [facts.kernel for facts in matrix.rows]
    compilers = list(dict.fromkeys(str(kernel.compiler) for kernel in kernels))
    parts = [
        f"{len(kernels)} {'kernel' if len(kernels) == 1 else 'kernels'}",
        *dict.fromkeys(f.identity["dtype"] for f in matrix.rows if "dtype" in f.identity),
        *dict.fromkeys(kernel.architecture for kernel in kernels),
        f"compiled by {', '.join(compilers)}",
    ]
    lines = [", ".join(parts)]
    if len(compilers) > 1:
        lines.append("different compilers: differences may be theirs, not the kernels'")
    for name, facts in matrix.named:
        if facts.where is not None:
            lines.append(f"{name}: {facts.name} of {facts.kernel.origin}")
        elif not facts.is_usual:
            lines.append(f"{name}: {facts.name}")
    return lines


def footnotes(matrix: Matrix) -> list[str]:
    """Notes on the numbers, below the tables."""
    notes = [f"{MEANING}."]
    loops = [facts.phases.main_loop for facts in matrix.rows]
    if not all(counts is None or counts.is_usual_tensor for counts in loops):
        notes.append(
            f"Per HMMA is per {UNIT_OPERATIONS} tensor operations, since the shapes differ."
        )
    notes.append(
        "Bounds leave out instructions whose cost no source tells (unknown), latency of memory and "
        "bank conflicts; predicated instructions count as executed, filler only as issued."
    )
    if any(f.occupancy is None and f.kernel.capability in LIMITS for f in matrix.rows):
        notes.append(
            "Without the occupancy bounds are those of one warp. It is unknown where it is not "
            "told how a kernel is launched: give --threads."
        )
    if matrix.measured_on:
        notes.append(f"Measured on {matrix.measured_on}.")
    else:
        notes.append("No measurement of these kernels on this architecture is at hand.")
    return notes


def matrix_text(matrix: Matrix) -> str:
    """The tables for a terminal of 120 columns."""
    tables = _tables(matrix)
    notes = [textwrap.fill(note, _WIDTH) for note in footnotes(matrix)]
    parts = ["\n".join(heading(matrix)), *(table.text() for table in tables[:-1])]
    parts.append(tables[-1].text(maxcolwidths=[None, 30, 80]))
    return "\n\n".join([*parts, "\n".join(notes)])


def matrix_markdown(matrix: Matrix) -> str:
    """The same tables in Markdown."""
    tables = [table.markdown(plain=True) for table in _tables(matrix)]
    lines = map(escaped_markdown, heading(matrix))
    return "\n\n".join(["  \n".join(lines), *tables, *map(escaped_markdown, footnotes(matrix))])


def facts_as_dict(facts: KernelFacts) -> dict[str, Any]:
    """The numbers of one kernel by name, for a machine; None where there are none."""
    loop, held, bound = facts.phases.main_loop, facts.occupancy, facts.bound_cycles
    return {
        **facts.identity,
        "architecture": facts.kernel.architecture,
        "compiler": str(facts.kernel.compiler),
        **asdict(facts.kernel.resources),
        "smem_bytes": facts.smem_bytes,
        "blocks_per_sm": held.blocks if held else None,
        "warps_per_sm": held.warps if held else None,
        "limited_by": " ".join(held.limiters) if held else None,
        "loop_instructions": loop.work if loop else None,
        "loop_filler": loop.by_bucket[Bucket.FILLER] if loop else None,
        "loop_hmma": loop.tensor if loop else None,
        "instructions_per_hmma": facts.per_hmma(loop.work) if loop else None,
        **{
            f"{name}_per_hmma": facts.per_hmma(facts.groups[name]) if loop else None
            for name in GROUP_NAMES
        },
        "bound_by": next(iter(bound)) if bound else None,
        "bound_cycles": next(iter(bound.values())) if bound else None,
        "unknown_cost": facts.loop.unknown if facts.loop else None,
        "least_ms": facts.prediction.least_ms if facts.prediction else None,
        "measured_ms": facts.measurement.median_ms if facts.measurement else None,
        "speed": facts.measurement.speed if facts.measurement else None,
    }


def matrix_csv(matrix: Matrix) -> str:
    """CSV with one row per kernel. A name that only some kernels have is empty for the others."""
    columns = dict.fromkeys((name for facts in matrix.rows for name in facts.identity), "")
    return records_csv([{**columns, **facts_as_dict(facts)} for facts in matrix.rows])


def counts_as_dict(counts: Counts) -> dict[str, Any]:
    """Instructions by bucket, class and opcode, for a machine."""
    return {
        "buckets": {kind.value: count for kind, count in counts.by_bucket.items()},
        "classes": dict(counts.by_class),
        "opcodes": dict(counts.by_opcode),
    }


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """All contents of the tables, and the opcodes and classes of each phase."""
    kernels = [
        {
            "name": name,
            **facts_as_dict(facts),
            "loop_bounds": dict(facts.bound_cycles or {}),
            "phases": {part: counts_as_dict(c) for part, c in facts.phases.named.items()},
            "changes": dict(changes),
        }
        for (name, facts), changes in zip(matrix.named, [(), *matrix.changes], strict=True)
    ]
    return {"measured_on": matrix.measured_on, "kernels": kernels}
