"""Blocks about the machine code: counts, bounds and listings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flash_helpers.console.tables import DASH, number, percent
from flash_helpers.course.arguments import Arguments, compiled_pattern, parse_kernel
from flash_helpers.course.columns import INDENT, changes, columns_table, folded_table, row
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.links import words_note
from flash_helpers.course.step_blocks import compiled_for, occupancy, spills_text
from flash_helpers.measure.live_registers import RESULTS, LiveComparison
from flash_helpers.measure.machine_code import ConfigFacts
from flash_helpers.registry.selection import UsageError, names_of
from flash_helpers.sass.analyse.bound import ISSUE, LATENCY
from flash_helpers.sass.analyse.counts import UNIT_OPERATIONS, Bucket, Counts
from flash_helpers.sass.analyse.matrix import (
    GROUP_NAMES,
    MEANING,
    changes_text,
    opcode_changes,
)
from flash_helpers.sass.analyse.phases import phases
from flash_helpers.sass.read.control import control_text
from flash_helpers.sass.read.flow import may_execute
from flash_helpers.sass.read.records import Instruction, Loop, SourceLine
from flash_helpers.sass.show.report_text import SourceText

# Names of a kernel's parts, and names of their counts in `PhaseCounts`.
PHASES: Mapping[str, str] = {"main": "main_loop", "prologue": "prologue", "epilogue": "epilogue"}
_OUTSIDE = ("prologue", "epilogue")
_LISTED = 12
PER_HMMA_NOTE = (
    f"Per HMMA is per {UNIT_OPERATIONS} operations of the tensor cores: the part of a warp in an "
    "HGMMA of 64 x 128 x 16 has 16 times as many."
)
LISTING_NOTE = (
    "Live: registers in use. Control: stall cycles; y, another warp may go first; w and r, "
    "scoreboards raised when the result is written and the operands are read; b, those waited for; "
    "u, operands reused."
)


def sass_block(evidence: Evidence, arguments: Arguments) -> str:
    """Table with one column per kernel, and the change between two kernels; then the opcodes that
    changed."""
    architecture, configs = arguments.architecture(), arguments.kernels()
    found = [evidence.facts(config, architecture) for config in configs]
    return "\n\n".join(
        [
            columns_table(configs, count_rows(found)),
            *(_change_sentences(*found) if len(found) == 2 else ()),
            *(arguments.once(PER_HMMA_NOTE) if any(map(_has_wgmma, found)) else ()),
            *arguments.once(compiled_for(found[-1], architecture)),
            *arguments.once(f"Classes: {MEANING}."),
            *words_note(arguments),
        ]
    )


def count_rows(found: Sequence[ConfigFacts]) -> Iterator[list[str]]:
    """Rows for registers, blocks, and instructions by phase and class."""
    yield row("registers per thread", [facts.kernel.resources.registers for facts in found])
    spills = [spills_text(facts) for facts in found]
    if set(spills) != {"0"}:
        yield ["spilled bytes per thread", *spills]
    yield row("blocks per SM", [occupancy(facts).blocks for facts in found])
    for phase in _OUTSIDE:
        yield row(f"instructions of the {phase}", [phase_counts(f, phase).work for f in found])
    loops = [phase_counts(facts, "main") for facts in found]
    yield row("instructions of the main loop", [counts.work for counts in loops])
    yield row(f"{INDENT}per HMMA", [c.per_tensor(c.work) for c in loops], digits=2)
    for name in GROUP_NAMES:
        numbers = [facts.groups[name] for facts in found]
        if any(numbers):
            yield row(f"{INDENT}{_tensor_name(found) if name == 'tensor' else name}", numbers)
    yield row(f"{INDENT}filler, not counted above", [c.by_bucket[Bucket.FILLER] for c in loops])


def _has_wgmma(facts: ConfigFacts) -> bool:
    return "HGMMA" in phase_counts(facts, "main").by_base


def _tensor_name(found: Sequence[ConfigFacts]) -> str:
    names = {"HGMMA" if _has_wgmma(facts) else "HMMA" for facts in found}
    return " or ".join(sorted(names, reverse=True))


def phase_counts(facts: ConfigFacts, phase: str) -> Counts:
    """Counts of the text of one of PHASES. Raises UsageError for a kernel without a main loop."""
    counts: Counts | None = getattr(facts.phases, PHASES[phase])
    if counts is None:
        raise UsageError(f"{facts.config.short_form()} has no loop")
    return counts


def _change_sentences(before: ConfigFacts, after: ConfigFacts) -> Iterator[str]:
    told = changes_text(opcode_changes(before, after))
    yield f"Opcodes of the main loop that changed most: {told}."
    for phase in _OUTSIDE:
        found = changes(*(phase_counts(facts, phase).by_opcode for facts in (before, after)))
        yield f"Of the {phase}: {changes_text(found)}."


def bound_block(evidence: Evidence, arguments: Arguments) -> str:
    """Lower bounds of an iteration of all resident warps, and of the measured launch."""
    architecture, configs = arguments.architecture(), arguments.kernels()
    found = [evidence.facts(config, architecture) for config in configs]
    rows = bound_rows(found)
    notes = [
        *words_note(arguments),
        *arguments.once(compiled_for(found[-1], architecture)),
        *arguments.once(
            "The bounds leave out bank conflicts, the latency of memory, and instructions of "
            "unknown cost."
        ),
    ]
    if _is_measured(found):
        last = found[-1].prediction
        assert last is not None
        chip = last.chip
        notes += arguments.once(
            f"The launch: {last.launch.words}, on {chip.sms} SMs at {chip.mhz:.0f} MHz."
        )
    headers = ["cycles of an SM for an iteration of all its warps, at least", *names_of(configs)]
    return "\n\n".join([folded_table(headers, rows, len(configs)), *notes])


def bound_rows(found: Sequence[ConfigFacts]) -> list[list[str]]:
    """Rows of least cycles by limit, and of the least time of a launch if all were measured."""
    each = [facts.bound_cycles or {} for facts in found]
    limits = (ISSUE, LATENCY)
    names = [*dict.fromkeys(n for cycles in each for n in cycles if n not in limits), *limits]
    rows = [[_limit(name), *(number(cycles.get(name)) for cycles in each)] for name in names]
    rows += [
        ["bound by", *(_limit(next(iter(cycles), DASH)) for cycles in each)],
        ["warps of an SM", *(str(occupancy(facts).warps) for facts in found)],
        ["instructions of unknown cost", *(str(f.loop.unknown if f.loop else "") for f in found)],
    ]
    if _is_measured(found):
        predictions = [facts.prediction for facts in found if facts.prediction]
        measured = [facts.measurement for facts in found if facts.measurement]
        rows += [
            ["a launch: ms at least", *(number(p.least_ms, 3) for p in predictions)],
            ["its limit", *(_limit(p.binding) for p in predictions)],
            ["measured ms", *(number(m.median_ms, 3) for m in measured)],
            ["least of measured", *(percent(facts.of_bound) for facts in found)],
        ]
    return rows


def _is_measured(found: Sequence[ConfigFacts]) -> bool:
    return all(facts.prediction and facts.measurement for facts in found)


def _limit(name: str) -> str:
    return {ISSUE: "issue slots", LATENCY: "latency of one warp"}.get(name, f"{name} pipe")


def live_registers_block(evidence: Evidence, arguments: Arguments) -> str:
    """Shares of instructions whose live registers are those of nvdisasm."""
    return LiveComparison.load(evidence.root / RESULTS).markdown()


def listing_block(evidence: Evidence, arguments: Arguments) -> str:
    """Matching instructions of one phase, each below its source line."""
    config = parse_kernel(arguments.words[0])
    architecture = arguments.architecture()
    phase = arguments.choice("phase", PHASES, "main")
    facts = evidence.facts(config, architecture)
    pattern = compiled_pattern(" ".join(arguments.words[1:]))
    where = compiled_pattern(arguments.options.get("at", ""))
    source = SourceText(evidence.root)
    file = str(config.step.source)
    title = PHASES[phase].replace("_", " ")
    found = [
        instruction
        for instruction in _instructions(facts, phase)
        if pattern.search(instruction.text)
        and (
            not where.pattern or any(where.search(source.line(line)) for line in instruction.source)
        )
    ]
    if not found:
        raise UsageError(
            f"no instruction of the {title} of {config.step.id} on {architecture} "
            f"matches {pattern.pattern!r}"
            + (f" at a source line that matches {where.pattern!r}" if where.pattern else "")
        )
    shown = found[: arguments.number("lines", _LISTED)]
    return "\n".join(
        [
            "```text",
            "address  live  control                   instruction",
            *_listing(shown, file, source),
            "```",
            "",
            f"{len(shown)} of {len(found)} such instructions of the {title}, {config.step.id}.",
            *(f"\n{note}" for note in arguments.once(compiled_for(facts, architecture))),
            *(f"\n{note}" for note in arguments.once(LISTING_NOTE)),
        ]
    )


def _instructions(facts: ConfigFacts, phase: str) -> Iterator[Instruction]:
    part = getattr(phases(facts.kernel), PHASES[phase])
    wanted = set(part.blocks if isinstance(part, Loop) else part or ())
    return (i for i in facts.kernel.instructions if i.block in wanted and may_execute(i))


def _listing(instructions: Sequence[Instruction], file: str, source: SourceText) -> Iterator[str]:
    shown: SourceLine | None = None
    for instruction in instructions:
        line = _own_line(instruction, file)
        if line is not None and line != shown:
            shown = line
            yield f"// {line.file}:{line.line}  {source.line(line)}".rstrip()
        live = "" if instruction.live is None else str(instruction.live.general)
        yield (
            f"{instruction.address:#06x}  {live:>5}  {control_text(instruction.control)}  "
            f"{instruction.text}"
        )


def _own_line(instruction: Instruction, file: str) -> SourceLine | None:
    """Source line of an instruction in the kernel's own file, or of the call there that it was
    inlined into; else its line in another file."""
    own = (line for line in instruction.source if line.file == file)
    return next(own, instruction.source[0] if instruction.source else None)
