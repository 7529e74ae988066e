"""Reading is per kernel: what is not understood refuses the kernel that uses it, by name and line,
and the others of the file run."""

import numpy as np
import pytest
from ptx_snippets import HEAD

from flash_helpers.ptx import (
    DeviceMemory,
    OutOfBoundsError,
    PtxSyntaxError,
    UnsupportedInstruction,
    load_ptx,
)
from flash_helpers.ptx.read.module import Address, Immediate, Register, parts

PLAIN = """
.visible .entry plain(.param .u64 out)
{
.reg .b32 %r<3>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
st.global.u32 [%rd3], %r1;
ret;
}
"""


def kernel_text(body: str, name: str = "k") -> str:
    return (
        f".visible .entry {name}(.param .u64 out)\n{{\n.reg .pred %p<3>;\n.reg .b32 %r<9>;\n"
        f".reg .b64 %rd<9>;\nld.param.u64 %rd1, [out];\n{body}\nret;\n}}\n"
    )


def run(text: str, name: str = "k", words: int = 32, **launch: object) -> np.ndarray:
    """The u32 words that a kernel writes behind its only parameter."""
    memory = DeviceMemory()
    out = memory.upload(np.zeros(words, np.uint32))
    options = {"grid": 1, "block": 32, **launch}
    load_ptx(HEAD + text).kernel(name).launch(args=[out], memory=memory, **options)
    return memory.download(out, words, np.uint32)


def refused_alone(text: str, name: str, words: str) -> None:
    """Asserts that a kernel is refused while `plain` of the same text runs."""
    np.testing.assert_array_equal(run(text, "plain"), np.arange(32))
    with pytest.raises(PtxSyntaxError, match=words):
        load_ptx(HEAD + text).kernel(name)


def line_of(text: str, part: str) -> int:
    lines = (HEAD + text).splitlines()
    return next(n for n, line in enumerate(lines, start=1) if part in line)


BROKEN = {
    "a register that is not declared": "mov.u32 %nobody, 1;",
    "a label that is not there": "bra NOWHERE;",
    "a statement that is none": "?!;",
    "an instruction without end": "mov.u32 %r1, 1",
    "a declaration of no known type": ".reg .quaternion %q<3>;",
}


FUNCTION = ".func {}()\n{{\n{}\nret;\n}}\n"
ALONE = {
    "a brace without end": (
        kernel_text("{ mov.u32 %r1, 1;"), "k", r"line 4: a closing brace is missing \(in k\)",
    ),
    "a head": (
        ".entry odd(.param .picture p) .with 3\n{\nret;\n}\n",
        "odd", r"\.picture is not known .*\(in odd\)",
    ),
    "a device function, which refuses those that call it": (
        FUNCTION.format("odd", "mov.u32 %nobody, 1;") + FUNCTION.format("caller", "call.uni odd;")
        + kernel_text("call.uni caller;"),
        "k", r"%nobody .*\(in odd\)",
    ),
    "a second one of the name": (
        kernel_text("") + kernel_text(""), "k", "k is defined twice, first at line 4",
    ),
    "a variable that cannot be initialised": (
        ".global .u64 lost = nowhere;\n" + kernel_text("mov.u64 %rd2, lost;"),
        "k", r"line 4: .* lost names nowhere, which is not",
    ),
}  # fmt: skip


class TestFunctions:
    @pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
    @pytest.mark.parametrize("first", [True, False])
    def test_what_cannot_be_read_refuses_its_kernel_alone(self, broken, first) -> None:
        bad = kernel_text(broken, "bad")
        text = bad + PLAIN if first else PLAIN + bad
        np.testing.assert_array_equal(run(text, "plain"), np.arange(32))
        module = load_ptx(HEAD + text)
        assert module.kernels == (("bad", "plain") if first else ("plain", "bad"))
        with pytest.raises(PtxSyntaxError, match=r"PTX line \d+: .*\(in bad\)") as caught:
            module.kernel("bad")
        end = line_of(text, "bad") + bad.count("\n")
        assert line_of(text, "bad") <= caught.value.line <= end

    def test_the_line_is_that_of_the_text_and_the_file_is_named(self, tmp_path) -> None:
        path = tmp_path / "mine.ptx"
        text = PLAIN + kernel_text("mov.u32 %nobody, 1;")
        path.write_text(HEAD + text)
        line = line_of(text, "%nobody")
        with pytest.raises(PtxSyntaxError, match=rf"mine\.ptx line {line}: .*%nobody .*\(in k\)"):
            load_ptx(path).kernel("k")

    @pytest.mark.parametrize(("text", "name", "words"), ALONE.values(), ids=ALONE)
    def test_it_does_not_spoil_the_others(self, text, name, words) -> None:
        refused_alone(text + PLAIN, name, words)

    def test_a_text_that_is_cut_off_is_refused_whole(self) -> None:
        text = HEAD + PLAIN + kernel_text("mov.u32 %r1, 1;")
        with pytest.raises(PtxSyntaxError, match="the text ends inside k: a closing brace is"):
            load_ptx(text[:-3])
        with pytest.raises(PtxSyntaxError, match="the text ends inside the head of k"):
            load_ptx(text[: text.rindex("{") - 3])
        with pytest.raises(PtxSyntaxError, match="the text ends inside a comment"):
            load_ptx(text + "/* and then")

    def test_names_of_inner_blocks_are_their_own(self) -> None:
        body = """
{ .reg .b32 %x; mov.u32 %x, 1; bra L; L: add.u32 %r1, %x, 0; }
{ { .reg .b32 %x; mov.u32 %x, 2; } .reg .b32 %x; mov.u32 %x, 4; bra L; L: add.u32 %r1, %r1, %x; }
st.global.u32 [%rd1], %r1;
"""
        assert run(kernel_text(body))[0] == 5


class TestOperands:
    def read(self, address: str) -> Address:
        body = f"cp.async.bulk.prefetch.tensor.2d.L2.global {address};"
        instruction = load_ptx(HEAD + kernel_text(body)).kernel("k").function.instructions[1]
        return instruction.operands[0]

    def test_a_place_in_a_tensor(self) -> None:
        assert self.read("[ %rd1 + 64, {%r1 , -3} ]") == Address(
            Register("%rd1"), 64, (Register("%r1"), Immediate(-3))
        )

    def test_its_coordinates_are_among_the_operands(self) -> None:
        assert Register("%r1") in set(parts(self.read("[%rd1, {%r1, 0}]")))

    @pytest.mark.parametrize("address", ["[%rd1, {}]", "[%rd1, {%r1,}]", "[%rd1, {%nobody}]"])
    def test_coordinates_that_cannot_be_read(self, address) -> None:
        with pytest.raises(PtxSyntaxError, match=r"an operand is missing|not declared"):
            self.read(address)


class TestVariables:
    def test_one_that_cannot_be_read_refuses_those_who_name_it(self) -> None:
        names = kernel_text("mov.u64 %rd2, picture;")
        through = kernel_text("ld.global.u64 %rd2, [pointer];", "through")
        declared = ".global .texref picture;\n.global .u64 pointer = generic(picture);\n"
        text = declared + names + through + PLAIN
        for name in ("k", "through"):
            refused_alone(text, name, r"line 4: .*\.texref .*\(in picture\)")

    def test_addresses_with_offsets_and_parts_of_them(self) -> None:
        text = """
.global .align 4 .u32 data[8] = {10, 11, 12, 13, 14, 15, 16, 17};
.global .align 8 .u64 s[3] = {97, generic(data)+12, 5};
.const .align 8 .u64 c = generic(data)+8;
.global .u64 before = data-4;
.global .align 1 .u8 packed[5] = {98, 0xFF(generic(data)+4), 0xFF00(generic(data)+4),
                                  0xFF0000(generic(data)+4), 0xff000000(data+4)};
""" + kernel_text("""
ld.global.u64 %rd2, [s+8];   ld.u32 %r1, [%rd2];    st.global.u32 [%rd1], %r1;
ld.const.u64 %rd2, [c];      ld.u32 %r1, [%rd2];    st.global.u32 [%rd1+4], %r1;
ld.global.u64 %rd2, [before]; ld.u32 %r1, [%rd2+8]; st.global.u32 [%rd1+8], %r1;
mov.u64 %rd3, data;
mov.u32 %r2, 0;
ld.global.u8 %r3, [packed+4]; shl.b32 %r2, %r3, 24;
ld.global.u8 %r3, [packed+3]; shl.b32 %r3, %r3, 16; or.b32 %r2, %r2, %r3;
ld.global.u8 %r3, [packed+2]; shl.b32 %r3, %r3, 8;  or.b32 %r2, %r2, %r3;
ld.global.u8 %r3, [packed+1]; or.b32 %r2, %r2, %r3;
cvt.u32.u64 %r3, %rd3;
sub.u32 %r2, %r2, %r3;
st.global.u32 [%rd1+12], %r2;
""")
        assert run(text)[:4].tolist() == [13, 12, 11, 4]

    def test_a_table_of_functions_is_initialised_and_copied(self) -> None:
        functions = FUNCTION.format("f", "") + FUNCTION.format("g", "")
        text = (
            functions
            + ".global .align 8 .u64 table[3] = {f, g, f};\n"
            + kernel_text("""
ld.global.u64 %rd2, [table];
ld.global.u64 %rd3, [table+16];
mov.u64 %rd4, f;
setp.eq.u64 %p1, %rd2, %rd3;
selp.u32 %r1, 1, 0, %p1;
setp.eq.u64 %p1, %rd2, %rd4;
selp.u32 %r2, 1, 0, %p1;
ld.global.u64 %rd3, [table+8];
setp.eq.u64 %p1, %rd2, %rd3;
selp.u32 %r3, 1, 0, %p1;
st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r3};
""")
        )
        assert run(text)[:3].tolist() == [1, 1, 0]
        with pytest.raises(OutOfBoundsError):
            run(text.replace("mov.u64 %rd4, f;", "mov.u64 %rd4, f; ld.u32 %r1, [%rd4];"))

    def test_alignment_is_kept(self) -> None:
        text = ".global .u32 x;\n.global .align 4096 .b8 page[4];\n" + kernel_text("""
mov.u64 %rd2, x;
mov.u64 %rd3, page;
cvt.u32.u64 %r1, %rd3;
and.b32 %r1, %r1, 4095;
st.global.u32 [%rd1], %r1;""")
        assert run(text)[0] == 0

    def test_managed_memory_is_global_memory(self) -> None:
        text = ".visible .global .attribute(.managed) .align 4 .u32 m = 7;\n" + kernel_text(
            "ld.global.u32 %r1, [m]; st.global.u32 [%rd1], %r1;"
        )
        assert run(text)[0] == 7


class TestUnknownInstructions:
    """Refuse when a thread reaches them."""

    @pytest.mark.parametrize(
        "unknown",
        [
            "frobnicate.s32 %r1, %r1, 1;",
            "add.s32.twice %r1, %r1, 1;",
            "ld.global [%rd1];",
            "cp.async.ca.shared.global [%r1], [%rd1], 3;",
            "bar.teleport 0;",
            "bra.somehow END;",
            "ret.again;",
            "mov.u32 %r1, %envreg7;",
            "mov.u32 %r1, %pm3;",
        ],
    )
    def test_and_not_before(self, unknown) -> None:
        text = kernel_text(f"""
mov.u32 %r1, %tid.x;
setp.ge.u32 %p1, %r1, LIMIT;
st.global.u32 [%rd1], 5;
@!%p1 bra END;
{unknown}
END:""")
        never, always = text.replace("LIMIT", "32"), text.replace("LIMIT", "0")
        assert run(never)[0] == 5
        line = line_of(text, unknown)
        with pytest.raises(
            UnsupportedInstruction, match=f"PTX line {line}: .*{unknown.split()[0].strip(';')}"
        ):
            run(always)
        with pytest.raises(UnsupportedInstruction, match=f"PTX line {line}: "):
            run(text.replace("LIMIT", "17"))

    @pytest.mark.parametrize(
        "unknown", ["frobnicate %r1;", "bar.teleport 0;", "ret.again;", "bra.somehow END;"]
    )
    def test_of_a_predicate_that_holds_nowhere_are_no_hindrance(self, unknown) -> None:
        text = kernel_text(f"""
setp.lt.u32 %p1, 2, 1;
@%p1 {unknown}
END: st.global.u32 [%rd1], 5;""")
        assert run(text)[0] == 5
        with pytest.raises(UnsupportedInstruction):
            run(text.replace("2, 1", "1, 2"))

    def test_what_was_written_before_stays(self) -> None:
        memory = DeviceMemory()
        out = memory.upload(np.zeros(1, np.uint32))
        text = HEAD + kernel_text("st.global.u32 [%rd1], 5;\nfrobnicate %r1;")
        with pytest.raises(UnsupportedInstruction):
            load_ptx(text).kernel("k").launch(1, 32, args=[out], memory=memory)
        assert memory.download(out, 1, np.uint32)[0] == 5


class TestSpecialRegisters:
    def test_a_grid_that_synchronises_itself_is_resident_at_once(self) -> None:
        # As cooperative groups do it: every block adds, the first one so that the top bit flips
        # with the last, and all wait for that. 100 blocks of 64 threads are several batches.
        text = ".global .u32 counter;\n" + kernel_text("""
mov.u32 %r1, %envreg2;
cvt.u64.u32 %rd2, %r1;
mov.u32 %r2, %envreg1;
cvt.u64.u32 %rd3, %r2;
bfi.b64 %rd4, %rd3, %rd2, 32, 32;
atom.global.add.u32 %r8, [counter], 1;
barrier.sync 0;
mov.u32 %r3, %tid.x;
setp.ne.u32 %p1, %r3, 0;
@%p1 bra WAITED;
mov.u32 %r4, %nctaid.x;
mov.u32 %r5, %ctaid.x;
sub.u32 %r6, -2147483647, %r4;
setp.eq.u32 %p2, %r5, 0;
selp.b32 %r6, %r6, 1, %p2;
atom.add.release.gpu.u32 %r7, [%rd4+4], %r6;
SPIN:
ld.acquire.gpu.u32 %r6, [%rd4+4];
xor.b32 %r6, %r6, %r7;
setp.gt.s32 %p2, %r6, -1;
@%p2 bra SPIN;
WAITED:
barrier.sync 0;
mov.u32 %r4, %ctaid.x;
mul.wide.u32 %rd5, %r4, 4;
add.s64 %rd5, %rd1, %rd5;
ld.global.u32 %r7, [counter];
st.global.u32 [%rd5], %r7;""")
        assert (run(text, words=100, grid=100, block=64) == 6400).all()

    def test_the_reserved_shared_memory_lies_behind_the_blocks_own(self) -> None:
        text = kernel_text("""
.shared .align 4 .b8 mine[100];
mov.u32 %r1, mine;
mov.u32 %r2, %reserved_smem_offset_1;
mov.u32 %r3, %reserved_smem_offset_end;
mov.u32 %r4, %reserved_smem_offset_cap;
ld.shared.u32 %r5, [%r2];
st.shared.u32 [%r2], %r4;
st.global.v4.u32 [%rd1], {%r2, %r3, %r4, %r5};
mov.u32 %r6, %total_smem_size;
st.global.u32 [%rd1+16], %r6;""")
        begin, end, size, first, total = run(text, block=1, shared_bytes=60)[:5].tolist()
        assert (begin >= 160, end - begin, size, first, total) == (True, 1024, 1024, 0, 160)
