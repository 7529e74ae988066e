"""Tables with a column for each kernel, and with the change where there are two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flash_helpers.kernel_configs import Config
from flash_helpers.registry.selection import names_of
from flash_helpers.sass.analyse.counts import count_changes
from flash_helpers.tables import Table, change, number


def columns_table(configs: Sequence[Config], rows: Iterable[list[str]]) -> str:
    """Markdown. rows: of `row`, or a label and a cell for each kernel."""
    headers = ["", *names_of(configs), *(["change"] if len(configs) == 2 else [])]
    padded = [cells + [""] * (len(headers) - len(cells)) for cells in rows]
    return Table(headers, padded).markdown()


def row(label: str, values: Sequence[float | None], digits: int = 0) -> list[str]:
    """A number for each kernel, and the change where there are two."""
    cells = [label, *(number(value, digits) for value in values)]
    return [*cells, change(*values, digits)] if len(values) == 2 else cells


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, int]]:
    """Numbers by opcode that differ, and by how much; the largest change first."""
    return [(opcode, new - old) for opcode, old, new in count_changes(before, after)]
