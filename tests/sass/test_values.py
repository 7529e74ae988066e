"""Whether registers are renamed consistently: values that they hold, and the diff that asks."""

from dataclasses import replace

import pytest
from sass_text import kernel

from flash_helpers.sass.analyse.diff import Likeness, diff_kernels
from flash_helpers.sass.analyse.values import agrees, one_to_one, register_values
from flash_helpers.sass.read.records import Kernel
from flash_helpers.sass.read.registers import operation_accesses


def value_numbers(text: str) -> str:
    """Each access of each instruction as a letter a value, a line of the text a word."""
    planted = kernel(text)
    letters: dict[object, str] = {}
    return " ".join(
        "".join(letters.setdefault(value, chr(ord("a") + len(letters))) for value in values)
        for values in register_values(planted)
    ).strip()


LOADS = """
    LDG.E R0, desc[UR4][R2.64]
    LDG.E R5, desc[UR4][R2.64+0x4]
    LDG.E R6, desc[UR4][R2.64+0x8]
"""


class TestValues:
    def test_have_one_accesses_each(self) -> None:
        planted = kernel(LOADS)
        counts = [len(operation_accesses(i)) for i in planted.instructions]
        assert [len(values) for values in register_values(planted)] == counts == [5, 5, 5]

    @pytest.mark.parametrize(
        ("text", "values"),
        [
            # one register, two values
            ("FADD R1, R2, R2\nFADD R3, R1, R1\nFADD R1, R3, R3\nFADD R4, R1, R1",
             "abb caa dcc edd"),
            # a value of several writes
            ("@P0 FADD R1, R2, R2\n@!P0 FADD R1, R3, R3\nFADD R4, R1, R1", "abcc abdd ebb"),
            # under one guard, what was there before is not read
            ("FADD R1, R2, R2\n@P0 FADD R1, R3, R3\n@P0 FADD R4, R1, R1\nEXIT", "abb cdee cfdd"),
            # without, it is
            ("FADD R1, R2, R2\n@P0 FADD R1, R3, R3\nFADD R4, R1, R1\nEXIT", "abb cadd eaa"),
            # a guard that is written in between is another
            (
                "FADD R1, R2, R2\n@P0 FADD R1, R3, R3\nISETP.EQ.AND P0, PT, R5, R6, PT\n"
                "@P0 FADD R4, R1, R1",
                "abb cadd efg ehaa",
            ),
            # copies
            ("FADD R1, R2, R2\nMOV R3, R1\nFADD R4, R3, R1", "abb aa caa"),
            # of a register that is written twice a copy is another value
            (
                "FADD R1, R2, R2\nloop: MOV R3, R1\nFADD R1, R1, 1\n@P0 BRA loop\nFADD R4, R3, R1",
                "abb ca aa d eca",
            ),
            # ways that meet join
            (
                "@P0 BRA other\nFADD R1, R2, R2\nBRA both\nother: FADD R1, R3, R3\n"
                "both: FADD R4, R1, R1",
                "a bcc  bdd ebb",
            ),
            # but not of a value that nobody reads any more
            (
                "FADD R1, R2, R2\nloop: FADD R3, R1, R1\nFADD R1, R4, R4\nFADD R5, R1, R1\n"
                "FADD R1, R6, R6\n@P0 BRA loop",
                "abb caa dee fdd agg h",
            ),
        ],
    )  # fmt: skip
    def test_of(self, text: str, values: str) -> None:
        assert value_numbers(text) == values


class TestOneToOne:
    def test_keeps_what_most_agree_with(self) -> None:
        pairs = [("ab", "xy"), ("ab", "xy"), ("ab", "yx"), ("c", "x")]
        renaming = one_to_one(pairs)
        assert renaming == {"a": "x", "b": "y"}
        assert [agrees(renaming, pair) for pair in pairs] == [True, True, False, False]

    def test_keeps_the_first_of_as_many(self) -> None:
        assert one_to_one([("a", "x"), ("a", "y")]) == {"a": "x"}

    def test_keeps_what_is_fixed(self) -> None:
        assert one_to_one([("a", "b"), ("a", "b")], "ab") == {"a": "a", "b": "b"}


def encoded(text: str) -> Kernel:
    """A kernel whose encodings differ where its text does."""
    planted = kernel(text)
    return replace(
        planted,
        instructions=tuple(
            replace(i, encoding=int.from_bytes(i.text.encode(), "little") << 128)
            for i in planted.instructions
        ),
    )


def news(before: str, after: str) -> list[str]:
    """Opcode and likeness of each instruction after that is not identical."""
    found = diff_kernels(encoded(before), encoded(after))
    return [
        f"{c.after.instruction.base} {c.likeness.value}"
        for c in found.changes
        if c.after is not None and c.likeness is not Likeness.IDENTICAL
    ]


class TestDiff:
    def test_two_factors_exchanged_are_a_change(self) -> None:
        before = f"{LOADS}FFMA R9, R0, R5, R6\nSTG.E desc[UR4][R2.64], R9\nEXIT"
        assert news(before, before.replace("R5, R6", "R6, R5")) == ["FFMA changed"]

    def test_so_they_are_of_registers_that_nobody_wrote(self) -> None:
        assert news("FFMA R9, R0, R5, R6", "FFMA R9, R0, R6, R5") == ["FFMA changed"]

    def test_all_registers_renamed_are_alike(self) -> None:
        before = f"{LOADS}FFMA R9, R0, R5, R6\nSTG.E desc[UR4][R2.64], R9"
        after = before.replace("R5", "R7").replace("R6", "R5").replace("R9", "R6")
        assert set(news(before, after)) == {"LDG renamed", "FFMA renamed", "STG renamed"}

    def test_each_value_has_a_name_of_its_own(self) -> None:
        """R5 holds two values before, which two registers hold after."""
        before = "S2R R5, SR_TID.X\nFADD R1, R5, 1\nS2R R5, SR_TID.Y\nFADD R2, R5, R1"
        after = "S2R R5, SR_TID.X\nFADD R1, R5, 1\nS2R R7, SR_TID.Y\nFADD R2, R7, R1"
        assert news(before, after) == ["S2R renamed", "FADD renamed"]
        wrong = after.replace("R7, R1", "R5, R1")
        assert news(before, wrong) == ["S2R renamed"]  # FADD prints alike
        wrong = after.replace("FADD R2, R7, R1", "FADD R2, R1, R7")
        assert news(before, wrong) == ["S2R renamed", "FADD changed"]

    def test_what_was_exchanged_is_found_where_it_stands(self) -> None:
        before = f"{LOADS}MUFU.EX2 R10, R5\nMUFU.EX2 R11, R6\nFADD R12, R10, -R11"
        after = f"{LOADS}MUFU.EX2 R21, R6\nMUFU.EX2 R20, R5\nFADD R12, R20, -R21"
        found = diff_kernels(encoded(before), encoded(after))
        assert found.likenesses[Likeness.CHANGED] == 0
        assert found.moved == 1

    def test_a_copy_left_out_changes_nothing_else(self) -> None:
        before = f"{LOADS}MOV R7, R5\nFFMA R9, R0, R7, R6\nFADD R8, R9, R7"
        after = f"{LOADS}FFMA R9, R0, R5, R6\nFADD R8, R9, R5"
        assert news(before, after) == ["FFMA renamed", "FADD renamed"]

    def test_jumps_that_lead_elsewhere_are_a_change(self) -> None:
        before = """
            @P0 BRA one
            @P1 BRA one
            @P2 BRA two
            one: FADD R1, R2, R3
            two: FMUL R1, R2, R3
        """
        assert news(before, before) == []
        moved_on = before.replace("one: FADD", "NOP\n one: FADD")
        assert news(before, moved_on) == ["BRA renamed"] * 3 + ["NOP added"]
        assert news(before, before.replace("@P1 BRA one", "@P1 BRA two")) == ["BRA changed"]
