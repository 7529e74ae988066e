"""Every modifier that a form takes changes a value; every other one is refused by name."""

from types import SimpleNamespace

import numpy as np
import pytest
from ptx_snippets import entry, evaluate, launch_on

from flash_helpers.ptx import UninitialisedReadError, UnsupportedInstruction
from flash_helpers.ptx.read.module import Immediate, Instruction
from flash_helpers.ptx.read.types import OPCODE_TYPES, SCALAR_TYPES
from flash_helpers.ptx.run.instructions import compare, convert, floats, integers
from flash_helpers.ptx.run.instructions.forms import find_form
from flash_helpers.ptx.run.instructions.operations import FORMS

THREADS = 256
COMPARED = "eq ne lt le gt ge"
UNORDERED = "equ neu ltu leu gtu geu num nan"

# An opcode; the modifiers, each of which changes a value against the opcode without it (or with
# the first one, behind a colon); the types of its operands, where they are not the last type.
CHANGES = [
    ("add.s32", "sat"), ("sub.s32", "sat"),
    ("add.f32", "rz rm rp ftz sat"), ("add.f16", "ftz sat"), ("add.f32x2", "rz rm rp ftz"),
    ("fma.f32", "rz rm rp ftz sat"), ("fma.f32x2", "rz rm rp ftz"), ("fma.f16", "ftz sat relu"),
    ("fma.bf16", "relu"),
    ("mul.u32", "lo: hi wide"), ("mad.u32", "lo: hi wide"), ("mad.u16", "lo: hi wide"),
    ("mad.s32", "lo: hi wide"), ("mad.hi.s32", "sat"), ("madc.u32", "lo: hi"),
    ("mul24.u32", "lo: hi"), ("mad24.u32", "lo: hi"), ("mad24.s32", "lo: hi"),
    ("mad24.hi.s32", "sat"),
    ("min.s32", "relu"), ("min.s16x2", "relu"), ("dp2a.s32.u32", "lo: hi"),
    ("min.f32", "ftz NaN abs xorsign.abs"), ("min.bf16", "NaN abs xorsign.abs"),
    ("max.f32 3", "ftz NaN abs"),
    ("div.f32", "approx", "f32 f32 f32"), ("div.approx.f32", "ftz"), ("div.f32", "rz rm rp ftz"),
    ("rcp.f32", "rz rm rp ftz"), ("rcp.f64", "ftz"), ("abs.f32", "ftz"), ("neg.f16", "ftz"),
    ("ex2.approx.f32", "ftz"), ("lg2.approx.f32", "ftz"), ("rsqrt.approx.f32", "ftz"),
    ("testp.f32", "finite: infinite number notanumber normal subnormal", "pred f32"),
    ("shf.clamp.b32", "l: r"), ("shf.r.b32", "wrap: clamp"),
    ("bmsk.b32", "wrap: clamp"), ("szext.s32", "wrap: clamp"),
    ("prmt.b32", "f4e b4e rc8 ecl ecr rc16"), ("bfind.u32", "shiftamt"),
    ("setp.u32", "eq: ne lt le gt ge lo ls hi hs", "pred u32 u32"),
    ("setp.eq.f32", "ftz", "pred f32 f32"), ("setp.eq.f32", "and: or xor", "pred f32 f32 pred"),
    ("setp.f32", f"eq: ne lt le gt ge {UNORDERED}", "pred f32 f32"),
    ("setp.f64", f"eq: ne lt le gt ge {UNORDERED}", "pred f64 f64"),
    ("setp.eq.u32", "and: or xor", "pred u32 u32 pred"),
    ("setp.eq.f64", "and: or xor", "pred f64 f64 pred"),
    ("set.u32.u32", "eq: ne lt le gt ge lo ls hi hs"),
    ("set.eq.u32.u32", "and: or xor", "u32 u32 u32 pred"),
    ("set.u32.f32", f"eq: ne lt le gt ge {UNORDERED}", "u32 f32 f32"),
    ("set.eq.u32.f32", "ftz", "u32 f32 f32"),
    ("set.eq.u32.f32", "and: or xor", "u32 f32 f32 pred"),
    ("set.u32.f64", f"eq: ne lt le gt ge {UNORDERED}", "u32 f64 f64"),
    ("set.eq.u32.f64", "and: or xor", "u32 f64 f64 pred"),
    ("set.f16x2.f16x2", f"eq: ne lt le gt ge {UNORDERED} "),
    ("set.eq.f16x2.f16x2", "ftz"), ("set.eq.f16x2.f16x2", "and: or xor", "f16x2 f16x2 f16x2 pred"),
    ("set.bf16x2.bf16x2", f"eq: ne lt le gt ge {UNORDERED} "),
    ("set.eq.bf16x2.bf16x2", "and: or xor", "bf16x2 bf16x2 bf16x2 pred"),
    ("slct.u32.f32", "ftz", "u32 u32 u32 f32"),
    ("cvt.u16.s32", "sat"), ("cvt.s32.f32", "rzi: rni rmi rpi"), ("cvt.rpi.s32.f32", "ftz"),
    ("cvt.s32.f64", "rzi: rni rmi rpi"), ("cvt.f32.s32", "rz rm rp sat"),
    ("cvt.f16.s32", "rz rm rp sat"), ("cvt.f32.f32", "rni rzi rmi rpi ftz sat"),
    *((f"cvt.{t}.{t}", "rni rzi rmi rpi sat") for t in ("f16", "bf16", "f64")),
    ("cvt.f32.f16", "sat"), ("cvt.f32.bf16", "ftz sat"), ("cvt.f32.f64", "rz rm rp ftz sat"),
    ("cvt.f16.f32", "rz rm rp sat relu satfinite"), ("cvt.rp.f16.f32", "ftz"),
    ("cvt.f16.f64", "rz rm rp sat"),
    ("cvt.bf16.f32", "rz rm rp ftz relu satfinite"), ("cvt.bf16.f64", "rz rm rp"),
    ("cvt.f64.f32", "ftz sat"), ("cvt.f64.f16", "sat"), ("cvt.f64.bf16", "sat"),
    ("cvt.tf32.f32", "rna rz relu satfinite"),
    ("cvt.f16x2.f32", "rz relu satfinite", "f16x2 f32 f32"),
    ("cvt.rn.satfinite.e4m3x2.f32", "relu", "b16 f32 f32"),
    ("cvt.rn.satfinite.e4m3x2.f16x2", "relu", "b16 f16x2"),
    ("cvt.f16x2.e4m3x2", "relu", "f16x2 b16"),
]  # fmt: skip
ELSEWHERE = {
    "cc": "sets a flag: test_carries below",
    "lop3": "has two results: test_logic_of_three_and_a_predicate below",
    "cvt.rn": "is due with a type of 8 bits: test_conversions_to_8_bits_name_what_they_do below",
    "cvt.satfinite": "likewise",
    "cvta": "names a state space: test_generic_addresses_know_their_space",
    "isspacep": "likewise",
}
"""Modifiers of the forms of arithmetic that other tests show, by an opcode or the modifier."""

EDGES = {
    "f": [0.0, -0.0, 1.0, -1.0, 0.3, -2.5, 1.5, 7.0, 1e9, -1e9, np.nan, np.inf, -np.inf],
    "i": [0, 1, 2, 3, 5, 31, 32, 33, 40, 0x7F, 0x80, 0xFFFF, 0x7FFFFF, 0x7FFFFFFF, -1, -2, -128],
}


def values(type_name: str, seed: int) -> np.ndarray:
    """Bits of one register a thread: edges, and numbers near each other."""
    rng = np.random.default_rng(seed)
    if type_name == "pred":
        return rng.integers(0, 2, THREADS).astype(np.uint32)
    scalar = SCALAR_TYPES.get(type_name, SCALAR_TYPES["b32"])
    is_float = scalar.is_float and type_name != "b32"
    if not is_float:
        edges = np.array(EDGES["i"], np.int64)
        chosen = np.where(rng.random(THREADS) < 0.7, rng.choice(edges, THREADS), rng.integers(
            -(1 << 62), 1 << 62, THREADS))  # fmt: skip
        return chosen.astype(f"i{scalar.size}").view(f"u{scalar.size}")
    own = type_name.removesuffix("x2")
    kind = {"f16": np.float16, "f64": np.float64}.get(own, np.float32)
    count = THREADS * (2 if type_name != own else 1)
    tiny, large = np.finfo(kind).tiny, np.finfo(kind).max
    edges = [*EDGES["f"], tiny / 2, -tiny / 2, tiny / 4, large, -large, 1 + 2.0**-9, large / 4]
    edges += [70000.0, 1e-5, 1e-40, -130.0, 1 + 2.0**-11]
    with np.errstate(all="ignore"):
        chosen = np.where(rng.random(count) < 0.7, rng.choice(edges, count), rng.normal(size=count))
        found = chosen.astype(kind)
    if own == "bf16":
        found = (found.view(np.uint32) >> 16).astype(np.uint16)
    return found.view(f"u{scalar.size}")


def operand_types(opcode: str, operands: int, given: str = "") -> list[str]:
    """Types of the destination and the sources."""
    name, *rest = opcode.split(".")
    types = [m for m in rest if m in OPCODE_TYPES]
    own = [types[-1]] * operands
    if name == "cvt":
        own[0] = types[0]
    if "wide" in rest:
        own[0] = f"u{16 * SCALAR_TYPES[types[-1]].size}"
        own[3:] = own[:1] * len(own[3:])
    return given.split() or own


def results(opcodes: list[list[str]], signatures: list[list[str]]) -> np.ndarray:
    """The results of opcodes on the same values, 64 bits each: (opcodes, threads)."""
    arrays, body, declared = [np.zeros((len(opcodes), THREADS), np.uint64)], [], []
    body += ["mov.u32 %t, %tid.x;", "ld.param.u64 %out, [p0];", "mad.wide.u32 %out, %t, 8, %out;"]
    known: dict[tuple[str, int], str] = {}
    for number, (opcode, types) in enumerate(zip(opcodes, signatures, strict=True)):
        names = []
        for i, type_name in enumerate(types[1:]):
            if (type_name, i) not in known:
                bits = values(type_name, 7 * i + 1)
                known[type_name, i] = name = f"%s{len(known)}"
                size = max(bits.itemsize, 2)
                declared.append(f".reg .b{8 * size} {name}; .reg .pred %p{len(known)};")
                body.append(f"ld.param.u64 %at, [p{len(arrays)}];")
                body.append(f"mad.wide.u32 %at, %t, {bits.itemsize}, %at;")
                body.append(f"ld.global.b{8 * bits.itemsize} {name}, [%at];")
                if type_name == "pred":
                    body.append(f"setp.ne.u32 %p{len(known)}, {name}, 0;")
                    known[type_name, i] = f"%p{len(known)}"
                arrays.append(bits)
            names.append(known[type_name, i])
        size = (
            2 if types[0] == "b16" else max(SCALAR_TYPES.get(types[0], SCALAR_TYPES["b32"]).size, 2)
        )
        target = f"%d{number}"
        declared.append(f".reg .{'pred' if types[0] == 'pred' else f'b{8 * size}'} {target};")
        body.append(f"{opcode} {target}, {', '.join(names)};")
        place = f"[%out+{number * THREADS * 8}]"
        if types[0] == "pred":
            body.append(f"selp.u64 %wide, 1, 0, {target};\nst.global.u64 {place}, %wide;")
        else:
            body.append(f"st.global.b{8 * size} {place}, {target};")
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    declared.append(".reg .b32 %t; .reg .b64 %at, %out, %wide;")
    text = entry("\n".join(body), parameters, "\n".join(declared))
    with np.errstate(all="ignore"):
        return launch_on(text, arrays, block=THREADS)[1][0]


def with_modifier(opcode: str, modifier: str) -> str:
    """The opcode with a modifier before its types."""
    parts = opcode.split(".")
    at = next(i for i, part in enumerate(parts) if part in OPCODE_TYPES)
    return ".".join([*parts[:at], *([modifier] if modifier else []), *parts[at:]])


def form_of(opcode: str, operands: int):
    name, *modifiers = opcode.split(".")
    types = tuple(m for m in modifiers if m in OPCODE_TYPES)
    written = Instruction(opcode, (Immediate(0),) * operands, None, 1, None, name,
                          tuple(modifiers), types)  # fmt: skip
    return find_form(MACHINE, written, FORMS)


def _unsupported(reason: str = "") -> UnsupportedInstruction:
    return UnsupportedInstruction("it", 1, reason)


MACHINE = SimpleNamespace(unsupported=_unsupported, launch=SimpleNamespace(written_for="sm_90a"))
ARITHMETIC = (*integers.FORMS, *floats.FORMS, *compare.FORMS, *convert.FORMS)


def expanded():
    """Each line of CHANGES: the opcode as the base, and with each modifier; number of operands."""
    for opcode, modifiers, *types in CHANGES:
        opcode, _, more = opcode.partition(" ")
        first, colon, rest = modifiers.partition(":")
        words = rest.split() if colon else modifiers.split()
        base = with_modifier(opcode, first if colon else "")
        name = opcode.partition(".")[0]
        count = min(n for f in ARITHMETIC if name in f.names.split() for n in f.operands)
        count = len(types[0].split()) if types else count + (more == "3")
        each = [with_modifier(opcode, word) for word in words]
        yield base, each, count, types[0] if types else ""


@pytest.mark.parametrize(("base", "each", "count", "types"), [*expanded()])
def test_a_modifier_that_a_form_takes_changes_a_value(base, each, count, types):
    opcodes = [base, *each]
    found = results(opcodes, [operand_types(opcode, count, types) for opcode in opcodes])
    for opcode, result in zip(each, found[1:], strict=True):
        assert (result != found[0]).any(), opcode


def test_no_modifier_of_arithmetic_is_left_out():
    shown = set()
    for base, each, count, _ in expanded():
        for opcode in (base, *each):
            form = form_of(opcode, count)
            shown |= {(id(form), m) for m in opcode.split(".")}
    missing = [
        (form.names, form.types, word)
        for form in ARITHMETIC
        for word in form.takes.split()
        if (id(form), word) not in shown
        and not {word, form.names, f"{form.names}.{word}"} & ELSEWHERE.keys()
    ]
    assert not missing


def test_a_modifier_of_another_opcode_is_refused_by_name():
    every = {modifier for form in ARITHMETIC for modifier in form.modifiers} | {"v2", "sync"}
    for form in ARITHMETIC:
        types = tuple(known.split()[0] for known in form.types)
        name = form.names.split()[0]
        others = [other.modifiers for other in FORMS[name][types] if other is not form]
        for word in every - form.modifiers.union(*others):
            opcode = ".".join(filter(None, [name, form.having, word, *types]))
            with pytest.raises(UnsupportedInstruction) as caught:
                form_of(opcode, form.operands[0])
            assert f"the modifier .{word} is not known" in str(caught.value)


def test_logic_of_three_and_a_predicate():
    """lop3.or and lop3.and combine whether the result is not zero with a predicate."""
    body = """
    setp.ne.u32 %p, %c, 0;
    lop3.{}.b32 %d|%q, %a, %b, %c, 0xC0, %p;
    selp.u32 %e, 256, 0, %q;
    add.u32 %d, %d, %e;
    """
    inputs = {"a": ("u32", [3, 3, 4, 4]), "b": ("u32", [1, 1, 3, 3]), "c": ("u32", [0, 1, 0, 1])}
    for operation, expected in (("or", [257, 257, 0, 256]), ("and", [1, 257, 0, 0])):
        declarations = ".reg .pred %p, %q; .reg .b32 %e;"
        found = evaluate(body.format(operation), inputs, "u32", declarations)[:4]
        np.testing.assert_array_equal(found, expected)


def test_logic_of_three_passes_poison_to_both_of_its_results():
    body = """
    ld.shared.u32 %e, [tile];
    lop3.or.b32 %e|%q, %e, 1, 2, 0xC0, %p;
    mov.u32 %d, {};
    """
    declarations = ".shared .align 4 .b8 tile[4]; .reg .pred %p, %q; .reg .b32 %e;"
    setp = "setp.eq.u32 %p, 1, 1;"
    assert evaluate(setp + body.format(3), declarations=declarations, threads=1)[0] == 3
    for result in ("%e", "%e; selp.u32 %d, 1, 0, %q"):
        with pytest.raises(UninitialisedReadError):
            evaluate(setp + body.format(result), declarations=declarations, threads=1)


@pytest.mark.parametrize("lacking", ["rn", "satfinite"])
def test_conversions_to_8_bits_name_what_they_do(lacking):
    opcode = "cvt.rn.satfinite.e4m3x2.f32".replace(f".{lacking}", "")
    with pytest.raises(UnsupportedInstruction, match=r"this conversion is \.rn\.satfinite"):
        evaluate(f"{opcode} %d, %a, %a;", {"a": ("f32", [1.0])}, "u16")


U32 = {"a": ("u32", [1, 7, 5, 2**32 - 1]), "b": ("u32", [2, 7, 3, 1])}
CARRIES = {
    # sub.cc leaves 1 where nothing is borrowed, as IADD3 a, -b does; a - b - 1 + 1 - 1 otherwise.
    "sub.cc.u32 %e, %a, %b; addc.u32 %d, 0, 0;": [0, 1, 1, 1],
    "sub.cc.u32 %e, %a, %b; subc.u32 %d, 10, 3;": [6, 7, 7, 7],
    "add.cc.u32 %e, %a, %b; addc.u32 %d, 10, 3;": [13, 13, 13, 14],
    "add.cc.u32 %e, %a, %b; subc.u32 %d, 10, 3;": [6, 6, 6, 7],
    "sub.cc.u32 %e, %a, %b; subc.cc.u32 %e, 0, 0; addc.u32 %d, 0, 0;": [0, 1, 1, 1],
    "mad.lo.cc.u32 %e, %a, %b, 1; madc.hi.u32 %d, %a, %b, 0;": [0, 0, 0, 1],
    "mad.hi.cc.u32 %e, %a, %b, -1; addc.u32 %d, 0, 0;": [0, 0, 0, 0],
    "sub.cc.u64 %w, %wa, %wb; addc.u64 %w, 0, 0; cvt.u32.u64 %d, %w;": [0, 1, 1, 1],
}


@pytest.mark.parametrize("body", CARRIES)
def test_carries(body):
    body = "cvt.u64.u32 %wa, %a; cvt.u64.u32 %wb, %b;" + body
    found = evaluate(body, U32, "u32", ".reg .b32 %e; .reg .b64 %w, %wa, %wb;")[:4]
    np.testing.assert_array_equal(found, CARRIES[body.partition("%wb, %b;")[2]])


VALUES = [
    ("mad24.hi.sat.s32 %d, %a, %a, %b;", "s32", [0x7FFFFF, 3], [0x7FFFFFFF, 4], [2**31 - 1, 4]),
    ("mad.hi.sat.s32 %d, %a, %a, %b;", "s32", [-(2**31)], [2**31 - 1], [2**31 - 1]),
    ("div.approx.f32 %d, %a, %b;", "f32", [2.0**125, -1.0, 3.0, 1.0],
     [2.0**127, 1.5 * 2.0**126, 2.0**126, np.inf], [0.0, -0.0, 3 * 2.0**-126, 0.0]),
    ("div.approx.f32 %d, %a, %b;", "f32", [np.inf, np.inf, np.nan], [2.0**127, 2.0**126, 2.0**127],
     [np.nan, np.inf, np.nan]),
    ("div.approx.ftz.f32 %d, %a, %b;", "f32", [2.0**125, 1.0], [2.0**127, 2.0**-127], [0, np.inf]),
    ("div.full.f32 %d, %a, %b;", "f32", [2.0**127], [2.0**127], [1.0]),
    ("min.abs.f32 %d, %a, %b, %a;", "f32", [-3.0, 1.0], [2.0, -4.0], [2.0, 1.0]),
    ("max.xorsign.abs.f32 %d, %a, %b;", "f32", [-3.0, -3.0], [2.0, -4.0], [-3.0, 4.0]),
    ("min.f32 %d, %a, %b;", "f32", [0.0, -0.0, -0.0], [-0.0, 0.0, -0.0], [-0.0, -0.0, -0.0]),
    ("max.f32 %d, %a, %b;", "f32", [0.0, -0.0, -0.0, 0.0], [-0.0, 0.0, -0.0, -1.0],
     [0.0, 0.0, -0.0, 0.0]),
    ("max.NaN.f16 %d, %a, %b;", "f16", [0.0, -0.0, -0.0], [-0.0, 0.0, -0.0], [0.0, 0.0, -0.0]),
    ("min.ftz.f32 %d, %a, %b;", "f32", [-0.0, 1e-40], [1e-40, -0.0], [-0.0, -0.0]),
    ("add.sat.f16 %d, %a, %b;", "f16", [-0.0, np.nan], [-0.0, 1.0], [0.0, 0.0]),
    ("sub.rm.f32 %d, %a, %b;", "f32", [3.0, 0.0], [3.0, -0.0], [-0.0, 0.0]),
    ("fma.rm.f32 %d, %a, %b, -6.0;", "f32", [3.0], [2.0], [-0.0]),
    ("fma.rn.f64 %d, %a, %b, 0dFFF0000000000000;", "f64", [1e308], [1e308], [-np.inf]),
    ("rem.s32 %d, %a, %b;", "s32", [7, -7, 9], [0, 0, 4], [-1, -1, 1]),
    ("fns.b32 %d, 0xF0F0, %a, %b;", "s32", [4, 4, 4, 8, 12, 0, 31], [0, 1, 2, -1, -2, 9, -1],
     [4, 4, 5, 7, 7, -1, 15]),
    ("max.relu.s16x2 %d, %a, %b;", "s32", [0x0003FFFE], [0x0002FFFF], [0x00030000]),
    ("add.u16x2 %d, %a, %b;", "u32", [0x0001FFFF], [0x00020001], [0x00030000]),
    ("min.u16x2 %d, %a, %b;", "u32", [0x0001FFFF], [0x00020001], [0x00010001]),
    ("min.s16x2 %d, %a, %b;", "u32", [0x0001FFFF], [0x00020001], [0x0001FFFF]),
    ("add.rn.f32x2 %d, %a, %b;", "u64", [0x3F800000_40000000], [0x40000000_3F800000],
     [0x40400000_40400000]),
    ("mul.rn.f32x2 %d, %a, %b;", "u64", [0x3F800000_40000000], [0x40000000_40400000],
     [0x40000000_40C00000]),
    ("fma.rn.f32x2 %d, %a, %b, %b;", "u64", [0x3F800000_40000000], [0x40000000_40400000],
     [0x40800000_41100000]),
    ("cvt.rn.sat.f32.s32 %d, %a;", "s32", [7, 0, -7], [0], [0x3F800000, 0, 0]),
    ("cvt.rn.satfinite.f16.f32 %h, %a; cvt.u32.u16 %d, %h;", "s32", [0x7F800000], [0], [0x7BFF]),
    ("cvt.rna.satfinite.tf32.f32 %d, %a;", "s32", [0x7F800000], [0], [0x7F7FE000]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "type_name", "a", "b", "expected"), VALUES)
def test_values(body, type_name, a, b, expected):
    a, b = np.broadcast_arrays(a, b)
    inputs = {"a": (type_name, a), "b": (type_name, b)}
    found = evaluate(body, inputs, type_name, ".reg .b16 %h;")[: len(expected)]
    expected = np.array(expected).astype(found.dtype)
    np.testing.assert_array_equal(found, expected)
    if found.dtype.kind == "f":
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))
