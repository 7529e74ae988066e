"""Tables of the experiments' speeds and of the facts of their machine code."""

from __future__ import annotations

import statistics
from dataclasses import fields

from experiments import DTYPE, EXPERIMENTS
from machine_code import LoopFacts, MachineCode

from flash_helpers.console.tables import DASH, Table, number
from flash_helpers.measure.benchmark_tables import share_text
from flash_helpers.measure.results import (
    FLASH,
    LIBRARY_NAMES,
    MMA_SYNC,
    RATE_NAMES,
    BenchmarkResults,
)


def speed_table(results: BenchmarkResults) -> Table:
    """Table of one row per experiment, the parent first, then PyTorch's flash backend. The columns
    are percent of flash at each length and of the harmonic means, percent of the parent and of the
    rate of mma.sync, and the resources."""
    dtype = DTYPE.short
    has_rate = results.rate(MMA_SYNC, dtype) is not None
    header = [
        "experiment",
        "what differs",
        *(f"% of flash at {n}" for n in results.sizes),
        "% of flash, mean",
        "% of parent",
        *([f"% of {RATE_NAMES[MMA_SYNC]}"] if has_rate else []),
        "registers",
        "bytes spilled",
    ]
    resources = {record.name: record for record in results.resources}

    parent = EXPERIMENTS[0].name

    def speeds(name: str) -> list[str]:
        own, other = (results.speed(n, dtype) for n in (name, parent))
        shares = [results.of_first(name, dtype, n) for n in (*results.sizes, None)]
        shares.append(own / other if own and other else None)
        if has_rate:
            shares.append(results.of_rate(MMA_SYNC, name, dtype))
        return [share_text(share) for share in shares]

    rows = []
    for e in EXPERIMENTS:
        record = resources.get(e.name)
        cost = [str(record.registers), str(record.local_bytes)] if record else [DASH, DASH]
        rows.append([f"`{e.name}`", e.title, *speeds(e.name), *cost])
    rows.append(["", LIBRARY_NAMES[FLASH], *speeds(FLASH), "", ""])
    return Table(header, rows, "ll")


def loop_table(code: MachineCode) -> Table:
    """Table of one row per experiment."""
    _, *columns = fields(LoopFacts)
    rows = [
        [f"`{loop.name}`", *(str(getattr(loop, column.name)) for column in columns)]
        for loop in code.loops
    ]
    return Table(["experiment", *(column.metadata["title"] for column in columns)], rows)


def provenance_line(results: BenchmarkResults) -> str:
    """Problems, machine and date of the measurement."""
    found, dtype = results.provenance, DTYPE.short
    rate = results.rate(MMA_SYNC, dtype)
    shapes = sorted({(m.size, m.asked.batch, m.asked.heads) for m in results.measurements})
    before = [
        f"SM clock {statistics.median(clocks):.0f} MHz at {seq_len}, {results.main_load}"
        for seq_len in results.sizes
        if (
            clocks := [
                clock
                for m in results.measurements
                if (m.size, m.load) == (seq_len, results.main_load)
                for clock in m.sm_mhz
            ]
        )
    ]
    if rate:
        before.append(f"{RATE_NAMES[MMA_SYNC]} {number(rate)} TFLOP/s")
    return found.sentence(
        f"PyTorch {found.torch}, CUDA {found.cuda}",
        f"{dtype}, {', '.join(f'batch {b}, {h} heads at {s}' for s, b, h in shapes)}",
        f"median of {results.protocol.rounds} rounds of CUDA graph replays",
        clock="; ".join(before),
    )
