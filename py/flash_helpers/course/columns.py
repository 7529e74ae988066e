"""Tables with a column for each kernel, and with the change where there are two.

Of two kernels the rows that differ are shown, and equal rows are folded below.
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
    """Markdown. rows: of `row`, or a label and a cell for each kernel. folds: equal rows."""
    headers = ["", *names_of(configs), *(["change"] if len(configs) == 2 else [])]
    padded = [cells + [""] * (len(headers) - len(cells)) for cells in rows]
    if not folds:
        return Table(headers, padded).markdown()
    return folded_table(headers, padded, len(configs))


def folded_table(headers: Sequence[str], rows: Sequence[Sequence[str]], n_kernels: int) -> str:
    """Markdown. The cells behind a row's label are those of the kernels. Of two, the rows in which
    both have the same are folded; an indented row says of what it is a part."""
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
    """The rows; an indented one has the label of the row above it before its own."""
    owner = ""
    for label, *cells in rows:
        if label.startswith(INDENT):
            yield [f"{owner}, {label.removeprefix(INDENT)}", *cells]
        else:
            owner = label
            yield [label, *cells]


def row(label: str, values: Sequence[float | None], digits: int = 0) -> list[str]:
    """A number for each kernel, and the change where there are two."""
    cells = [label, *(number(value, digits) for value in values)]
    return [*cells, change(values[0], values[1], digits)] if len(values) == 2 else cells


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, float]]:
    """Numbers by opcode that differ, and by how much; the largest change first."""
    return [(opcode, new - old) for opcode, old, new in count_changes(before, after)]
