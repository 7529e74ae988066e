"""mma, ldmatrix and movmatrix (PTX ISA 9.0, "Warp-Level Matrix Instructions").

Fragments. With g = lane / 4 and t = lane % 4, a 32-bit register of a fragment holds e consecutive
elements (e = 2 for 16-bit types, 4 for 8-bit, 1 for tf32 and f64). Register i of A holds row
g + 8 (i % 2), columns e t ... of column block i / 2 (a block is 4 e wide); register i of B holds
column g and rows e t ... of row block i. C and D hold row g + 8 (i / 2), columns 2t and 2t + 1, as
two registers, or as the halves of one for f16. So a register of a warp, reshaped to (8, 4 e), is a
block of the matrix as it stands.

Arithmetic. Products are exact and are summed with C in float64, then rounded once to the type of D.
The hardware sums groups of products in an accumulator of limited width and truncates, so its last
bit may differ; the PTX ISA leaves order and rounding open.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.access import Port, addresses_of
from flash_helpers.ptx.run.dtypes import dtype_of
from flash_helpers.ptx.run.forms import Form
from flash_helpers.ptx.run.machine import Action, Alu, Machine, pick
from flash_helpers.ptx.run.memory import WINDOWS, Selection
from flash_helpers.ptx.run.rounding import F16, odd_f32, to_floats

# Element types of A and B for each shape.
_SHAPES = {
    "m16n8k4": ("tf32",),
    "m16n8k8": ("f16", "bf16", "tf32"),
    "m16n8k16": ("f16", "bf16", "s8", "u8"),
    "m16n8k32": ("s8", "u8"),
    "m8n8k4": ("f64",),
}
_ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 1, "f64": 1, "s8": 4, "u8": 4}


# How NumPy reads the elements, as they lie in a register.
_RAW = {"f16": F16, "bf16": "u2", "tf32": "u4", "f64": "f8", "s8": "i1", "u8": "u1"}


def _values(raw: np.ndarray, type_name: str) -> np.ndarray:
    """Elements as float64."""
    if type_name == "tf32":
        # The low 13 bits of a tf32 operand are not used.
        raw = raw & np.uint32(0xFFFF_E000)
    return to_floats(raw, type_name).astype(np.float64)


def matrix_of_a(registers: Sequence[np.ndarray], type_name: str, rows: int = 16) -> np.ndarray:
    """The matrix A, float64 (warps, rows, k), of its fragment's registers, one element a lane."""
    warps = registers[0].shape[0] // WARP
    width = 4 * _ELEMENTS[type_name]
    row_blocks = rows // 8
    raw = np.empty((warps, rows, width * len(registers) // row_blocks), _RAW[type_name])
    for i, register in enumerate(registers):
        row, column = 8 * (i % row_blocks), width * (i // row_blocks)
        block = np.ascontiguousarray(register).view(raw.dtype).reshape(warps, 8, width)
        raw[:, row : row + 8, column : column + width] = block
    return _values(raw, type_name)


def matrix_of_b(registers: Sequence[np.ndarray], type_name: str) -> np.ndarray:
    """The transpose of the matrix B, float64 (warps, 8 columns, k), of its fragment's registers."""
    return matrix_of_a(registers, type_name, rows=8)


def matrix_of_c(registers: Sequence[np.ndarray], type_name: str) -> np.ndarray:
    """The matrix C or D, float64 (warps, rows, 8), of its fragment's registers."""
    warps = registers[0].shape[0] // WARP
    row_blocks = len(registers) // _accumulators(8, type_name)
    # of a lane the two columns
    raw = np.empty((warps, row_blocks, WARP, 2), dtype_of(type_name))
    for i, register in enumerate(registers):
        if type_name == "f16":
            raw[:, i] = np.ascontiguousarray(register).view(F16).reshape(warps, WARP, 2)
        else:
            raw[:, i // 2, :, i % 2] = register.reshape(warps, WARP)
    return raw.reshape(warps, -1, 8).astype(np.float64)


def _accumulators(rows: int, type_name: str) -> int:
    """Registers of C or D."""
    return rows // 8 * (1 if type_name == "f16" else 2)


def _registers_of_d(matrix: np.ndarray, type_name: str, saturate: bool) -> tuple[np.ndarray, ...]:
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


def _mma(machine: Machine, instruction: Instruction) -> Alu:
    shape = machine.one_of(_SHAPES)
    d_type, a_type, b_type, c_type = instruction.types
    known = {a_type, b_type} <= set(_SHAPES[shape]) and _ELEMENTS[a_type] == _ELEMENTS[b_type]
    if instruction.has("sp") or not known:
        raise machine.unsupported(f"{shape} is known for {', '.join(_SHAPES[shape])}")
    rows = 8 if shape == "m8n8k4" else 16
    n_b = int(shape.rpartition("k")[2]) // (4 * _ELEMENTS[a_type])
    n_a = rows // 8 * n_b
    counts = (_accumulators(rows, d_type), n_a, n_b, _accumulators(rows, c_type))
    d, a, b, c = map(machine.elements, instruction.operands, counts)
    saturate = instruction.has("satfinite")
    for register in a:
        machine.register(register)  # constants for all lanes may stand elsewhere only

    def compute(*registers: np.ndarray) -> tuple[np.ndarray, ...]:
        lanes = max(register.shape[0] for register in registers)
        full = [r if r.shape[0] == lanes else np.repeat(r, lanes) for r in registers]
        matrix_b = matrix_of_b(full[n_a : n_a + n_b], b_type)
        product = matrix_of_a(full[:n_a], a_type, rows) @ matrix_b.transpose(0, 2, 1)
        product += matrix_of_c(full[n_a + n_b :], c_type)
        return _registers_of_d(product, d_type, saturate)

    factor = "f64" if a_type == "f64" else "b32"
    d_register, c_register = ("b32" if t == "f16" else t for t in (d_type, c_type))
    return Alu(
        tuple((o, d_register) for o in d),
        (*((o, factor) for o in (*a, *b)), *((o, c_register) for o in c)),
        compute,
    )


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


_FACTORS = " ".join(_ELEMENTS)

FORMS = (
    Form("mma", _mma, (4,), ("f16 f32 f64 s32", _FACTORS, _FACTORS, "f16 f32 f64 s32")),
    Form("ldmatrix", _ldmatrix, (2,), ("b16",)),
    Form("stmatrix", _stmatrix, (2,), ("b16",)),
    Form("movmatrix", _movmatrix, (2,), ("b16",)),
)
