"""Differences that the diff of machine code reports, and those that it does not."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from edited_kernels import (
    OPERAND_BIT,
    STALL_BIT,
    block_of_phase,
    edit,
    edit_all,
    instructions_of,
    library_kernel,
    rename_registers,
)
from sass_text import needs

from flash_helpers.kernel_configs import STEPS, Element
from flash_helpers.ptx.read.flow import Phase
from flash_helpers.sass.analyse.alignment import common_subsequence, gaps
from flash_helpers.sass.analyse.counts import Bucket, buckets
from flash_helpers.sass.analyse.diff import (
    KernelDiff,
    Likeness,
    diff_kernels,
    normalised,
    normalised_ptx,
)
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import NEVER
from flash_helpers.sass.read.records import Instruction, Kernel
from flash_helpers.sass.show.diff_text import diff_as_json, diff_text, listing_text

pytestmark = pytest.mark.slow

NAMES = ("before", "after")
NUMBERS = [step.number for step in STEPS.values() if step.id == f"v{step.number}"]


def working(kernel: Kernel) -> list[Instruction]:
    """The instructions that are no padding."""
    kinds = buckets(kernel.instructions)
    return [
        i for i, kind in zip(kernel.instructions, kinds, strict=True) if kind is not Bucket.PADDING
    ]


def news(diff: KernelDiff) -> list[tuple[Likeness, bool]]:
    return [(change.likeness, change.moved) for change in diff.changes if change.is_news]


def longest_common(a: str, b: str) -> int:
    """The textbook's table."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row[:]
        for j, y in enumerate(b, start=1):
            row[j] = before[j - 1] + 1 if x == y else max(before[j], row[j - 1])
    return row[-1]


class TestAlignment:
    @pytest.mark.parametrize("seed", range(40))
    def test_is_a_longest_common_subsequence(self, seed: int) -> None:
        rng = random.Random(seed)
        a, b = ("".join(rng.choices("abcd", k=rng.randint(0, 70))) for _ in range(2))
        pairs = common_subsequence(a, b)
        assert all(a[i] == b[j] for i, j in pairs)
        assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))
        assert len(pairs) == longest_common(a, b)

    def test_leaves_gaps_that_hold_the_rest(self) -> None:
        a, b = "xaybz", "awb"
        pairs = common_subsequence(a, b)
        found = gaps(pairs, len(a), len(b))
        assert ["".join(a[i] for i in in_a) for in_a, _ in found] == ["x", "y", "z"]
        assert ["".join(b[j] for j in in_b) for _, in_b in found] == ["", "w", ""]


class TestNormalisation:
    def text(self, kernel: Kernel, capability: int = 90, **changes: object) -> str:
        return normalised(replace(kernel.instructions[0], **changes), capability)

    def test_drops_numbers_of_registers_predicates_and_barriers(self, kernel) -> None:
        one = self.text(kernel, predicate="@!P0", opcode="FFMA", operands="R1, R2.reuse, -R3, UR4")
        other = self.text(kernel, predicate="@!P3", opcode="FFMA", operands="R9, R8, -R7, UR6")
        assert one == other
        assert self.text(kernel, opcode="BSSY", operands="B0, 0x40", target=0x40) == self.text(
            kernel, opcode="BSSY", operands="B1, 0x80", target=0x80
        )

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("R1, R2, R3", "R1, R2, -R3"),
            ("R1, R2, R3", "R1, R2, RZ"),
            ("R1, R2, R3", "R1, R2, UR3"),
            ("R1, [R2+0x10]", "R1, [R2+0x20]"),
            ("R1, R2, 0x1", "R1, R2, 0x2"),
            ("R1, c[0x0][0x210]", "R1, c[0x0][0x218]"),
        ],
    )
    def test_keeps_everything_else(self, kernel, one: str, other: str) -> None:
        assert self.text(kernel, operands=one) != self.text(kernel, operands=other)

    def test_keeps_whether_a_guard_is_negated(self, kernel) -> None:
        assert self.text(kernel, predicate="@P0") != self.text(kernel, predicate="@!P0")

    def test_counts_parameters_from_where_they_begin(self, kernel) -> None:
        on_80 = self.text(kernel, 80, operands="R1, c[0x0][0x168]")
        on_90 = self.text(kernel, 90, operands="R1, c[0x0][0x218]")
        assert on_80 == on_90

    def test_of_ptx_drops_registers_labels_and_the_kernels_namespace(self) -> None:
        symbol = "_ZN2v814forward_kernelI3abcEEv"
        text = normalised_ptx(f"ld.param.u64 \t%rd38, [{symbol}_param_0+32];", symbol)
        assert text == "ld.param.u64 %rd, [kernel_param_0+32];"
        one = normalised_ptx("mov.u32 %r160, _ZN2v84smemE;", symbol)
        other = symbol.replace("_ZN2v8", "_ZN4fast")
        assert one == normalised_ptx("mov.u32 %r7, _ZN4fast4smemE;", other)
        assert one != normalised_ptx("mov.u32 %r7, _ZN4fast4smemE;", symbol)
        assert normalised_ptx("@%p3 bra $L__BB0_2;", symbol) == "@%p bra $;"


class TestPlanted:
    def test_nothing_is_equal(self, kernel) -> None:
        diff = diff_kernels(kernel, kernel)
        assert diff.equal
        assert diff.likenesses == {Likeness.IDENTICAL: len(working(kernel))}
        assert news(diff) == []
        assert "equal: the same encodings" in diff_text(diff, NAMES)

    def test_renaming_is_no_difference_but_not_equal(self, kernel) -> None:
        other = edit_all(kernel, rename_registers)
        diff = diff_kernels(kernel, other)
        changed = sum(a != b for a, b in zip(working(kernel), working(other), strict=True))
        assert changed > 0.8 * len(working(kernel))
        assert diff.likenesses[Likeness.RENAMED] == changed
        assert (news(diff), diff.equal) == ([], False)
        assert "not equal" in diff_text(diff, NAMES)

    def test_control_words_are_told_apart(self, kernel) -> None:
        other = edit_all(
            kernel, lambda i: replace(i, encoding=i.encoding ^ STALL_BIT) if i.base == "HMMA" else i
        )
        diff = diff_kernels(kernel, other)
        assert diff.likenesses[Likeness.SCHEDULED] == 128
        assert (news(diff), diff.equal) == ([], False)

    def test_what_prints_alike_is_not_called_equal(self, kernel) -> None:
        other = edit_all(
            kernel,
            lambda i: replace(i, encoding=i.encoding ^ OPERAND_BIT) if i.base == "MUFU" else i,
        )
        diff = diff_kernels(kernel, other)
        assert diff.likenesses[Likeness.ENCODED] == sum(
            i.base == "MUFU" for i in kernel.instructions
        )
        assert not diff.equal
        assert "prints alike, encoded differently" in diff_text(diff, NAMES)

    @pytest.mark.parametrize("distance", [1, 7, 60])
    @pytest.mark.parametrize("base", ["LDSM", "HMMA", "FFMA"])
    def test_an_instruction_that_moved(self, kernel, base: str, distance: int) -> None:
        def move(inside: list[Instruction]) -> list[Instruction]:
            at = next(n for n, i in enumerate(inside) if i.base == base)
            inside.insert(at + distance, inside.pop(at))
            return inside

        diff = diff_kernels(kernel, edit(kernel, block_of_phase(kernel, Phase.MAIN_LOOP), move))
        assert news(diff) == [(Likeness.IDENTICAL, True)]
        moved = [tally.moved for tally in diff.tallies()[Phase.MAIN_LOOP].values() if tally.moved]
        assert moved == [1]
        assert listing_text(diff).count("\n>") == 1

    def test_one_that_took_the_place_of_another(self, kernel) -> None:
        """Both read alike, and their PTX tells which is gone."""
        loop = block_of_phase(kernel, Phase.MAIN_LOOP)
        gone, moved = [i for i in instructions_of(kernel, loop) if i.base == "MUFU"][3:12:8]

        def change(inside: list[Instruction]) -> list[Instruction]:
            at = inside.index(gone)
            inside.remove(moved)
            inside[at] = moved
            return inside

        diff = diff_kernels(kernel, edit(kernel, loop, change))
        assert sorted(news(diff)) == [(Likeness.IDENTICAL, True), (Likeness.REMOVED, False)]
        (removed,) = (c.before for c in diff.changes if c.likeness is Likeness.REMOVED)
        assert removed is not None and removed.instruction == gone

    def test_an_instruction_that_left_the_loop(self, kernel) -> None:
        loop = block_of_phase(kernel, Phase.MAIN_LOOP)
        prologue = block_of_phase(kernel, Phase.PROLOGUE)
        taken = next(i for i in instructions_of(kernel, loop) if i.base == "LDSM")
        without = edit(kernel, loop, lambda inside: [i for i in inside if i != taken])
        other = edit(without, prologue, lambda inside: [*inside[:-1], taken, inside[-1]])
        diff = diff_kernels(kernel, other)
        assert news(diff) == [(Likeness.IDENTICAL, True)]
        tallies = diff.tallies()
        assert tallies[Phase.MAIN_LOOP][opcodes.LDMATRIX].moved_out == 1
        assert tallies[Phase.PROLOGUE][opcodes.LDMATRIX].moved_in == 1
        assert "(from the main loop)" in listing_text(diff)

    @pytest.mark.parametrize("number", [1, 5])
    def test_instructions_that_were_removed_or_added(self, kernel, number: int) -> None:
        loop = block_of_phase(kernel, Phase.MAIN_LOOP)

        def remove(inside: list[Instruction]) -> list[Instruction]:
            gone = [i for i in inside if i.base == "FMNMX"][:number]
            return [i for i in inside if i not in gone]

        other = edit(kernel, loop, remove)
        removed, added = diff_kernels(kernel, other), diff_kernels(other, kernel)
        assert news(removed) == [(Likeness.REMOVED, False)] * number
        assert news(added) == [(Likeness.ADDED, False)] * number
        tally = removed.tallies()[Phase.MAIN_LOOP][opcodes.FP32_MINMAX]
        assert (tally.removed, tally.before - tally.after) == (number, number)
        ((opcode, before, after),) = removed.opcode_deltas()
        assert (opcode, after - before) == ("FMNMX", -number)

    def test_another_constant_is_a_change(self, kernel) -> None:
        loop = block_of_phase(kernel, Phase.MAIN_LOOP)

        def change(inside: list[Instruction]) -> list[Instruction]:
            at = next(n for n, i in enumerate(inside) if i.base == "LDSM")
            inside[at] = replace(
                inside[at], operands="R1, [R2+0x7ff0]", encoding=inside[at].encoding ^ 1 << 41
            )
            return inside

        diff = diff_kernels(kernel, edit(kernel, loop, change))
        assert news(diff) == [(Likeness.CHANGED, False)]
        assert "(was LDSM" in listing_text(diff)

    def test_without_ptx_text_alone_aligns(self, kernel) -> None:
        bare = replace(kernel, ptx=None)
        assert news(diff_kernels(bare, bare)) == []

        def remove(inside: list[Instruction]) -> list[Instruction]:
            return [i for i in inside if i.base != "SHFL"]

        diff = diff_kernels(bare, edit(bare, block_of_phase(bare, Phase.MAIN_LOOP), remove))
        assert not diff.by_ptx
        assert set(news(diff)) == {(Likeness.REMOVED, False)}
        assert "aligned by their own text only" in diff_text(diff, NAMES)


class TestProgression:
    @pytest.mark.parametrize("number", NUMBERS[1:])
    def test_accounts_for_every_instruction_once(self, number: int) -> None:
        before, after = library_kernel(number - 1), library_kernel(number)
        diff = diff_kernels(before, after)
        for kernel, sides in (
            (before, [change.before for change in diff.changes]),
            (after, [change.after for change in diff.changes]),
        ):
            addresses = [side.instruction.address for side in sides if side is not None]
            assert sorted(addresses) == [i.address for i in working(kernel)]
        for tallies in diff.tallies().values():
            for t in tallies.values():
                stayed = t.alike + t.changed + t.moved
                assert t.before == stayed + t.moved_out + t.removed
                assert t.after == stayed + t.moved_in + t.added
        # both main loops hold the same mma instructions: none may look new or gone
        tally = diff.tallies()[Phase.MAIN_LOOP][opcodes.TENSOR]
        assert (tally.before, tally.after) == (128, 128)
        assert (tally.added, tally.removed) == (0, 0)

    def test_version_9_drops_moves_from_the_loop_and_nothing_else(self) -> None:
        loop = diff_kernels(library_kernel(8), library_kernel(9)).tallies()[Phase.MAIN_LOOP]
        removed = {name: tally.removed for name, tally in loop.items() if tally.removed}
        assert set(removed) <= {opcodes.MOVE, opcodes.IMAD_MOVE}
        assert sum(removed.values()) > 50

    def test_opcodes_that_changed_most_come_first(self) -> None:
        before, after = library_kernel(8), library_kernel(9)
        deltas = diff_kernels(before, after).opcode_deltas()
        sizes = [abs(b - a) for _, a, b in deltas]
        assert sizes == sorted(sizes, reverse=True)
        for opcode, a, b in deltas:
            for kernel, number in ((before, a), (after, b)):
                there = [i for i in working(kernel) if i.opcode == opcode]
                assert sum(i.predicate not in NEVER for i in there) == number

    def test_version_14_changes_only_accesses_to_global_memory(self) -> None:
        diff = diff_kernels(library_kernel(13), library_kernel(14))
        changed = {change.after.group for change in diff.changes if change.is_news and change.after}
        assert changed == {opcodes.ASYNC_COPY, opcodes.GLOBAL_STORE}

    def test_another_dtype_changes_only_what_knows_it(self) -> None:
        diff = diff_kernels(library_kernel(8, Element.BF16), library_kernel(8, Element.FP16))
        found = {
            (change.likeness, change.after.instruction.base)
            for change in diff.changes
            if change.is_news and change.after
        }
        assert found == {(Likeness.CHANGED, "HMMA"), (Likeness.CHANGED, "F2FP")}

    @needs("sm_80", "sm_90")
    def test_another_architecture_keeps_what_does_the_work(self) -> None:
        diff = diff_kernels(
            library_kernel(16, architecture="sm_80"), library_kernel(16, architecture="sm_90")
        )
        loop = diff.tallies()[Phase.MAIN_LOOP]
        for name in (opcodes.TENSOR, opcodes.LDMATRIX, opcodes.MUFU, opcodes.SHUFFLE):
            assert (loop[name].added, loop[name].removed) == (0, 0)

    def test_as_json_holds_what_is_news(self) -> None:
        diff = diff_kernels(library_kernel(8), library_kernel(9))
        document = diff_as_json(diff, NAMES)
        assert len(document["changes"]) == len(news(diff))
        assert document["likenesses"]["removed"] == diff.likenesses[Likeness.REMOVED]
        assert document["equal"] is False
