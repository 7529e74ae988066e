"""The progression matrix as tables: for a terminal, Markdown, CSV and JSON; a row a kernel."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from tabulate import tabulate

from flash_helpers.kernel_configs import get_kernel_progression_configs
from flash_helpers.sass.analyse.bound import ISSUE, LATENCY
from flash_helpers.sass.analyse.counts import Bucket
from flash_helpers.sass.analyse.matrix import (
    GROUP_NAMES,
    MEANING,
    KernelFacts,
    Matrix,
    changes_text,
    opcode_changes,
)

_WIDTH = 118
_RESOURCE_HEADERS = (
    "", "registers", "spilled bytes\nstored/loaded", "stack\nbytes", "shared memory\nbytes",
    "blocks\nan SM", "warps\nan SM", "limited by", "instructions\nof the text",
)  # fmt: skip
_PER_HMMA = tuple(name for name in GROUP_NAMES if name != "tensor")
_COUNT_HEADERS = ("", "main\nloop", "HMMA", "all per\nHMMA", *_PER_HMMA, "filler")


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _resource_row(name: str, facts: KernelFacts) -> list[str]:
    resources, parts = facts.kernel.resources, facts.phases
    total = sum(c.work for c in (parts.prologue, parts.main_loop, parts.epilogue) if c is not None)
    return [
        name,
        str(resources.registers),
        f"{resources.spill_store_bytes}/{resources.spill_load_bytes}",
        str(resources.stack_bytes),
        _number(facts.smem_bytes),
        str(facts.occupancy.blocks),
        f"{facts.occupancy.warps}/{facts.occupancy.max_warps}",
        ", ".join(facts.occupancy.limiters),
        _number(total),
    ]


def _count_row(name: str, facts: KernelFacts) -> list[str]:
    counts = facts.phases.main_loop
    if counts is None:
        return [name, *["-"] * (len(_COUNT_HEADERS) - 1)]
    return [
        name,
        _number(counts.work),
        _number(counts.tensor),
        _number(facts.per_hmma(counts.work), 2),
        *(_number(facts.per_hmma(facts.groups[group]), 2) for group in _PER_HMMA),
        _number(facts.per_hmma(counts.by_bucket[Bucket.FILLER]), 2),
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
        *(_number(cycles.get(column)) for column in columns),
        next(iter(cycles), "-"),
        _number(facts.loop.unknown if facts.loop else None),
    ]


_TIME_HEADERS = (
    "", "least ms", "limited by", "measured ms", "least/measured", "TFLOP/s at most", "measured"
)  # fmt: skip


def _time_row(name: str, facts: KernelFacts) -> list[str]:
    prediction, measurement, share = facts.prediction, facts.measurement, facts.of_bound
    return [
        name,
        _number(prediction.least_ms if prediction else None, 3),
        prediction.binding if prediction else "-",
        _number(measurement.median_ms if measurement else None, 3),
        "-" if share is None else f"{100 * share:.0f}%",
        _number(prediction.most_tflops if prediction else None),
        _number(measurement.tflops if measurement else None),
    ]


def _change_rows(matrix: Matrix) -> list[list[str]]:
    rows = []
    for number, (name, facts) in enumerate(zip(matrix.names, matrix.rows, strict=True)):
        idea = facts.config.step.idea
        if number == 0:
            rows.append([name, idea, ""])
        else:
            rows.append([name, idea, changes_text(opcode_changes(matrix.rows[number - 1], facts))])
    return rows


def _time_table(
    matrix: Matrix, named: Sequence[tuple[str, KernelFacts]]
) -> list[tuple[str, Sequence[str], list[list[str]], str]]:
    if not matrix.measured_on:
        return []
    title = f"Time of a launch at length {matrix.seq_len}"
    return [(title, _TIME_HEADERS, [_time_row(*row) for row in named], "lrlrrrr")]


def _tables(matrix: Matrix) -> list[tuple[str, Sequence[str], list[list[str]], str]]:
    """Each table: title, headers, rows, and a letter a column for how it is aligned."""
    named = list(zip(matrix.names, matrix.rows, strict=True))
    columns = _bound_columns(matrix)
    bound_headers = ("", *columns, "bound by", "of unknown cost")
    return [
        ("Resources", _RESOURCE_HEADERS, [_resource_row(*row) for row in named], "lrrrrrrlr"),
        (
            "Main loop: instructions, and how many for each HMMA",
            _COUNT_HEADERS,
            [_count_row(*row) for row in named],
            "l" + "r" * (len(_COUNT_HEADERS) - 1),
        ),
        (
            "Bound: cycles of the SM for an iteration of all its warps, and instructions left out",
            bound_headers,
            [_bound_row(*row, columns) for row in named],
            "l" + "r" * len(columns) + "lr",
        ),
        *_time_table(matrix, named),
        (
            "Opcodes of the main loop that changed most, against the row above",
            ("", "idea", "changes"),
            _change_rows(matrix),
            "lll",
        ),
    ]


def heading(matrix: Matrix) -> list[str]:
    """What was compared: lines above the tables."""
    kernels = [facts.kernel for facts in matrix.rows]
    compilers = list(dict.fromkeys(str(kernel.compiler) for kernel in kernels))
    dtypes = ", ".join(dict.fromkeys(facts.config.dtype.short for facts in matrix.rows))
    lines = [
        f"{len(kernels)} {'kernel' if len(kernels) == 1 else 'kernels'}, {dtypes}, "
        f"{', '.join(dict.fromkeys(kernel.architecture for kernel in kernels))}, compiled by "
        f"{', '.join(compilers)}"
    ]
    if len(compilers) > 1:
        lines.append("different compilers: differences may be theirs, not the kernels'")
    lines += [
        f"{name}: {facts.config.short_form()}"
        for name, facts in zip(matrix.names, matrix.rows, strict=True)
        if facts.config not in get_kernel_progression_configs()
    ]
    return lines


def footnotes(matrix: Matrix) -> list[str]:
    """What has to be said about the numbers."""
    notes = [f"{MEANING}."]
    notes.append(
        "Bounds leave out instructions whose cost no source tells (unknown), latency of memory and "
        "bank conflicts; predicated instructions count as executed, filler only as issued."
    )
    if matrix.measured_on:
        notes.append(f"Measured on {matrix.measured_on}.")
    else:
        notes.append("No measurement of these kernels on this architecture is at hand.")
    return notes


_ALIGNMENT = MappingProxyType({"l": "left", "r": "right"})


def matrix_text(matrix: Matrix) -> str:
    """The tables for a terminal of 120 columns."""
    parts = ["\n".join(heading(matrix))]
    for title, headers, rows, alignment in _tables(matrix):
        wraps = {"maxcolwidths": [None, 30, 80]} if headers[1] == "idea" else {}
        table = tabulate(
            rows,
            headers,
            disable_numparse=True,
            colalign=[_ALIGNMENT[letter] for letter in alignment],
            **wraps,
        )
        parts.append(f"{title}\n{table}")
    notes = [textwrap.fill(note, _WIDTH) for note in footnotes(matrix)]
    return "\n\n".join([*parts, "\n".join(notes)])


def matrix_markdown(matrix: Matrix) -> str:
    """The same tables in Markdown."""
    parts = ["  \n".join(heading(matrix))]
    for title, headers, rows, alignment in _tables(matrix):
        table = tabulate(
            [[cell.replace("|", "\\|") for cell in row] for row in rows],
            [header.replace("\n", " ") for header in headers],
            tablefmt="pipe",
            disable_numparse=True,
            colalign=[_ALIGNMENT[letter] for letter in alignment],
        )
        parts.append(f"**{title}**\n\n{table}")
    return "\n\n".join([*parts, "\n\n".join(footnotes(matrix))])


def facts_as_dict(facts: KernelFacts) -> dict[str, Any]:
    """The numbers of one kernel by name, for a machine; None where there are none."""
    loop = facts.phases.main_loop
    return {
        "config": facts.config.short_form(),
        "step": facts.config.step.id,
        "dtype": facts.config.dtype.short,
        "architecture": facts.kernel.architecture,
        "compiler": str(facts.kernel.compiler),
        **{name: value for name, value in asdict(facts.kernel.resources).items()},
        "smem_bytes": facts.smem_bytes,
        "blocks_per_sm": facts.occupancy.blocks,
        "warps_per_sm": facts.occupancy.warps,
        "limited_by": " ".join(facts.occupancy.limiters),
        "loop_instructions": loop.work if loop else None,
        "loop_filler": loop.by_bucket[Bucket.FILLER] if loop else None,
        "loop_hmma": loop.tensor if loop else None,
        "instructions_per_hmma": facts.per_hmma(loop.work) if loop else None,
        **{
            f"{name}_per_hmma": facts.per_hmma(facts.groups[name]) if loop else None
            for name in GROUP_NAMES
        },
        "bound_by": next(iter(facts.bound_cycles)) if facts.bound_cycles else None,
        "bound_cycles": next(iter(facts.bound_cycles.values())) if facts.bound_cycles else None,
        "unknown_cost": facts.loop.unknown if facts.loop else None,
        "least_ms": facts.prediction.least_ms if facts.prediction else None,
        "measured_ms": facts.measurement.median_ms if facts.measurement else None,
        "tflops": facts.measurement.tflops if facts.measurement else None,
    }


def matrix_csv(matrix: Matrix) -> str:
    """A row a kernel."""
    rows = [facts_as_dict(facts) for facts in matrix.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """Everything that the tables tell, and the opcodes and classes of each phase."""
    kernels = []
    for number, (name, facts) in enumerate(zip(matrix.names, matrix.rows, strict=True)):
        parts = {
            "prologue": facts.phases.prologue,
            "main loop": facts.phases.main_loop,
            "epilogue": facts.phases.epilogue,
        }
        changes = opcode_changes(matrix.rows[number - 1], facts) if number else []
        kernels.append(
            {
                "name": name,
                **facts_as_dict(facts),
                "loop_bounds": dict(facts.bound_cycles or {}),
                "phases": {
                    phase: {
                        "buckets": {k.value: n for k, n in counts.by_bucket.items()},
                        "classes": dict(counts.by_class),
                        "opcodes": dict(counts.by_opcode),
                    }
                    for phase, counts in parts.items()
                    if counts is not None
                },
                "changes": dict(changes),
            }
        )
    return {"seq_len": matrix.seq_len, "measured_on": matrix.measured_on, "kernels": kernels}
