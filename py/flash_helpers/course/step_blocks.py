"""Blocks about a step as a whole: what it takes, and what it changed in the source."""

from __future__ import annotations

from flash_helpers.course.arguments import (
    DEFAULT_ARCHITECTURE,
    Arguments,
    parse_step,
)
from flash_helpers.course.evidence import Evidence, with_parent
from flash_helpers.course.sources import StepDiff, code_lines
from flash_helpers.course.tables import markdown_table, number
from flash_helpers.registry.family import Step
from flash_helpers.sass.analyse.matrix import KernelFacts

FACT_ARCHITECTURES = ("sm_80", DEFAULT_ARCHITECTURE)
_LONGEST_OPEN_DIFF = 60  # lines; longer ones are folded


def facts_block(evidence: Evidence, arguments: Arguments) -> str:
    """A column for the parent and one for the step."""
    step = parse_step(arguments.words[0])
    configs = with_parent(step)
    rows = [
        ["idea", *(c.step.idea for c in configs)],
        ["lines of code", *(number(len(code_lines(c.step, evidence.root))) for c in configs)],
    ]
    if step.parent is not None:
        diff = evidence.step_diff(step)
        changed = f"{diff.changed} ({diff.added} added, {diff.removed} removed)"
        rows.append(["of them changed", "", changed])
    for architecture in FACT_ARCHITECTURES:
        found = [evidence.facts(config, architecture) for config in configs]
        rows += [
            [f"registers a thread, {architecture}", *(_registers(facts) for facts in found)],
            [f"spilled bytes a thread, {architecture}", *(spills_text(facts) for facts in found)],
            [f"blocks an SM, {architecture}", *(_blocks(facts) for facts in found)],
        ]
    rows.append(["shared memory a block, KiB", *(f"{c.smem_bytes / 1024:g}" for c in configs)])
    headers = ["", *(config.step.id for config in configs)]
    if len(configs) > 1:
        headers[1] += " (parent)"
    return f"{markdown_table(headers, rows)}\n\n{compiled_by(evidence.facts(configs[-1], 'sm_90'))}"


def _registers(facts: KernelFacts) -> str:
    return str(facts.kernel.resources.registers)


def _blocks(facts: KernelFacts) -> str:
    return f"{facts.occupancy.blocks} ({', '.join(facts.occupancy.limiters)})"


def spills_text(facts: KernelFacts) -> str:
    """Bytes stored and loaded; 0 where there are no spills."""
    resources = facts.kernel.resources
    if not resources.spill_store_bytes and not resources.spill_load_bytes:
        return "0"
    return f"{resources.spill_store_bytes} stored, {resources.spill_load_bytes} loaded"


def compiled_by(facts: KernelFacts) -> str:
    """The sentence that names dtype and compiler."""
    return f"{facts.config.dtype.short}, compiled by {facts.kernel.compiler}."


def diff_block(evidence: Evidence, arguments: Arguments) -> str:
    """The diff of the code against the parent; folded if it is long."""
    step = parse_step(arguments.words[0])
    diff = evidence.step_diff(step)
    fenced = f"```diff\n{diff.text}\n```"
    if len(diff.text.splitlines()) <= _LONGEST_OPEN_DIFF:
        return fenced
    return folded(_summary(step, diff), fenced)


def _summary(step: Step, diff: StepDiff) -> str:
    return (
        f"The diff of {step.parent} to {step.id}: {diff.added} lines added, {diff.removed} removed"
    )


def folded(summary: str, text: str) -> str:
    """Markdown that is shown when a reader opens it."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text.strip()}\n\n</details>'
