"""Two countings of instructions side by side, by opcode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flash_helpers.console.tables import Table, csv_text, json_text
from flash_helpers.sass.analyse.counts import Bucket
from flash_helpers.sass.show.listing_counts import OpcodeCounts


@dataclass(frozen=True)
class Change:
    """Numbers of working instructions of one opcode, before and after."""

    opcode: str
    before: int
    after: int

    @property
    def delta(self) -> int:
        """The number after less the number before."""
        return self.after - self.before

    @property
    def percent(self) -> float | None:
        """The change in percent of the number before; None if that was 0."""
        return 100 * self.delta / self.before if self.before else None


COMPARISON_COLUMNS = ("opcode", "before", "after", "delta", "percent")


@dataclass(frozen=True)
class Comparison:
    """Two countings. `changes`: every opcode of either, the largest change first, then by name."""

    before: OpcodeCounts
    after: OpcodeCounts
    changes: tuple[Change, ...]

    @property
    def total(self) -> Change:
        """All opcodes together."""
        return Change("total", self.before.work.total(), self.after.work.total())

    def shown(self, unchanged: bool) -> list[Change]:
        """The changes, with unchanged opcodes if `unchanged`."""
        return [change for change in self.changes if unchanged or change.delta]

    def notes(self) -> list[str]:
        """Notes for a reader of the comparison."""
        found = []
        known = [side.by_bucket is not None for side in (self.before, self.after)]
        if known[0] != known[1]:
            side = "BEFORE" if known[1] else "AFTER"
            found.append(
                f"{side} is a file of bare counts, which may hold filler and padding; the other "
                "side is counted without"
            )
        compilers = self.before.compiler, self.after.compiler
        if all(compilers) and compilers[0] != compilers[1]:
            found.append(
                f"compiled by {compilers[0]} and {compilers[1]}: what changed may be the "
                "compiler's doing"
            )
        return found

    def summary(self) -> str:
        """The comparison in one line."""
        changed = len(self.shown(unchanged=False))
        total = self.total
        text = (
            f"{total.before:,} -> {total.after:,} instructions ({_signed(total)}); "
            f"{changed} of {len(self.changes)} opcodes changed"
        )
        if self.before.by_bucket is None or self.after.by_bucket is None:
            return text
        before, after = self.before.totals(), self.after.totals()
        parts = (f"{k.value} {before[k.value]:,} -> {after[k.value]:,}" for k in Bucket)
        return f"{text}; {', '.join(parts)}"


def _signed(change: Change) -> str:
    if change.percent is None:
        return f"{change.delta:+,}"
    return f"{change.delta:+,}, {change.percent:+.1f}%"


def compare_counts(before: OpcodeCounts, after: OpcodeCounts) -> Comparison:
    """The comparison of two countings, by opcode."""
    opcodes = set(before.work) | set(after.work)
    changes = [Change(name, before.work[name], after.work[name]) for name in opcodes]
    ordered = sorted(changes, key=lambda change: (-abs(change.delta), change.opcode))
    return Comparison(before, after, tuple(ordered))


def _percent(change: Change) -> str:
    if not change.delta:
        return ""
    return "new" if change.percent is None else f"{change.percent:+.1f}%"


def comparison_as_text(
    comparison: Comparison, unchanged: bool = False, markdown: bool = False
) -> str:
    """A table, a line that sums it up, and the notes."""
    shown = comparison.shown(unchanged)
    lines = [comparison.summary(), *comparison.notes()]
    if not shown:
        return "\n".join(lines)
    rows = [
        [c.opcode, str(c.before), str(c.after), f"{c.delta:+d}" if c.delta else "=", _percent(c)]
        for c in [*shown, comparison.total]
    ]
    table = Table(COMPARISON_COLUMNS, rows)
    if markdown:
        return "\n\n".join([table.markdown(plain=True), *lines])
    return "\n\n".join([table.text(), "\n".join(lines)])


def comparison_as_csv(comparison: Comparison, unchanged: bool = False) -> str:
    """A row for each opcode."""
    rows = (_entry(change).values() for change in comparison.shown(unchanged))
    return csv_text(COMPARISON_COLUMNS, map(list, rows))


def comparison_as_json(comparison: Comparison, unchanged: bool = False) -> str:
    """The total, the notes, and an object for each opcode."""
    return json_text(
        {
            "total": _entry(comparison.total),
            "notes": comparison.notes(),
            "opcodes": [_entry(change) for change in comparison.shown(unchanged)],
        }
    )


def _entry(change: Change) -> dict[str, Any]:
    return {name: getattr(change, name) for name in COMPARISON_COLUMNS}
