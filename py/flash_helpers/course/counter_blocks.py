"""Blocks about the simulator's counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flash_helpers.course.arguments import Arguments
from flash_helpers.course.columns import INDENT, changes, columns_table, row
from flash_helpers.course.evidence import Evidence, KernelCounts
from flash_helpers.course.links import words_note
from flash_helpers.kernel_configs import Config
from flash_helpers.measure.asked import one_operation
from flash_helpers.ptx import Counts

# Beginnings of PTX opcodes with a row of their own; of cp.async without commits and waits.
_OPCODES = (
    *("ldmatrix", "stmatrix", "cp.async.cg"),
    *("ld.shared", "st.shared", "ld.global", "st.global"),
)
# Counts and their labels. Requests would add nothing to instructions.
_QUANTITIES = {
    "instructions": "warp instructions",
    "mma": "mma",
    "wgmma": "wgmma",
    "wgmma_bytes": "bytes of shared memory that wgmma read",
    "tma_bytes": "TMA bytes",
    "bank_conflicts": "shared-memory bank conflicts",
    "shared_wavefronts": "shared-memory wavefronts",
    "shared_bytes": "shared-memory bytes",
    "global_sectors": "global-memory sectors",
    "global_bytes": "global-memory bytes",
    "barriers": "barriers",
    "waits": "waits for groups",
    "mbarrier_waits": "mbarrier waits",
}
_BY_OPCODE = ("instructions", "bank_conflicts", "shared_wavefronts")
_MOST_CHANGES = 8


def counters_block(evidence: Evidence, arguments: Arguments) -> str:
    """Return a table with one column per kernel, and the change between two kernels.

    Raises UsageError for kernels of several operations, whose problems cannot be compared.
    """
    configs = arguments.kernels()
    one_operation(configs)
    found = [evidence.counts(config) for config in configs]
    parts = [
        columns_table(configs, counter_rows(found)),
        *arguments.once(
            f"Counted in the simulator: {_counted_text(configs[0])}. An instruction of PTX counts "
            "once for each warp that executes it."
        ),
        *words_note(arguments),
    ]
    if len(found) == 2:
        parts.insert(1, f"PTX opcodes whose number changed most: {_changes_text(*found)}.")
    return "\n\n".join(parts)


def _counted_text(config: Config) -> str:
    """Return the problem that `count_kernel` simulates for a config, in words."""
    operation = config.family.operation
    problem, within = operation.counted, operation.counted_within
    tensors = "" if within == problem else f", in tensors of {within}"
    return f"{problem}, {config.dtype.short}{tensors}"


def counter_rows(found: Sequence[KernelCounts]) -> list[list[str]]:
    """Rows of all quantities, with some opcodes indented below them, and of the main loop."""
    rows = [cells for name in _QUANTITIES for cells in _rows(name, found)]
    return [*rows, *_main_loop_rows(found)]


def _of_opcode(counts: KernelCounts, beginning: str) -> Counts:
    found = Counts()
    for opcode, of_opcode in counts.by_opcode.items():
        if opcode.startswith(beginning):
            found.add(of_opcode)
    return found


def per_mma(loop: Counts, quantity: str = "instructions", instruction: str = "mma") -> float | None:
    """A quantity of the main loop per mma or wgmma; None in a loop without them."""
    products = getattr(loop, instruction)
    return getattr(loop, quantity) / products if products else None


def _rows(quantity: str, found: Sequence[KernelCounts]) -> Iterator[list[str]]:
    totals = [getattr(counts.total, quantity) for counts in found]
    if quantity == "bank_conflicts" or any(totals):
        yield row(_QUANTITIES[quantity], totals)
    for opcode in _OPCODES if quantity in _BY_OPCODE else ():
        values = [getattr(_of_opcode(counts, opcode), quantity) for counts in found]
        if any(values):
            yield row(f"{INDENT}of {opcode.removesuffix('.cg')}", values)


def _main_loop_rows(found: Sequence[KernelCounts]) -> Iterator[list[str]]:
    loops = [counts.main_loop for counts in found]
    yield row("warp instructions in the main loop", [loop.instructions for loop in loops])
    for products in ("mma", "wgmma"):
        instructions = [per_mma(loop, "instructions", products) for loop in loops]
        if any(instructions):
            yield row(f"{INDENT}of them per {products}", instructions, digits=2)
    wavefronts = [per_mma(loop, "shared_wavefronts") for loop in loops]
    if any(loop.mma for loop in loops):
        yield row("wavefronts there per mma", wavefronts, digits=2)


def _changes_text(before: KernelCounts, after: KernelCounts) -> str:
    numbers = ({op: c.instructions for op, c in k.by_opcode.items()} for k in (before, after))
    found = changes(*numbers)
    parts = [f"`{opcode}` {value:+,}" for opcode, value in found[:_MOST_CHANGES]]
    if len(found) > _MOST_CHANGES:
        parts.append(f"{len(found) - _MOST_CHANGES} more")
    return ", ".join(parts) or "none"
