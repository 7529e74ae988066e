"""The lint for lanes that load a box in another layout than TMA wrote it in.

`place` and `each` make a kernel of two warps, whose lanes read a box of ROWS rows by
the formula of one swizzle, after TMA has written it with one.
"""

import numpy as np
import pytest
from ptx_snippets import entry
from tma_snippets import BARRIER_INITS, DECLARATIONS, EXPECT, INIT, LOAD, wait

from flash_helpers.ptx import DeviceMemory, LayoutLint, TensorMap, load_ptx

SIZES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
SWIZZLES = ("32B", "64B", "128B")
ROWS, THREADS = 32, 64


def row_bytes(swizzle: str) -> int:
    """Bytes of a row of a box, as wide as its swizzle."""
    return SIZES[swizzle] or 128


def lints(body: str, swizzle: str, start: int = 0) -> list[LayoutLint]:
    """The lints for layouts of a block that begins with a box in shared memory.

    `body`: reads the box from address %r20 on and writes to address %rd1. %tid and %lane are its
    thread and lane. `start`: where the box begins in shared memory.
    """
    memory = DeviceMemory()
    width = row_bytes(swizzle)
    data, out = (memory.upload(np.zeros(1 << 16, np.uint8)) for _ in range(2))
    dims = (width // 4, ROWS)
    tensor_map = TensorMap("f32", data, dims, dims, (width,), swizzle=swizzle)
    text = f"""
    mov.u32 %tid, %tid.x;
    and.b32 %lane, %tid, 31;
    setp.eq.u32 %p0, %tid, 0;
    mov.b64 %rd8, map;
    cvta.param.u64 %rd8, %rd8;
    ld.param.u64 %rd1, [global_out];
    mov.u32 %r20, smem;
    add.u32 %r20, %r20, {start};
    @%p0 {INIT} [bar], 1;
    @%p0 {BARRIER_INITS}
    bar.sync 0;
    @%p0 {EXPECT} [bar], {width * ROWS};
    @%p0 {LOAD} [%r20], [%rd8, {{0, 0}}], [bar];
    {wait("bar", 0)}
    {body}
    """
    parameters = ".param .align 64 .b8 map[128], .param .u64 global_out"
    module = entry(text, parameters, DECLARATIONS + ".reg .f32 %f<16>;")
    kernel = load_ptx(module.replace("sm_80", "sm_90a")).kernel("k")
    run = kernel.launch(1, THREADS, args=[tensor_map.encode(), out], memory=memory, lints=True)
    return [lint for lint in run.lints if isinstance(lint, LayoutLint)]


def place(swizzle: str, start: int = 0) -> str:
    """%r3, the address of byte %r2 of the box, by a reader who thinks of a swizzle and of a box at
    address `start`."""
    return f"""
    add.u32 %r3, %r2, {start};
    shr.u32 %r4, %r3, 7;
    and.b32 %r4, %r4, {max(SIZES[swizzle] // 16 - 1, 0)};
    shl.b32 %r4, %r4, 4;
    xor.b32 %r3, %r3, %r4;
    sub.u32 %r3, %r3, {start};
    add.u32 %r3, %r3, %r20;
    """


def each(
    written: str, reader: str, step: str, size: int = 4, unrolled: int = 1, threads: int = THREADS
) -> str:
    """`step` for each `size` bytes of the box: they are at byte %r2 of the box and at address %r3,
    in row %r5, %r6 bytes behind its beginning. `threads`: those that share the box; with a warp's,
    each warp goes through it alone."""
    width = row_bytes(written)
    copies = "".join(
        f"""
    add.u32 %r2, %r9, {threads * size * i};
    shr.u32 %r5, %r2, {width.bit_length() - 1};
    and.b32 %r6, %r2, {width - 1};
    {reader}
    {step}
    """
        for i in range(unrolled)
    )
    return f"""
    mul.lo.u32 %r9, {"%lane" if threads == 32 else "%tid"}, {size};
    EACH:
    {copies}
    add.u32 %r9, %r9, {threads * size * unrolled};
    setp.lt.u32 %p1, %r9, {width * ROWS};
    @%p1 bra EACH;
    """


def to(address: str) -> str:
    """%rd2: the output from byte %r7 on, which `address` computes."""
    return f"{address}\ncvt.u64.u32 %rd2, %r7;\nadd.u64 %rd2, %rd2, %rd1;\n"


SAME = to("mov.u32 %r7, %r2;")
TRANSPOSED = to(f"mad.lo.u32 %r7, %r6, {ROWS}, 0;\nmad.lo.u32 %r7, %r5, 4, %r7;")
PADDED = to("mad.lo.u32 %r7, %r5, 1024, %r6;")
SCALAR = "ld.shared.f32 %f0, [%r3];\nst.global.f32 [%rd2], %f0;\n"
VECTOR = """
ld.shared.v4.f32 {%f0, %f1, %f2, %f3}, [%r3];
st.global.v4.f32 [%rd2], {%f0, %f1, %f2, %f3};
"""
COMPUTED = """
ld.shared.b32 %r8, [%r3];
mov.b32 {%h0, %h1}, %r8;
cvt.f32.f16 %f0, %h0;
fma.rn.f32 %f0, %f0, 0f40000000, 0f3F800000;
setp.lt.f32 %p2, %f0, 0f00000000;
selp.f32 %f0, 0f00000000, %f0, %p2;
cvt.rn.f16.f32 %h0, %f0;
shl.b64 %rd2, %rd2, 0;
st.global.b16 [%rd2], %h0;
"""
ADDED = "ld.shared.f32 %f0, [%r3];\nred.global.add.f32 [%rd2], %f0;\n"
COPIES = {
    "copy": (SAME + SCALAR, 4),
    "copy of vectors": (SAME + VECTOR, 16),
    "copy to padded rows": (PADDED + SCALAR, 4),
    "transposition": (TRANSPOSED + SCALAR, 4),
    "computed": (SAME + COMPUTED, 4),
    "added to memory": (SAME + ADDED, 4),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_readers_that_forget_the_swizzle(swizzle: str, kind: str) -> None:
    step, size = COPIES[kind]
    assert lints(each(swizzle, place(swizzle), step, size), swizzle) == []
    (lint,) = lints(each(swizzle, place("none"), step, size), swizzle)
    text, mask = str(lint), SIZES[swizzle] // 16 - 1
    assert f"expects no swizzle in bytes that TMA wrote with swizzle {swizzle}\n    at " in text
    assert (
        f"the byte that would be at address a without a swizzle is at a ^ ((a >> 7 & {mask})"
        in text
    )
    assert lint.site.opcode.startswith("ld.shared")


def rows_of(swizzle: str, reader: str, step: str, last: str) -> str:
    """`step` for each 4 bytes of a row, in row %tid for each of ROWS threads, and `last`."""
    width = row_bytes(swizzle)
    return f"""
    setp.ge.u32 %p1, %tid, {ROWS};
    @%p1 bra DONE;
    mov.f32 %f1, 0f00000000;
    mov.u32 %r5, %tid;
    mov.u32 %r6, 0;
    ROW:
    mad.lo.u32 %r2, %r5, {width}, %r6;
    {reader}
    {step}
    add.u32 %r6, %r6, 4;
    setp.lt.u32 %p1, %r6, {width};
    @%p1 bra ROW;
    {last}
    DONE:
    """


def columns_of(swizzle: str, reader: str, last: str) -> str:
    """Sums %f1 over columns. The threads that share a column share its rows; %r7: byte of the
    column in a row."""
    width = row_bytes(swizzle)
    return f"""
    shl.b32 %r2, %tid, 2;
    and.b32 %r7, %r2, {width - 1};
    mov.f32 %f1, 0f00000000;
    COLUMN:
    {reader}
    ld.shared.f32 %f0, [%r3];
    add.f32 %f1, %f1, %f0;
    add.u32 %r2, %r2, {4 * THREADS};
    setp.lt.u32 %p1, %r2, {ROWS * width};
    @%p1 bra COLUMN;
    {last}
    """


ROW_COPY = PADDED + SCALAR
COLUMN_SUM = to("") + "red.global.add.f32 [%rd2], %f1;\n"


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_copies_of_rows(swizzle: str) -> None:
    """Each thread copies a row."""
    assert lints(rows_of(swizzle, place(swizzle), ROW_COPY, ""), swizzle) == []
    (lint,) = lints(rows_of(swizzle, place("none"), ROW_COPY, ""), swizzle)
    assert f"ld expects no swizzle in bytes that TMA wrote with swizzle {swizzle}\n" in str(lint)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_sums_over_columns(swizzle: str) -> None:
    """Sums in registers, over a loop."""
    assert lints(columns_of(swizzle, place(swizzle), COLUMN_SUM), swizzle) == []
    (lint,) = lints(columns_of(swizzle, place("none"), COLUMN_SUM), swizzle)
    assert "expects no swizzle" in str(lint)


def summed_over(register: str) -> str:
    """The sum of a register over the lanes of a warp, in %f1."""
    return f"mov.f32 %f1, {register};\n" + "".join(
        f"shfl.sync.bfly.b32 %f2, %f1, {n}, 31, -1;\nadd.f32 %f1, %f1, %f2;\n"
        for n in (16, 8, 4, 2, 1)
    )


NORMALISED = f"""
ld.shared.f32 %f0, [%r3];
ex2.approx.f32 %f0, %f0;
{summed_over("%f0")}
div.approx.f32 %f0, %f0, %f1;
st.global.f32 [%rd2], %f0;
"""


def test_rows_that_are_divided_by_their_sum() -> None:
    """Each warp takes a row. Its sum is right in any layout, and the quotients are not."""
    assert lints(each("128B", place("128B"), SAME + NORMALISED), "128B") == []
    assert "expects no swizzle" in str(
        lints(each("128B", place("none"), SAME + NORMALISED), "128B")[0]
    )


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_readers_of_a_swizzle_that_is_not_there(swizzle: str) -> None:
    assert lints(each("none", place("none"), *COPIES["copy"]), "none") == []
    text = str(lints(each("none", place(swizzle), *COPIES["copy"]), "none")[0])
    assert f"expects swizzle {swizzle} in bytes that TMA wrote with no swizzle\n" in text
    assert "without a swizzle the rows of a box lie one behind the other" in text


@pytest.mark.parametrize(
    ("written", "read"), [("64B", "32B"), ("128B", "32B"), ("128B", "64B"), ("64B", "128B")]
)
def test_readers_of_another_swizzle(written: str, read: str) -> None:
    text = str(lints(each(written, place(read), *COPIES["copy of vectors"]), written)[0])
    assert f"expects swizzle {read} in bytes that TMA wrote with swizzle {written}\n" in text


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_readers_of_a_pattern_that_begins_at_the_box(swizzle: str) -> None:
    """The pattern begins at multiples of its length, wherever the box begins."""
    right = each(swizzle, place(swizzle, 128), *COPIES["copy"])
    assert lints(right, swizzle, start=128) == []
    found = lints(each(swizzle, place(swizzle), *COPIES["copy"]), swizzle, start=128)
    length = 8 * SIZES[swizzle]
    assert "expects a pattern that begins at the box, at address 128, in bytes" in str(found[0])
    assert f"begins at multiples of {length} bytes: align the box to them" in str(found[0])
    assert lints(each(swizzle, place(swizzle), *COPIES["copy"]), swizzle, start=length) == []


def fragments(swizzle: str, operands: str) -> str:
    """An mma of the box by itself: A and B are the bytes of 8 rows of 16 elements, k along them."""
    return f"""
    shr.u32 %r5, %lane, 2;
    and.b32 %r6, %lane, 3;
    shl.b32 %r6, %r6, 2;
    mad.lo.u32 %r2, %r5, {row_bytes(swizzle)}, %r6;
    {operands}
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%f4, %f5, %f6, %f7}},
        {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%f8, %f9, %f10, %f11}};
    """


ZEROS = "".join(f"mov.f32 %f{i}, 0f00000000;\n" for i in range(8, 12)) + "".join(
    f"mov.b32 %r{i}, 0;\n" for i in range(10, 16)
)
ALONG_K = "ld.shared.b32 %r{0}, [%r3];\n"
"""A register of A or B, which TMA wrote with k along its rows."""
CONVERTED = """
ld.shared.f32 %f0, [%r3];
cvt.rn.f16x2.f32 %r{0}, %f0, %f0;
"""


@pytest.mark.parametrize("operand", ["%r10", "%r15"])
@pytest.mark.parametrize("load", [ALONG_K, CONVERTED])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_fragments(swizzle: str, load: str, operand: str) -> None:
    def body(reader: str) -> str:
        loaded = load.format(operand.removeprefix("%r"))
        return fragments(swizzle, ZEROS + place(reader) + loaded)

    assert lints(body(swizzle), swizzle) == []
    (lint,) = lints(body("none"), swizzle)
    assert "expects no swizzle" in str(lint)
    assert "[mma.sync" in str(lint)
    assert lints(body("none"), "none") == []


def across_k(swizzle: str, reader: str) -> str:
    """A register of A, which TMA wrote with m along its rows: two rows, 8 columns of f16."""
    loads = "".join(
        f"""
    mad.lo.u32 %r2, %r6, {2 * row_bytes(swizzle)}, {row * row_bytes(swizzle)};
    mad.lo.u32 %r2, %r5, 4, %r2;
    {place(reader)}
    ld.shared.b16 %h{row}, [%r3];
    """
        for row in range(2)
    )
    return fragments(
        swizzle,
        f"{ZEROS}\nand.b32 %r6, %lane, 3;\n{loads}\nmov.b32 %r10, {{%h0, %h1}};\n",
    )


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_fragments_across_rows(swizzle: str) -> None:
    assert lints(across_k(swizzle, swizzle), swizzle) == []
    found = lints(across_k(swizzle, "none"), swizzle)
    assert found
    assert "expects no swizzle" in str(found[0])


# -- right in any layout ---------------------------------------------------------------------------

SUMMED = """
ld.shared.f32 %f0, [%r3];
add.f32 %f1, %f1, %f0;
"""
ROW_SUM = to("mul.lo.u32 %r7, %tid, 4;") + "st.global.f32 [%rd2], %f1;\n"
WHOLE_SUM = "red.global.add.f32 [%rd1], %f1;\n"
SHUFFLED = summed_over("%f1") + to("mul.lo.u32 %r7, %tid, 4;")
HALF_SHUFFLED = "shfl.sync.down.b32 %f2, %f1, 16, 31, -1;\nadd.f32 %f1, %f1, %f2;\n" + ROW_SUM
SCALED = """
ld.shared.f32 %f0, [%r3];
mul.f32 %f0, %f0, 0f40000000;
st.shared.f32 [%r3], %f0;
"""
TO_SHARED = """
ld.shared.f32 %f0, [%r3];
st.shared.f32 [%r3+4096], %f0;
"""
BACK = """
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd8, {0, 0}], [%r20];
@%p0 cp.async.bulk.commit_group;
@%p0 cp.async.bulk.wait_group 0;
"""
RAW = place("none")


@pytest.mark.parametrize(
    "body",
    [
        rows_of("128B", RAW, SUMMED, ROW_SUM),
        columns_of("128B", RAW, WHOLE_SUM),
        columns_of("128B", RAW, SHUFFLED + "st.global.f32 [%rd2], %f1;\n"),
        columns_of("128B", RAW, HALF_SHUFFLED),
        each("128B", RAW, SCALED) + BACK,
        each("128B", RAW, TO_SHARED),
    ],
    ids=[
        "sums of rows",
        "whole sum",
        "whole sum by shuffles",
        "shuffled",
        "in place",
        "to shared memory",
    ],
)
def test_what_is_right_in_any_layout(body: str) -> None:
    assert lints(body, "128B") == []


@pytest.mark.parametrize("unrolled", [1, 8])
@pytest.mark.parametrize("swizzle", SIZES)
def test_readers_that_exchange_chunks(swizzle: str, unrolled: int) -> None:
    """Columns exchange their values by 16 bytes, as under a swizzle in some rows. In an unrolled
    loop each load may have one of these rows."""
    exchanged = "mov.u32 %r7, %r2;\nxor.b32 %r2, %r2, 16;\n" + place(swizzle)
    body = each(swizzle, exchanged, to("") + SCALAR, unrolled=unrolled, threads=32)
    assert lints(body, swizzle) == []


def test_readers_of_an_element_of_each_row() -> None:
    """Each thread takes the element of its row that a label names."""
    label = "shl.b32 %r6, %tid, 2;\nmul.lo.u32 %r6, %r6, 5;\nand.b32 %r6, %r6, 124;\n"
    body = label + rows_of("128B", "", "", "").partition("ROW:")[0]
    body += f"mad.lo.u32 %r2, %tid, 128, %r6;\n{place('128B')}"
    body += to("mul.lo.u32 %r7, %tid, 4;") + SCALAR + "DONE:\n"
    assert lints(body, "128B") == []


def test_one_wrong_operand_of_two() -> None:
    """A reads with the swizzle, B without it."""
    loads = place("128B") + ALONG_K.format(10) + place("none") + ALONG_K.format(14)
    (lint,) = lints(fragments("128B", ZEROS + loads), "128B")
    assert "expects no swizzle" in str(lint)


def test_values_of_other_instructions_are_not_followed() -> None:
    """A register that something else has written since."""
    other = SCALAR.replace("\n", "\nmov.f32 %f0, 0f00000000;\n", 1)
    assert lints(each("128B", RAW, SAME + other), "128B") == []
