"""Tables with one column per kernel, and with the change between two kernels.

A table of two kernels shows the rows that differ, and folds the equal rows below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flash_helpers.console.tables import Table, change, number
from flash_helpers.kernel_configs import Config
from flash_helpers.registry.selection import names_of
from flash_helpers.sass.analyse.counts import count_changes

INDENT = "&nbsp;&nbsp;"  # before the label of a row that is a part of the one above


def columns_table(
    configs: Sequence[Config], rows: Iterable[list[str]], *, folds: bool = True
) -> str:
    """Markdown of a table. rows: made by `row`, or a label and one cell per kernel. folds: whether
    equal rows are folded."""
    headers = ["", *names_of(configs), *(["change"] if len(configs) == 2 else [])]
    padded = [cells + [""] * (len(headers) - len(cells)) for cells in rows]
    if not folds:
        return Table(headers, padded).markdown()
    return folded_table(headers, padded, len(configs))


def folded_table(headers: Sequence[str], rows: Sequence[Sequence[str]], n_kernels: int) -> str:
    """Markdown of a table whose equal rows of two kernels are folded. rows: a label, then one cell
    per kernel. A folded indented row names the row that it is a part of."""
    named = [*zip(with_owners(rows), rows, strict=True)]
    if n_kernels != 2:
        return Table(headers, rows).markdown()
    changed = [own for own, cells in named if cells[1] != cells[2]]
    equal = [own for own, cells in named if cells[1] == cells[2]]
    if not equal:
        return Table(headers, rows).markdown()
    n = len(equal)
    folded = (
        f'<details markdown="1">\n<summary>{n} {"row is" if n == 1 else "rows are"} equal</summary>'
        f"\n\n{Table(headers, equal).markdown()}\n\n</details>"
    )
    return "\n\n".join([Table(headers, changed).markdown(), folded] if changed else [folded])


def with_owners(rows: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    """Rows in which an indented row's label begins with the label of the row that it is a part
    of."""
    owner = ""
    for label, *cells in rows:
        if label.startswith(INDENT):
            yield [f"{owner}, {label.removeprefix(INDENT)}", *cells]
        else:
            owner = label
            yield [label, *cells]


def row(label: str, values: Sequence[float | None], digits: int = 0) -> list[str]:
    """Row of one number per kernel, and the change between two kernels."""
    cells = [label, *(number(value, digits) for value in values)]
    return [*cells, change(values[0], values[1], digits)] if len(values) == 2 else cells


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, float]]:
    """Opcodes whose numbers differ, with the difference; the largest change first."""
    return [(opcode, new - old) for opcode, old, new in count_changes(before, after)]
