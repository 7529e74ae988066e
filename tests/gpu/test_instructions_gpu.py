"""The simulator's instructions beside the hardware's: each kernel here runs on both, on the same
inputs.

Where values are integers that every sum can hold exactly, and where the result is defined bit by
bit, the outputs must be equal bit by bit. So a wrong place of an element is seen as well as a wrong
value. Sums of random numbers are rounded, and may differ by what the PTX ISA leaves open.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from warp_kernel import WarpKernel, vector

from flash_helpers.gpu import WARP
from flash_helpers.ptx.run.numbers.rounding import to_floats, to_fp8

pytestmark = pytest.mark.gpu

WARPS = 8
BITS = {"b1": 1, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "f16": 16, "bf16": 16,
        "tf32": 32, "f32": 32, "s32": 32, "f64": 64}  # fmt: skip
INTEGERS = ("b1", "s4", "u4", "s8", "u8", "s32")


def shape_of(text: str) -> tuple[int, int, int]:
    m, rest = text[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def encoded(x: np.ndarray, type_name: str) -> np.ndarray:
    """Numbers as bytes in memory, rounded to their type where they must be."""
    if type_name in ("e4m3", "e5m2"):
        stored = to_fp8(x.astype(np.float32), type_name)
    elif type_name == "bf16":
        stored = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = x.astype({"f16": np.float16, "f64": np.float64}.get(type_name, np.float32))
    return stored.reshape(-1).view(np.uint8)


Draw = Callable[[np.random.Generator, int], np.ndarray]


def small_integers(rng: np.random.Generator, count: int) -> np.ndarray:
    """All sums of their products have 11 bits at most."""
    return rng.integers(-4, 5, count)


def elements(
    rng: np.random.Generator, type_name: str, count: int, draw: Draw, unit: float = 1
) -> np.ndarray:
    """Bytes of numbers times the unit; of integer types any bytes."""
    if type_name in INTEGERS:
        return rng.integers(0, 256, count * BITS[type_name] // 8, np.uint8)
    return encoded(draw(rng, count) * unit, type_name)


def near_the_ends(rng: np.random.Generator, c: np.ndarray) -> np.ndarray:
    """Words of s32 so near to its limits that sums saturate."""
    near = rng.integers(0, 500, c.shape, np.uint32)
    return np.uint32(1 << 31) + np.where(c & 1, near, ~near)


# -- mma -------------------------------------------------------------------------------------------

Form = tuple[str, str, str, str, str, str]
FP8 = ("e4m3", "e5m2")


def mma_forms() -> Iterator[Form]:
    """Shape, layouts and what goes with them, types of D, A, B and C: what ptxas takes."""
    for a, b in itertools.product(("row", "col"), repeat=2):
        for d, c in (("f16", "f16"), ("f32", "f16"), ("f32", "f32")):
            yield "m8n8k4", f"{a}.{b}", d, "f16", "f16", c
    for shape in ("m16n8k8", "m16n8k16"):
        for sums, factor in (("f16", "f16"), ("f32", "f16"), ("f32", "bf16")):
            yield shape, "row.col", sums, factor, factor, sums
    for shape in ("m16n8k4", "m16n8k8"):
        yield shape, "row.col", "f32", "tf32", "tf32", "f32"
    for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"):
        yield shape, "row.col", "f64", "f64", "f64", "f64"
    for shape, a, b, sums in itertools.product(("m16n8k16", "m16n8k32"), FP8, FP8, ("f16", "f32")):
        yield shape, "row.col", sums, a, b, sums
    for shapes, types in (
        (("m8n8k16", "m16n8k16", "m16n8k32"), ("s8", "u8")),
        (("m8n8k32", "m16n8k32", "m16n8k64"), ("s4", "u4")),
    ):
        for shape, a, b in itertools.product(shapes, types, types):
            yield shape, "row.col", "s32", a, b, "s32"
            yield shape, "row.col.satfinite", "s32", a, b, "s32"
    for shape in ("m8n8k128", "m16n8k128", "m16n8k256"):
        yield shape, "xor", "s32", "b1", "b1", "s32"
        yield shape, "and", "s32", "b1", "b1", "s32"


def mma(form: Form, draw: Draw = small_integers, unit: float = 1, note: str = "") -> WarpKernel:
    """unit: of A and C."""
    shape, end, d, a, b, c = form
    m, n, k = shape_of(shape)
    rng = np.random.default_rng([*f"{shape}{a}{b}{c}".encode()])
    products = WARPS * (4 if (shape, a) == ("m8n8k4", "f16") else 1)
    size = 8 if a == "f64" else 4
    inputs = {}
    counts, units = (m * k, k * n, m * n), (unit, 1, unit)
    for name, own, count, by in zip("abc", (a, b, c), counts, units, strict=True):
        data = elements(rng, own, count * products, draw, by).view(f"u{size}")
        inputs[name] = np.ascontiguousarray(data.reshape(WARPS * WARP, -1).T)
    if end.endswith("satfinite"):
        inputs["c"] = near_the_ends(rng, inputs["c"])
    count = m * n * products * BITS[d] // (WARPS * WARP * 8 * size)
    operands = ", ".join([vector("d", count), *(vector(x, len(inputs[x])) for x in "abc")])
    layout, tail = ("row.col", f".{end}.popc") if a == "b1" else (end, "")
    body = f"mma.sync.aligned.{shape}.{layout}.{d}.{a}.{b}.{c}{tail} {operands};"
    name = "-".join(filter(None, ("mma", shape, end, d, a, b, c, note)))
    return WarpKernel(name, body, inputs, (count, 8 * size))


# The subnormal numbers are integers times these.
SMALLEST = {"f16": 2.0**-24, "bf16": 2.0**-133, "e4m3": 2.0**-9, "e5m2": 2.0**-16}


def mma_cases() -> Iterator[WarpKernel]:
    for form in mma_forms():
        yield mma(form)
        _, _, d, a, b, _ = form
        if d == "f32" and a == b and a in SMALLEST:
            yield mma(form, unit=SMALLEST[a], note="subnormal")
        if a == "tf32":
            case = mma(form, note="low_bits_set")
            low = np.arange(WARPS * WARP, dtype=np.uint32) * np.uint32(37) % np.uint32(1 << 13)
            set_low = {x: case.inputs[x] | low for x in "ab"}
            yield replace(case, inputs={**case.inputs, **set_low})


# -- wmma ------------------------------------------------------------------------------------------

# Of A, B and C. D has the other layout than C.
LAYOUTS = ("row row col", "row col row", "col row row", "col col col")


def wmma_forms() -> Iterator[tuple[str, str, str, str, str]]:
    """Shape, layouts, types of D, of A and B, and of C."""
    large = ("m16n16k16", "m32n8k16", "m8n32k16")
    for shape, layouts in itertools.product(large, LAYOUTS):
        for d, c in itertools.product(("f16", "f32"), repeat=2):
            yield shape, layouts, d, "f16", c
        yield shape, layouts, "f32", "bf16", "f32"
        for factor in ("s8", "u8"):
            yield shape, layouts, "s32", factor, "s32"
            yield shape, layouts, "s32.satfinite", factor, "s32"
    for layouts in LAYOUTS:
        yield "m16n16k8", layouts, "f32", "tf32", "f32"
        yield "m8n8k4", layouts, "f64", "f64", "f64"
    for layouts in ("row col row", "row col col"):
        for factor in ("s4", "u4"):
            yield "m8n8k32", layouts, "s32", factor, "s32"
            yield "m8n8k32", layouts, "s32.satfinite", factor, "s32"
        yield "m8n8k128", layouts, "s32.xor", "b1", "s32"
        yield "m8n8k128", layouts, "s32.and", "b1", "s32"


def wmma(shape: str, layouts: str, d_type: str, factor: str, c_type: str) -> WarpKernel:
    m, n, k = shape_of(shape)
    d_type, _, end = d_type.partition(".")
    types = (factor, factor, c_type, d_type)
    every = (*layouts.split(), "row" if layouts.endswith("col") else "col")
    sizes = ((m, k), (k, n), (m, n), (m, n))
    rng = np.random.default_rng([*f"{shape}{factor}{c_type}".encode()])
    bits = 64 if factor == "f64" else 32
    code, vectors, inputs = [], {}, {}
    for name, own, layout, size in zip("abcd", types, every, sizes, strict=True):
        lines, line = size if layout == "row" else reversed(size)
        stride = line + 128 // BITS[own]
        count = 8 if own == "f16" and name in "ab" else math.prod(size) * BITS[own] // (WARP * bits)
        vectors[name] = vector(f"f{name}", count)
        code.append(f".reg .b{bits} %f{name}<{count}>;")
        place = f"sync.aligned.{layout}.{shape}.global.{own}"
        if name != "d":
            data = elements(rng, own, lines * stride, small_integers)
            inputs[name] = np.pad(data, (0, -len(data) % 256))
            code.append(f"wmma.load.{name}.{place} {vectors[name]}, [%{name}], {stride};")
    if end == "satfinite":
        inputs["c"] = near_the_ends(rng, inputs["c"].view(np.uint32)).view(np.uint8)
    popc = f"{end}.popc." if factor == "b1" else ""
    all_types = f"{d_type}.{c_type}" if factor == "f16" else f"{d_type}.{factor}.{factor}.{c_type}"
    sat = ".satfinite" if end == "satfinite" else ""
    operands = ", ".join(vectors[x] for x in "dabc")
    a_b = ".".join(every[:2])
    code.append(f"wmma.mma.{popc}sync.aligned.{a_b}.{shape}.{all_types}{sat} {operands};")
    code.append(f"wmma.store.d.{place} [%out], {vectors['d']}, {stride};")
    name = "-".join(filter(None, ("wmma", shape, *every, d_type, end, factor, c_type)))
    return WarpKernel(name, "\n".join(code), inputs, n_bytes=lines * stride * BITS[d_type] // 8)


def wmma_f32_as_f16() -> Iterator[WarpKernel]:
    """A fragment of f32 rounded element by element is one of f16."""
    for shape in ("m16n16k16", "m32n8k16", "m8n32k16"):
        c = np.arange(256).astype(np.float32).view(np.uint8)
        stride = shape_of(shape)[1]
        halves = "\n".join(f"cvt.rn.f16x2.f32 %h{i}, %f{2 * i + 1}, %f{2 * i};" for i in range(4))
        body = f""".reg .b32 %f<8>, %h<4>;
wmma.load.c.sync.aligned.row.{shape}.global.f32 {vector("f", 8)}, [%c], {stride};
{halves}
wmma.store.d.sync.aligned.row.{shape}.global.f16 [%out], {vector("h", 4)}, {stride};"""
        yield WarpKernel(f"wmma-{shape}-f32_as_f16", body, {"c": c}, n_bytes=512)


# -- moves, conversions, and what lanes do together ------------------------------------------------


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1 << 32, (count, WARPS * WARP), np.uint32)


def matrix_moves() -> Iterator[WarpKernel]:
    rng = np.random.default_rng(2)
    movmatrix = "movmatrix.sync.aligned.m8n8.trans.b16 %d0, %a0;"
    yield WarpKernel("movmatrix", movmatrix, {"a": words(rng, 1)}, (1, 32))
    shared = """.shared .align 16 .b8 tile[512]; .reg .b32 %row;
mov.u32 %row, tile;
mad.lo.u32 %row, %lane, 16, %row;
st.shared.v4.b32 [%row], {};
bar.warp.sync -1;
"""
    zeros, read = shared.format("{0, 0, 0, 0}"), f"ld.shared.v4.b32 {vector('d', 4)}, [%row];"
    for count, trans in itertools.product((1, 2, 4), ("", ".trans")):
        place, inputs = f"sync.aligned.m8n8.x{count}{trans}.shared.b16", {"a": words(rng, count)}
        body = f"{zeros}stmatrix.{place} [%row], {vector('a', count)};\nbar.warp.sync -1;\n{read}"
        yield WarpKernel(f"stmatrix-x{count}{trans}", body, inputs, (4, 32))
        body = f"{shared.format(vector('a', 4))}ldmatrix.{place} {vector('d', count)}, [%row];"
        yield WarpKernel(f"ldmatrix-x{count}{trans}", body, {"a": words(rng, 4)}, (count, 32))


def matrix_accesses_in_turns() -> Iterator[WarpKernel]:
    """stmatrix and ldmatrix of one tile by one warp, without a barrier of the warp. Each lane gives
    the address of another row every time."""
    rng = np.random.default_rng(4)
    place, at = "sync.aligned.m8n8.x4.shared.b16", "mad.lo.u32 %row, %lane, {}, %i;"
    row = f"{at}\nand.b32 %row, %row, 31;\nmad.lo.u32 %row, %row, 16, %base;"
    values = [f"add.u32 %d{i}, %d{i}, %a{i};" for i in range(4)]
    store = f"stmatrix.{place} [%row], {vector('d', 4)};"
    load = f"ldmatrix.{place} {vector('d', 4)}, [%row];"
    for name, body in (
        ("stmatrix-ldmatrix", [row.format(1), store, row.format(7), load]),
        ("stmatrix-stmatrix", [row.format(1), store, *values, row.format(5), store, load]),
    ):
        code = [
            ".shared .align 128 .b8 tile[512]; .reg .b32 %row, %base, %i; .reg .pred %more;",
            "mov.u32 %base, tile;\nmad.lo.u32 %row, %lane, 16, %base;\nmov.u32 %i, 0;",
            *(f"mov.b32 %d{i}, %a{i};" for i in range(4)),
            f"st.shared.v4.b32 [%row], {vector('d', 4)};\nbar.warp.sync -1;",
            *("AGAIN:", *body, *values),
            "add.u32 %i, %i, 1;\nsetp.lt.u32 %more, %i, 200;\n@%more bra AGAIN;",
        ]
        yield WarpKernel(f"{name}-in_turns", "\n".join(code), {"a": words(rng, 4)}, (4, 32))


def fp8_conversions() -> Iterator[WarpKernel]:
    """All pairs of codes down; up all numbers, what lies halfway, their neighbours, and all f16."""
    everything = np.arange(1 << 16, dtype=np.uint32)[None]
    halves = everything | everything[:, ::-1] << np.uint32(16)
    short = ".reg .b16 %h;\n"
    for own, relu in itertools.product(FP8, ("", ".relu")):
        body = f"{short}cvt.u16.u32 %h, %a0;\ncvt.rn{relu}.f16x2.{own}x2 %d0, %h;"
        yield WarpKernel(f"cvt{relu}-f16x2-{own}x2", body, {"a": everything}, (1, 32))
        up = f"cvt.rn.satfinite{relu}.{own}x2"
        body = f"{short}{up}.f16x2 %h, %a0;\ncvt.u32.u16 %d0, %h;"
        yield WarpKernel(f"cvt{relu}-{own}x2-f16x2", body, {"a": halves}, (1, 32))
        numbers = to_floats(np.arange(256, dtype=np.uint8), own)
        numbers = np.unique(numbers[np.isfinite(numbers)])
        x = np.concatenate([numbers, (numbers[:-1] + numbers[1:]) / 2])
        x = np.concatenate([np.nextafter(x, np.float32(s * np.inf)) for s in (-1, 1)] + [x])
        most = numbers.max()
        ends = [most * 1.03, most * 1.07, most * 1.25, 1e9, 3e38, 1e-9, 1e-40, 0, np.inf, np.nan]
        x = np.concatenate([x, ends, np.negative(ends)]).astype(np.float32)
        x = np.resize(x, -(-len(x) // WARP) * WARP).view(np.uint32)
        body = f"{short}{up}.f32 %h, %a0, %a1;\ncvt.u32.u16 %d0, %h;"
        yield WarpKernel(f"cvt{relu}-{own}x2-f32", body, {"a": np.stack([x, x[::-1]])}, (1, 32))


def clamped_at_zero() -> Iterator[WarpKernel]:
    """.relu of every 16-bit number, -0 among them; the bits of a NaN are not simulated."""
    for own, one, infinity in (("f16", "0x3C00", 0x7C00), ("bf16", "0x3F80", 0x7F80)):
        everything = np.arange(1 << 16, dtype=np.uint32)[None]
        everything = np.where(everything & 0x7FFF > infinity, np.uint32(0), everything)
        body = f"""{{ .reg .b32 %one, %zero;
mov.b32 %one, {one}{one[2:]};
mov.b32 %zero, 0x80008000;
fma.rn.relu.{own}x2 %d0, %a0, %one, %zero; }}"""
        halves = everything | everything[:, ::-1] << np.uint32(16)
        yield WarpKernel(f"fma.relu-{own}x2", body, {"a": halves}, (1, 32))
        wide = np.where(everything & 0x7FFF > 0x7F80, np.uint32(0), everything) << np.uint32(16)
        body = f"cvt.rn.relu.{own}x2.f32 %d0, %a0, %a1;"
        inputs = {"a": np.concatenate([wide, wide[:, ::-1]])}
        yield WarpKernel(f"cvt.relu-{own}x2-f32", body, inputs, (1, 32))


def warp_wide() -> Iterator[WarpKernel]:
    """By all lanes, and by the first 20; equal values are likely, and certain in the first warp."""
    rng = np.random.default_rng(3)
    few = words(rng, 1) % (1 + np.arange(WARPS).repeat(WARP) // 2).astype(np.uint32)
    bit = np.uint32(1) << words(rng, 1) % np.uint32(32)
    for lanes, member in ((32, "-1"), (20, "0xfffff")):
        first = f"""mov.b32 %d0, 0;
.reg .pred %p, %q;
setp.lt.u32 %p, %lane, {lanes};
setp.ne.u32 %q, %lane, %lane;
@%p """
        for operation, own in (
            *itertools.product(("add", "min", "max"), ("u32", "s32")),
            *itertools.product(("and", "or", "xor"), ("b32",)),
        ):
            values = {"and": ~bit, "or": bit}.get(operation, words(rng, 1))
            body = f"{first}redux.sync.{operation}.{own} %d0, %a0, {member};"
            yield WarpKernel(f"redux-{operation}-{own}-{lanes}", body, {"a": values}, (1, 32))
        for bits in (32, 64):
            inputs = {"a": few.astype(f"u{bits // 8}") << (bits - 8)}
            body = f"{first}match.any.sync.b{bits} %d0, %a0, {member};"
            yield WarpKernel(f"match-any-b{bits}-{lanes}", body, inputs, (1, 32))
            body = f"{first}match.all.sync.b{bits} %d0|%q, %a0, {member};\nselp.b32 %d1, 1, 0, %q;"
            yield WarpKernel(f"match-all-b{bits}-{lanes}", body, inputs, (2, 32))


# Lanes with three masks in one instruction, as in a labeled partition.
THREE_GROUPS = """.reg .pred %p, %q; .reg .b32 %group, %member, %x;
rem.u32 %group, %lane, 3;
match.any.sync.b32 %member, %group, -1;
setp.eq.u32 %q, %lane, 99;
mov.b32 %d0, 0;
"""
# Lanes from 20 on end; the others wait for them, and for nothing that they do.
LANES_END = """.reg .pred %p, %q; .reg .b32 %x, %y;
mov.b32 %d0, 0;
setp.ge.u32 %q, %lane, 20;
@%q exit;
"""


def lanes_that_take_part() -> Iterator[WarpKernel]:
    """Groups of lanes with masks of their own, and lanes that have ended."""
    rng = np.random.default_rng(4)
    bit = np.uint32(1) << words(rng, 1) % np.uint32(32)
    for operation, own in (
        *itertools.product(("add", "min", "max"), ("u32", "s32")),
        *itertools.product(("and", "or", "xor"), ("b32",)),
    ):
        values = {"and": ~bit, "or": bit}.get(operation, words(rng, 1))
        redux = f"redux.sync.{operation}.{own} %d0, %a0,"
        for name, body in (
            ("groups", f"{THREE_GROUPS}{redux} %member;"),
            ("ended", f"{LANES_END}{redux} -1;"),
        ):
            yield WarpKernel(f"redux-{operation}-{own}-{name}", body, {"a": values}, (1, 32))
    # Equal in the first warps.
    few = {"a": words(rng, 1) % (1 + np.arange(WARPS).repeat(WARP) // 2).astype(np.uint32)}
    vote = "setp.eq.u32 %p, %a0, 0;\nvote.sync.{} {}, %p, {};"
    for name, begin, member in (
        ("groups", THREE_GROUPS, "%member"),
        ("ended", LANES_END, "-1"),
    ):
        for mode in ("all", "any", "uni"):
            body = begin + vote.format(f"{mode}.pred", "%q", member) + "\nselp.b32 %d0, 1, 0, %q;"
            yield WarpKernel(f"vote-{mode}-{name}", body, few, (1, 32))
        for does, instruction in (
            ("vote-ballot", vote.format("ballot.b32", "%d0", member)),
            ("match-any", f"match.any.sync.b32 %d0, %a0, {member};"),
            ("match-all", f"match.all.sync.b32 %d0, %a0, {member};"),
            ("elect", f"elect.sync %d0|%q, {member};"),
        ):
            yield WarpKernel(f"{does}-{name}", f"{begin}{instruction}", few, (1, 32))
    # Lane 19 is the last that is left; lanes from 17 on are out of range of their segment.
    for mode, operands in (
        ("idx", "19, 31"),
        ("down", "1, 0x1013"),
        ("up", "3, 0"),
        ("bfly", "3, 31"),
    ):
        body = f"{LANES_END}shfl.sync.{mode}.b32 %d0, %a0, {operands}, -1;"
        yield WarpKernel(f"shfl-{mode}-ended", body, {"a": words(rng, 1)}, (1, 32))


def half_warp_trees() -> Iterator[WarpKernel]:
    """Sums of 16 lanes, whose lanes from 8 on read lanes that take no part."""
    inputs = {"a": words(np.random.default_rng(5), 1)}
    declared = ".reg .pred %p, %q; .reg .b32 %x, %y;\nmov.b32 %y, %a0;\nmov.b32 %d0, 0;\n"
    half, result = "setp.ge.u32 %q, %lane, 16;\n", "setp.eq.u32 %p, %lane, 0;\n@%p mov.b32 %d0, %y;"
    for name, begin, guard, mask in (
        ("ended", "@%q exit;", "", "-1"),
        ("not-named", "@%q bra END;", "", "0xffff"),
        ("predicated-off", "", "@!%q ", "0xffff"),
        ("two-groups", "selp.b32 %d0, 0xffff0000, 0xffff, %q;", "", "%d0"),
    ):
        steps = [
            f"{guard}shfl.sync.down.b32 %x, %y, {n}, 31, {mask};\nadd.u32 %y, %y, %x;"
            for n in (8, 4, 2, 1)
        ]
        clear = "mov.b32 %d0, 0;"
        body = "\n".join([declared + half + begin, *steps, clear, result, "END:"])
        yield WarpKernel(f"tree-{name}", body, inputs, (1, 32))


CASES = [*mma_cases(), *itertools.starmap(wmma, wmma_forms()), *wmma_f32_as_f16()]
CASES += [
    *matrix_moves(),
    *matrix_accesses_in_turns(),
    *fp8_conversions(),
    *clamped_at_zero(),
    *warp_wide(),
]
ROUNDED = [
    (form, mma(form, lambda rng, count: rng.normal(size=count)))
    for form in mma_forms()
    if form[3] in SMALLEST and form[1] == "row.col"
]


@pytest.fixture(autouse=True, scope="module")
def hopper(cuda_device: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda_device) < (9, 0):
        pytest.skip("these kernels need compute capability 9.0")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_outputs_are_equal_bit_by_bit(case: WarpKernel) -> None:
    ours, theirs = case.simulated(), case.on_gpu()
    differ = [tuple(at) for at in np.argwhere(ours != theirs)]
    shown = [f"({at[0]}, {at[1]}): {theirs[at]:#x}, not {ours[at]:#x}" for at in differ[:8]]
    found = f"{len(differ)} of {ours.size} words; (register, thread): {'; '.join(shown)}"
    assert not differ, found


@pytest.mark.parametrize(("form", "case"), ROUNDED, ids=lambda x: getattr(x, "name", ""))
def test_random_sums_differ_by_rounding_alone(form: Form, case: WarpKernel) -> None:
    """PTX ISA 9.0, "mma": sums are made with at least the precision of C and D, in any order and
    rounded any way. So each of k additions, the conversion to D, and the simulator's own rounding
    errs by at most u = 2^-23 (f16: 2^-10) of a number that is no larger than the sum of the terms'
    magnitudes: by n u / (1 - n u) of it in all (Higham 2002, lemma 3.1), n = k + 2. The simulator
    sums the magnitudes, and rounds that sum too: n = k + 3."""
    shape, _, d, a, _, _ = form
    dtype, u = (np.float16, 2.0**-10) if d == "f16" else (np.float32, 2.0**-23)
    sign = {"a": BITS[a], "b": BITS[a], "c": BITS[d]}
    clear = {x: np.uint32(sum(1 << i for i in range(32) if (i + 1) % n)) for x, n in sign.items()}
    positive = replace(case, inputs={x: case.inputs[x] & clear[x] for x in "abc"})
    ours, theirs, magnitudes = (
        x.view(dtype).astype(np.float64)
        for x in (case.simulated(), case.on_gpu(), positive.simulated())
    )
    n = shape_of(shape)[2] + 3
    difference = np.abs(ours - theirs) / magnitudes
    bound = n * u / (1 - n * u)
    count, most = (difference > 0).sum(), difference.max() / u
    print(f"{case.name}: {count} of {ours.size} sums differ, by {most:.3f} u of {bound / u:.1f} u")
    assert difference.max() <= bound
