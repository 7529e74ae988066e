"""From PTX to SASS: dependences, fan-out, and the tool that shows them."""

from collections import Counter
from dataclasses import replace

import pytest
from fake_backend import run_tool
from sass_text import DEFAULT, of_version

from flash_helpers.measure.machine_code import own_ptx
from flash_helpers.ptx import read_ptx
from flash_helpers.ptx.read.flow import Phase, build_program
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.analyse.counts import WORK, buckets
from flash_helpers.sass.analyse.ptx_links import (
    KernelPtx,
    depends_on,
    fan_out,
    ptx_sources,
    read_kernel_ptx,
    read_registers,
    sass_by_ptx_line,
    written_registers,
)
from flash_helpers.sass.read.records import SassError

TOOL = "tools/analysis/ptx_sass_filter.py"

SMALL = """\
.version 9.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 k_param_0)
{
.reg .pred %p<3>;
.reg .b32 %r<9>;
.reg .f32 %f<9>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [k_param_0];
mov.u32 %r1, %tid.x;
mov.u32 %r2, 0;
mov.u32 %r3, 7;
$L_loop:
add.s32 %r2, %r2, %r1;
setp.lt.s32 %p1, %r2, 100;
@%p1 mov.u32 %r3, %r2;
@%p1 bra $L_loop;
cp.async.cg.shared.global [%r3], [%rd1], 16;
st.global.u32 [%rd1], %r3;
bar.sync %r1, 32;
shfl.sync.bfly.b32 %r4|%p2, %r3, 1, 31, -1;
ret;
}
"""

V8, V9 = of_version(8), of_version(9)


@pytest.fixture(scope="module")
def small() -> KernelPtx:
    program = build_program(read_ptx(SMALL).functions["k"])
    return KernelPtx(tuple(SMALL.split("\n")), program)


@pytest.fixture(scope="module")
def ptx(kernel) -> KernelPtx:
    return read_kernel_ptx(kernel)


def line_of(ptx: KernelPtx, beginning: str) -> int:
    return next(n for n, text in enumerate(ptx.lines, 1) if text.startswith(beginning))


def found(ptx: KernelPtx, beginning: str, depth: int) -> dict[str, int]:
    """The text of each instruction of a slice, with its depth."""
    return {ptx.text(d.line): d.depth for d in depends_on(ptx, line_of(ptx, beginning), depth)}


class TestRegisters:
    @pytest.mark.parametrize(
        ("beginning", "written", "read"),
        [
            ("ld.param", ("%rd1",), ()),
            ("add.s32", ("%r2",), ("%r2", "%r1")),
            ("@%p1 mov", ("%r3",), ("%r2", "%p1")),
            ("@%p1 bra", (), ("%p1",)),
            ("cp.async", (), ("%r3", "%rd1")),
            ("st.global", (), ("%rd1", "%r3")),
            ("bar.sync", (), ("%r1",)),
            ("shfl.sync", ("%r4", "%p2"), ("%r3",)),
        ],
    )
    def test_of_an_instruction(self, small, beginning, written, read) -> None:
        (index,) = small.at_line[line_of(small, beginning)]
        instruction = small.program.instructions[index]
        assert written_registers(instruction) == written
        assert read_registers(instruction) == read


class TestSlice:
    def test_goes_back_step_by_step(self, small) -> None:
        assert found(small, "st.global", 0) == {"st.global.u32 [%rd1], %r3;": 0}
        assert found(small, "st.global", 1) == {
            "st.global.u32 [%rd1], %r3;": 0,
            "ld.param.u64 %rd1, [k_param_0];": 1,
            "@%p1 mov.u32 %r3, %r2;": 1,
            "mov.u32 %r3, 7;": 1,  # where the guard is false
        }
        assert found(small, "st.global", 2)["setp.lt.s32 %p1, %r2, 100;"] == 2

    def test_goes_round_loops(self, small) -> None:
        assert found(small, "add.s32", 1) == {
            "add.s32 %r2, %r2, %r1;": 0,
            "mov.u32 %r1, %tid.x;": 1,
            "mov.u32 %r2, 0;": 1,
        }
        index = small.at_line[line_of(small, "add.s32")][0]
        definitions = small.definitions(index, "%r2")
        assert index in definitions and len(definitions) == 2

    def test_ends_where_a_value_is_overwritten(self, small) -> None:
        """The sum that setp reads is of this iteration, not the zero from before the loop."""
        assert "mov.u32 %r2, 0;" not in found(small, "setp", 1)

    def test_of_an_mma_holds_the_fragments_it_multiplies(self, ptx) -> None:
        program = ptx.program
        line = next(
            i.line
            for n, i in enumerate(program.instructions)
            if i.name == "mma" and ptx.phase(n) is Phase.MAIN_LOOP
        )
        names = Counter(
            program.instructions[ptx.at_line[d.line][0]].name
            for d in depends_on(ptx, line, 1)
            if d.depth == 1
        )
        assert names["ldmatrix"] == 2

    def test_of_a_line_without_an_instruction_names_the_nearest(self, small) -> None:
        with pytest.raises(SassError, match=r"the nearest that does is line 10, 'ld\.param"):
            depends_on(small, 1, 1)


class TestFanOut:
    def test_accounts_for_all_sass(self, kernel, ptx) -> None:
        result = fan_out(kernel, ptx)
        work = sum(kind in WORK for kind in buckets(kernel.instructions))
        assert sum(result.counts.values()) + result.without_ptx == work
        assert sum(row.instructions for row in result.opcodes) == len(ptx.at_line)
        for row in result.opcodes:
            assert row.sass == sum(number for _, number in row.made)
            assert row.vanished + row.several <= row.instructions

    def test_of_mma_and_ldmatrix_is_one_each(self, kernel, ptx) -> None:
        for row in fan_out(kernel, ptx).opcodes:
            if row.opcode.startswith(("mma.", "ldmatrix.")):
                assert (row.sass, row.several, row.vanished) == (row.instructions, 0, 0)

    def test_of_parameters_is_nothing(self, kernel, ptx) -> None:
        """They are operands in the constant bank."""
        rows = [r for r in fan_out(kernel, ptx).opcodes if r.opcode.startswith("ld.param")]
        assert rows and all(row.vanished == row.instructions for row in rows)

    def test_leaves_filler_and_padding_out(self, kernel) -> None:
        made = [i for sass in sass_by_ptx_line(kernel).values() for i in sass]
        assert not any(i.predicate == "@!PT" for i in made)


class TestSources:
    def test_are_those_of_the_directives(self, kernel, ptx) -> None:
        shipped = own_ptx(V9)
        chains = ptx_sources(kernel, shipped)
        lines = shipped.split("\n")
        assert set(chains) == set(ptx.at_line)
        directive = next(n for n, text in enumerate(lines) if text.lstrip().startswith(".loc\t1 "))
        following = min(number for number in chains if number > directive)
        assert chains[following][-1].file == "previous_kernels/v9/forward_kernel.cuh"
        tails = {chain[-1].file for chain in chains.values()}
        assert tails == {"previous_kernels/v9/forward_kernel.cuh"}

    def test_of_another_text_are_none(self, kernel) -> None:
        assert ptx_sources(kernel, own_ptx(V8)) == {}
        assert ptx_sources(kernel, "no PTX") == {}


class TestEmbedded:
    def test_that_is_missing_is_said(self, kernel) -> None:
        with pytest.raises(SassError, match="compile it with -lineinfo"):
            read_kernel_ptx(replace(kernel, ptx=None))

    def test_that_cannot_be_read_is_said(self, kernel) -> None:
        with pytest.raises(SassError, match="cannot be read"):
            read_kernel_ptx(replace(kernel, ptx=kernel.ptx[: len(kernel.ptx) // 2]))

    def test_of_another_kernel_is_said(self, kernel) -> None:
        with pytest.raises(SassError, match="has no kernel other"):
            read_kernel_ptx(replace(kernel, symbol="other"))


class TestCommand:
    @pytest.fixture
    def file(self) -> list[str]:
        return [str(library_path()), "--arch", DEFAULT, "--kernel", V9.short_form()]

    @pytest.fixture
    def mma(self, ptx) -> str:
        return str(next(i.line for i in ptx.program.instructions if i.name == "mma"))

    def test_prints_ptx_and_its_sass(self, capsys, file, mma) -> None:
        status, out, err = run_tool(capsys, TOOL, *file, mma)
        assert (status, err) == (0, "")
        first, second = out.splitlines()[:2]
        assert first.startswith("mma.sync")
        assert second.startswith("    -> HMMA")
        alone = [*file, mma, "--depth", "0"]
        _, out, _ = run_tool(capsys, TOOL, *alone, "-ptx")
        assert out.startswith("mma.sync") and len(out.splitlines()) == 1
        _, out, _ = run_tool(capsys, TOOL, *alone, "-sass")
        assert out.startswith("HMMA") and len(out.splitlines()) == 1
        _, out, _ = run_tool(capsys, TOOL, *alone, "-n")
        assert out.splitlines()[0].split()[0] == mma
        assert out.splitlines()[1].split()[1].startswith("0x")

    def test_prints_the_fan_out_of_a_short_form(self, capsys, mma) -> None:
        """The short form of version 16 without a static stride begins that with one."""
        name = "v16_bf16_d128_Br64_Bc64_w4_async_eager_swizzled_Q1_K1_V1_db_ffma"
        arguments = [str(library_path()), "--arch", DEFAULT, "--kernel", name, "--fan-out"]
        status, out, _ = run_tool(capsys, TOOL, *arguments, "-n")
        assert status == 0
        assert "[became several]" in out and "[vanished, or was merged into another]" in out
