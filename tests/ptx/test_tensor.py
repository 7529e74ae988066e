"""Matrix instructions: the place of each element is computed here from the PTX ISA's formulas."""

import re
from typing import ClassVar

import numpy as np
import pytest
from ptx_snippets import entry, evaluate, launch_on

from flash_helpers.ptx import Run, UnsupportedInstruction, load_ptx

LANES = np.arange(32)
GROUP, IN_GROUP = LANES >> 2, LANES % 4  # the ISA's groupID and threadID_in_group


def run_warp(
    instruction: str, inputs: list[np.ndarray], n_outputs: int, wide: bool = False
) -> np.ndarray:
    """Runs one instruction in one warp; returns the registers {o}, (outputs, 32) words.

    inputs: the registers of {0}, {1}, ..., each (registers, 32) words of 32 bits, or of 64 if wide.
    """
    bits, size = (64, 8) if wide else (32, 4)
    declarations, code, names = [".reg .b32 %thread; .reg .b64 %at;"], [], []
    for i, registers in enumerate(inputs):
        own = [f"%i{i}_{j}" for j in range(len(registers))]
        names.append("{" + ", ".join(own) + "}")
        declarations.append(f".reg .b{bits} {', '.join(own)};")
        code.append(f"ld.param.u64 %at, [p{i}];\nmad.wide.u32 %at, %thread, {size}, %at;")
        code += [f"ld.global.b{bits} {name}, [%at+{32 * size * j}];" for j, name in enumerate(own)]
    out = [f"%o{j}" for j in range(n_outputs)]
    declarations.append(f".reg .b{bits} {', '.join(out)};" if out else "")
    code.insert(0, "mov.u32 %thread, %tid.x;")
    code.append(instruction.format(*names, o="{" + ", ".join(out) + "}"))
    code.append(f"ld.param.u64 %at, [p_out];\nmad.wide.u32 %at, %thread, {size}, %at;")
    code += [f"st.global.b{bits} [%at+{32 * size * j}], {name};" for j, name in enumerate(out)]
    parameters = ", ".join(f".param .u64 p{name}" for name in (*range(len(inputs)), "_out"))
    dtype = np.dtype(f"u{size}")
    arrays = [np.ascontiguousarray(x).view(dtype) for x in inputs]
    arrays.append(np.zeros((n_outputs, 32), dtype))
    return launch_on(entry("\n".join(code), parameters, "\n".join(declarations)), arrays)[1][-1]


class TestStmatrix:
    """PTX ISA 9.0, "stmatrix": lane 8 i + r gives the address of row r of matrix i; lane l holds
    elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, of each matrix."""

    @pytest.mark.parametrize("count", [1, 2, 4])
    @pytest.mark.parametrize("trans", ["", ".trans"])
    def test_elements_land_where_the_isa_says(self, count, trans):
        rng = np.random.default_rng(count)
        registers = rng.integers(0, 1 << 32, (count, 32), np.uint64).astype(np.uint32)
        # Each lane reads back the row whose address it gave.
        body = f"""
        .shared .align 16 .b8 tile[1024]; .reg .b32 %row; .reg .pred %gives;
        shl.b32 %row, %thread, 5;
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%row], {{0}};
        bar.warp.sync -1;
        mov.b64 {{{{%o0, %o1}}}}, 0;
        mov.b64 {{{{%o2, %o3}}}}, 0;
        setp.lt.u32 %gives, %thread, {8 * count};
        @%gives ld.shared.v4.b32 {{o}}, [%row];
        """
        rows = run_warp(body, [registers], 4)
        halves = np.ascontiguousarray(rows.T).view(np.uint16)  # (32 lanes, 8 elements)
        given = np.ascontiguousarray(registers).view(np.uint16).reshape(count, 32, 2)
        for matrix in range(count):
            for lane in range(32):
                for element in range(2):
                    row, column = lane // 4, 2 * (lane % 4) + element
                    if trans:
                        row, column = column, row
                    assert halves[8 * matrix + row, column] == given[matrix, lane, element]


def pieces(raw: np.ndarray, bits: int) -> np.ndarray:
    """Elements of `bits` bits packed into registers, the first one lowest.

    raw: (32 lanes, elements), unsigned. Returns (registers, 32) words of 32 bits.
    """
    raw = raw.astype(np.uint64).reshape(32, -1, 32 // bits)
    shifts = np.arange(32 // bits, dtype=np.uint64) * np.uint64(bits)
    return (raw << shifts).sum(axis=2, dtype=np.uint64).astype(np.uint32).T


def value_of_fp8(code: int, exponent_bits: int) -> float:
    """PTX ISA 9.0, "Alternate Floating-Point Data Formats", written out by hand."""
    fraction_bits = 7 - exponent_bits
    exponent, fraction = code >> fraction_bits & (1 << exponent_bits) - 1, code % 2**fraction_bits
    sign, bias = (-1.0) ** (code >> 7), 2 ** (exponent_bits - 1) - 1
    if exponent == 0:
        return sign * fraction / 2**fraction_bits * 2.0 ** (1 - bias)
    return sign * (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias)


FP8 = {
    "e4m3": np.array([value_of_fp8(code, 4) for code in range(256)]),
    "e5m2": np.array([value_of_fp8(code, 5) for code in range(256)]),
}
FP8["e4m3"][[0x7F, 0xFF]] = np.nan
FP8["e5m2"][[0x7C, 0xFC]] = np.inf, -np.inf
FP8["e5m2"][[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
BITS = {"b1": 1, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "f16": 16, "bf16": 16,
        "tf32": 32}  # fmt: skip


def elements(rng: np.random.Generator, type_name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random elements as they are stored."""
    if type_name in FP8:
        codes = rng.integers(0, 256, shape)
        return np.where(np.isfinite(FP8[type_name][codes]), codes, 0x35)
    if type_name == "f16":
        return (rng.integers(-64, 65, shape) / 8).astype(np.float16).view(np.uint16)
    if type_name in ("bf16", "tf32"):
        bits = (rng.integers(-64, 65, shape) / 8).astype(np.float32).view(np.uint32)
        return bits >> 16 if type_name == "bf16" else bits
    return rng.integers(0, 1 << BITS[type_name], shape)


def values(raw: np.ndarray, type_name: str) -> np.ndarray:
    """The values of the elements."""
    if type_name in FP8:
        return FP8[type_name][raw]
    if type_name == "f16":
        return raw.astype(np.uint16).view(np.float16).astype(float)
    if type_name in ("bf16", "tf32"):
        bits = raw.astype(np.uint32) << np.uint32(16) if type_name == "bf16" else raw
        return bits.astype(np.uint32).view(np.float32).astype(float)
    sign = 1 << BITS[type_name] - 1
    return np.where((raw >= sign) & (type_name[0] == "s"), raw - 2 * sign, raw).astype(float)


# (row, column) of element i of A, and (row, column) of element i of B, from the section "Matrix
# Fragments for mma.<shape>" of each.
G, T = GROUP, IN_GROUP
PLACES = {
    ("m8n8k16", 8): (lambda i: (G, T * 4 + i), lambda i: (T * 4 + i, G)),
    ("m8n8k32", 4): (lambda i: (G, T * 8 + i), lambda i: (T * 8 + i, G)),
    ("m8n8k128", 1): (lambda i: (G, T * 32 + i), lambda i: (T * 32 + i, G)),
    ("m16n8k16", 8): (
        lambda i: (G + 8 * (i >= 4), T * 4 + (i & 3)),
        lambda i: (T * 4 + i, G),
    ),
    ("m16n8k32", 8): (
        lambda i: (G + 8 * (4 <= i < 8 or i >= 12), T * 4 + (i & 3) + 16 * (i >= 8)),
        lambda i: (T * 4 + (i & 3) + 16 * (i >= 4), G),
    ),
    ("m16n8k32", 4): (
        lambda i: (G + 8 * (i >= 8), T * 8 + (i & 7)),
        lambda i: (T * 8 + i, G),
    ),
    ("m16n8k64", 4): (
        lambda i: (G + 8 * (8 <= i < 16 or i >= 24), T * 8 + (i & 7) + 32 * (i >= 16)),
        lambda i: (T * 8 + (i & 7) + 32 * (i >= 8), G),
    ),
    ("m16n8k128", 1): (
        lambda i: (G + 8 * (i >= 32), T * 32 + (i & 31)),
        lambda i: (T * 32 + i, G),
    ),
    ("m16n8k256", 1): (
        lambda i: (G + 8 * (32 <= i < 64 or i >= 96), T * 32 + (i & 31) + 128 * (i >= 64)),
        lambda i: (T * 32 + (i & 31) + 128 * (i >= 32), G),
    ),
    ("m16n8k16", 16): (
        lambda i: (G + 8 * (i in (2, 3, 6, 7)), T * 2 + (i & 1) + 8 * (i >= 4)),
        lambda i: (T * 2 + (i & 1) + 8 * (i >= 2), G),
    ),
}


def place_of_c(i: int) -> tuple[np.ndarray, np.ndarray]:
    return G + 8 * (i >= 2), T * 2 + (i & 1)


def matrix(lanes: np.ndarray, place, rows: int, columns: int) -> np.ndarray:
    """lanes: (32, elements)."""
    found = np.full((rows, columns), np.nan)
    for i in range(lanes.shape[1]):
        found[place(i)] = lanes[:, i]
    assert not np.isnan(found).any()
    return found


def size(shape: str) -> tuple[int, int, int]:
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


class TestMma:
    INTEGERS = (
        ("m8n8k16", "s8", "u8"), ("m16n8k16", "u8", "s8"), ("m16n8k32", "s8", "s8"),
        ("m8n8k32", "s4", "u4"), ("m16n8k32", "s4", "s4"), ("m16n8k32", "u4", "s4"),
        ("m16n8k64", "s4", "u4"), ("m16n8k64", "u4", "u4"),
    )  # fmt: skip
    FLOATS = (
        ("m16n8k16", "f16", "f16", "f32"), ("m16n8k16", "bf16", "bf16", "f32"),
        ("m16n8k16", "e4m3", "e4m3", "f32"), ("m16n8k16", "e5m2", "e4m3", "f16"),
        ("m16n8k32", "e4m3", "e4m3", "f32"), ("m16n8k32", "e4m3", "e5m2", "f32"),
        ("m16n8k32", "e5m2", "e5m2", "f32"), ("m16n8k32", "e4m3", "e4m3", "f16"),
    )  # fmt: skip

    def factors(self, rng, shape: str, a_type: str, b_type: str):
        """Registers and matrices of A and B."""
        m, n, k = size(shape)
        places = PLACES[shape, BITS[a_type]]
        found = []
        for place, type_name, rows, columns in zip(
            places, (a_type, b_type), (m, k), (k, n), strict=True
        ):
            raw = elements(rng, type_name, (32, rows * columns // 32))
            found.append(pieces(raw, BITS[type_name]))
            found.append(matrix(values(raw, type_name), place, rows, columns))
        return found

    @pytest.mark.parametrize(("shape", "a_type", "b_type"), INTEGERS)
    def test_integers(self, shape, a_type, b_type):
        rng = np.random.default_rng(1)
        a, matrix_a, b, matrix_b = self.factors(rng, shape, a_type, b_type)
        c = rng.integers(-1000, 1000, (2 * size(shape)[0] // 8, 32)).astype(np.int32)
        mma = f"mma.sync.aligned.{shape}.row.col.satfinite.s32.{a_type}.{b_type}.s32"
        d = run_warp(f"{mma} {{o}}, {{0}}, {{1}}, {{2}};", [a, b, c], len(c)).view(np.int32)
        expected = matrix_a @ matrix_b + matrix(c.T, place_of_c, size(shape)[0], 8)
        np.testing.assert_array_equal(matrix(d.T, place_of_c, size(shape)[0], 8), expected)

    @pytest.mark.parametrize("shape", ["m8n8k128", "m16n8k128", "m16n8k256"])
    @pytest.mark.parametrize("operation", ["xor", "and"])
    def test_single_bits(self, shape, operation):
        rng = np.random.default_rng(2)
        a, matrix_a, b, matrix_b = self.factors(rng, shape, "b1", "b1")
        c = rng.integers(-1000, 1000, (2 * size(shape)[0] // 8, 32)).astype(np.int32)
        mma = f"mma.sync.aligned.{shape}.row.col.s32.b1.b1.s32.{operation}.popc"
        d = run_warp(f"{mma} {{o}}, {{0}}, {{1}}, {{2}};", [a, b, c], len(c)).view(np.int32)
        combine = {"xor": np.not_equal, "and": np.multiply}[operation]
        popc = combine(matrix_a[:, :, None], matrix_b[None, :, :]).sum(axis=1)
        expected = popc + matrix(c.T, place_of_c, size(shape)[0], 8)
        np.testing.assert_array_equal(matrix(d.T, place_of_c, size(shape)[0], 8), expected)

    @pytest.mark.parametrize(("shape", "a_type", "b_type", "c_type"), FLOATS)
    def test_floats(self, shape, a_type, b_type, c_type):
        rng = np.random.default_rng(3)
        a, matrix_a, b, matrix_b = self.factors(rng, shape, a_type, b_type)
        dtype = {"f16": np.float16, "f32": np.float32}[c_type]
        c = rng.integers(-8, 9, (32, 4)).astype(dtype)
        mma = f"mma.sync.aligned.{shape}.row.col.{c_type}.{a_type}.{b_type}.{c_type}"
        registers = c.view(np.uint32).T
        d = run_warp(f"{mma} {{o}}, {{0}}, {{1}}, {{2}};", [a, b, registers], len(registers))
        got = np.ascontiguousarray(d.T).view(dtype)
        with np.errstate(over="ignore"):
            # Sums of products of 8-bit floats are exact in float64, and rounded once.
            expected = (matrix_a @ matrix_b + matrix(c, place_of_c, 16, 8)).astype(dtype)
        np.testing.assert_array_equal(matrix(got, place_of_c, 16, 8), expected)

    @pytest.mark.parametrize("k", [4, 8, 16])
    def test_doubles(self, k):
        rng = np.random.default_rng(4)
        a, b, c = (rng.integers(-99, 99, (n, 32)) / 4 for n in (k // 2, k // 4, 4))
        mma = f"mma.sync.aligned.m16n8k{k}.row.col.f64.f64.f64.f64"
        d = run_warp(f"{mma} {{o}}, {{0}}, {{1}}, {{2}};", [a, b, c], 4, wide=True)
        matrix_a = matrix(a.T, lambda i: (G + 8 * (i & 1), T + 4 * (i // 2)), 16, k)
        matrix_b = matrix(b.T, lambda i: (T + 4 * i, G), k, 8)
        expected = matrix_a @ matrix_b + matrix(c.T, place_of_c, 16, 8)
        got = matrix(d.view(np.float64).T, place_of_c, 16, 8)
        np.testing.assert_array_equal(got, expected)

    @pytest.mark.parametrize("a_layout", ["row", "col"])
    @pytest.mark.parametrize("b_layout", ["row", "col"])
    @pytest.mark.parametrize(("d_type", "c_type"), [("f32", "f32"), ("f16", "f16"), ("f32", "f16")])
    def test_four_products_of_quads(self, a_layout, b_layout, d_type, c_type):
        """ "Matrix Fragments for mma.m8n8k4 with .f16 floating point type"."""
        rng = np.random.default_rng(5)
        a, b = ((rng.integers(-64, 65, (32, 4)) / 8).astype(np.float16) for _ in range(2))
        dtypes = {"f16": np.float16, "f32": np.float32}
        c = rng.integers(-8, 9, (32, 8)).astype(dtypes[c_type])
        mma = f"mma.sync.aligned.m8n8k4.{a_layout}.{b_layout}.{d_type}.f16.f16.{c_type}"
        registers = [x.view(np.uint32).T for x in (a, b, c)]
        d = run_warp(f"{mma} {{o}}, {{0}}, {{1}}, {{2}};", registers, 4 if d_type == "f16" else 8)
        d = np.ascontiguousarray(d.T).view(dtypes[d_type])

        def place_in_c(lane: int, i: int, type_name: str) -> tuple[int, int]:
            if type_name == "f16":
                return lane % 4 + 4 * (lane >= 16), i
            row = (lane & 0b1) + (i & 0b10) + 4 * (lane >= 16)
            return row, (i & 0b100) + (lane & 0b10) + (i & 0b1)

        for quad in range(4):
            lanes = [*range(4 * quad, 4 * quad + 4), *range(4 * quad + 16, 4 * quad + 20)]
            matrix_a, matrix_b, sums = np.zeros((8, 4)), np.zeros((4, 8)), np.zeros((8, 8))
            got = np.full((8, 8), np.nan)
            for lane in lanes:
                high = 4 * (lane >= 16)
                for i in range(4):
                    if a_layout == "row":
                        matrix_a[lane % 4 + high, i] = a[lane, i]
                    else:
                        matrix_a[i + high, lane % 4] = a[lane, i]
                    if b_layout == "row":
                        matrix_b[lane % 4, i + high] = b[lane, i]
                    else:
                        matrix_b[i, lane % 4 + high] = b[lane, i]
                for i in range(8):
                    sums[place_in_c(lane, i, c_type)] = c[lane, i]
                    got[place_in_c(lane, i, d_type)] = d[lane, i]
            expected = (matrix_a @ matrix_b + sums).astype(dtypes[d_type])
            np.testing.assert_array_equal(got, expected)

    @pytest.mark.parametrize(
        ("opcode", "counts", "words"),
        [
            ("m16n8k16.row.col.f32.f16.bf16.f32", (4, 4, 2, 4), "f16 with bf16"),
            ("m16n8k16.row.col.f32.s8.s8.s32", (4, 2, 1, 4), "sums of s8 are s32"),
            ("m16n8k16.row.col.f16.bf16.bf16.f16", (2, 4, 2, 2), "sums of bf16 are f32"),
            ("m16n8k128.row.col.s32.b1.b1.s32", (4, 2, 1, 4), "single bits take .xor.popc"),
            ("m16n8k8.row.col.s32.s8.s8.s32", (4, 2, 1, 4), "known for f16, bf16, tf32, f64"),
        ],
    )
    def test_products_that_the_isa_does_not_have(self, opcode, counts, words):
        fragments = ", ".join("{" + ", ".join(["%r"] * n) + "}" for n in counts)
        text = entry(f"mma.sync.aligned.{opcode} {fragments};", "", ".reg .b32 %r;")
        with pytest.raises(UnsupportedInstruction, match=re.escape(words)):
            load_ptx(text).kernel("k").launch(1, 32)


class TestWmma:
    """Fragments may be scaled element by element, and that is all that is known of them."""

    # Types and registers of A, B and C, by the tables of "Matrix Fragments for WMMA".
    CASES = (
        ("m16n16k16", "f16", "f32", 8, 8, 8), ("m16n16k16", "f16", "f16", 8, 8, 4),
        ("m32n8k16", "f16", "f32", 8, 8, 8), ("m8n32k16", "f16", "f16", 8, 8, 4),
        ("m16n16k16", "bf16", "f32", 4, 4, 8), ("m32n8k16", "bf16", "f32", 8, 2, 8),
        ("m8n32k16", "bf16", "f32", 2, 8, 8), ("m16n16k8", "tf32", "f32", 4, 4, 8),
        ("m16n16k16", "s8", "s32", 2, 2, 8), ("m16n16k16", "u8", "s32", 2, 2, 8),
        ("m32n8k16", "s8", "s32", 4, 1, 8), ("m8n32k16", "u8", "s32", 1, 4, 8),
    )  # fmt: skip
    NUMPY: ClassVar = {"f16": np.float16, "f32": np.float32, "tf32": np.float32, "s32": np.int32,
             "s8": np.int8, "u8": np.uint8}  # fmt: skip

    def run(self, body: str, registers: str, arrays: list[np.ndarray]) -> tuple[Run, np.ndarray]:
        """Runs a body whose %a, %b and %c point to copies of the arrays, in that order; the run,
        and what the last copy holds then."""
        names = "abc"[: len(arrays)]
        parameters = ", ".join(f".param .u64 p{name}" for name in names)
        loads = "".join(f"ld.param.u64 %{name}, [p{name}];\n" for name in names)
        text = entry(loads + body, parameters, ".reg .b64 %a, %b, %c;\n" + registers)
        run, found = launch_on(text, arrays)
        return run, found[-1]

    def stored(self, x: np.ndarray, type_name: str, layout: str, stride: int) -> np.ndarray:
        """A matrix in memory, with `stride` elements from line to line."""
        lines = x if layout == "row" else x.T
        if type_name == "bf16":
            lines = (lines.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            lines = lines.astype(self.NUMPY[type_name])
        padded = np.zeros((len(lines), stride), lines.dtype)
        padded[:, : lines.shape[1]] = lines
        return padded

    @pytest.mark.parametrize(("shape", "type_name", "c_type", "n_a", "n_b", "n_c"), CASES)
    @pytest.mark.parametrize(
        "layouts", ["row row col", "col row row", "row col row", "col col col"]
    )
    @pytest.mark.parametrize("space", ["", ".global", ".shared"])
    def test_products(self, shape, type_name, c_type, n_a, n_b, n_c, layouts, space):
        m, n, k = size(shape)
        a_layout, b_layout, c_layout = layouts.split()
        rng = np.random.default_rng(6)
        low = 0 if type_name == "u8" else -8
        a, b, c = (rng.integers(low, 9, s).astype(float) for s in ((m, k), (k, n), (m, n)))
        strides = [40, 48, 56]
        data = [
            self.stored(*x, stride)
            for x, stride in zip(
                ((a, type_name, a_layout), (b, type_name, b_layout), (c, c_type, c_layout)),
                strides,
                strict=True,
            )
        ]
        # Copied 128 bytes at a time.
        arrays = [np.pad(x.reshape(-1).view(np.uint8), (0, 128)) for x in data]

        def vector(name: str, count: int) -> str:
            return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"

        products = {"s32": f"s32.{type_name}.{type_name}.s32", "f16": "f16.f16"}
        kinds = products.get(c_type, "f32.f32" if type_name == "f16" else
                             f"f32.{type_name}.{type_name}.f32")  # fmt: skip
        twice = {"s32": "add.s32", "f16": "add.f16x2", "f32": "add.f32"}[c_type]
        copies, places = [], ["%a", "%b", "%c"]
        if space == ".shared":
            places = ["%sa", "%sb", "%sc"]
            for i, x in enumerate(data):
                offset = 8192 * i
                copies.append(
                    f"mov.u32 {places[i]}, tile;\nadd.u32 {places[i]}, {places[i]}, {offset};"
                )
                for start in range(0, x.nbytes, 128):
                    copies.append(f"""
                    mad.wide.u32 %at, %lane, 4, %{"abc"[i]};
                    ld.global.b32 %word, [%at+{start}];
                    mad.lo.u32 %to, %lane, 4, {places[i]};
                    st.shared.b32 [%to+{start}], %word;""")
            copies.append("bar.sync 0;")
        load = f"sync.aligned.{{}}.{shape}{space}"
        scaled = "\n".join(f"{twice} %d{i}, %d{i}, %d{i};" for i in range(n_c))
        registers = """
        .reg .b32 %fa<8>, %fb<8>, %fc<8>, %d<8>, %lane, %word, %to, %sa, %sb, %sc;
        .reg .b64 %at;
        .shared .align 128 .b8 tile[24576];
        """
        body = f"""
        mov.u32 %lane, %tid.x;
        {"".join(copies)}
        wmma.load.a.{load.format(a_layout)}.{type_name} {vector("fa", n_a)}, [{places[0]}], 40;
        wmma.load.b.{load.format(b_layout)}.{type_name} {vector("fb", n_b)}, [{places[1]}], 48;
        wmma.load.c.{load.format(c_layout)}.{c_type} {vector("fc", n_c)}, [{places[2]}], 56;
        wmma.mma.sync.aligned.{a_layout}.{b_layout}.{shape}.{kinds} {vector("d", n_c)},
            {vector("fa", n_a)}, {vector("fb", n_b)}, {vector("fc", n_c)};
        {scaled}
        wmma.store.d.sync.aligned.{c_layout}.{shape}.global.{c_type} [%c], {vector("d", n_c)}, 56;
        """
        run, found = self.run(body, registers, arrays)
        got = found[: data[2].nbytes].view(data[2].dtype).reshape(data[2].shape)
        expected = self.stored(2 * (a @ b + c), c_type, c_layout, 56)
        np.testing.assert_array_equal(got, expected)
        assert (run.counters.total.mma, run.counters.total.mma_flops) == (1, 2 * m * n * k)

    def test_sums_of_16_and_32_bits_have_the_same_elements(self):
        rng = np.random.default_rng(9)
        c = rng.integers(-99, 99, (16, 16)).astype(np.float32)
        halves = "\n".join(f"cvt.rn.f16x2.f32 %h{i}, %f{2 * i + 1}, %f{2 * i};" for i in range(4))
        body = f"""
        wmma.load.c.sync.aligned.row.m16n16k16.f32
            {{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}}, [%a], 16;
        {halves}
        wmma.store.d.sync.aligned.row.m16n16k16.f16 [%b], {{%h0, %h1, %h2, %h3}}, 16;
        """
        _, found = self.run(body, ".reg .b32 %f<8>, %h<4>;", [c, np.zeros((16, 16), np.float16)])
        np.testing.assert_array_equal(found, c)

    def test_the_stride_may_be_left_out(self):
        rng = np.random.default_rng(7)
        a, b, c = (rng.integers(-99, 99, s) / 4 for s in ((8, 4), (4, 8), (8, 8)))
        body = """
        wmma.load.a.sync.aligned.row.m8n8k4.f64 {%fa}, [%a];
        wmma.load.b.sync.aligned.row.m8n8k4.f64 {%fb}, [%b];
        wmma.load.c.sync.aligned.row.m8n8k4.f64 {%fc0, %fc1}, [%c];
        wmma.mma.sync.aligned.row.row.m8n8k4.f64.f64.f64.f64.rn
            {%fc0, %fc1}, {%fa}, {%fb}, {%fc0, %fc1};
        wmma.store.d.sync.aligned.row.m8n8k4.f64 [%c], {%fc0, %fc1};
        """
        _, found = self.run(body, ".reg .f64 %fa, %fb, %fc<2>;", [a, b, c])
        np.testing.assert_array_equal(found, a @ b + c)

    @pytest.mark.parametrize("type_name", ["s4", "u4", "b1"])
    def test_elements_below_a_byte(self, type_name):
        rng, bits = np.random.default_rng(8), BITS[type_name]
        k = 128 // bits
        a, b = (elements(rng, type_name, (8, k)) for _ in range(2))
        packed = [
            np.packbits(x.astype(np.uint8)[..., None] >> np.arange(bits) & 1, bitorder="little")
            for x in (a, b)
        ]
        operation = "xor.popc." if type_name == "b1" else ""
        body = f"""
        mov.b64 {{%d0, %d1}}, 0;
        wmma.load.a.sync.aligned.row.m8n8k{k}.global.{type_name} {{%fa}}, [%a], {k};
        wmma.load.b.sync.aligned.col.m8n8k{k}.global.{type_name} {{%fb}}, [%b], {k};
        wmma.mma.{operation}sync.aligned.row.col.m8n8k{k}.s32.{type_name}.{type_name}.s32
            {{%d0, %d1}}, {{%fa}}, {{%fb}}, {{%d0, %d1}};
        wmma.store.d.sync.aligned.row.m8n8k{k}.global.s32 [%c], {{%d0, %d1}}, 8;
        """
        _, found = self.run(body, ".reg .b32 %fa, %fb, %d<2>;", [*packed, np.zeros((8, 8), "i4")])
        if type_name == "b1":
            expected = (a[:, None, :] != b[None, :, :]).sum(axis=2)
        else:
            expected = values(a, type_name) @ values(b, type_name).T
        np.testing.assert_array_equal(found, expected)


class TestFp8:
    """cvt of e4m3x2 and e5m2x2, for every code."""

    @pytest.mark.parametrize("type_name", ["e4m3", "e5m2"])
    @pytest.mark.parametrize("relu", ["", ".relu"])
    def test_to_halves(self, type_name, relu):
        codes = np.arange(256).reshape(4, 32, 2)
        for pairs in codes:
            packed = (pairs[:, 0] | pairs[:, 1] << 8).astype(np.uint16)
            got = evaluate(
                f"cvt.rn{relu}.f16x2.{type_name}x2 %d, %a;", {"a": ("b16", packed)}, "b32"
            )
            exact = FP8[type_name][pairs]
            exact = np.where(exact <= 0, 0, exact) if relu else exact  # -0 too
            expected = np.where(np.isnan(exact), 0x7FFF, exact.astype(np.float16).view(np.uint16))
            np.testing.assert_array_equal(got.view(np.uint16).reshape(32, 2), expected)

    @pytest.mark.parametrize("type_name", ["e4m3", "e5m2"])
    @pytest.mark.parametrize("source", ["f32", "f16x2"])
    def test_from_every_number_and_what_lies_between(self, type_name, source):
        numbers = np.unique(FP8[type_name][np.isfinite(FP8[type_name])])
        halfway = (numbers[:-1] + numbers[1:]) / 2
        x = np.concatenate([numbers, halfway, [-0.0]])
        if source == "f32":
            near = halfway.astype(np.float32)
            below, above = (np.nextafter(near, np.float32(s * np.inf)) for s in (-1, 1))
            x = np.concatenate([x, below, above, [1e9, -1e9, np.inf, -np.inf, np.nan]])
        else:
            x = np.concatenate([x, [np.inf, -np.inf, np.nan]])
            x = x[x.astype(np.float16) == x.astype(np.float64)]
        x = np.resize(x, -(-x.size // 32) * 32)
        for lanes in x.reshape(-1, 32):
            expected = [self.nearest(value, type_name) for value in lanes]
            if source == "f32":
                inputs = {"a": ("f32", lanes), "b": ("f32", lanes[::-1])}
                body = f"cvt.rn.satfinite.{type_name}x2.f32 %d, %a, %b;"
                expected = [a << 8 | b for a, b in zip(expected, expected[::-1], strict=True)]
            else:
                halves = np.stack([lanes, lanes[::-1]], axis=1).astype(np.float16)
                inputs = {"a": ("b32", halves.view(np.uint32).reshape(-1))}
                body = f"cvt.rn.satfinite.{type_name}x2.f16x2 %d, %a;"
                expected = [a | b << 8 for a, b in zip(expected, expected[::-1], strict=True)]
            np.testing.assert_array_equal(evaluate(body, inputs, "b16"), expected)

    def nearest(self, x: float, type_name: str) -> int:
        """By looking at every number."""
        if np.isnan(x):
            return 0x7F
        numbers = {
            code: v for code, v in enumerate(FP8[type_name]) if np.isfinite(v) and code < 128
        }
        x, sign = np.float64(x), 0x80 if np.signbit(x) else 0
        magnitude = min(abs(x), max(numbers.values()))
        return sign | min(numbers, key=lambda code: (abs(numbers[code] - magnitude), code & 1))

    def test_relu(self):
        inputs = {"a": ("f32", [-1.0, 1.0]), "b": ("f32", [2.0, -2.0])}
        body = "cvt.rn.satfinite.relu.e4m3x2.f32 %d, %a, %b;"
        np.testing.assert_array_equal(evaluate(body, inputs, "b16")[:2], [0x0040, 0x3800])
