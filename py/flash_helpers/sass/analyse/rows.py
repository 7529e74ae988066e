"""Two versions of a listing as the rows of one: pairs of lines, and the change of each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from flash_helpers.sass.analyse.alignment import Keys, Matching, common_subsequence
from flash_helpers.sass.analyse.diff import ALIKE, Change, KernelDiff, Likeness
from flash_helpers.sass.analyse.values import agrees, one_to_one
from flash_helpers.sass.read.records import INSTRUCTION_BYTES


class Mark(str, Enum):
    """The mark of a row, one character."""

    ALIKE = " "
    RENAMED = "≈"
    CHANGED = "~"
    ADDED = "+"
    REMOVED = "-"
    MOVED = ">"
    MOVED_AND_CHANGED = "}"
    LEFT = "<"


MARK_MEANING: Mapping[Mark, str] = {
    Mark.ADDED: "added",
    Mark.REMOVED: "removed",
    Mark.CHANGED: "changed: other values or operands",
    Mark.MOVED: "moved here",
    Mark.MOVED_AND_CHANGED: "moved here, and changed",
    Mark.LEFT: "moved away from here",
    Mark.RENAMED: "renamed: other names one to one, of registers, labels or addresses",
}
_MOVED = {Mark.CHANGED: Mark.MOVED_AND_CHANGED}


class Row(NamedTuple):
    """A row. `before` and `after` are indices into the two listings, None for a line without that
    side.

    A moved line has two rows: MOVED with both indices at its new place, and LEFT at its old place.
    """

    mark: Mark
    before: int | None
    after: int | None


class Line(NamedTuple):
    """A line of a text. `text`: the text of the line. `alike`: a key that is equal for lines that
    differ in names only. `opcode`: opcode of an instruction; two lines that share only the opcode
    count as changed. `phase`: lines of the same phase are matched first. `names`: the names that
    `alike` leaves out and that must be renamed consistently, such as registers, in order."""

    text: str
    alike: str
    opcode: str | None = None
    phase: Hashable = None
    names: tuple[str, ...] = ()


def _has_words(text: str) -> bool:
    return sum(map(str.isalnum, text)) > 1


def line_rows(before: Sequence[Line], after: Sequence[Line]) -> list[Row]:
    """The rows of two texts.

    Lines with equal `alike` are matched in order, lines with words first, so that brackets and
    empty lines follow the others. Then lines that resemble no other unmatched line are matched out
    of order (moved), then lines with equal opcodes in order (changed). Lines whose names contradict
    those of other lines, as `values.one_to_one` renames them, are changed too."""
    texts = (before, after)
    matching = Matching(
        [[line.phase for line in text] for text in texts], [range(len(text)) for text in texts]
    )
    alike = [[line.alike for line in text] for text in texts]
    worded = [[text if _has_words(text) else None for text in of] for of in alike]
    matching.align(worded)
    matching.align(alike)
    matching.relocate(_unique(matching, worded))
    matching.align([[line.opcode for line in text] for text in texts])
    pairs = {
        j: (before[i].names, after[j].names)
        for j, i in sorted(matching.partner.items())
        if before[i].alike == after[j].alike
    }
    renaming = one_to_one(pairs.values())
    marks = []
    for j, line in enumerate(after):
        i = matching.partner.get(j)
        if i is None:
            marks.append(Mark.ADDED)
        elif line.text == before[i].text:
            marks.append(Mark.ALIKE)
        else:
            renamed = j in pairs and agrees(renaming, pairs[j])
            marks.append(Mark.RENAMED if renamed else Mark.CHANGED)
    return _rows(matching.partner, matching.moved, marks, len(before))


def _unique(matching: Matching, keys: Keys) -> list[list[Hashable | None]]:
    """The keys without those that several free elements of one text have."""
    found = []
    for free, of in zip(matching.free, keys, strict=True):
        count = Counter(of[n] for n in free)
        found.append([key if count[key] == 1 else None for key in of])
    return found


def sass_rows(diff: KernelDiff) -> list[Row]:
    """The rows of two kernels, in the order of their addresses; padding is alike."""
    partner: dict[int, int] = {}
    moved: set[int] = set()
    marks = [Mark.ALIKE] * len(diff.after.instructions)
    gone: set[int | None] = set()
    for change in diff.changes:
        before, after = (
            None if side is None else side.instruction.address // INSTRUCTION_BYTES
            for side in (change.before, change.after)
        )
        if after is None:
            gone.add(before)
            continue
        marks[after] = _mark(change)
        if before is not None:
            partner[after] = before
            if change.moved:
                moved.add(after)
    rows = _rows(partner, moved, marks, len(diff.before.instructions))
    return [row for row in rows if row.mark is not Mark.REMOVED or row.before in gone]


def _mark(change: Change) -> Mark:
    if change.likeness is Likeness.ADDED:
        return Mark.ADDED
    if change.likeness is Likeness.RENAMED:
        return Mark.RENAMED
    return Mark.ALIKE if change.likeness in ALIKE else Mark.CHANGED


def _rows(
    partner: Mapping[int, int], moved: set[int], marks: Sequence[Mark], n_before: int
) -> list[Row]:
    """Both listings in their order. `partner`, `moved`: as in `Matching`. `marks`: marks of the
    second listing if nothing has moved. In a pair that crosses others, one side counts as moved."""
    pairs = [(partner[j], j) for j in sorted(partner) if j not in moved]
    firsts = [i for i, _ in pairs]
    in_place = [pairs[n] for _, n in common_subsequence(sorted(firsts), firsts)]
    elsewhere = set(partner.values())
    bounds = [(-1, -1), *in_place, (n_before, len(marks))]

    def between() -> Iterator[Row]:
        for (i, j), (next_i, next_j) in itertools.pairwise(bounds):
            if i >= 0:
                yield Row(marks[j], i, j)
            for n in range(i + 1, next_i):
                yield Row(Mark.LEFT if n in elsewhere else Mark.REMOVED, n, None)
            for n in range(j + 1, next_j):
                if n in partner:
                    yield Row(_MOVED.get(marks[n], Mark.MOVED), partner[n], n)
                else:
                    yield Row(marks[n], None, n)

    return list(between())
