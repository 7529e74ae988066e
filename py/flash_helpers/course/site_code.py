"""Code boxes of the site: what is wider than a box goes on below, indented further."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from pygments.formatters import HtmlFormatter

from flash_helpers.course.excerpts import COLUMNS

_TAG = re.compile(r"<[^>]*>")
_INDENT = re.compile(r"[-+$|/ ]*")  # with the mark of a diff, a prompt, or what begins a comment


class WrappingFormatter(HtmlFormatter[str]):
    """Pygments' formatter, which tells the style sheet the lines of more than COLUMNS characters
    (class `long`) and how far each is indented (`--indent`)."""

    def wrap(self, source: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        return super().wrap((is_line, _marked(text)) for is_line, text in source)


def _marked(line: str) -> str:
    """A line of HTML, marked if it is long."""
    text = html.unescape(_TAG.sub("", line)).rstrip("\n")
    if len(text) <= COLUMNS:
        return line
    indent = re.match(_INDENT, text)
    return f'<span class="long" style="--indent:{len(indent[0])}ch">{line.rstrip()}</span>\n'
