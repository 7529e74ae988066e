"""What a step changed in its kernel's file: the code alone, without comments. Standard library
only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.kernel_configs import STEPS
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
class StepDiff:
    """What a version changed against its parent.

    text: in the form of a unified diff; the numbers of its hunks are those of lines of the files,
    comments included.
    """

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
            f"{step.source} cannot be read ({error.strerror}): build the pages in a "
            "checkout of the repository"
        ) from error
    file_lines = text.split("\n")
    name = re.escape(step.namespace)
    text = re.sub(rf"\b{name}(?=::)", _FOLDED, without_comments(text))
    text = re.sub(rf"\bnamespace {name}\b", f"namespace {_FOLDED}", text)
    is_empty = [not line.strip() for line in file_lines]
    found = []
    before = 0
    for at, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            found.append(CodeLine(at, line.rstrip(), any(is_empty[before : at - 1])))
            before = at
    return found


def step_diff(step: Step, root: Path) -> StepDiff:
    """The changes of a step against its parent. Raises UsageError for one without a parent."""
    if step.parent is None:
        raise UsageError(f"step {step.id} has no parent: there is nothing to compare it with")
    parent = STEPS[step.parent]
    before, after = code_lines(parent, root), code_lines(step, root)
    matcher = difflib.SequenceMatcher(
        None, [line.text for line in before], [line.text for line in after], autojunk=False
    )
    lines = [f"--- {parent.source}", f"+++ {step.source}"]
    removed = added = 0
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        lines.append(_hunk_header(before, after, group))
        for tag, a_from, a_to, b_from, b_to in group:
            if tag == "equal":
                lines += _marked(" ", before[a_from:a_to])
                continue
            lines += _marked("-", before[a_from:a_to])
            lines += _marked("+", after[b_from:b_to])
            removed += a_to - a_from
            added += b_to - b_from
    return StepDiff("\n".join(lines), removed, added)


def _marked(mark: str, lines: Sequence[CodeLine]) -> Iterator[str]:
    """The lines of a hunk; empty lines between them are shown, and are no change."""
    for at, line in enumerate(lines):
        if at and line.after_gap:
            yield ""
        yield mark + line.text


def _hunk_header(
    before: list[CodeLine], after: list[CodeLine], group: list[tuple[str, int, int, int, int]]
) -> str:
    a_from, b_from = group[0][1], group[0][3]
    inside = next(_headings(after[: b_from + 1]), "")
    header = f"@@ -{_number(before, a_from)} +{_number(after, b_from)} @@"
    return f"{header} {inside}".rstrip()


def _headings(lines: list[CodeLine]) -> Iterator[str]:
    """The lines at the margin that begin something, the last one first."""
    for line in reversed(lines):
        if re.match(r"[A-Za-z_]", line.text):
            yield line.text


def _number(lines: list[CodeLine], at: int) -> int:
    return lines[at].number if at < len(lines) else lines[-1].number if lines else 0
