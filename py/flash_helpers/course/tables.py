"""Markdown tables, and numbers in them."""

from __future__ import annotations

from collections.abc import Sequence

DASH = "-"


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str = "l") -> str:
    """A pipe table; cells are not padded, so that one number changes one line.

    align: l or r for each column; those that are missing are r.
    """
    letters = align.ljust(len(headers), "r")
    rule = [":--" if letter == "l" else "--:" for letter in letters]
    lines = ([_cell(cell) for cell in headers], rule, *([_cell(c) for c in row] for row in rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def number(value: float | None, digits: int = 0) -> str:
    """With commas between thousands; a dash where there is none."""
    return DASH if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, signed: bool = False) -> str:
    """A share as percent with one digit: 0.887 gives "88.7%"."""
    return DASH if value is None else f"{100 * value:{'+' if signed else ''}.1f}%"


def change(before: float | None, after: float | None, digits: int = 0) -> str:
    """The difference with its sign; "=" if there is none to be seen, "" if one of the two is
    missing."""
    if before is None or after is None:
        return ""
    text = f"{after - before:+,.{digits}f}"
    return "=" if not text.strip("+-0.,") else text
