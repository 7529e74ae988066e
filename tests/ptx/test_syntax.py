"""What the grammar of PTX allows beyond what nvcc usually writes: read, or refused by name."""

import numpy as np
import pytest
from ptx_snippets import HEAD, entry, evaluate, launch_on

from flash_helpers.ptx import PtxError, load_ptx
from flash_helpers.ptx.read.constants import evaluate as constant

# As ptxas 13.0 folds them, by the literals in its machine code.
CONSTANTS = {
    "!0 + ~5 + -3": -8,
    "7/-2 + 7 % 3": -2,
    "(.s64)0xffffffffffffffff >> 60": -1,
    "0xffffffffffffffffU >> 60": 15,
    "0xffffffffffffffff >> 60": 15,
    "-1 >> 1": -1,
    "(.u64)-1 >> 1": 2**63 - 1,
    "(1 == 2) ^ (3 != 4) & 1": 1,
    "1.5 > 1.0": 1,
    "1.5*2.0": 3.0,
    "-1.5/2.0": -0.75,
    "-7 % 3": 0,
    "-1 > 1U": 1,
    "1 ? 2 : 3": 2,
    "(5>4)?7:8": 7,
    "-7 / 2U": (2**64 - 7) // 2,
    "2*(3+4)-WARP_SZ/3": 4,
    "!5": 0,
    "1 && 2 || 0": 1,
    "010 + 0b11 + 0x10": 27,
    "0f3F800000 + 0d4000000000000000": 3.0,
}


@pytest.mark.parametrize("text", CONSTANTS)
def test_a_constant_expression_has_the_value_that_ptxas_folds_it_to(text):
    found, expected = constant(text), CONSTANTS[text]
    if isinstance(expected, float):
        assert found == expected
    else:
        assert (found - expected) % 2**64 == 0


@pytest.mark.parametrize(
    "text", ["", "1 +", "(1", "1 2", "1/0", "1 % 0", "1 ? 2", "%r1 + 1", "1.5 << 1", "1.5 ? 1 : 2",
             "(" * 1000 + "1" + ")" * 1000, "-" * 1000 + "1", "9" * 5000, "1e400.", "~1.5"]
)  # fmt: skip
def test_other_text_is_none(text):
    with pytest.raises(ValueError, match=r"\w"):
        constant(text)


OPERANDS = {
    "mov.u32 %d, (3+4)*2;": 14,
    "mov.u32 %d, WARP_SZ*2 - 1;": 63,
    "add.u32 %d, (1), WARP_SZ;": 33,
    "mov.f32 %x, 1.5*2.0; cvt.rzi.u32.f32 %d, %x;": 3,
    "ld.global.u32 %d, [table + 4*2];": 32,
    "mov.u64 %at, table+8-4; ld.global.u32 %d, [%at - (2*2) + 8];": 32,
    "ld.global.u32 %d, [table+(5>4?12:0)];": 7,
    "ld.global.u32 %d, [table+4].unified;": 13,
    "setp.eq.u32 %p, 3, (1|2); selp.u32 %d, !0, 0, %p;": 1,
    "mov.b32 {%h, _}, (7<<16)|9; cvt.u32.u16 %d, %h;": 9,
    "setp.ne.u32 %p, 1, 0; selp.u32 %d, 1, 2, !%p;": 2,
}
TABLE = ".global .align 4 .u32 table[4] = {1+2, (3<<2)|1, WARP_SZ, (5>4)?7:8};"


@pytest.mark.parametrize("body", OPERANDS)
def test_an_operand_is_a_constant_expression(body):
    declarations = ".reg .b32 %x; .reg .b16 %h; .reg .pred %p;"
    found = evaluate(body, {}, "u32", declarations, threads=1, before=TABLE)
    assert found[0] == OPERANDS[body]


VECTORS = {
    "ld.global.v4.u32 v, [table]; mov.u32 %d, v.y;": 13,
    "mov.u32 v.x, 5; mov.u32 v.w, 6; add.u32 %d, v.r, v.a;": 11,
    "ld.global.v4.u32 v, [table]; mov.u32 v.x, 5; st.global.v4.b32 [table], v;"
    "ld.global.u32 %d, [table];": 5,
    "mov.u32 w1.y, 9; mov.u32 w0.y, 1; mov.b64 %at, w1; shr.u64 %at, %at, 32; cvt.u32.u64 %d, %at;":
        9,
    "{ .reg .v2 .b32 v; mov.u32 v.x, 3; mov.u32 %d, v.x; } mov.u32 v.x, 4; add.u32 %d, %d, v.x;": 7,
}  # fmt: skip


@pytest.mark.parametrize("body", VECTORS)
def test_a_vector_of_registers_and_its_elements(body):
    declarations = ".reg .v4 .b32 v; .reg .v2 .b32 w<2>;"
    found = evaluate(body, {}, "u32", declarations, threads=1, before=TABLE)
    assert found[0] == VECTORS[body]


def test_a_vector_has_no_further_elements():
    with pytest.raises(PtxError, match=r"cannot read the operand 'v\.z'"):
        evaluate("mov.u32 %d, v.z;", declarations=".reg .v2 .b32 v;")


@pytest.mark.parametrize("space", ["shared", "local", "global"])
def test_an_access_without_a_space_takes_the_generic_address_of_a_symbol(space):
    body = f"st.u32 [there+4], 7; ld.{space}.u32 %d, [there+4];"
    body += "atom.add.u32 %d, [there+4], 1; ld.u32 %d, [there+4];"
    variable = f".{space} .align 8 .b8 there[16];"
    assert evaluate(body, declarations=variable, threads=1)[0] == 8


def test_a_parameter_by_its_generic_address():
    body = "ld.u32 %d, [p_a]; ld.param::entry.u32 %e, [p_a]; sub.u32 %d, %d, %e;"
    inputs = {"a": ("u32", [1])}
    assert evaluate(body, inputs, "u32", ".reg .b32 %e;", threads=1)[0] == 0


ADD_ONE = """.func (.param .b32 out) {name}(.param .b32 in)
{{ .reg .b32 %r; ld.param.b32 %r, [in]; add.u32 %r, %r, 1; st.param.b32 [out], %r; ret; }}
"""
CALL = """
.param .b32 to; .param .b32 from;
st.param.b32 [from], 6;
call (to), {name}, (from);
ld.param.b32 %d, [to];
"""


def test_an_alias_is_called_like_its_function():
    before = ".func (.param .b32 out) other(.param .b32 in);\n" + ADD_ONE.format(name="first")
    before += ".alias other, first;\n"
    found = evaluate(CALL.format(name="other"), before=before, threads=1)
    assert found[0] == 7


def test_an_alias_of_nothing_is_told():
    with pytest.raises(PtxError, match=r"\.alias of first, which is no function"):
        load_ptx(f"{HEAD}.alias other, first;\n")


def test_directives_and_attributes_of_functions_and_variables():
    """.noreturn, .pragma before a body, .unified and .managed."""
    before = """
    .func stop() .noreturn;
    .func stop() .noreturn { trap; }
    .global .attribute(.managed, .unified(19, 95)) .u32 shown = 5;
    .global .attribute(.unified(1, 2)) .u32 other;
    .pragma "nounroll";
    .func .attribute(.unified(3, 4)) (.param .b32 out) add_one(.param .b32 in)
    .abi_preserve 16 .pragma "nounroll", "other";
    """ + ADD_ONE.format(name="add_one").partition("\n")[2]
    body = (
        CALL.format(name="add_one")
        + """
    .reg .pred %p;
    setp.eq.u32 %p, %d, 0;
    @%p call stop, ();
    ld.global.u32 %e, [shown];
    add.u32 %d, %d, %e;
    """
    )
    assert evaluate(body, {}, "u32", ".reg .b32 %e;", 1, before)[0] == 12


def test_an_attribute_that_is_not_known_is_told():
    variable = ".global .attribute(.other) .u32 x;"
    with pytest.raises(PtxError, match=r"cannot read the declaration '.*\.attribute\(\.other\)"):
        evaluate("ld.global.u32 %d, [x];", before=variable)


def test_a_pragma_before_the_body_of_a_kernel():
    text = entry("st.global.u32 [%at], 3;", ".param .u64 out", ".reg .b64 %at;")
    text = text.replace("{\n", '.maxntid 32 .pragma "nounroll";\n{\n', 1)
    text = text.replace("st.global", "ld.param.u64 %at, [out]; st.global")
    (found,) = launch_on(text, [np.zeros(1, np.uint32)])[1]
    assert found[0] == 3
