"""Atomics on vectors, and the sums of floats that they make."""

import numpy as np
import pytest
from ptx_snippets import entry, evaluate, launch_on

from flash_helpers.ptx import MisalignedError, UnsupportedInstruction

ONE, TWO = 0x3F800000, 0x40000000


def updated(body, words, threads=1):
    """Words of global memory at %at after a body."""
    declarations = ".reg .b64 %at; .reg .b32 %o<8>; .reg .b16 %h<8>;"
    body = f"ld.param.u64 %at, [at];\n{body}"
    text = entry(body, ".param .u64 at", declarations)
    (found,) = launch_on(text, [np.array(words, np.uint32)], block=threads)[1]
    return found.tolist()


SUMS = [
    ("red.global.v4.f32.add [%at], {0f3F800000, 0f40000000, 0f3F800000, 0f40000000};",
     [0, ONE, 0, 0], [ONE, 0x40400000, ONE, TWO]),
    ("red.global.add.v2.f32 [%at+8], {0f3F800000, 0f40000000};", [0] * 4, [0, 0, ONE, TWO]),
    ("mov.b16 %h0, 0x3C00; red.global.add.noftz.v4.f16 [%at], {%h0, %h0, %h0, %h0};",
     [0x3C000000, 0], [0x40003C00, 0x3C003C00]),
    ("mov.b16 %h0, 0x3F80; red.global.max.noftz.v2.bf16 [%at], {%h0, %h0};",
     [0xBF804000], [0x3F804000]),
    ("mov.b32 %o0, 0x3C00BC00; red.global.min.noftz.v2.f16x2 [%at], {%o0, %o0};",
     [0, 0x40000000], [0x0000BC00, 0x3C00BC00]),
    ("atom.global.v2.f32.add {%o0, %o1}, [%at], {0f3F800000, 0f3F800000};"
     "st.global.v2.b32 [%at+8], {%o1, %o0};", [ONE, TWO, 0, 0], [TWO, 0x40400000, TWO, ONE]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words", "expected"), SUMS)
def test_each_element_of_a_vector_is_updated(body, words, expected):
    assert updated(body, words) == expected


def test_lanes_that_meet_at_a_vector_take_turns():
    body = "red.global.add.v2.f32 [%at], {0f3F800000, 0f40000000};"
    assert updated(body, [0, 0], threads=32) == [0x42000000, 0x42800000]


def test_a_vector_is_aligned_as_a_whole():
    with pytest.raises(MisalignedError, match="not a multiple of 16"):
        updated("red.global.add.v4.f32 [%at+8], {%o0, %o0, %o0, %o0};", [0] * 8)


@pytest.mark.parametrize(
    ("opcode", "reason"),
    [
        ("red.global.min.v2.f32", "min of 2 elements of f32"),
        ("red.global.add.v8.f32", "add of 8 elements of f32"),
        ("red.shared.add.v2.f32", "add of 2 elements of f32"),
        ("red.global.add.v2.u32", "add of 2 elements of u32"),
    ],
)
def test_other_vectors_are_refused(opcode, reason):
    count = int(opcode.partition(".v")[2][0])
    elements = ", ".join(["%o0"] * count)
    with pytest.raises(UnsupportedInstruction, match=reason):
        updated(f"{opcode} [%at], {{{elements}}};", [0] * 8)


def test_a_sum_of_f32_is_flushed_in_global_memory_alone():
    small = 0x00400000
    assert updated("red.global.add.f32 [%at], 0f00400000;", [small]) == [0]
    assert updated("red.global.add.f32 [%at], 0f80400000;", [0x80000000]) == [0x80000000]
    body = f"st.shared.b32 [tile], {small}; red.shared.add.f32 [tile], 0f00400000;"
    body += "ld.shared.u32 %d, [tile];"
    found = evaluate(body, declarations=".shared .align 4 .b8 tile[4];", threads=1)
    assert found[0] == 2 * small


OPERATIONS = {
    "add.u32": 12 + 10, "and.b32": 12 & 10, "or.b32": 12 | 10, "xor.b32": 12 ^ 10,
    "min.s32": 10, "max.u32": 12, "inc.u32": 0, "dec.u32": 10,
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("space", ["global", "shared", "generic"])
def test_an_operation_by_atom_and_by_red(operation, space):
    where = "" if space == "generic" else f".{space}"
    body = f"""
    st{where}.u32 [there], 12;
    red{where}.{operation} [there], 10;
    ld{where}.u32 %d, [there];
    st{where}.u32 [there], 12;
    atom{where}.{operation} %old, [there], 10;
    ld{where}.u32 %new, [there];
    setp.ne.u32 %p, %new, %d;
    @%p mov.u32 %d, -1;
    setp.ne.u32 %p, %old, 12;
    @%p mov.u32 %d, -2;
    """
    before = ".global .b32 there;" if space == "global" else ""
    declarations = ".reg .b32 %old, %new; .reg .pred %p;"
    declarations += "" if before else ".shared .align 4 .b32 there;"
    found = evaluate(body, {}, "u32", declarations, threads=1, before=before)
    assert found[0] == OPERATIONS[operation]


def test_an_order_that_red_does_not_have_is_refused():
    with pytest.raises(UnsupportedInstruction, match=r"the modifier \.acquire is not known"):
        updated("red.acquire.gpu.global.add.u32 [%at], 1;", [0])
