"""The report of a kernel as text, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from flash_helpers.measure.results import Measurement
from flash_helpers.sass.analyse.bound import ISSUE, LATENCY, Bound, Prediction
from flash_helpers.sass.analyse.counts import Bucket, Counts
from flash_helpers.sass.analyse.report import KernelReport, verdicts, warps_text
from flash_helpers.sass.analyse.stalls import group_stalls, group_waits, stall_cycles
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.control import control_text
from flash_helpers.sass.read.records import Instruction, Loop, SourceLine

_LONGEST_STALLS = 5


@dataclass(frozen=True)
class Table:
    """rows: cells as text. align: of each column, l or r; what is missing is r."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = "l"


@dataclass(frozen=True)
class Section:
    """A heading, and a table, sentences, or a listing under it."""

    title: str
    table: Table | None = None
    sentences: Sequence[str] = ()
    listing: Sequence[str] = ()


class SourceText:
    """The lines of source files, as far as they are there. root: of relative paths."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, list[str]] = {}

    def line(self, where: SourceLine) -> str:
        """The text of a line, without indentation; "" if it is not there."""
        if where.file not in self._files:
            path = self._root / where.file
            try:
                self._files[where.file] = path.read_text(errors="replace").splitlines()
            except OSError:
                self._files[where.file] = []
        lines = self._files[where.file]
        return lines[where.line - 1].strip() if 0 < where.line <= len(lines) else ""


def report_text(report: KernelReport, source: SourceText | None = None) -> str:
    """The report for a terminal. source: print the CUDA lines above what they became."""
    parts = [_headline(report)]
    for section in _sections(report, source):
        parts += ["", section.title, "-" * len(section.title)]
        if section.table:
            parts.append(_table(section.table, "simple"))
        parts += [f"- {sentence}" for sentence in section.sentences]
        parts += section.listing
    return "\n".join(parts)


def report_markdown(report: KernelReport, source: SourceText | None = None) -> str:
    """The report as Markdown. source: as for `report_text`."""
    parts = [f"# `{report.name}`", "", _headline(report)]
    for section in _sections(report, source):
        parts += ["", f"## {section.title}", ""]
        if section.table:
            parts.append(_table(section.table, "pipe"))
        parts += [f"- {sentence}" for sentence in section.sentences]
        if section.listing:
            parts += ["```", *section.listing, "```"]
    return "\n".join(parts)


def report_json(report: KernelReport) -> dict[str, Any]:
    """The report for a machine."""
    bound, prediction, measurement = report.bound, report.prediction, report.measurement
    return {
        "name": report.name,
        "symbol": report.kernel.symbol,
        "architecture": report.kernel.architecture,
        "compiler": str(report.kernel.compiler),
        "resources": asdict(report.kernel.resources),
        "occupancy": None
        if report.occupancy is None
        else {
            "blocks": report.occupancy.blocks,
            "warps": report.occupancy.warps,
            "max_warps": report.occupancy.max_warps,
            "limiters": list(report.occupancy.limiters),
        },
        "peak_live_registers": _peak_json(report.peak),
        "spills": [asdict(site) for site in report.spills],
        "phases": {name: _counts_json(counts) for name, counts in _phase_counts(report)},
        "loop": None
        if report.loop is None
        else {
            "index": report.loop.index,
            "header": report.kernel.blocks[report.loop.header].start,
            "is_main_loop": report.is_main_loop,
            "instructions": [_instruction_json(i) for i in report.body],
        },
        "unrolling": asdict(report.unrolling) if report.unrolling else None,
        "bound": None
        if bound is None
        else {
            "rows": [asdict(row) for row in bound.rows],
            "issued": bound.issued,
            "stall": bound.stall,
            "tensor_chain": bound.tensor_chain,
            "straight": bound.straight,
            "resident_warps": report.resident_warps,
            "cycles": bound.cycles(report.resident_warps),
        },
        "waits": [
            {
                "producer": wait.producer.address,
                "consumer": wait.consumer.address,
                "for_result": wait.for_result,
                "cycles": wait.cycles,
            }
            for wait in report.waits
        ],
        "prediction": None
        if prediction is None
        else {
            "launch": asdict(prediction.launch),
            "milliseconds": dict(prediction.milliseconds),
            "most_tflops": prediction.most_tflops,
        },
        "measurement": None
        if measurement is None
        else {"median_ms": measurement.median_ms, "tflops": measurement.tflops},
        "verdicts": verdicts(report),
    }


def _counts_json(counts: Counts) -> dict[str, Any]:
    return {
        "buckets": {kind.value: number for kind, number in counts.by_bucket.items()},
        "classes": dict(counts.by_class),
        "opcodes": dict(counts.by_opcode),
    }


def _instruction_json(instruction: Instruction) -> dict[str, Any]:
    return {
        "address": instruction.address,
        "text": instruction.text,
        "control": asdict(instruction.control),
        "live": asdict(instruction.live) if instruction.live else None,
        "pipe": instruction.pipe,
        "cycles": instruction.cost,
        "ptx_line": instruction.ptx_line,
        "source": [f"{line.file}:{line.line}" for line in instruction.source],
    }


def _peak_json(peak: Instruction | None) -> dict[str, Any] | None:
    if peak is None or peak.live is None:
        return None
    return {"registers": peak.live.general, "address": peak.address, "loop": peak.loop}


def _headline(report: KernelReport) -> str:
    kernel = report.kernel
    resources = kernel.resources
    parts = [
        report.name,
        f"{kernel.architecture}, {kernel.compiler}, from {kernel.origin}",
        f"{resources.registers} registers, {resources.stack_bytes} bytes of stack, "
        f"{resources.static_smem_bytes} bytes of static shared memory, "
        f"{resources.barriers} barriers",
    ]
    held = report.occupancy
    if held is None:
        parts.append("occupancy: unknown, since it is not told how the kernel is launched")
    else:
        limits = " and ".join(held.limiters)
        parts.append(
            f"occupancy: {held.blocks} blocks an SM, {held.warps} of {held.max_warps} warps, "
            f"limited by {limits}"
        )
    return "\n".join(parts)


def _sections(report: KernelReport, source: SourceText | None) -> Iterator[Section]:
    yield Section("Verdicts", sentences=verdicts(report))
    yield Section("Instructions", table=_phase_table(report))
    yield Section("Registers and spills", sentences=list(_register_sentences(report)))
    if report.loop is None or report.bound is None:
        yield Section("Loops", sentences=["The kernel has no loop."])
        return
    yield Section("Loop", sentences=list(_loop_sentences(report, report.loop)))
    yield Section(
        f"Lower bounds of an iteration, {warps_text(report.resident_warps)}",
        table=_bound_table(report.bound, report.resident_warps),
    )
    yield Section("Costs", table=_cost_table(report.bound))
    if report.prediction:
        title = "Lower bounds of a launch"
        yield Section(title, table=_prediction_table(report.prediction, report.measurement))
    yield Section("Stalls by control word", table=_stall_table(report))
    yield Section("Scoreboard waits", table=_wait_table(report))
    title = "Main loop" if report.is_main_loop else f"Loop {report.loop.index}"
    yield Section(title, listing=list(_listing(report, source)))


def _table(table: Table, style: str) -> str:
    letters = table.align.ljust(len(table.headers), "r")
    sides = [{"l": "left", "r": "right"}[letter] for letter in letters]
    return tabulate(
        table.rows,
        table.headers,
        tablefmt=style,
        disable_numparse=True,
        colalign=sides if table.rows else None,
    )


def _phase_counts(report: KernelReport) -> list[tuple[str, Counts]]:
    parts = [("prologue", report.phases.prologue)]
    if report.phases.main_loop is not None:
        parts.append(("main loop", report.phases.main_loop))
    return [*parts, ("epilogue", report.phases.epilogue), ("whole kernel", report.counts)]


def _phase_table(report: KernelReport) -> Table:
    columns = _phase_counts(report)
    buckets = [
        [kind.value, *(f"{counts.by_bucket[kind]:,}" for _, counts in columns)] for kind in Bucket
    ]
    classes = [
        [name, *(f"{counts.by_class.get(name, 0) or ''}" for _, counts in columns)]
        for name in opcodes.CLASSES
        if any(counts.by_class.get(name) for _, counts in columns)
    ]
    ratios = [
        "work per tensor instruction",
        *(_ratio(counts.per_tensor(counts.work)) for _, counts in columns),
    ]
    return Table(["", *(name for name, _ in columns)], [*buckets, ratios, *classes])


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _register_sentences(report: KernelReport) -> Iterator[str]:
    registers = report.kernel.resources.registers
    peak = report.peak
    if peak is None or peak.live is None:
        yield f"{registers} registers; how many are live is not known."
    else:
        where = "outside loops" if peak.loop is None else f"in loop {peak.loop}"
        yield (
            f"At most {peak.live.general} of {registers} registers are live, first at "
            f"{peak.address:#06x}, {where}: {peak.text}"
        )
    for site in report.spills:
        where = "Outside loops" if site.loop is None else f"In loop {site.loop}"
        yield (
            f"{where}: {site.instructions} local loads and stores, {site.store_bytes} bytes stored "
            f"and {site.load_bytes} loaded a thread."
        )


def _loop_sentences(report: KernelReport, loop: Loop) -> Iterator[str]:
    header = report.kernel.blocks[loop.header].start
    counts = report.loop_counts
    assert counts is not None
    yield (
        f"Loop {loop.index} of {len(report.kernel.loops)}, from {header:#06x}, depth {loop.depth}, "
        f"basic blocks {len(loop.blocks)}: {counts.work} instructions and "
        f"{counts.by_bucket[Bucket.FILLER]} of filler, {counts.tensor} tensor instructions."
    )
    if report.config is not None:
        per_block = report.config.mma_per_key_block
        yield (
            f"A block of K and V takes {per_block} tensor instructions of a warp, so that an "
            f"iteration handles {counts.tensor / per_block:g}."
        )
    signs = report.unrolling
    if signs is not None and signs.by_ptxas is not None:
        copies = (
            "did not unroll it"
            if signs.by_ptxas == 1
            else f"unrolled it: {signs.by_ptxas} instructions of one PTX line"
        )
        yield f"ptxas {copies}."
    if signs is not None and signs.by_source is not None and signs.by_source > 1:
        yield (
            f"One source line most often became {signs.by_source} PTX instructions of the loop, as "
            "#pragma unroll makes them."
        )


def _bound_table(bound: Bound, warps: int) -> Table:
    each = {**bound.pipes, ISSUE: bound.issue}
    low, high = bound.chain_cycles
    rows = []
    for name, cycles in bound.cycles(warps).items():
        if name == LATENCY:
            note = (
                f"{bound.stall:,} cycles of stalls; {bound.tensor_chain} tensor instructions in a "
                f"chain: {low} to {high}"
            )
            rows.append(["latency of a warp", "", f"{cycles:,.0f}", note])
        else:
            label = ISSUE if name == ISSUE else f"{name} pipe"
            note = f"{bound.issued} instructions, filler included" * (name == ISSUE)
            rows.append([label, f"{each[name]:.1f}", f"{cycles:,.0f}", note])
    return Table(["bound", "cycles of an SM, one warp", "all warps", ""], rows, "lrrl")


def _cost_table(bound: Bound) -> Table:
    rows = [
        [
            row.name,
            row.pipe,
            "unknown"
            if row.cycles is None
            else f"{row.source.rstrip('?')}{'' if row.certain else ' [?]'}",
            str(row.number),
            "?" if row.cycles is None else f"{row.cycles:g}",
            "?" if row.cycles is None else f"{row.number * row.cycles:.1f}",
        ]
        for row in bound.rows
    ]
    return Table(["class", "pipe", "source", "instructions", "cycles each", "cycles"], rows, "lll")


def _prediction_table(prediction: Prediction, measurement: Measurement | None) -> Table:
    rows = [[name, f"{value:.3f}"] for name, value in prediction.milliseconds.items()]
    if measurement is None:
        return Table(["bound", "ms"], rows)
    rows.append(["measured", f"{measurement.median_ms:.3f}"])
    whole = measurement.median_ms
    shares = [f"{100 * value / whole:.0f}%" for value in prediction.milliseconds.values()]
    joined = [[*row, share] for row, share in zip(rows, [*shares, "100%"], strict=True)]
    return Table(["bound", "ms", "of the measured time"], joined)


def _stall_table(report: KernelReport) -> Table:
    groups = group_stalls(report.body)
    total = sum(group.cycles for group in groups)
    rows = [
        [g.name, str(g.instructions), str(g.cycles), f"{100 * g.cycles / total:.0f}%"]
        for g in groups
    ]
    longest = sorted(report.body, key=lambda i: (-stall_cycles(i), i.address))
    for instruction in longest[:_LONGEST_STALLS]:
        rows.append(
            [
                f"{instruction.address:#06x} {instruction.text}",
                "1",
                str(stall_cycles(instruction)),
                "",
            ]
        )
    return Table(["class, and the longest stalls", "instructions", "cycles", "share"], rows)


def _wait_table(report: KernelReport) -> Table:
    rows = [
        [
            group.producer,
            group.consumer,
            "result" if group.for_result else "operands read",
            str(len(group.cycles)),
            str(group.cycles[0]),
            f"{group.median:g}",
            str(group.cycles[-1]),
        ]
        for group in group_waits(report.waits)
    ]
    headers = ["raised by", "waited for by", "until", "waits"]
    return Table([*headers, "least cycles between", "median", "most"], rows, "lll")


def _listing(report: KernelReport, source: SourceText | None) -> Iterator[str]:
    yield "address  live  control                       pipe      cycles  instruction"
    shown: tuple[SourceLine, ...] = ()
    block = None
    for instruction in report.body:
        if instruction.block != block:
            block = instruction.block
            yield f"block {block}:"
        if source is not None and instruction.source and instruction.source != shown:
            shown = instruction.source
            first, *callers = shown
            via = "".join(f" < {line.file}:{line.line}" for line in callers)
            yield f"    // {first.file}:{first.line}{via}  {source.line(first)}".rstrip()
        live = "" if instruction.live is None else str(instruction.live.general)
        cost = "" if instruction.cost is None else f"{instruction.cost:g}"
        yield (
            f"{instruction.address:#06x}  {live:>5}  {control_text(instruction.control)}  "
            f"{instruction.pipe:<8}  {cost:>6}  {instruction.text}"
        )
