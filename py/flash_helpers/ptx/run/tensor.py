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

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from flash_helpers.ptx.read.module import Address, Instruction, Operand, Vector
from flash_helpers.ptx.run.integers import Builder
from flash_helpers.ptx.run.machine import Action, Alu, Machine, pick
from flash_helpers.ptx.run.memory import SHARED_WINDOW
from flash_helpers.ptx.run.rounding import F16, bf16_to_f32, odd_f32
from flash_helpers.ptx.run.shared import ALL, Selection

Decode = Callable[[np.ndarray], np.ndarray]

# Element types of A and B for each shape.
_SHAPES = {
    "m16n8k4": ("tf32",),
    "m16n8k8": ("f16", "bf16", "tf32"),
    "m16n8k16": ("f16", "bf16", "s8", "u8"),
    "m16n8k32": ("s8", "u8"),
    "m8n8k4": ("f64",),
}
_ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 1, "f64": 1, "s8": 4, "u8": 4}


def _decoder(type_name: str) -> Decode:
    """Registers, one a lane, to float64 elements (lanes, e)."""
    if type_name == "f16":
        return lambda r: np.ascontiguousarray(r).view(F16).astype(np.float32)
    if type_name == "bf16":
        return lambda r: bf16_to_f32(np.ascontiguousarray(r).view(np.uint16))
    if type_name == "tf32":
        # The low 13 bits of a tf32 operand are not used.
        return lambda r: (r & np.uint32(0xFFFF_E000)).view(np.float32)
    if type_name == "f64":
        return lambda r: r
    kind = "i1" if type_name == "s8" else "u1"
    return lambda r: np.ascontiguousarray(r).view(kind)


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def matrix_of_a(registers: Sequence[np.ndarray], type_name: str, rows: int = 16) -> np.ndarray:
    """The matrix A, float64 (warps, rows, k), of its fragment's registers, one element a lane."""
    warps = registers[0].shape[0] // 32
    width = 4 * _ELEMENTS[type_name]
    row_blocks = rows // 8
    decode = _decoder(type_name)
    matrix = np.empty((warps, rows, width * len(registers) // row_blocks))
    for i, register in enumerate(registers):
        row, column = 8 * (i % row_blocks), width * (i // row_blocks)
        block = decode(register).reshape(warps, 8, width)
        matrix[:, row : row + 8, column : column + width] = block
    return matrix


def matrix_of_b(registers: Sequence[np.ndarray], type_name: str) -> np.ndarray:
    """The transpose of the matrix B, float64 (warps, 8 columns, k), of its fragment's registers."""
    return matrix_of_a(registers, type_name, rows=8)


def matrix_of_c(registers: Sequence[np.ndarray], type_name: str) -> np.ndarray:
    """The matrix C or D, float64 (warps, rows, 8), of its fragment's registers."""
    warps = registers[0].shape[0] // 32
    if type_name == "f16":
        pairs = [np.ascontiguousarray(r).view(F16) for r in registers]
    else:
        pairs = [np.stack(p, axis=1) for p in zip(registers[::2], registers[1::2], strict=True)]
    blocks = [pair.astype(np.float64).reshape(warps, 8, 8) for pair in pairs]
    return np.concatenate(blocks, axis=1)


def mma(machine: Machine, instruction: Instruction) -> Alu:
    shape = next((m for m in instruction.modifiers if m in _SHAPES), None)
    if shape is None or len(instruction.types) != 4 or instruction.has("sp"):
        raise machine.unsupported(f"known shapes are {', '.join(_SHAPES)}")
    d_type, a_type, b_type, c_type = instruction.types
    if a_type not in _SHAPES[shape] or b_type not in _SHAPES[shape]:
        raise machine.unsupported(f"{shape} is known for {', '.join(_SHAPES[shape])}")
    rows = 8 if shape == "m8n8k4" else 16
    width = 4 * _ELEMENTS[a_type]
    depth = int(shape.rpartition("k")[2])
    row_blocks, depth_blocks = rows // 8, depth // width
    bits = "f64" if a_type == "f64" else "b32"
    d, a, b, c = (_elements(o) for o in instruction.operands[:4])
    accumulator = _Accumulator(d_type, c_type, rows, saturate=instruction.has("satfinite"))
    if (
        len(a) != row_blocks * depth_blocks
        or len(b) != depth_blocks
        or len(d) != accumulator.registers(d_type)
        or len(c) != accumulator.registers(c_type)
    ):
        raise machine.unsupported("the number of registers does not fit the shape")
    integer = d_type == "s32"

    def compute(*registers: np.ndarray) -> tuple[np.ndarray, ...]:
        full = next(r for r in registers if r.shape[0] > 1)
        registers = tuple(r if r.shape[0] > 1 else np.repeat(r, full.shape[0]) for r in registers)
        matrix_a = matrix_of_a(registers[: len(a)], a_type, rows)
        matrix_b = matrix_of_b(registers[len(a) : len(a) + len(b)], b_type)
        product = matrix_a @ matrix_b.transpose(0, 2, 1)
        if integer:
            product = product.astype(np.int64)
        return accumulator.finish(product, registers[len(a) + len(b) :])

    return Alu(
        tuple((o, accumulator.register_type(d_type)) for o in d),
        (
            *((o, bits) for o in a),
            *((o, bits) for o in b),
            *((o, accumulator.register_type(c_type)) for o in c),
        ),
        compute,
    )


class _Accumulator:
    """Adds C to the product and lays the sum out as the registers of D."""

    def __init__(self, d_type: str, c_type: str, rows: int, *, saturate: bool) -> None:
        self.d_type, self.c_type, self.rows = d_type, c_type, rows
        self.saturate = saturate

    def registers(self, type_name: str) -> int:
        return self.rows // 8 * (1 if type_name == "f16" else 2)

    def register_type(self, type_name: str) -> str:
        return "b32" if type_name == "f16" else type_name

    def finish(self, product: np.ndarray, c: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        warps = product.shape[0]
        results = []
        # (warps, row block, lane, two columns)
        parts = product.reshape(warps, self.rows // 8, 32, 2)
        for block in range(self.rows // 8):
            columns = []
            if self.c_type == "f16":
                pair = np.ascontiguousarray(c[block]).view(F16).reshape(warps, 32, 2)
            for half in range(2):
                term = pair[:, :, half] if self.c_type == "f16" else c[2 * block + half].reshape(
                    warps, 32)  # fmt: skip
                columns.append(parts[:, block, :, half] + term)
            if self.d_type == "f16":
                total = np.stack(columns, axis=2)
                results.append(odd_f32(total).astype(F16).view(np.uint32).reshape(-1))
            elif self.d_type == "s32":
                for column in columns:
                    if self.saturate:
                        column = np.clip(column, -(1 << 31), (1 << 31) - 1)
                    results.append(column.astype(np.uint64).astype(np.uint32).view(
                        np.int32).reshape(-1))  # fmt: skip
            else:
                dtype = np.float64 if self.d_type == "f64" else np.float32
                results.extend(column.astype(dtype).reshape(-1) for column in columns)
        return tuple(results)


def ldmatrix(machine: Machine, instruction: Instruction) -> Action:
    target, address = instruction.operands
    count = int(next(m for m in instruction.modifiers if m in ("x1", "x2", "x4"))[1:])
    if not instruction.has("m8n8") or not isinstance(address, Address):
        raise machine.unsupported("only 8x8 matrices of 16-bit elements")
    trans = instruction.has("trans")
    destinations = [machine.destination(e, "b32") for e in _elements(target)]
    if len(destinations) != count:
        raise machine.unsupported(f"x{count} needs {count} registers")
    base = machine.source(address.base, "u32")
    offset = address.offset
    shared, tally, position = machine.shared, machine.tally, machine.position
    memory = shared.words(16)
    supplying = 8 * count
    lane = machine.lane_ids % 32
    suppliers = machine.lane_ids[lane < supplying]
    generic = instruction.has("shared") is False
    if generic:
        base64 = machine.source(address.base, "u64")

    def run_some(selection: Selection) -> None:
        whole = isinstance(selection, slice) and selection == ALL
        lanes = suppliers if whole else machine.lane_ids[selection]
        if not whole:
            lanes = lanes[lanes % 32 < supplying]
        choose: Selection = ALL if whole and count == 4 else lanes
        if generic:
            addresses = (pick(base64, choose) - np.uint64(SHARED_WINDOW)).astype(np.int64) + offset
        else:
            addresses = pick(base, choose).astype(np.int64)
            if offset:
                addresses += offset
        addresses = np.broadcast_to(addresses, lanes.shape)
        rows, good = shared.rows(position, addresses, 16, choose)
        if good is None:
            shared.note_read(position, rows, 16, choose)
        else:
            rows = np.where(good, rows, 0)
        tally.shared_access(position, addresses, 16, None if count == 4 and (
            whole or isinstance(selection, slice)) else lanes)  # fmt: skip
        # (warps, matrices, 8 rows, 4 words): lane (g, t) gets word t of row g.
        words = memory[rows].reshape(-1, count, 8, 4)
        if trans:
            halves = words.view(np.uint16)
            words = np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32)
        for i, destination in enumerate(destinations):
            if destination is not None:
                destination.put_some(selection, words[:, i].reshape(-1))

    return Action(partial(run_some, ALL), run_some)


def movmatrix(machine: Machine, instruction: Instruction) -> Alu:
    target, source = instruction.operands

    def compute(a: np.ndarray) -> np.ndarray:
        halves = np.ascontiguousarray(a).view(np.uint16).reshape(-1, 8, 8)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1)

    return Alu(((target, "b32"),), ((source, "b32"),), compute)


OPERATIONS: Mapping[str, Builder] = {"mma": mma, "ldmatrix": ldmatrix, "movmatrix": movmatrix}
