"""mma, ldmatrix, stmatrix and movmatrix (PTX ISA 9.0, "Warp-Level Matrix Instructions").

Fragments ("Matrix Fragments for mma.m16n8k16" and those of the other shapes). With g = lane / 4 and
t = lane % 4, a 32-bit register of a fragment holds e consecutive elements (e = 32 for single bits,
8 for 4-bit types, 4 for 8-bit ones, 2 for 16-bit ones, 1 for tf32 and f64). Register i of A holds
row g + 8 (i % 2), columns e t ... of column block i / 2 (a block is 4 e wide); register i of B
holds column g and rows e t ... of row block i. C and D hold row g + 8 (i / 2), columns 2t and 2t +
1, as two registers, or as the halves of one for f16. So a register of a warp, reshaped to (8, 4 e),
is a block of the matrix. Only mma.m8n8k4 of f16 differs: it is four products at once.

Arithmetic. Products are exact and are summed with C in float64, then rounded once to the type of D.
The hardware sums groups of products in an accumulator of limited width and truncates, so its last
bit may differ; the PTX ISA leaves order and rounding open.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.module import Instruction, Operand
from flash_helpers.ptx.run.instructions.access import Port, addresses_of
from flash_helpers.ptx.run.instructions.forms import WARP_WIDE, Form
from flash_helpers.ptx.run.machine import Action, Alu, Computes, Machine, pick
from flash_helpers.ptx.run.memory.regions import WINDOWS, Selection
from flash_helpers.ptx.run.numbers.dtypes import dtype_of
from flash_helpers.ptx.run.numbers.elements import ELEMENTS, RAW, unpacked, values
from flash_helpers.ptx.run.numbers.rounding import F16, odd_f32

# Element types of A and B for each shape.
_SHAPES = {
    "m8n8k4": ("f64", "f16"),
    "m8n8k16": ("s8", "u8"),
    "m8n8k32": ("s4", "u4"),
    "m8n8k128": ("b1",),
    "m16n8k4": ("tf32", "f64"),
    "m16n8k8": ("f16", "bf16", "tf32", "f64"),
    "m16n8k16": ("f16", "bf16", "s8", "u8", "e4m3", "e5m2", "f64"),
    "m16n8k32": ("s8", "u8", "e4m3", "e5m2", "s4", "u4"),
    "m16n8k64": ("s4", "u4"),
    "m16n8k128": ("b1",),
    "m16n8k256": ("b1",),
}
# Types that C and D may have; types that A and B may have together.
_SUMS = {"f16": ("f16", "f32"), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32"), "f64": ("f64",)}
_SUMS |= {"bf16": ("f32",), "tf32": ("f32",)}
_MIXED = ({"s8", "u8"}, {"s4", "u4"}, {"e4m3", "e5m2"})


def check_types(machine: Machine, known: Sequence[str], types: Sequence[str]) -> None:
    """Refuses a product unless A and B have known types that go together, and C and D theirs.
    `types`: types of D, A, B and C."""
    d_type, a_type, b_type, c_type = types
    if not {a_type, b_type} <= set(known):
        raise machine.unsupported(f"this shape is known for {', '.join(known)}")
    if a_type != b_type and {a_type, b_type} not in _MIXED:
        raise machine.unsupported(f"{a_type} with {b_type}")
    sums = _SUMS.get(a_type, ("s32",))
    if not {d_type, c_type} <= set(sums):
        raise machine.unsupported(f"sums of {a_type} are {' or '.join(sums)}")


def matrix_of_a(registers: Sequence[np.ndarray], type_name: str, rows: int = 16) -> np.ndarray:
    """The matrix A, float64 (warps, rows, k), of its fragment's registers, one element per lane."""
    warps = registers[0].shape[0] // WARP
    width = 4 * ELEMENTS[type_name]
    row_blocks = rows // 8
    raw = np.empty((warps, rows, width * len(registers) // row_blocks), RAW[type_name])
    for i, register in enumerate(registers):
        row, column = 8 * (i % row_blocks), width * (i // row_blocks)
        block = unpacked(register, type_name).reshape(warps, 8, width)
        raw[:, row : row + 8, column : column + width] = block
    return values(raw, type_name)


def matrix_of_b(registers: Sequence[np.ndarray], type_name: str) -> np.ndarray:
    """The transpose of the matrix B, float64 (warps, 8 columns, k), of its fragment's registers."""
    return matrix_of_a(registers, type_name, rows=8)


def matrix_of_c(registers: Sequence[np.ndarray], type_name: str) -> np.ndarray:
    """The matrix C or D, float64 (warps, rows, 8), of its fragment's registers."""
    warps = registers[0].shape[0] // WARP
    row_blocks = len(registers) // accumulators(8, type_name)
    # of a lane the two columns
    raw = np.empty((warps, row_blocks, WARP, 2), dtype_of(type_name))
    for i, register in enumerate(registers):
        if type_name == "f16":
            raw[:, i] = np.ascontiguousarray(register).view(F16).reshape(warps, WARP, 2)
        else:
            raw[:, i // 2, :, i % 2] = register.reshape(warps, WARP)
    return raw.reshape(warps, -1, 8).astype(np.float64)


def accumulators(rows: int, type_name: str) -> int:
    """Registers of C or D, for each 8 columns."""
    return rows // 8 * (1 if type_name == "f16" else 2)


def registers_of_d(matrix: np.ndarray, type_name: str, saturate: bool) -> tuple[np.ndarray, ...]:
    """The fragment of a matrix (warps, rows, 8), rounded to its type."""
    if type_name == "f16":
        matrix = odd_f32(matrix)
    elif type_name == "s32":
        matrix = np.clip(matrix, -(1 << 31), (1 << 31) - 1) if saturate else matrix
        matrix = matrix.astype(np.int64)
    warps, rows, _ = matrix.shape
    raw = matrix.astype(dtype_of(type_name)).reshape(warps, rows // 8, WARP, 2)
    if type_name == "f16":
        return tuple(raw.view(np.uint32)[:, i].reshape(-1) for i in range(rows // 8))
    return tuple(raw[:, i // 2, :, i % 2].reshape(-1) for i in range(rows // 4))


def product(a: np.ndarray, b: np.ndarray, instruction: Instruction) -> np.ndarray:
    """A times the transpose of b; of single bits, how many differ (`.xor.popc`) or are both set."""
    found = a @ b.swapaxes(-1, -2)
    if instruction.has("xor"):
        return a.sum(axis=-1)[..., :, None] + b.sum(axis=-1)[..., None, :] - 2 * found
    return found


def for_all_lanes(registers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Registers with one element per lane: constants may have one element for all."""
    lanes = max(register.shape[0] for register in registers)
    return [r if r.shape[0] == lanes else np.repeat(r, lanes) for r in registers]


def _mma(machine: Machine, instruction: Instruction) -> Alu:
    shape = machine.one_of(_SHAPES)
    d_type, a_type, b_type, c_type = instruction.types
    check_types(machine, _SHAPES[shape], instruction.types)
    if a_type == "b1" and not (instruction.has("popc") and instruction.first(("xor", "and"))):
        raise machine.unsupported("single bits take .xor.popc or .and.popc")
    if shape == "m8n8k4" and a_type == "f16":
        return _mma_of_quads(machine, instruction)
    if d_type != c_type:
        raise machine.unsupported(f"D of {d_type} and C of {c_type} are due to be of one type")
    rows = 8 if shape.startswith("m8") else 16
    n_b = int(shape.rpartition("k")[2]) // (4 * ELEMENTS[a_type])
    n_a = rows // 8 * n_b
    counts = (accumulators(rows, d_type), n_a, n_b, accumulators(rows, c_type))
    d, a, b, c = map(machine.elements, instruction.operands, counts)
    saturate = instruction.has("satfinite")
    for register in a:
        machine.register(register)  # constants for all lanes may stand elsewhere only

    def compute(*registers: np.ndarray) -> tuple[np.ndarray, ...]:
        full = for_all_lanes(registers)
        matrix_b = matrix_of_b(full[n_a : n_a + n_b], b_type)
        matrix = product(matrix_of_a(full[:n_a], a_type, rows), matrix_b, instruction)
        matrix += matrix_of_c(full[n_a + n_b :], c_type)
        return registers_of_d(matrix, d_type, saturate)

    return alu_of_product(instruction.types, d, (*a, *b), c, compute)


def alu_of_product(
    types: Sequence[str],
    d: Sequence[Operand],
    factors: Sequence[Operand],
    c: Sequence[Operand],
    compute: Computes,
) -> Alu:
    """A product of fragments. `types`: types of D, A, B and C."""
    factor = "f64" if types[1] == "f64" else "b32"
    d_register, c_register = ("b32" if t == "f16" else t for t in (types[0], types[3]))
    return Alu(
        tuple((o, d_register) for o in d),
        (*((o, factor) for o in factors), *((o, c_register) for o in c)),
        compute,
    )


# "Matrix Fragments for mma.m8n8k4 with .f16 floating point type": the lanes 4q ... 4q + 3 and those
# 16 above, h = 0 and 1, have the matrices of product q. By the type of C or D, the bits of lane and
# element, (h, q, rest of the lane, element), and their order in (q, row, column).
_QUADS = {
    "f16": ((2, 4, 4, 8), (0, 2, 1, 3, 4)),
    "f32": ((2, 4, 2, 2, 2, 2, 2), (0, 2, 1, 6, 4, 5, 3, 7)),
}


def _mma_of_quads(machine: Machine, instruction: Instruction) -> Alu:
    """mma.m8n8k4 of f16: four products, by the lanes that make them."""
    d_type, _, _, c_type = instruction.types
    a_layout, b_layout = (m for m in instruction.modifiers if m in ("row", "col"))
    counts = (4 if d_type == "f16" else 8, 2, 2, 4 if c_type == "f16" else 8)
    d, a, b, c = map(machine.elements, instruction.operands, counts)
    for register in a:
        machine.register(register)

    def elements(registers: Sequence[np.ndarray], type_name: str) -> np.ndarray:
        """(lanes, elements)."""
        return np.stack(registers, axis=-1).view(dtype_of(type_name))

    def factor(registers: Sequence[np.ndarray], lane_has_row: bool) -> np.ndarray:
        """A, or the transpose of B, (warps, 4 products, 8 rows, k)."""
        x = elements(registers, "f16").reshape(-1, 2, 4, 4, 4).astype(np.float64)
        x = x.transpose((0, 2, 1, 3, 4) if lane_has_row else (0, 2, 1, 4, 3))
        return x.reshape(-1, 4, 8, 4)

    def compute(*registers: np.ndarray) -> tuple[np.ndarray, ...]:
        full = for_all_lanes(registers)
        found = factor(full[:2], a_layout == "row") @ factor(full[2:4], b_layout == "col").swapaxes(
            2, 3
        )
        shape, order = _QUADS[c_type]
        added = elements(full[4:], c_type).reshape(-1, *shape).transpose(order)
        found += added.reshape(found.shape)
        shape, order = _QUADS[d_type]
        shape = (len(found), *shape)
        parts = found.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
        values = odd_f32(parts) if d_type == "f16" else parts
        lanes = np.ascontiguousarray(values.astype(dtype_of(d_type)).reshape(-1, 8))
        return tuple(lanes.view("u4" if d_type == "f16" else "f4").T)

    return alu_of_product(instruction.types, d, (*a, *b), c, compute)


def _ldmatrix(machine: Machine, instruction: Instruction) -> Action:
    target, address = instruction.operands
    count = int(machine.one_of(("x1", "x2", "x4"))[1:])
    if not instruction.has("m8n8"):
        raise machine.unsupported("only 8x8 matrices of 16-bit elements")
    trans = instruction.has("trans")
    destinations = [machine.destination(e, "b32") for e in machine.elements(target, count)]
    addresses_at = addresses_of(machine, address)
    window = 0 if instruction.has("shared") else WINDOWS["shared"]
    port = Port(machine, instruction, 16)

    def run_some(selection: Selection) -> None:
        suppliers = selection
        if count < 4:
            lanes = machine.lanes_of(selection)
            suppliers = lanes[lanes % WARP < 8 * count]
        memory = port.read("shared", addresses_at(suppliers) - window, suppliers)
        # (warps, matrices, 8 rows, 4 words): lane (g, t) gets word t of row g.
        words = memory.reshape(-1, count, 8, 4)
        if trans:
            halves = words.view(np.uint16)
            words = np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32)
        for i, destination in enumerate(destinations):
            destination[selection] = words[:, i].reshape(-1)

    return machine.from_some(run_some)


def _stmatrix(machine: Machine, instruction: Instruction) -> Action:
    """The inverse of ldmatrix."""
    address, source = instruction.operands
    count = int(machine.one_of(("x1", "x2", "x4"))[1:])
    if not instruction.has("m8n8"):
        raise machine.unsupported("only 8x8 matrices of 16-bit elements")
    trans = instruction.has("trans")
    sources = [machine.source(e, "b32") for e in machine.elements(source, count)]
    addresses_at = addresses_of(machine, address)
    window = 0 if instruction.has("shared") else WINDOWS["shared"]
    port = Port(machine, instruction, 16)

    def run_some(selection: Selection) -> None:
        lanes = machine.lanes_of(selection)
        # (warps, matrices, 8 rows, 4 words)
        rows = [np.broadcast_to(pick(s, selection), lanes.shape).reshape(-1, 8, 4) for s in sources]
        words = np.stack(rows, axis=1)
        if trans:
            halves = words.view(np.uint16)
            words = np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32)
        suppliers = selection if count == 4 else lanes[lanes % WARP < 8 * count]
        value = words.reshape(-1, 4)
        port.write("shared", addresses_at(suppliers) - window, suppliers, value)

    return machine.from_some(run_some)


def _movmatrix(machine: Machine, instruction: Instruction) -> Alu:
    machine.register(instruction.operands[1])

    def compute(a: np.ndarray) -> np.ndarray:
        halves = np.ascontiguousarray(a).view(np.uint16).reshape(-1, 8, 8)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1)

    return Alu.of(instruction, compute, "b32")


_FACTORS = " ".join(ELEMENTS)
_PRODUCTS = f"{' '.join(_SHAPES)} row col"
_OF_INTEGERS = "satfinite xor and popc"
_MATRICES = "shared m8n8 x1 x2 x4 trans"
_C = "f16 f32 f64 s32"

FORMS = (
    Form("mma", _mma, (4,), ("f16 f32 f64", _FACTORS, _FACTORS, _C), _PRODUCTS, WARP_WIDE),
    Form(
        "mma", _mma, (4,), ("s32", _FACTORS, _FACTORS, _C), f"{_PRODUCTS} {_OF_INTEGERS}", WARP_WIDE
    ),
    Form("ldmatrix", _ldmatrix, (2,), ("b16",), _MATRICES, WARP_WIDE),
    Form("stmatrix", _stmatrix, (2,), ("b16",), _MATRICES, WARP_WIDE),
    Form("movmatrix", _movmatrix, (2,), ("b16",), "", f"{WARP_WIDE} m8n8 trans"),
)
