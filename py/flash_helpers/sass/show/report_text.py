"""The report of a kernel as text, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flash_helpers.console.tables import DASH, Table, code_span, escaped_markdown, fenced, percent
from flash_helpers.gpu import LIMITS
from flash_helpers.sass.analyse.bound import ISSUE, LATENCY, Bound, Measured, Prediction, loop_bound
from flash_helpers.sass.analyse.counts import UNIT_OPERATIONS, Bucket, Counts, count_all, count_loop
from flash_helpers.sass.analyse.report import KernelReport, verdicts, warps_text
from flash_helpers.sass.analyse.roles import numbers_text
from flash_helpers.sass.analyse.stalls import group_stalls, group_waits, stall_cycles
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.control import control_text
from flash_helpers.sass.read.records import Instruction, Loop, SourceLine
from flash_helpers.sass.read.symbols import with_demangled_symbols
from flash_helpers.sass.show.matrix_tables import counts_as_dict

_LONGEST_STALLS = 5

_Body = Table | Iterable[str] | str  # a table, sentences, or a listing


class SourceText:
    """The lines of source files, as far as the files exist. `root`: root of relative paths."""

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
    """The report for a terminal. `source`: print the CUDA lines above the instructions that they
    became."""
    parts = [_headline(report)]
    for title, body in _sections(report, source):
        text = body.text() if isinstance(body, Table) else body
        if not isinstance(text, str):
            text = "\n".join(f"- {sentence}" for sentence in text)
        parts += ["", title, "-" * len(title), text]
    return "\n".join(parts)


def report_markdown(report: KernelReport, source: SourceText | None = None) -> str:
    """The report as Markdown. `source`: as in `report_text`."""
    lines = map(escaped_markdown, _headline(report).split("\n"))
    parts = [f"# {code_span(report.facts.name)}", "", "  \n".join(lines)]
    for title, body in _sections(report, source):
        parts += ["", f"## {title}", ""]
        if isinstance(body, str):
            parts.append(fenced(body))
        elif isinstance(body, Table):
            parts.append(body.markdown(plain=True))
        else:
            parts += [f"- {escaped_markdown(sentence)}" for sentence in body]
    return "\n".join(parts)


def report_json(report: KernelReport) -> dict[str, Any]:
    """The report for a machine."""
    kernel, held, loop, bound = report.kernel, report.facts.occupancy, report.loop, report.bound
    peak, warps = report.peak, report.warps
    prediction, measurement = report.facts.prediction, report.facts.measurement
    return {
        "name": report.facts.name,
        "symbol": kernel.symbol,
        "architecture": kernel.architecture,
        "compiler": str(kernel.compiler),
        "resources": asdict(kernel.resources),
        "occupancy": held
        and {
            "blocks": held.blocks,
            "warps": held.warps,
            "max_warps": held.max_warps,
            "limiters": list(held.limiters),
            "misfit": report.facts.misfit,
        },
        "peak_live_registers": peak
        and peak.live
        and {"registers": peak.live.general, "address": peak.address, "loop": peak.loop},
        "spills": [asdict(site) for site in report.spills],
        "local_accesses": [asdict(site) for site in report.local_accesses],
        "roles": [asdict(role) for role in report.facts.roles],
        "together": report.facts.together,
        "phases": {name: counts_as_dict(counts) for name, counts in _phase_counts(report).items()},
        "loop": loop
        and {
            "index": loop.index,
            "header": kernel.blocks[loop.header].start,
            "is_main_loop": report.is_main_loop,
            "instructions": [_instruction_json(i) for i in report.body],
        },
        "unrolling": report.unrolling and asdict(report.unrolling),
        "bound": bound
        and {
            "rows": [asdict(row) for row in bound.rows],
            "issued": bound.issued,
            "stall": bound.stall,
            "tensor_chain": bound.tensor_chain,
            "straight": bound.straight,
            "warps": warps,
            "cycles": bound.cycles(warps) if bound.tells_tensor and warps else None,
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
        "prediction": prediction
        and {
            "launch": {"problem": prediction.launch.problem, **asdict(prediction.chip)},
            "milliseconds": prediction.milliseconds,
            "most_tflops": prediction.most_tflops,
        },
        "measurement": measurement and asdict(measurement),
        "verdicts": verdicts(report),
    }


def _instruction_json(instruction: Instruction) -> dict[str, Any]:
    return {
        "address": instruction.address,
        "text": instruction.text,
        "control": asdict(instruction.control),
        "live": instruction.live and asdict(instruction.live),
        "pipe": instruction.pipe,
        "cycles": instruction.cost,
        "is_spill": instruction.is_spill,
        "ptx_line": instruction.ptx_line,
        "source": [str(line) for line in instruction.source],
    }


def _headline(report: KernelReport) -> str:
    kernel = report.kernel
    resources = kernel.resources
    stack = "an unknown number of" if resources.stack_bytes is None else resources.stack_bytes
    parts = [
        report.facts.name,
        f"{kernel.architecture}, {kernel.compiler}, from {kernel.origin}",
        f"{resources.registers} registers, {stack} bytes of stack, "
        f"{resources.static_smem_bytes} bytes of static shared memory, "
        f"{resources.barriers} barriers",
    ]
    held = report.facts.occupancy
    if kernel.capability not in LIMITS:
        parts.append(f"occupancy: unknown, since the limits of {kernel.architecture} are not known")
    elif held is None:
        parts.append("occupancy: unknown, since it is not told how the kernel is launched")
    elif report.facts.misfit:
        parts.append(f"a block does not fit on an SM: {report.facts.misfit}")
    else:
        limits = " and ".join(held.limiters)
        parts.append(
            f"occupancy: {held.blocks} blocks per SM, {held.warps} of {held.max_warps} warps, "
            f"limited by {limits}"
        )
    if kernel.capability not in opcodes.KNOWN:
        tensor = "tensor, " if kernel.capability in opcodes.TENSOR_KNOWN else ""
        unknown = " but of tensor instructions" if tensor else ""
        parts.append(
            f"costs of instructions: unknown for {kernel.architecture}{unknown}; bounds are of "
            f"{tensor}issue and latency alone"
        )
    return "\n".join(parts)


def _sections(report: KernelReport, source: SourceText | None) -> Iterator[tuple[str, _Body]]:
    """Titles of sections, and their contents."""
    yield "Verdicts", verdicts(report)
    if report.facts.roles:
        yield "Warp roles", _role_table(report)
    yield "Instructions", _phase_table(report)
    yield "Registers and spills", _register_sentences(report)
    if report.loop is None or report.bound is None:
        yield "Loops", ["The kernel has no loop."]
        return
    yield "Loop", _loop_sentences(report, report.loop)
    if report.bound.tells_tensor and report.warps is not None:
        title = f"Lower bounds of an iteration, {warps_text(report)}"
        yield title, _bound_table(report.bound, report.warps)
    title = "Costs" if report.bound.straight else "Costs of the whole text"
    yield title, _cost_table(report.bound)
    if prediction := report.facts.prediction:
        yield "Lower bounds of a launch", _prediction_table(prediction, report.facts.measurement)
    yield "Stalls by control word", _stall_table(report)
    yield "Scoreboard waits", _wait_table(report)
    title = "Main loop" if report.is_main_loop else f"Loop {report.loop.index}"
    yield title, "\n".join(_listing(report, source))


def _phase_counts(report: KernelReport) -> dict[str, Counts]:
    return {**report.facts.phases.named, "whole kernel": count_all(report.kernel.instructions)}


def _phase_table(report: KernelReport) -> Table:
    columns = _phase_counts(report)
    buckets = [
        [kind.value, *(f"{counts.by_bucket[kind]:,}" for counts in columns.values())]
        for kind in Bucket
    ]
    ratios = (counts.per_tensor(counts.work) for counts in columns.values())
    classes = [
        [name, *(f"{counts.by_class.get(name, 0) or ''}" for counts in columns.values())]
        for name in opcodes.CLASSES
        if any(counts.by_class.get(name) for counts in columns.values())
    ]
    usual = all(counts.is_usual_tensor for counts in columns.values())
    unit = "tensor instruction" if usual else f"{UNIT_OPERATIONS} tensor operations"
    per_tensor = [f"work per {unit}", *("" if r is None else f"{r:.2f}" for r in ratios)]
    return Table(["", *columns], [*buckets, per_tensor, *classes])


def _register_sentences(report: KernelReport) -> Iterator[str]:
    registers = report.kernel.resources.registers
    peak = report.peak
    if peak is None or peak.live is None:
        why = f": {report.kernel.why_not_live}" * bool(report.kernel.why_not_live)
        yield f"{registers} registers; how many are live is not known{why}."
    else:
        where = "outside loops" if peak.loop is None else f"in loop {peak.loop}"
        changes = any(i.base == "USETMAXREG" for i in report.kernel.instructions)
        of = "" if changes else f" of {registers}"
        yield (
            f"At most {peak.live.general}{of} registers are live, first at {peak.address:#06x}, "
            f"{where}: {peak.text}"
        )
        if changes:
            yield f"The kernel starts with {registers} registers, and USETMAXREG changes that."
    known = report.kernel.resources.spill_store_bytes is not None
    no_spills = ", no spills" if known else ""
    for sites, kind in ((report.spills, ""), (report.local_accesses, no_spills)):
        for site in sites:
            where = "Outside loops" if site.loop is None else f"In loop {site.loop}"
            yield (
                f"{where}: {site.instructions} local loads and stores{kind}, {site.store_bytes} "
                f"bytes stored and {site.load_bytes} loaded per thread."
            )
    shared = sum(i.is_spill and i.base in ("LDS", "STS") for i in report.kernel.instructions)
    if shared:
        yield f"{shared} loads and stores of shared memory spill registers, too."


def _loop_sentences(report: KernelReport, loop: Loop) -> Iterator[str]:
    header = report.kernel.blocks[loop.header].start
    counts = count_loop(report.kernel, loop)
    yield (
        f"Loop {loop.index} of {len(report.kernel.loops)}, from {header:#06x}, depth {loop.depth}, "
        f"basic blocks {len(loop.blocks)}: {counts.work} instructions and "
        f"{counts.by_bucket[Bucket.FILLER]} of filler, {counts.tensor} tensor instructions."
    )
    if report.n_waits:
        yield f"{report.n_waits} of the loops only wait, and are not told as loops below."
    if unit := report.facts.unit:
        yield (
            f"A {unit.name} takes {unit.tensor} tensor instructions of a warp, so that an "
            f"iteration handles {counts.tensor / unit.tensor:g}."
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


def _role_table(report: KernelReport) -> Table:
    """One row per role, and one for all; the bound is that of the working loop. A loop that some of
    the warps may not run is marked with "?"."""
    kernel, facts = report.kernel, report.facts
    rows = []
    for role in facts.roles:
        loop, bound = DASH, DASH
        if role.working_loop is not None:
            working = kernel.loops[role.working_loop]
            loop = f"{working.index}, from {kernel.blocks[working.header].start:#06x}"
            found, warps = loop_bound(kernel, working), facts.loop_warps(working)
            if found.tells_tensor and warps is not None:
                name, cycles = next(iter(found.cycles(warps).items()))
                bound = f"{name}, {cycles:,.0f} cycles"
        rows.append(
            [
                role.name,
                numbers_text("warp", role.warps),
                DASH if role.registers is None else str(role.registers),
                ", ".join(f"{n}?" if n in role.unsure else f"{n}" for n in role.loops) or DASH,
                str(role.waits),
                loop,
                bound,
            ]
        )
    if facts.together:
        name, cycles = next(iter(facts.together.items()))
        bound = f"{name}, {cycles:,.0f} cycles"
        rows.append(["together", "", "", "", "", "an iteration of each", bound])
    headers = ["role", "warps of a block", "registers", "loops", "waits", "working loop"]
    return Table([*headers, "bound of an iteration"], rows, "llrlrll")


def _bound_table(bound: Bound, warps: int) -> Table:
    each = {**bound.pipes, ISSUE: bound.issue}
    low, high = bound.chain_cycles
    has_tensor = any(row.name == opcodes.TENSOR for row in bound.rows)
    rows = []
    for name, cycles in bound.cycles(warps).items():
        if name == LATENCY:
            note = f"{bound.stall:,} cycles of stalls"
            if bound.tensor_chain or not has_tensor:
                note += f"; {bound.tensor_chain} tensor instructions in a chain: {low} to {high}"
            rows.append(["latency of one warp", "", f"{cycles:,.0f}", note])
        else:
            label = ISSUE if name == ISSUE else f"{name} pipe"
            note = f"{bound.issued} instructions, filler included" * (name == ISSUE)
            rows.append([label, f"{each[name]:.1f}", f"{cycles:,.0f}", note])
    return Table(["bound", "SM cycles, one warp", "SM cycles, all warps", ""], rows, "lrrl")


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
    headers = ["class", "pipe", "source", "instructions", "SM cycles each", "SM cycles"]
    return Table(headers, rows, "lll")


def _prediction_table(prediction: Prediction, measurement: Measured | None) -> Table:
    times = dict(prediction.milliseconds)
    if measurement is None:
        return Table(["bound", "ms"], [[name, f"{ms:.3f}"] for name, ms in times.items()])
    times["measured"] = measurement.median_ms
    return Table(
        ["bound", "ms", "of the measured time"],
        [[name, f"{ms:.3f}", percent(ms / measurement.median_ms, 0)] for name, ms in times.items()],
    )


def _stall_table(report: KernelReport) -> Table:
    groups = group_stalls(report.body)
    total = sum(group.cycles for group in groups)
    rows = [
        [g.name, str(g.instructions), str(g.cycles), percent(g.cycles / total, 0)] for g in groups
    ]
    longest = sorted(report.body, key=lambda i: (-stall_cycles(i), i.address))
    rows += [
        [f"{i.address:#06x} {i.text}", "1", str(stall_cycles(i)), ""]
        for i in longest[:_LONGEST_STALLS]
    ]
    return Table(["class, and the longest stalls", "instructions", "warp cycles", "share"], rows)


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
    return Table([*headers, "least warp cycles between", "median", "most"], rows, "lll")


def _listing(report: KernelReport, source: SourceText | None) -> Iterator[str]:
    yield "address  live  control                       pipe      SM cycles  instruction"
    shown: tuple[SourceLine, ...] = ()
    block = None
    for instruction in report.body:
        if instruction.block != block:
            block = instruction.block
            yield f"block {block}:"
        if source is not None and instruction.source and instruction.source != shown:
            shown = instruction.source
            first, *callers = shown
            via = "".join(f" < {line}" for line in callers)
            yield f"    // {first}{via}  {source.line(first)}".rstrip()
        live = "" if instruction.live is None else str(instruction.live.general)
        cost = "" if instruction.cost is None else f"{instruction.cost:g}"
        yield (
            f"{instruction.address:#06x}  {live:>5}  {control_text(instruction.control)}  "
            f"{instruction.pipe:<8}  {cost:>9}  {with_demangled_symbols(instruction.text)}"
            f"{'  // spill' * instruction.is_spill}"
        )
