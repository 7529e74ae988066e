"""Blocks about what the simulator counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from flash_helpers.course.arguments import Arguments, parse_kernel, parse_step
from flash_helpers.course.counting import KernelCounts
from flash_helpers.course.evidence import Evidence, with_parent
from flash_helpers.course.tables import change, markdown_table, number
from flash_helpers.kernel_configs import Config
from flash_helpers.ptx import Counts, Phase
from flash_helpers.registry.ampere import PROGRESSION_ROW_STRIDE
from flash_helpers.registry.selection import find_steps, names_of

# Opcodes of PTX by the name that pages use: those that begin with the text.
OPCODE_GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "ldmatrix": "ldmatrix",
        "cp_async": "cp.async.c",  # not the commits and waits
        "ld_shared": "ld.shared",
        "st_shared": "st.shared",
        "ld_global": "ld.global",
        "st_global": "st.global",
    }
)
QUANTITIES: Mapping[str, tuple[str, Callable[[Counts], int]]] = MappingProxyType(
    {
        "instructions": ("warp instructions", lambda c: c.instructions),
        "mma": ("mma", lambda c: c.mma),
        "conflicts": ("shared-memory bank conflicts", lambda c: c.bank_conflicts),
        "wavefronts": ("shared-memory wavefronts", lambda c: c.shared_wavefronts),
        "shared_requests": ("shared-memory requests", lambda c: c.shared_requests),
        "shared_bytes": ("shared-memory bytes", lambda c: c.shared_bytes),
        "global_requests": ("global-memory requests", lambda c: c.global_requests),
        "sectors": ("global-memory sectors", lambda c: c.global_sectors),
        "global_bytes": ("global-memory bytes", lambda c: c.global_bytes),
        "barriers": ("barriers", lambda c: c.barriers),
        "waits": ("cp.async waits", lambda c: c.waits),
    }
)
# Requests say no more than instructions do.
_SHOWN = tuple(name for name in QUANTITIES if not name.endswith("requests"))
# Quantities told of each group of opcodes, too.
_BY_GROUP = ("instructions", "conflicts", "wavefronts")
_MOST_CHANGES = 8


def counters_block(evidence: Evidence, arguments: Arguments) -> str:
    """A column for each kernel, and the change if there are two."""
    configs = kernels_of(arguments)
    found = [evidence.counts(config) for config in configs]
    rows = [row for name in _SHOWN for row in _rows(name, found)]
    rows += _main_loop_rows(found)
    headers = ["", *names_of(configs)]
    if len(found) == 2:
        headers.append("change")
    parts = [
        markdown_table(headers, rows),
        f"Counted in the simulator: {found[0].seq_len} rows of one head, {configs[0].dtype.short}, "
        f"row stride {PROGRESSION_ROW_STRIDE} elements. An instruction of PTX counts once for each "
        "warp that executes it.",
    ]
    if len(found) == 2:
        parts.insert(1, f"PTX opcodes whose number changed most: {_changes_text(*found)}.")
    return "\n\n".join(parts)


def kernels_of(arguments: Arguments) -> list[Config]:
    """The kernels that the words name; of a version alone, its parent and itself."""
    if len(arguments.words) == 1 and find_steps(arguments.words[0]):
        return with_parent(parse_step(arguments.words[0]))
    return list(dict.fromkeys(parse_kernel(word) for word in arguments.words))


def of_group(counts: KernelCounts, group: str, phase: Phase | None = None) -> Counts:
    """The counts of one of OPCODE_GROUPS."""
    return counts.total(phase, lambda opcode: opcode.startswith(OPCODE_GROUPS[group]))


def _rows(quantity: str, found: Sequence[KernelCounts]) -> Iterator[list[str]]:
    label, value = QUANTITIES[quantity]
    totals = [value(counts.total()) for counts in found]
    if quantity == "conflicts" or any(totals):
        yield _row(label, totals)
    if quantity not in _BY_GROUP:
        return
    for group, opcode in OPCODE_GROUPS.items():
        values = [value(of_group(counts, group)) for counts in found]
        if any(values):
            yield _row(f"&nbsp;&nbsp;of {opcode.removesuffix('.c')}", values)


def _main_loop_rows(found: Sequence[KernelCounts]) -> Iterator[list[str]]:
    each = [counts.total(Phase.MAIN_LOOP) for counts in found]
    yield _row("warp instructions in the main loop", [counts.instructions for counts in each])
    for label, value in (
        ("&nbsp;&nbsp;of them for each mma", lambda c: c.instructions / c.mma if c.mma else None),
        ("wavefronts there for each mma", lambda c: c.shared_wavefronts / c.mma if c.mma else None),
    ):
        yield _row(label, [value(counts) for counts in each], digits=2)


def _row(label: str, values: Sequence[float | None], digits: int = 0) -> list[str]:
    cells = [label, *(number(value, digits) for value in values)]
    return [*cells, change(*values, digits)] if len(values) == 2 else cells


def _changes_text(before: KernelCounts, after: KernelCounts) -> str:
    old, new = before.opcodes(), after.opcodes()
    differences = {op: new.get(op, 0) - old.get(op, 0) for op in old | new}
    rows = sorted(
        ((opcode, value) for opcode, value in differences.items() if value),
        key=lambda row: (-abs(row[1]), row[0]),
    )
    if not rows:
        return "none"
    parts = [f"`{opcode}` {value:+,}" for opcode, value in rows[:_MOST_CHANGES]]
    more = [f"{len(rows) - _MOST_CHANGES} more"] if len(rows) > _MOST_CHANGES else []
    return ", ".join([*parts, *more])
