"""Blocks about what the simulator counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from flash_helpers.course.arguments import Arguments
from flash_helpers.course.columns import INDENT, changes, columns_table, row
from flash_helpers.course.evidence import SEQ_LEN, Evidence, KernelCounts
from flash_helpers.course.links import words_note
from flash_helpers.ptx import Counts

# Beginning of PTX opcodes, by the name that pages use.
OPCODE_GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "ldmatrix": "ldmatrix",
        "stmatrix": "stmatrix",
        "cp_async": "cp.async.cg",  # not the commits and waits
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
        "wgmma": ("wgmma", lambda c: c.wgmma),
        "wgmma_bytes": ("bytes of shared memory that wgmma read", lambda c: c.wgmma_bytes),
        "tma_requests": ("TMA requests", lambda c: c.tma_requests),
        "tma_bytes": ("TMA bytes", lambda c: c.tma_bytes),
        "conflicts": ("shared-memory bank conflicts", lambda c: c.bank_conflicts),
        "wavefronts": ("shared-memory wavefronts", lambda c: c.shared_wavefronts),
        "shared_requests": ("shared-memory requests", lambda c: c.shared_requests),
        "shared_bytes": ("shared-memory bytes", lambda c: c.shared_bytes),
        "global_requests": ("global-memory requests", lambda c: c.global_requests),
        "sectors": ("global-memory sectors", lambda c: c.global_sectors),
        "global_bytes": ("global-memory bytes", lambda c: c.global_bytes),
        "barriers": ("barriers", lambda c: c.barriers),
        "waits": ("waits for groups", lambda c: c.waits),
        "mbarrier_waits": ("mbarrier waits", lambda c: c.mbarrier_waits),
    }
)
# Requests say no more than instructions do.
_SHOWN = tuple(name for name in QUANTITIES if not name.endswith("requests"))
# Quantities told of each group of opcodes, too.
_BY_GROUP = ("instructions", "conflicts", "wavefronts")
_MOST_CHANGES = 8


def counters_block(evidence: Evidence, arguments: Arguments) -> str:
    """A column for each kernel, and the change if there are two."""
    configs = arguments.kernels()
    found = [evidence.counts(config) for config in configs]
    parts = [
        columns_table(configs, counter_rows(found)),
        *arguments.once(
            f"Counted in the simulator: {SEQ_LEN} rows of one head, {configs[0].dtype.short}, row "
            f"stride {found[0].row_stride} elements. An instruction of PTX counts once for each "
            "warp that executes it."
        ),
        *words_note(arguments),
    ]
    if len(found) == 2:
        parts.insert(1, f"PTX opcodes whose number changed most: {_changes_text(*found)}.")
    return "\n\n".join(parts)


def counter_rows(found: Sequence[KernelCounts]) -> list[list[str]]:
    """Every quantity, those of groups of opcodes indented below it, and those of the main loop."""
    rows = [cells for name in _SHOWN for cells in _rows(name, found)]
    return [*rows, *_main_loop_rows(found)]


def of_group(counts: KernelCounts, group: str) -> Counts:
    """The counts of one of OPCODE_GROUPS."""
    found = Counts()
    for opcode, of_opcode in counts.by_opcode.items():
        if opcode.startswith(OPCODE_GROUPS[group]):
            found.add(of_opcode)
    return found


def per_mma(loop: Counts, quantity: str = "instructions", instruction: str = "mma") -> float | None:
    """A quantity of the main loop per mma, or wgmma; None without any."""
    products = getattr(loop, instruction)
    return getattr(loop, quantity) / products if products else None


def _rows(quantity: str, found: Sequence[KernelCounts]) -> Iterator[list[str]]:
    label, value = QUANTITIES[quantity]
    totals = [value(counts.total) for counts in found]
    if quantity == "conflicts" or any(totals):
        yield row(label, totals)
    for group, opcode in OPCODE_GROUPS.items() if quantity in _BY_GROUP else ():
        values = [value(of_group(counts, group)) for counts in found]
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
