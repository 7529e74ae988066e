"""Code boxes of the site: what is wider than a box goes on below, indented further."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from pygments.formatters import HtmlFormatter

from flash_helpers.course.excerpts import COLUMNS

_TAG = re.compile(r"<[^>]*>")
# With the mark of a diff, and a prompt or what begins a comment.
_INDENT = re.compile(r"[-+|]? *(?:\$ |// )?")
_MOST_INDENTED = COLUMNS // 2  # for the parts of a line below its first


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
    found = _INDENT.match(text)
    indent = min(len(found[0]) if found else 0, _MOST_INDENTED)
    return f'<span class="long" style="--indent:{indent}ch">{line.rstrip()}</span>\n'
