"""Blocks about sequences that several GPUs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flash_helpers.console.tables import Table
from flash_helpers.course.arguments import Arguments
from flash_helpers.course.evidence import Evidence
from flash_helpers.measure.ring_costs import bytes_table, hidden_table, scale_table
from flash_helpers.registry.selection import UsageError

TABLES: Mapping[str, Callable[[], Table]] = {
    "bytes": bytes_table,
    "hidden": hidden_table,
    "scale": scale_table,
}


def ring_block(_evidence: Evidence, arguments: Arguments) -> str:
    """A table of the arithmetic, by its name."""
    (name,) = arguments.words
    if name not in TABLES:
        raise UsageError(f"there is no table {name!r}: the tables are {', '.join(TABLES)}")
    return TABLES[name]().markdown()
