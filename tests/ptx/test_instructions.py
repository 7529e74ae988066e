"""Each instruction computes what the PTX ISA says, at the edges too."""

import numpy as np
import pytest
from ptx_snippets import evaluate

from flash_helpers.ptx import UnsupportedInstruction

INF, NAN = float("inf"), float("nan")
MIN32, MAX32 = -(1 << 31), (1 << 31) - 1


def check(body, inputs, result, expected, declarations=""):
    got = evaluate(body, inputs, result, declarations)[: len(expected)]
    np.testing.assert_array_equal(got, np.array(expected, got.dtype))


def two(type_name, a, b):
    return {"a": (type_name, a), "b": (type_name, b)}


def three(type_name, a, b, c):
    return {**two(type_name, a, b), "c": (type_name, c)}


INTEGER = [
    ("add.s32", "s32", [1, MAX32], [2, 1], [3, MIN32]),
    ("add.sat.s32", "s32", [MAX32, MIN32, 5], [1, -1, -7], [MAX32, MIN32, -2]),
    ("sub.sat.s32", "s32", [MIN32, MAX32], [1, -1], [MIN32, MAX32]),
    ("add.u64", "u64", [2**64 - 1], [2], [1]),
    ("sub.s16", "s16", [-32768], [1], [32767]),
    ("mul.lo.s32", "s32", [1 << 20, -3], [1 << 12, 7], [0, -21]),
    ("mul.hi.s32", "s32", [MIN32, -1, MAX32], [MIN32, 1, 4], [1 << 30, -1, 1]),
    ("mul.hi.u32", "u32", [2**32 - 1, 1 << 31], [2**32 - 1, 2], [2**32 - 2, 1]),
    ("mul.hi.u64", "u64", [2**64 - 1, 3 << 62], [2**64 - 1, 8], [2**64 - 2, 6]),
    ("mul.hi.s64", "s64", [-1, -(2**63), 5], [1, -(2**63), -7], [-1, 2**62, -1]),
    ("mul24.lo.s32", "s32", [0x1FFFFFF, 3], [2, -4], [-2, -12]),
    ("div.s32", "s32", [-7, 7, 7, -8], [2, -2, 2, 2], [-3, -3, 3, -4]),
    ("rem.s32", "s32", [-7, 7, 7], [2, -2, 3], [-1, 1, 1]),
    ("div.u32", "u32", [7, 2**32 - 1], [2, 2], [3, 2**31 - 1]),
    ("rem.u64", "u64", [2**63 + 5], [10], [(2**63 + 5) % 10]),
    ("min.s32", "s32", [-1, 5], [1, 4], [-1, 4]),
    ("max.u32", "u32", [2**32 - 1, 5], [1, 4], [2**32 - 1, 5]),
    ("and.b32", "u32", [0b1100], [0b1010], [0b1000]),
    ("xor.b64", "u64", [0b1100], [0b1010], [0b0110]),
    ("bmsk.clamp.b32", "u32", [4, 30, 0], [8, 8, 32], [0xFF0, 0xC0000000, 0xFFFFFFFF]),
    ("szext.clamp.s32", "s32", [0xFF, 0x7F, -1], [8, 8, 32], [-1, 127, -1]),
]


@pytest.mark.parametrize(("opcode", "type_name", "a", "b", "expected"), INTEGER)
def test_integer(opcode, type_name, a, b, expected):
    check(f"{opcode} %d, %a, %b;", two(type_name, a, b), type_name, expected)


SHIFTS = [
    ("shl.b32", "u32", [1, 1, 1], [31, 32, 200], [1 << 31, 0, 0]),
    ("shr.u32", "u32", [1 << 31] * 3, [31, 32, 200], [1, 0, 0]),
    ("shr.s32", "s32", [-8] * 3, [1, 31, 64], [-4, -1, -1]),
    ("shl.b64", "u64", [1, 1], [63, 64], [1 << 63, 0]),
    ("shr.s64", "s64", [-(2**62), 7], [80, 1], [-1, 3]),
    ("shl.b16", "u16", [3, 3], [15, 16], [1 << 15, 0]),
]


@pytest.mark.parametrize(("opcode", "type_name", "a", "n", "expected"), SHIFTS)
def test_shifts_clamp_their_amount(opcode, type_name, a, n, expected):
    check(f"{opcode} %d, %a, %n;", {"a": (type_name, a), "n": ("u32", n)}, type_name, expected)


FUNNEL = [
    ("shf.l.wrap.b32", 0x12345678, 0x9ABCDEF0, [0, 8, 32, 40], None),
    ("shf.r.wrap.b32", 0x12345678, 0x9ABCDEF0, [0, 8, 32, 40], None),
    ("shf.l.clamp.b32", 0x12345678, 0x9ABCDEF0, [0, 8, 32, 40], None),
    ("shf.r.clamp.b32", 0x12345678, 0x9ABCDEF0, [0, 8, 32, 40], None),
]


@pytest.mark.parametrize(("opcode", "a", "b", "amounts", "_"), FUNNEL)
def test_funnel_shift(opcode, a, b, amounts, _):
    both = b << 32 | a
    expected = []
    for amount in amounts:
        n = min(amount, 32) if "clamp" in opcode else amount % 32
        value = (both << n) >> 32 if ".l." in opcode else both >> n
        expected.append(value & 0xFFFFFFFF)
    inputs = {"a": ("u32", [a]), "b": ("u32", [b]), "n": ("u32", amounts)}
    check(f"{opcode} %d, %a, %b, %n;", inputs, "u32", expected)


UNARY = [
    ("popc.b32", "u32", [0, 0xFF, 2**32 - 1], "u32", [0, 8, 32]),
    ("popc.b64", "u64", [2**64 - 1], "u32", [64]),
    ("clz.b32", "u32", [0, 1, 1 << 31], "u32", [32, 31, 0]),
    ("clz.b64", "u64", [0, 1 << 40], "u32", [64, 23]),
    ("bfind.u32", "u32", [0, 1, 0x8000], "u32", [2**32 - 1, 0, 15]),
    ("bfind.s32", "s32", [-1, -2, 5], "u32", [2**32 - 1, 0, 2]),
    ("bfind.shiftamt.u32", "u32", [1, 0], "u32", [31, 2**32 - 1]),
    ("brev.b32", "u32", [1, 0x80000001, 6], "u32", [1 << 31, 0x80000001, 0x60000000]),
    ("brev.b64", "u64", [1], "u64", [1 << 63]),
    ("not.b32", "u32", [0], "u32", [2**32 - 1]),
    ("cnot.b32", "u32", [0, 5], "u32", [1, 0]),
    ("abs.s32", "s32", [-5, 5], "s32", [5, 5]),
    ("neg.s64", "s64", [5], "s64", [-5]),
    ("abs.f32", "f32", [-0.0, -3.5], "f32", [0.0, 3.5]),
    ("neg.f16", "f16", [1.5], "f16", [-1.5]),
    ("neg.bf16x2", "bf16x2", [0x3F80C000], "bf16x2", [0xBF804000]),
    ("abs.f16x2", "f16x2", [0xBC00C000], "f16x2", [0x3C004000]),
    ("rcp.rn.f32", "f32", [4.0, -0.0], "f32", [0.25, -INF]),
    ("sqrt.rn.f64", "f64", [2.0], "f64", [2.0**0.5]),
    ("rcp.approx.ftz.f64", "f64", [2.0**-200, 2.0**-1030], "f64", [2.0**200, INF]),
    ("rsqrt.approx.f32", "f32", [4.0, 0.0], "f32", [0.5, INF]),
    ("ex2.approx.ftz.f32", "f32", [3.0, -INF, -0.0, -140.0], "f32", [8.0, 0.0, 1.0, 0.0]),
    ("ex2.approx.f32", "f32", [-140.0], "f32", [2.0**-140]),
    ("lg2.approx.f32", "f32", [8.0, 0.0], "f32", [3.0, -INF]),
    ("ex2.approx.f16", "f16", [3.0], "f16", [8.0]),
]


@pytest.mark.parametrize(("opcode", "type_name", "a", "result", "expected"), UNARY)
def test_unary(opcode, type_name, a, result, expected):
    check(f"{opcode} %d, %a;", {"a": (type_name, a)}, result, expected)


def test_bit_field_extract():
    inputs = {"a": ("s32", [0x0000FF00] * 6), "p": ("u32", [8, 8, 8, 28, 40, 12]),
              "n": ("u32", [8, 4, 0, 8, 4, 8])}  # fmt: skip
    check("bfe.u32 %d, %a, %p, %n;", inputs, "u32", [0xFF, 0xF, 0, 0, 0, 0xF])
    check("bfe.s32 %d, %a, %p, %n;", inputs, "s32", [-1, -1, 0, 0, 0, 15])
    negative = {"a": ("s32", [MIN32]), "p": ("u32", [28, 40]), "n": ("u32", [8, 4])}
    check("bfe.s32 %d, %a, %p, %n;", negative, "s32", [-8, -1])


def test_bit_field_insert():
    inputs = {"a": ("u32", [0xF]), "b": ("u32", [0xFFFF0000]), "p": ("u32", [4, 30, 32]),
              "n": ("u32", [8, 4, 4])}  # fmt: skip
    check("bfi.b32 %d, %a, %b, %p, %n;", inputs, "u32", [0xFFFF00F0, 0xFFFF0000, 0xFFFF0000])


def test_places_of_bit_fields_of_64_bits_are_no_larger_than_255():
    """Of 32 bits, the lowest 8 bits of a larger number count."""
    inputs = {"a": ("u64", [2**64 - 2]), "p": ("u32", [1, 64, 255]), "n": ("u32", [255, 4, 1])}
    check("bfe.u64 %d, %a, %p, %n;", inputs, "u64", [2**63 - 1, 0, 0])
    check("bfe.s64 %d, %a, %p, %n;", inputs, "u64", [2**64 - 1] * 3)
    check("bfi.b64 %d, %a, %a, %p, %n;", inputs, "u64", [2**64 - 4, 2**64 - 2, 2**64 - 2])
    check("bfe.u32 %d, 0xF0, 260, 257;", {}, "u32", [1])
    check("bfi.b32 %d, 1, 0, 257, 258;", {}, "u32", [2])


@pytest.mark.parametrize("places", ["256, 8", "8, 256", "%p, 8", "8, %p"])
@pytest.mark.parametrize("body", ["bfe.u64 %d, %a", "bfe.s64 %d, %a", "bfi.b64 %d, %a, %a"])
def test_a_place_of_a_bit_field_of_64_bits_past_255_is_refused(body, places):
    inputs = {"a": ("u64", [1, 1]), "p": ("u32", [0, 4096])}
    with pytest.raises(
        UnsupportedInstruction, match=r"a bit field at (256|4096), or of that length"
    ):
        evaluate(f"{body}, {places};", inputs, "u64")


def test_logic_of_three_follows_its_table():
    a, b, c = [0xF0F0F0F0], [0xCCCCCCCC], [0xAAAAAAAA]
    for table in (0x00, 0x80, 0x96, 0xE8, 0xFE, 0xCA, 0xFF):
        bits = 0
        for i in range(32):
            index = (a[0] >> i & 1) << 2 | (b[0] >> i & 1) << 1 | (c[0] >> i & 1)
            bits |= (table >> index & 1) << i
        check(f"lop3.b32 %d, %a, %b, %c, {table};", three("u32", a, b, c), "u32", [bits])


def test_permute():
    a, b = [0x33221100], [0x77665544]
    inputs = three("u32", a, b, [0x3210, 0x7654, 0x0123, 0x1032])
    check("prmt.b32 %d, %a, %b, %c;", inputs, "u32",
          [0x33221100, 0x77665544, 0x00112233, 0x11003322])  # fmt: skip
    signs = three("u32", [0x000080FF], [0], [0x8 | 0, 0x9, 0xA])
    check("prmt.b32 %d, %a, %b, %c;", signs, "u32", [0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFF00])
    modes = three("u32", a, b, [1])
    check("prmt.b32.f4e %d, %a, %b, %c;", modes, "u32", [0x44332211])
    check("prmt.b32.rc16 %d, %a, %b, %c;", modes, "u32", [0x33223322])


def test_multiply_add():
    check("mad.lo.s32 %d, %a, %b, %c;", three("s32", [3], [-4], [5]), "s32", [-7])
    check("mad.hi.u32 %d, %a, %b, %c;", three("u32", [1 << 31], [4], [5]), "u32", [7])
    wide = {**two("s32", [MIN32], [2]), "c": ("s64", [1])}
    check("mad.wide.s32 %d, %a, %b, %c;", wide, "s64", [-(1 << 32) + 1])
    check("mul.wide.u16 %d, %a, %b;", two("u16", [65535], [65535]), "u32", [65535 * 65535])
    check("sad.s32 %d, %a, %b, %c;", three("s32", [3], [10], [1]), "s32", [8])
    check("dp4a.s32.s32 %d, %a, %b, %c;", three("u32", [0x01FF0203], [0x02020202], [10]), "s32",
          [10 + 2 * (1 - 1 + 2 + 3)])  # fmt: skip


def test_carry_chain_adds_128_bits():
    a, b = [2**64 - 1, 5], [1, 6]
    body = """
    .reg .b64 %low;
    add.cc.u64 %low, %a, %b;
    addc.u64 %d, %a, %b;
    """
    check(body, two("u64", a, b), "u64", [(2**64 - 1 + 1 + 1) % 2**64, 11])
    body = "sub.cc.u32 %d, %a, %b;\n subc.u32 %d, 0, 0;"
    check(body, two("u32", [1, 5], [2, 3]), "u32", [2**32 - 1, 0])


FLOAT = [
    ("add.f32", "f32", [1.0, INF], [2.0**-24, 1.0], [1.0, INF]),
    ("add.rz.f32", "f32", [1.0], [-(2.0**-30)], [1 - 2.0**-24]),
    ("add.rp.f32", "f32", [1.0], [2.0**-60], [1 + 2.0**-23]),
    ("add.rm.f32", "f32", [1.0], [-(2.0**-60)], [1 - 2.0**-24]),
    ("mul.rz.f32", "f32", [1 + 2.0**-23], [1 + 2.0**-23], [1 + 2.0**-22]),
    ("add.ftz.f32", "f32", [2.0**-130], [0.0], [0.0]),
    ("mul.sat.f32", "f32", [2.0, -1.0, NAN], [3.0, 1.0, 1.0], [1.0, 0.0, 0.0]),
    ("min.f32", "f32", [NAN, 1.0], [2.0, NAN], [2.0, 1.0]),
    ("max.NaN.f32", "f32", [NAN, 1.0], [2.0, 3.0], [NAN, 3.0]),
    ("div.rn.f32", "f32", [1.0, 1.0], [3.0, 0.0], [np.float32(1) / np.float32(3), INF]),
    ("div.rz.f32", "f32", [2.0], [3.0], [np.nextafter(np.float32(2 / 3), np.float32(0))]),
    ("div.rz.f32", "f32", [2.0**100], [2.0**-100], [np.finfo(np.float32).max]),
    ("copysign.f32", "f32", [-1.0], [2.0], [-2.0]),
    ("add.f16", "f16", [2048.0, 65504.0], [1.0, 65504.0], [2048.0, INF]),
    ("mul.f64", "f64", [0.1], [0.2], [0.1 * 0.2]),
]


@pytest.mark.parametrize(("opcode", "type_name", "a", "b", "expected"), FLOAT)
def test_float(opcode, type_name, a, b, expected):
    check(f"{opcode} %d, %a, %b;", two(type_name, a, b), type_name, expected)


def test_fma_rounds_once():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 32)).astype(np.float32)
    # The sum cancels to the error of the product, which two roundings would lose.
    c = -(a * b)
    exact = a.astype(np.float64) * b.astype(np.float64) + c
    check("fma.rn.f32 %d, %a, %b, %c;", three("f32", a, b, c), "f32", exact.astype(np.float32))
    # A tie of float32 that the addend breaks, below what a double holds.
    tie = three("f32", [1 + 2.0**-12], [1 + 2.0**-12], [2.0**-60])
    check("fma.rn.f32 %d, %a, %b, %c;", tie, "f32", [1 + 2.0**-11 + 2.0**-23])
    x, y, z = 1 + 2.0**-30, 1 - 2.0**-30, -1.0
    check("fma.rn.f64 %d, %a, %b, %c;", three("f64", [x], [y], [z]), "f64", [-(2.0**-60)])
    half = three("f16x2", [0x3C003C01], [0x3C003C01], [0x00000000])
    check("fma.rn.f16x2 %d, %a, %b, %c;", half, "u32", [0x3C003C02])
    relu = three("bf16x2", [0x3F80BF80], [0x3F803F80], [0])
    check("fma.rn.relu.bf16x2 %d, %a, %b, %c;", relu, "u32", [0x3F800000])


CONVERSIONS = [
    ("cvt.rni.s32.f32", "f32", [2.5, 3.5, -2.5, NAN, 1e20, -1e20], "s32",
     [2, 4, -2, 0, MAX32, MIN32]),
    ("cvt.rzi.u32.f32", "f32", [2.9, -1.0, 5e9], "u32", [2, 0, 2**32 - 1]),
    ("cvt.rmi.s32.f32", "f32", [-2.1], "s32", [-3]),
    ("cvt.rzi.s32.f64", "f64", [NAN, 3.5, 1e20], "s32", [MIN32, 3, MAX32]),
    ("cvt.rzi.s64.f32", "f32", [NAN, 3.5], "s64", [-(2**63), 3]),
    ("cvt.rpi.s32.f32", "f32", [2.1], "s32", [3]),
    ("cvt.rni.f32.f32", "f32", [2.5, -0.5], "f32", [2.0, -0.0]),
    ("cvt.rzi.s64.f64", "f64", [1e18, -1e30], "s64", [10**18, -(2**63)]),
    ("cvt.rn.f32.s32", "s32", [2**24 + 1, -5], "f32", [2.0**24, -5.0]),
    ("cvt.rz.f32.u32", "u32", [2**32 - 1], "f32", [2.0**32 - 256]),
    ("cvt.rn.f32.u64", "u64", [2**64 - 1, 2**40 + 1], "f32", [2.0**64, 2.0**40]),
    ("cvt.rz.f32.s64", "s64", [-(2**62) - 2**9], "f32", [-(2.0**62)]),
    ("cvt.rp.f32.u64", "u64", [2**62 + 1], "f32", [2.0**62 * (1 + 2.0**-23)]),
    ("cvt.rn.f16.f32", "f32", [1 + 2.0**-11, 70000.0, 1 + 3 * 2.0**-11], "f16",
     [1.0, INF, 1 + 2.0**-9]),
    ("cvt.rz.f16.f32", "f32", [70000.0, 1 + 2.0**-10.5], "f16", [65504.0, 1.0]),
    ("cvt.rn.bf16.f32", "f32", [1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, NAN], "u16",
     [0x3F80, 0x3F80, 0x3F82, 0x7FFF]),
    ("cvt.rz.bf16.f32", "f32", [-1 - 2.0**-8], "u16", [0xBF80]),
    ("cvt.f32.bf16", "u16", [0x3F80, 0xC000], "f32", [1.0, -2.0]),
    ("cvt.f32.f16", "f16", [1.5], "f32", [1.5]),
    ("cvt.sat.f32.f32", "f32", [2.0, -1.0, NAN], "f32", [1.0, 0.0, 0.0]),
    ("cvt.rna.tf32.f32", "f32", [1 + 2.0**-11], "u32", [0x3F802000]),
    ("cvt.u64.u32", "u32", [2**32 - 1], "u64", [2**32 - 1]),
    ("cvt.s64.s32", "s32", [-1], "s64", [-1]),
    ("cvt.s32.s8", "u32", [0x80], "s32", [-128]),
    ("cvt.u8.u32", "u32", [0x1FF], "u16", [0xFF]),
    ("cvt.sat.s8.s32", "s32", [1000, -1000], "s16", [127, -128]),
    ("cvt.sat.u8.s32", "s32", [1000, -1000], "u16", [255, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "source", "a", "result", "expected"), CONVERSIONS)
def test_conversion(opcode, source, a, result, expected):
    check(f"{opcode} %d, %a;", {"a": (source, a)}, result, expected)


def test_packed_conversion_puts_its_first_source_high():
    inputs = two("f32", [1.0, -1.0], [-2.0, 0.5])
    check("cvt.rn.f16x2.f32 %d, %a, %b;", inputs, "u32", [0x3C00C000, 0xBC003800])
    check("cvt.rn.bf16x2.f32 %d, %a, %b;", inputs, "u32", [0x3F80C000, 0xBF803F00])
    check("cvt.rn.relu.bf16x2.f32 %d, %a, %b;", inputs, "u32", [0x3F800000, 0x00003F00])


COMPARISONS = [
    ("lt.s32", "s32", [-1, 1, 1], [1, -1, 1], [1, 0, 0]),
    ("lo.u32", "u32", [2**32 - 1, 1], [1, 2], [0, 1]),
    ("hs.u32", "u32", [5, 1], [5, 2], [1, 0]),
    ("ne.f32", "f32", [1.0, NAN], [2.0, 1.0], [1, 0]),
    ("neu.f32", "f32", [1.0, NAN], [1.0, 1.0], [0, 1]),
    ("ltu.f32", "f32", [NAN, 2.0], [1.0, 1.0], [1, 0]),
    ("ge.f32", "f32", [NAN, 2.0], [1.0, 1.0], [0, 1]),
    ("num.f32", "f32", [NAN, 2.0], [1.0, 1.0], [0, 1]),
    ("nan.f32", "f32", [NAN, 2.0], [1.0, 1.0], [1, 0]),
    ("eq.u64", "u64", [2**63], [2**63], [1]),
    ("gt.f16", "f16", [2.0], [1.0], [1]),
    ("gt.bf16", "u16", [0x4000], [0x3F80], [1]),
]


@pytest.mark.parametrize(("opcode", "type_name", "a", "b", "expected"), COMPARISONS)
def test_comparison(opcode, type_name, a, b, expected):
    body = f"setp.{opcode} %p, %a, %b;\n selp.u32 %d, 1, 0, %p;"
    check(body, two(type_name, a, b), "u32", expected, ".reg .pred %p;")


def test_comparison_combined_and_complemented():
    body = """
    setp.lt.and.s32 %p|%q, %a, %b, !%c0;
    selp.u32 %d, 1, 0, %p;
    selp.u32 %e, 2, 0, %q;
    or.b32 %d, %d, %e;
    """
    declarations = ".reg .pred %p, %q, %c0; .reg .b32 %e;"
    body = "setp.eq.s32 %c0, %c, 0;\n" + body
    inputs = three("s32", [1, 1, 2], [2, 2, 1], [1, 0, 1])
    check(body, inputs, "u32", [1, 0, 2], declarations)


def test_set_and_slct_and_pairs():
    check("set.gt.u32.f32 %d, %a, %b;", two("f32", [2.0, 1.0], [1.0, 2.0]), "u32", [2**32 - 1, 0])
    check("set.gt.f32.s32 %d, %a, %b;", two("s32", [2, 1], [1, 2]), "f32", [1.0, 0.0])
    check("slct.u32.s32 %d, %a, %b, %c;", three("s32", [7], [8], [0, -1]), "u32", [7, 8])
    pair = two("f16x2", [0x3C004000], [0x40003C00])
    check("set.gt.f16x2.f16x2 %d, %a, %b;", pair, "u32", [0x00003C00])
    check("max.f16x2 %d, %a, %b;", pair, "u32", [0x40004000])


def test_moves_pack_and_unpack():
    body = """
    .reg .b16 %x, %y;
    mov.b32 {%x, %y}, %a;
    mov.b32 %d, {%y, %x};
    """
    check(body, {"a": ("u32", [0x12345678])}, "u32", [0x56781234])
    body = """
    .reg .b32 %x;
    mov.b64 {_, %x}, %a;
    mov.b32 %d, %x;
    """
    check(body, {"a": ("u64", [0x1122334455667788])}, "u32", [0x11223344])
    body = """
    .reg .b128 %q; .reg .b64 %x;
    mov.b128 %q, {%a, %b};
    mov.b128 {_, %x}, %q;
    mov.b64 %d, %x;
    """
    check(body, two("u64", [1], [2**63 + 1]), "u64", [2**63 + 1])


def test_special_registers():
    lanes = np.arange(64, dtype=np.uint32)
    get = {
        "%tid.x": lanes,
        "%laneid": lanes % 32,
        "%warpid": lanes // 32,
        "%ntid.x": np.full(64, 64),
        "%nctaid.y": np.ones(64),
        "%ctaid.x": np.zeros(64),
        "%lanemask_lt": (1 << (lanes.astype(np.uint64) % 32)) - 1,
        "%lanemask_ge": 2**32 - (1 << (lanes.astype(np.uint64) % 32)),
    }
    for name, expected in get.items():
        got = evaluate(f"mov.u32 %d, {name};", threads=64)
        np.testing.assert_array_equal(got, expected, err_msg=name)


def test_generic_addresses_know_their_space():
    body = """
    .reg .pred %p; .reg .b64 %g, %s;
    mov.u64 %s, tile;
    cvta.shared.u64 %g, %s;
    isspacep.shared %p, %g;
    st.u32 [%g], 7;
    ld.shared.u32 %d, [tile];
    @!%p mov.u32 %d, 0;
    """
    got = evaluate(body, declarations=".shared .align 4 .b8 tile[4];", threads=1)
    assert got[0] == 7


def test_indexed_branch():
    body = """
    .reg .b32 %i;
    and.b32 %i, %thread, 1;
    ts: .branchtargets EVEN, ODD;
    brx.idx %i, ts;
    EVEN:
    mov.u32 %d, 100;
    bra.uni DONE;
    ODD:
    mov.u32 %d, 200;
    DONE:
    """
    np.testing.assert_array_equal(evaluate(body), np.where(np.arange(32) % 2, 200, 100))


# The result in a register of 64 bits.
WIDE = {
    "ld.global.f32 %w, [place];": 0x3F800000,
    "ld.global.v2.f32 {%w, _}, [place];": 0x3F800000,
    "cvt.f32.f64 %w, 0d3FF0000000000000;": 0x3F800000,
    "cvt.rn.f16.f32 %w, 0f3F800000;": 0x3C00,
    "mov.b64 %w, 0x123456783F800000; cvt.f64.f32 %w, %w;": 0x3FF0000000000000,
}


@pytest.mark.parametrize("body", WIDE)
def test_floats_in_wider_registers_are_extended_and_chopped(body):
    """PTX ISA 9.0, "Operand Size Exceeding Instruction-Type Size", for ld, st and cvt."""
    place = ".global .align 8 .b32 place[2] = {0x3F800000, 0x40000000};"
    found = evaluate(f"{body} mov.b64 %d, %w;", {}, "u64", ".reg .b64 %w;", 1, place)
    assert found[0] == WIDE[body]


def test_no_f32_is_stored_from_a_wider_register():
    """ptxas converts its integer, where the ISA chops its bits."""
    body = "mov.b64 %w, 0; st.global.f32 [place], %w;"
    with pytest.raises(UnsupportedInstruction, match="a register of 64 bits for an f32"):
        evaluate(body, declarations=".reg .b64 %w;", before=".global .b32 place;")


def test_arithmetic_gives_no_float_to_a_wider_register():
    reason = "a register of 64 bits for a result of f32"
    with pytest.raises(UnsupportedInstruction, match=reason):
        evaluate("add.f32 %w, 0f3F800000, 0f3F800000;", declarations=".reg .b64 %w;")
