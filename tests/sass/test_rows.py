"""Two listings as the rows of one: marks, order, and that nothing is lost."""

import random
from dataclasses import replace

import pytest
from edited_kernels import block_of_phase, edit, library_kernel

from flash_helpers.ptx.read.flow import Phase
from flash_helpers.sass.analyse.diff import diff_kernels
from flash_helpers.sass.analyse.rows import MARK_MEANING, Line, Mark, Row, line_rows, sass_rows
from flash_helpers.sass.read.records import Instruction, Kernel


def lines(text: str) -> list[Line]:
    """A line a word; what stands before a dot is its opcode, and digits are names."""
    return [
        Line(word, word.rstrip("0123456789"), word.split(".")[0] if "." in word else None)
        for word in text.split()
    ]


def marked(before: str, after: str) -> str:
    """The rows of two texts, as a person writes them down."""
    a, b = lines(before), lines(after)
    return " ".join(
        row.mark.strip() + (a[row.before] if row.after is None else b[row.after]).text
        for row in line_rows(a, b)
    )


@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [
        ("one two three", "one two three", "one two three"),
        ("one three", "one two three", "one +two three"),
        ("one two three", "one three", "one -two three"),
        ("reg1 two", "reg22 two", "≈reg22 two"),
        ("one add.x two", "one add.y two", "one ~add.y two"),
        ("one two three four", "three one two four", ">three one two <three four"),
        # two that look the same: which one moved would be a guess
        ("aa bb aa cc", "cc", "-aa -bb -aa cc"),
        ("aa aa bb cc dd", "bb cc dd aa", "-aa -aa bb cc dd +aa"),
        # brackets follow the words between which they stand
        ("if { one }", "for { zero } if { one }", "+for +{ +zero +} if { one }"),
        ("", "one", "+one"),
        ("one", "", "-one"),
    ],
)
def test_lines(before: str, after: str, rows: str) -> None:
    assert marked(before, after) == rows


@pytest.mark.parametrize("seed", range(30))
def test_hold_every_line_of_both_in_its_order(seed: int) -> None:
    rng = random.Random(seed)
    words = ["aa", "bb", "cc1", "cc2", "dd.x", "dd.y", "{", "}", "ee", "ff"]
    before, after = (lines(" ".join(rng.choices(words, k=rng.randint(0, 40)))) for _ in range(2))
    rows = line_rows(before, after)
    here = (Mark.MOVED, Mark.MOVED_AND_CHANGED)
    assert [r.after for r in rows if r.after is not None] == list(range(len(after)))
    stood = [r.before for r in rows if r.before is not None and r.mark not in here]
    assert stood == list(range(len(before)))
    came = sorted(r.before for r in rows if r.mark in here)
    assert came == sorted(r.before for r in rows if r.mark is Mark.LEFT)
    for row in rows:
        assert (row.after is None) == (row.mark in (Mark.REMOVED, Mark.LEFT))
        assert (row.before is None) == (row.mark is Mark.ADDED)
        if row.mark is Mark.ALIKE:
            assert before[row.before].text == after[row.after].text


def test_every_mark_is_explained() -> None:
    assert set(MARK_MEANING) == set(Mark) - {Mark.ALIKE}
    assert all(len(mark.value) == 1 for mark in Mark)


def news(rows: list[Row]) -> list[Mark]:
    return [row.mark for row in rows if row.mark not in (Mark.ALIKE, Mark.RENAMED)]


class TestSass:
    def change(self, kernel: Kernel, name: str) -> Kernel:
        def changed(inside: list[Instruction]) -> list[Instruction]:
            at = next(n for n, i in enumerate(inside) if i.base == "LDSM")
            found = inside.pop(at)
            if name == "changed":
                encoding = found.encoding ^ 1 << 41
                inside.insert(at, replace(found, operands="R1, [R2+0x7ff0]", encoding=encoding))
            elif name == "moved":
                inside.insert(at + 7, found)
            return inside

        return edit(kernel, block_of_phase(kernel, Phase.MAIN_LOOP), changed)

    @pytest.mark.parametrize(
        ("name", "marks"),
        [
            ("changed", [Mark.CHANGED]),
            ("removed", [Mark.REMOVED]),
            ("moved", [Mark.LEFT, Mark.MOVED]),
        ],
    )
    def test_marks_what_was_done(self, kernel: Kernel, name: str, marks: list[Mark]) -> None:
        other = self.change(kernel, name)
        assert news(sass_rows(diff_kernels(kernel, other))) == marks

    def test_equal_kernels_have_no_marks(self, kernel: Kernel) -> None:
        rows = sass_rows(diff_kernels(kernel, kernel))
        assert {row.mark for row in rows} == {Mark.ALIKE}
        assert [row.after for row in rows] == list(range(len(kernel.instructions)))

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [2, 8, 16])
    def test_agree_with_the_diff(self, number: int) -> None:
        before, after = library_kernel(number - 1), library_kernel(number)
        diff = diff_kernels(before, after)
        rows = sass_rows(diff)
        assert [r.after for r in rows if r.after is not None] == list(
            range(len(after.instructions))
        )
        assert len(news(rows)) == sum(c.is_news for c in diff.changes) + diff.moved
