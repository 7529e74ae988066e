"""Changes between the files of two steps: the code alone, without comments. Standard library
only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.registry.family import Step
from flash_helpers.registry.selection import UsageError

_FOLDED = "vN"
_CONTEXT = 3  # lines around a change
# A literal is matched as a whole, so that what looks like a comment in it stays.
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)


@dataclass(frozen=True)
class CodeLine:
    """A line that holds code. number: of the line in the file, from 1. after_gap: an empty line
    stands before it, or before the comment before it."""

    number: int
    text: str
    after_gap: bool


@dataclass(frozen=True)
class CodeDiff:
    """text: in the form of a unified diff, whose hunks are numbered by the lines of the files,
    comments included."""

    text: str
    removed: int
    added: int

    @property
    def changed(self) -> int:
        """Lines removed and added."""
        return self.removed + self.added


def without_comments(text: str) -> str:
    """C++ source with its comments cut out; line ends stay."""
    return _TOKEN.sub(
        lambda match: "\n" * match[0].count("\n") if match["comment"] else match[0], text
    )


def code_lines(step: Step, root: Path) -> list[CodeLine]:
    """The lines of a kernel's file that are neither empty nor comment, its namespace written vN.

    root: of the repository. Raises UsageError if the file is not there.
    """
    path = root / step.source
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{step.source} cannot be read ({error.strerror}): the sources are not part of the "
            "installed package, so run this in a checkout of the repository"
        ) from error
    is_empty = [not line.strip() for line in text.split("\n")]
    name = re.escape(step.namespace)
    code = re.sub(rf"\b{name}(?=::)|(?<=\bnamespace ){name}\b", _FOLDED, without_comments(text))
    found = []
    before = 0
    for at, line in enumerate(code.split("\n"), start=1):
        if line.strip():
            found.append(CodeLine(at, line.rstrip(), any(is_empty[before : at - 1])))
            before = at
    return found


def code_diff(before: Step, after: Step, root: Path) -> CodeDiff:
    """The changes from one step's code to another's. Raises as `code_lines` does."""
    old, new = code_lines(before, root), code_lines(after, root)
    matcher = difflib.SequenceMatcher(
        None, [line.text for line in old], [line.text for line in new], autojunk=False
    )
    lines = [f"--- {before.source}", f"+++ {after.source}"]
    removed = added = 0
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        lines.append(_hunk_header(old, new, group[0]))
        for tag, a_from, a_to, b_from, b_to in group:
            if tag == "equal":
                lines += _marked(" ", old[a_from:a_to])
                continue
            lines += _marked("-", old[a_from:a_to])
            lines += _marked("+", new[b_from:b_to])
            removed += a_to - a_from
            added += b_to - b_from
    return CodeDiff("\n".join(lines), removed, added)


def _marked(mark: str, lines: Sequence[CodeLine]) -> Iterator[str]:
    """The lines of a hunk; empty lines between them are shown, and are no change."""
    for at, line in enumerate(lines):
        if at and line.after_gap:
            yield ""
        yield mark + line.text


def _hunk_header(
    old: list[CodeLine], new: list[CodeLine], first: tuple[str, int, int, int, int]
) -> str:
    _, a_from, _, b_from, _ = first
    # what the hunk stands in: the nearest line before it that begins at the margin
    above = (line.text for line in reversed(new[: b_from + 1]))
    inside = next((text for text in above if re.match(r"[A-Za-z_]", text)), "")
    return f"@@ -{_number(old, a_from)} +{_number(new, b_from)} @@ {inside}".rstrip()


def _number(lines: list[CodeLine], at: int) -> int:
    return lines[min(at, len(lines) - 1)].number if lines else 0
