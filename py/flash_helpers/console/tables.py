"""Tables: for a terminal, for Markdown, and as CSV and JSON for machines."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from tabulate import tabulate

DASH = "-"  # in place of a missing number

# Characters with a meaning in Markdown; an underscore within a word has none.
_ACTIVE = re.compile(r"[\\`*<>&\[\]#~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ALIGNMENT = {"l": "left", "r": "right"}


@dataclass(frozen=True)
class Table:
    """A table of texts. align: l or r for each column; columns beyond its end are r."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = "l"
    title: str = ""

    @property
    def _letters(self) -> str:
        return self.align.ljust(len(self.header), "r")

    def text(self, **options: Any) -> str:
        """Text for a terminal, below the title if there is one. options: of tabulate, such as
        maxcolwidths."""
        table = tabulate(
            self.rows,
            headers=self.header,
            disable_numparse=True,
            colalign=[_ALIGNMENT[letter] for letter in self._letters] if self.rows else None,
            **options,
        )
        return f"{self.title}\n{table}" if self.title else table

    def markdown(self, plain: bool = False) -> str:
        """Markdown for a page, below the title in bold if there is one. plain: cells and title are
        plain text instead of Markdown, such as names from files."""
        marks = [":--" if letter == "l" else "--:" for letter in self._letters]
        shown = escaped_markdown if plain else str
        cells = ([_markdown_cell(shown(cell)) for cell in row] for row in self.rows)
        rows = ([_markdown_cell(cell) for cell in self.header], marks, *cells)
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([f"**{shown(self.title)}**\n", *lines] if self.title else lines)


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def escaped_markdown(text: str) -> str:
    """Markdown that shows a plain text."""
    return _ACTIVE.sub(r"\\\g<0>", text)


def code_span(text: str) -> str:
    """Markdown of a code span with any text."""
    marks = _more_backticks(text, 1)
    return f"{marks}{text}{marks}" if marks == "`" else f"{marks} {text} {marks}"


def fenced(text: str, language: str = "") -> str:
    """Markdown of a fenced code block with any text."""
    fence = _more_backticks(text, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def _more_backticks(text: str, least: int) -> str:
    """Backticks: at least `least`, and more than a text has side by side."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV of rows below a header; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def records_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """CSV of one row per record; there is at least one, and all have the first record's keys."""
    return csv_text(list(records[0]), (list(record.values()) for record in records))


def json_text(document: Any) -> str:
    """Indented JSON; numbers that are not finite become null."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def known(value: object) -> str:
    """Text of a value; "unknown" for None."""
    return "unknown" if value is None else str(value)


def number(value: float | None, digits: int = 0) -> str:
    """Text of a number with commas between thousands; a dash for None."""
    return DASH if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1, signed: bool = False) -> str:
    """Text of a share in percent; a dash for None."""
    return DASH if value is None else f"{100 * value:{'+' if signed else ''}.{digits}f}%"


def change(before: float | None, after: float | None, digits: int = 0) -> str:
    """Text of a difference with its sign; "=" if it rounds to zero, "" if one of the two numbers is
    None."""
    if before is None or after is None:
        return ""
    text = f"{after - before:+,.{digits}f}"
    return text if text.strip("+-0.,") else "="
