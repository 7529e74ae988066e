"""Lints, for what is legal but suspicious, in kernels of Hopper's units with and without
mistakes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hopper_cases import WHOLE, Case, gemm, gemm_a_registers
from hopper_launches import KERNELS, launched, module_of
from tma_snippets import BARRIER_INITS, EXPECT, INIT, LOAD, run, wait

from flash_helpers.check.faults import drop, nth, swap
from flash_helpers.ptx import (
    EarlyReleaseLint,
    LeftArrivalsLint,
    Lint,
    NeverReadLint,
    UnfencedInitLint,
    ZeroFillLint,
    load_ptx,
)


@dataclass(frozen=True)
class Edit:
    """A change of some instructions: those from a line of the .cu file that holds `source`, whose
    opcode matches the regular expression. which: a slice of them; None for all."""

    source: str
    opcode: str
    change: Callable[[str], str]
    which: slice | None = None


def source_of(case: Case) -> list[str]:
    """The lines of the .cu file."""
    return (KERNELS / f"{case.module}.cu").read_text().splitlines()


def edited(case: Case, edits: Sequence[Edit]) -> str:
    """The PTX of a case's module after the edits."""
    source = source_of(case)
    lines = (KERNELS / f"{case.module}.ptx").read_text().split("\n")
    for edit in edits:
        found = []
        for instruction in module_of(case.module).kernel(case.kernel).function.instructions:
            frames = instruction.location.frames() if instruction.location else ()
            here = [source[f.line - 1] for f in frames if f.file == f"{case.module}.cu"]
            matches = re.match(edit.opcode, instruction.opcode)
            if matches and any(edit.source in line for line in here):
                found.append(instruction.line - 1)
        chosen = sorted(found)[edit.which or slice(None)]
        assert chosen, f"the edit has nowhere to go: {edit.source}, {edit.opcode}"
        for index in chosen:
            lines[index] = edit.change(lines[index])
    return "\n".join(lines)


def lints_of(case: Case, *edits: Edit) -> tuple[Lint, ...]:
    """The lints of a case, of its own PTX or of that after edits."""
    module = load_ptx(edited(case, edits)) if edits else module_of(case.module)
    return launched(case, module, lints=True)[0].lints


def lines_of(lint: Lint, case: Case) -> list[str]:
    """The lines of the .cu file that a lint names as its place."""
    source = source_of(case)
    numbers = re.findall(rf"{case.module}\.cu:(\d+)", lint.site.source)
    return [source[int(number) - 1] for number in numbers]


WGMMA = r"wgmma\.mma"
TURN = Edit("take_turn(); // that consumer 1", r"barrier\.sync|bar", drop)
GEMM_STEP, A_STEP = "wgmma<T>(acc, a + advance", "wgmma<T, 1>(acc, a + 4 * step"
# A case, edits of its PTX, the lint, and part of the line that the lint names.
PLANTED = {
    # no rule of the PTX ISA is broken, and the barriers of a block end with it
    "a turn left over": ("attention_f16_ping_pong", [TURN], LeftArrivalsLint, "exponentials();"),
    "a turn left over, in an overlapped loop": (
        "attention_bf16_ping_pong_overlap", [TURN], LeftArrivalsLint, "exponentials();",
    ),
    "the last 16 of k": (
        "gemm_bf16", [Edit(GEMM_STEP, WGMMA, drop, nth(3))], NeverReadLint,
        "load_2d(A_smem + ring.slot",
    ),
    "the last 16 of k, from registers": (
        "gemm_a_registers", [Edit(A_STEP, WGMMA, drop, nth(3))], NeverReadLint, "load_2d(panel",
    ),
    "the last 16 keys": (
        "attention_bf16",
        [Edit("wgmma<T, 1>(O, P + 4 * step", WGMMA, drop, slice(7, None, 8))],
        NeverReadLint, "load_tile<B_c>(shared.V",
    ),
}  # fmt: skip
WHOLE_BOXES = gemm("gemm_bf16", "bf16", 4, 64, 128, 448)


def released_by(count: int, register: str) -> tuple[Edit, ...]:
    """The slots of gemm_bf16 are released by the first of each group of threads, so many in all."""

    def of_the_first(line: str) -> str:
        return f"""{{ .reg .b32 %which; .reg .pred %first;
mov.u32 %which, {register};
setp.eq.u32 %first, %which, 0;
@%first {line.strip()}
}}"""

    return (
        Edit("init(empty + 8 * s, 128)", r"mbarrier\.init", swap(r"%r\d+;", f"{count};")),
        Edit("arrive(last)", r"mbarrier\.arrive\.", of_the_first),
    )


class TestMistakes:
    @pytest.mark.parametrize(("name", "edits", "kind", "at"), PLANTED.values(), ids=PLANTED)
    def test_are_found_where_they_are(self, name, edits, kind, at) -> None:
        mine = [lint for lint in lints_of(WHOLE[name], *edits) if type(lint) is kind]
        assert any(at in line for lint in mine for line in lines_of(lint, WHOLE[name]))

    @pytest.mark.parametrize(
        ("name", "at", "opcode"),
        [
            ("gemm_a_registers", "load_fragment(a, 4 * step", "ldmatrix"),
            ("scale_tiles", "four", "ld.shared"),
            ("gemm_bf16", "wgmma<T>(acc, a + advance", "wgmma"),
        ],
    )
    def test_what_lies_outside_of_a_tensor_is_read(self, name: str, at: str, opcode: str) -> None:
        found = [x for x in lints_of(WHOLE[name]) if isinstance(x, ZeroFillLint)]
        lines = [
            line for x in found if opcode in x.site.opcode for line in lines_of(x, WHOLE[name])
        ]
        assert any(at in line for line in lines)
        assert "lies outside of the tensor" in str(found[0])

    def test_one_warp_releases_for_its_warpgroup(self) -> None:
        case = WHOLE["attention_bf16"]
        found = lints_of(case)
        assert {type(lint) for lint in found} == {EarlyReleaseLint}
        assert all("arrive(barrier)" in "".join(lines_of(x, case)) for x in found)
        assert "warps 1, 2, 3, 5, 6, 7 of its block" in str(found[0])

    def test_a_turn_that_is_taken_at_the_end_is_not_left(self) -> None:
        found = lints_of(WHOLE["attention_f16_ping_pong"])
        assert {type(lint) for lint in found} == {EarlyReleaseLint}

    def test_one_thread_releases_for_its_warpgroup(self) -> None:
        (lint,) = lints_of(WHOLE_BOXES, *released_by(1, "%tid.x"))
        assert type(lint) is EarlyReleaseLint
        assert "warps 1, 2, 3 of its block" in str(lint)
        assert "arrive(last)" in "".join(lines_of(lint, WHOLE_BOXES))


class TestNone:
    """Nothing is said where nothing is suspicious."""

    @pytest.mark.parametrize(
        "case",
        [
            WHOLE_BOXES,
            gemm_a_registers(64, 128, 192),
            WHOLE["copy_bytes"],
            WHOLE["cluster_shift"],
            WHOLE["hand_over"],
        ],
        ids=lambda case: case.kernel,
    )
    def test_of_kernels_whose_tensors_are_multiples_of_boxes(self, case: Case) -> None:
        assert lints_of(case) == ()

    def test_of_a_slot_that_each_warp_releases(self) -> None:
        assert lints_of(WHOLE_BOXES, *released_by(4, "%laneid")) == ()

    def test_unless_asked_for(self) -> None:
        case = WHOLE["scale_tiles"]
        assert launched(case, module_of(case.module))[0].lints == ()


class TestArrivals:
    """At a named barrier, by warp 0 of two, which then ends."""

    @pytest.mark.parametrize(("threads", "due"), [("64", 64), ("96", 96), ("%r0", 64)])
    def test_that_nobody_waits_for(self, threads: str, due: int) -> None:
        body = f"mov.u32 %r0, %ntid.x;\nsetp.lt.u32 %p1, %tid, 32;\n@%p1 bar.arrive 1, {threads};"
        (lint,) = run(body, block=64 if due == 64 else 96, grid=2, lints=True)[0].lints
        assert type(lint) is LeftArrivalsLint
        assert f"32 of {due} threads of block (0, 0, 0) have arrived at barrier 1" in str(lint)
        assert (lint.site.opcode, lint.count, lint.address) == ("bar.arrive", 2, None)

    @pytest.mark.parametrize("others", ["bar.sync 1, 64;", "bar.arrive 1, 64;"])
    def test_that_others_complete(self, others: str) -> None:
        body = f"setp.lt.u32 %p1, %tid, 32;\n@%p1 bar.arrive 1, 64;\n@!%p1 {others}"
        assert run(body, lints=True)[0].lints == ()

    def test_unless_asked_for(self) -> None:
        assert run("setp.lt.u32 %p1, %tid, 32;\n@%p1 bar.arrive 1, 64;")[0].lints == ()


class TestBytes:
    BODY = f"""@%p0 {INIT} [bar], 1;
    @%p0 {BARRIER_INITS}
    bar.sync 0;
    @%p0 {EXPECT} [bar], 512;
    @%p0 {LOAD} [smem], [%rd2, {{0, 62}}], [bar];
    {{wait}}
    shl.b32 %r1, %tid, 2;
    mov.u32 %r2, smem;
    add.u32 %r1, %r1, %r2;
    {{read}}"""
    """A box of 4 rows of 128 bytes, the last two of which are beyond the end."""

    def lints(self, read: str) -> dict[type[Lint], Lint]:
        body = self.BODY.replace("{wait}", wait("bar", 0)).replace("{read}", read)
        return {type(lint): lint for lint in run(body, lints=True)[0].lints}

    def test_read_within_the_tensor(self) -> None:
        assert self.lints("ld.shared.u32 %r3, [%r1];") == {}

    def test_read_beyond_its_end(self) -> None:
        found = self.lints("ld.shared.u32 %r3, [%r1]; ld.shared.u32 %r4, [%r1+252];")
        lint = found.pop(ZeroFillLint)
        assert (found, lint.thread.lane, lint.address) == ({}, 1, 256)
        assert lint.site.opcode == "ld.shared.u32"

    def test_overwritten_by_a_thread(self) -> None:
        lint = self.lints("st.shared.u32 [%r1], %tid;")
        assert set(lint) == {NeverReadLint}
        assert "have not been read when they are overwritten at" in str(lint[NeverReadLint])

    def test_never_read(self) -> None:
        lint = self.lints("")[NeverReadLint]
        assert "256 of the bytes" in str(lint)
        assert "when its block ends" in str(lint)
        assert (lint.address, lint.count, lint.thread.lane) == (0, 1, 0)

    def test_are_reported_with_the_faults(self) -> None:
        body = self.BODY.replace("{wait}", wait("bar", 0)).replace("{read}", "")
        found = run(body, lints=True)[0]
        assert found.report() == str(found.lints[0])
        assert found.report().startswith("bytes delivered and never read: 256 of")


class TestAnMbarrier:
    """Made by thread 0, which then hands it to a bulk copy, or lets thread 32 do so."""

    def lints(self, after: str, before: str = "", issuer: int = 0) -> list[type[Lint]]:
        body = f"""
        @%p0 {INIT} [bar], 1;
        {after}
        bar.sync 0;
        {before}
        setp.eq.u32 %p1, %tid, {issuer};
        @%p1 {EXPECT} [bar], 512;
        @%p1 {LOAD} [smem], [%rd2, {{0, 0}}], [bar];
        {wait("bar", 0)}
        shl.b32 %r1, %tid, 3;
        mov.u32 %r2, smem;
        add.u32 %r1, %r1, %r2;
        ld.shared.v2.u32 {{%r3, %r4}}, [%r1];
        """
        return [type(lint) for lint in run(body, lints=True)[0].lints]

    FENCES = (f"@%p0 {BARRIER_INITS}", "@%p0 fence.proxy.async;", "fence.proxy.async.shared::cta;")

    @pytest.mark.parametrize("issuer", [0, 32])
    @pytest.mark.parametrize("fence", FENCES)
    def test_that_is_fenced(self, fence: str, issuer: int) -> None:
        assert self.lints(fence, issuer=issuer) == []

    def test_that_its_user_fences(self) -> None:
        assert self.lints("", before="fence.proxy.async.shared::cta;", issuer=32) == []

    @pytest.mark.parametrize(
        ("after", "before"),
        [
            ("", ""),
            ("", BARRIER_INITS),  # of threads that have made none
            ("@!%p0 fence.proxy.async;", ""),
            ("@%p0 fence.proxy.async.global;", ""),
        ],
    )
    def test_that_is_not(self, after: str, before: str) -> None:
        assert self.lints(after, before, issuer=32) == [UnfencedInitLint]
