"""What was measured of the experiments, and what was read from their machine code, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from machine_code import MachineCode
from overlap import DTYPE, EXPERIMENTS

from flash_helpers.measure.benchmark_tables import format_cell
from flash_helpers.measure.results import (
    FLASH,
    LIBRARY_NAMES,
    MMA_SYNC,
    RATE_NAMES,
    BenchmarkResults,
)


@dataclass(frozen=True)
class Table:
    """Cells and how they are aligned: "left" or "right", a column each."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    alignment: Sequence[str]

    def markdown(self) -> str:
        """As lines of a Markdown file."""
        rules = [{"left": ":--", "right": "--:"}[side] for side in self.alignment]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.header, rules, *self.rows))


def speed_table(results: BenchmarkResults) -> Table:
    """A row an experiment, then PyTorch's flash backend: percent of flash at each length and of the
    harmonic means, of the parent, and of mma.sync's rate, and what it costs."""
    dtype = DTYPE.short
    has_rate = results.rate(MMA_SYNC, dtype) is not None
    rate = [f"% of {RATE_NAMES[MMA_SYNC]}"] if has_rate else []
    header = [
        "experiment",
        "against its parent",
        *(f"% of flash at {n}" for n in results.seq_lens),
        "% of flash, mean",
        "% of parent",
        *rate,
        "registers",
        "bytes spilled",
    ]
    resources = {record.name: record for record in results.resources}

    def speeds(name: str, parent: str) -> list[str]:
        own = results.mean_tflops(name, dtype)
        other = results.mean_tflops(parent, dtype) if parent else None
        shares = [results.of_flash(name, dtype, n) for n in (*results.seq_lens, None)]
        shares.append(own / other if own and other else None)
        if rate:
            shares.append(results.of_rate(MMA_SYNC, name, dtype))
        return [format_cell(share, 100, 1) for share in shares]

    rows = []
    for e in EXPERIMENTS:
        record = resources.get(e.name)
        cost = [str(record.registers), str(record.local_bytes)] if record else ["-", "-"]
        title = f"{e.title} (`{e.parent}`)" if e.parent else e.title
        rows.append([f"`{e.name}`", title, *speeds(e.name, e.parent), *cost])
    rows.append(["", LIBRARY_NAMES[FLASH], *speeds(FLASH, ""), "", ""])
    return Table(header, rows, ["left", "left", *["right"] * (len(header) - 2)])


_LOOP_COLUMNS: Mapping[str, str] = {
    "instructions": "instructions",
    "hmma": "HMMA",
    "ldmatrix": "LDSM",
    "mufu": "MUFU",
    "ffma": "FFMA",
    "fmul": "FMUL",
    "fadd": "FADD",
    "moves": "moves",
    "local": "local memory",
    "gap": "most between two HMMA",
    "hmma_behind": "HMMA behind half of MUFU",
}


def loop_table(code: MachineCode) -> Table:
    """A row an experiment."""
    rows = [
        [f"`{loop.name}`", *(str(getattr(loop, key)) for key in _LOOP_COLUMNS)]
        for loop in code.loops
    ]
    header = ["experiment", *_LOOP_COLUMNS.values()]
    return Table(header, rows, ["left", *["right"] * len(_LOOP_COLUMNS)])


def provenance_line(results: BenchmarkResults) -> str:
    """What was measured, on what, when."""
    found, dtype = results.provenance, DTYPE.short
    rate = results.rate(MMA_SYNC, dtype)
    shapes = {(m.seq_len, m.batch, m.n_heads) for m in results.measurements}
    parts = [
        found.gpu,
        *(f"SM clock {c.sm_mhz[1]:.0f} MHz at {c.seq_len}" for c in results.clocks),
        f"{RATE_NAMES[MMA_SYNC]} {format_cell(rate)} TFLOP/s" if rate else "",
        f"driver {found.driver}" if found.driver else "",
        f"PyTorch {found.torch}, CUDA {found.cuda}",
        f"{dtype}, {', '.join(f'batch {b}, {h} heads at {s}' for s, b, h in sorted(shapes))}",
        f"median of {results.protocol.rounds} rounds of CUDA graph replays",
        found.date,
        f"commit {found.commit}" if found.commit else "",
    ]
    return "; ".join(part for part in parts if part) + "."
