"""Blocks about a step as a whole: its resources, and its changes to the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flash_helpers.console.tables import number
from flash_helpers.course.arguments import DEFAULT_ARCHITECTURE, Arguments, with_parent
from flash_helpers.course.columns import folded_table
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.sources import code_lines
from flash_helpers.gpu import capability_of
from flash_helpers.kernel_configs import Config
from flash_helpers.measure.machine_code import ConfigFacts
from flash_helpers.sass.analyse.occupancy import Occupancy

FACT_ARCHITECTURES = ("sm_80", DEFAULT_ARCHITECTURE)


def facts_block(evidence: Evidence, arguments: Arguments) -> str:
    """Table with one column for the parent and one for the step."""
    step = arguments.step()
    configs = with_parent(step)
    rows = [
        ["idea", *(c.step.idea for c in configs)],
        ["lines of code", *(number(len(code_lines(c.step, evidence.root))) for c in configs)],
    ]
    if step.parent is not None:
        diff = evidence.step_diff(step)
        changed = f"{diff.changed} ({diff.added} added, {diff.removed} removed)"
        rows.append(["of them changed", "", changed])
    facts_text: dict[str, Callable[[ConfigFacts], str]] = {
        "registers per thread": lambda f: str(f.kernel.resources.registers),
        "spilled bytes per thread": spills_text,
        "blocks per SM": lambda f: f"{occupancy(f).blocks} ({', '.join(occupancy(f).limiters)})",
    }
    for architecture in FACT_ARCHITECTURES:
        if not configs[-1].family.targets_for([capability_of(architecture)]):
            continue
        found = [evidence.facts(config, architecture) for config in configs]
        rows += [
            [f"{label}, {architecture}", *map(text, found)] for label, text in facts_text.items()
        ]
    rows.append(shared_memory_row(configs))
    headers = ["", *(config.step.id for config in configs)]
    if len(configs) > 1:
        headers[1] += " (parent)"
    table = folded_table(headers, rows, len(configs))
    return "\n\n".join([table, *arguments.once(compiled_by(found[-1]))])


def shared_memory_row(configs: Sequence[Config]) -> list[str]:
    """Row of the shared memory per thread block of each config."""
    return ["shared memory per block, KiB", *(f"{c.smem_bytes / 1024:g}" for c in configs)]


def occupancy(facts: ConfigFacts) -> Occupancy:
    """Blocks and warps per SM, which are known for each kernel of the library."""
    assert facts.occupancy is not None
    return facts.occupancy


def spills_text(facts: ConfigFacts) -> str:
    """Spilled bytes stored and loaded, in words; "0" without spills."""
    resources = facts.kernel.resources
    if not resources.spill_store_bytes and not resources.spill_load_bytes:
        return "0"
    return f"{resources.spill_store_bytes} stored, {resources.spill_load_bytes} loaded"


def compiled_by(facts: ConfigFacts) -> str:
    """Sentence that names dtype and compiler."""
    return f"{facts.config.dtype.short}, compiled by {facts.kernel.compiler}."


def compiled_for(facts: ConfigFacts, architecture: str) -> str:
    """Sentence that names dtype, compiler, and the target for an architecture such as "sm_90"."""
    return f"{facts.config.family.target_on(architecture)}, {compiled_by(facts)}"


def diff_block(evidence: Evidence, arguments: Arguments) -> str:
    """Diff of a step's code against its parent's."""
    step = arguments.step()
    diff = evidence.step_diff(step)
    return f"```diff\n{diff.text}\n```"
