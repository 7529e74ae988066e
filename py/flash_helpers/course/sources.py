"""Changes between the files of two steps, in code without comments. Standard library only."""

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
# A literal is matched as a whole, so that text in it that looks like a comment stays.
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)


@dataclass(frozen=True)
class CodeLine:
    """A line that holds code. number: of the line in the file, from 1. after_gap: whether an empty
    line stands before it, or before the comment above it."""

    number: int
    text: str
    after_gap: bool


@dataclass(frozen=True)
class CodeDiff:
    """Changes between two files. text: a unified diff whose hunks have the line numbers of the
    files, comments counted."""

    text: str
    removed: int
    added: int

    @property
    def changed(self) -> int:
        """Number of removed and added lines."""
        return self.removed + self.added


def without_comments(text: str) -> str:
    """C++ source with its comments cut out; line ends stay."""
    return _TOKEN.sub(
        lambda match: "\n" * match[0].count("\n") if match["comment"] else match[0], text
    )


def code_lines(step: Step, root: Path) -> list[CodeLine]:
    """Lines of a kernel's file that are neither empty nor comments, with the namespace written as
    vN.

    root: of the repository. Raises UsageError if the file is absent.
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
    """Lines of a hunk; empty lines between them are shown and do not count as changes."""
    for at, line in enumerate(lines):
        if at and line.after_gap:
            yield ""
        yield mark + line.text


def _hunk_header(
    old: list[CodeLine], new: list[CodeLine], first: tuple[str, int, int, int, int]
) -> str:
    _, a_from, _, b_from, _ = first
    # The hunk's scope: the nearest line before it that begins at the margin.
    above = (line.text for line in reversed(new[: b_from + 1]))
    inside = next((text for text in above if re.match(r"[A-Za-z_]", text)), "")
    return f"@@ -{_number(old, a_from)} +{_number(new, b_from)} @@ {inside}".rstrip()


def _number(lines: list[CodeLine], at: int) -> int:
    return lines[min(at, len(lines) - 1)].number if lines else 0
