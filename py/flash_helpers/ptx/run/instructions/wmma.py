"""wmma.load, wmma.store and wmma.mma (PTX ISA 9.0, "Warp-level Matrix Instructions: wmma.mma").

The ISA leaves the layout of fragments open. Here fragments of A, and of the transpose of B, have
the layout of A in `mma`. Those of C and D have the layout of `mma`, one column block of 8 after the
other. The layouts of f16 and f32 sums agree element by element. A and B in f16 have eight
registers, which repeat elements if they fill fewer.

A lane loads and stores a register at a time where its elements are neighbours in memory, and an
element at a time elsewhere; the hardware's accesses, and so their counts, differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.instructions.access import Port, addresses_of
from flash_helpers.ptx.run.instructions.forms import NEAREST, SPACES, WARP_WIDE, Form
from flash_helpers.ptx.run.instructions.tensor import (
    accumulators,
    alu_of_product,
    check_types,
    for_all_lanes,
    matrix_of_a,
    matrix_of_c,
    product,
    registers_of_d,
)
from flash_helpers.ptx.run.machine import Action, Alu, Machine, pick
from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.run.numbers.elements import ELEMENTS

# By shape: m, n and k, and the element types of A and B.
_INTO_16 = ("f16", "bf16", "s8", "u8")
_SHAPES = {
    "m16n16k16": (16, 16, 16, _INTO_16),
    "m32n8k16": (32, 8, 16, _INTO_16),
    "m8n32k16": (8, 32, 16, _INTO_16),
    "m16n16k8": (16, 16, 8, ("tf32",)),
    "m8n8k4": (8, 8, 4, ("f64",)),
    "m8n8k32": (8, 8, 32, ("s4", "u4")),
    "m8n8k128": (8, 8, 128, ("b1",)),
}
_SUMS = ("f16", "f32", "s32", "f64")
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "f64": 64}
_BITS |= {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}


@dataclass(frozen=True)
class _Fragment:
    """The place of each element of a fragment. `shape`: shape of the matrix, for B that of its
    transpose. `registers`: number of registers. `outer`, `inner`: place in `shape` of each lane's
    first element of each different register, (registers, lanes). `together`: elements per register,
    neighbours in the inner dimension."""

    shape: tuple[int, int]
    registers: int
    outer: np.ndarray
    inner: np.ndarray
    together: int


def _fragment(m: int, n: int, k: int, name: str, type_name: str) -> _Fragment:
    rows, columns = {"a": (m, k), "b": (n, k)}.get(name, (m, n))
    lane = np.arange(WARP)
    group, in_group = lane >> 2, lane % 4
    row_blocks = rows // 8
    if name in "ab":
        together = ELEMENTS[type_name]
        block = np.arange(row_blocks * columns // (4 * together))[:, None]
        outer = group + 8 * (block % row_blocks)
        inner = together * (in_group + 4 * (block // row_blocks))
    else:
        pairs = type_name == "f16"
        together = 2 if pairs else 1
        register = np.arange(rows * columns // (WARP * together))[:, None]
        block = register if pairs else register // 2
        outer = group + 8 * (block % row_blocks)
        inner = 2 * in_group + 8 * (block // row_blocks) + (0 if pairs else register % 2)
    registers = 8 if name in "ab" and type_name == "f16" else len(outer)
    return _Fragment((rows, columns), registers, outer, inner, together)


def _move(machine: Machine, instruction: Instruction) -> Action:
    """wmma.load and wmma.store."""
    operation, name = (*instruction.modifiers, "", "")[:2]
    type_name = instruction.types[0]
    m, n, k, factors = _SHAPES[machine.one_of(_SHAPES)]
    known: dict[str, dict[str, Sequence[str]]] = {
        "load": {"a": factors, "b": factors, "c": _SUMS},
        "store": {"d": _SUMS},
    }
    if type_name not in known.get(operation, {}).get(name, ()):
        raise machine.unsupported(f"this shape has no {name} of .{type_name}")
    fragment = _fragment(m, n, k, name, type_name)
    operands = list(instruction.operands)
    stride = operands.pop() if len(operands) == 3 else None
    target, address = operands if operation == "load" else reversed(operands)
    registers = machine.elements(target, fragment.registers)
    bits = _BITS[type_name]
    register_type = "f64" if bits == 64 else "b32"
    # Of B, the inner dimension of the transpose is that of the columns.
    is_dense = machine.one_of(("row", "col")) == ("col" if name == "b" else "row")
    if bits < 8 and not is_dense:
        raise machine.unsupported("elements of less than a byte that are no neighbours")
    strides = None if stride is None else machine.source(stride, "u32")
    addresses = addresses_of(machine, address)
    together = fragment.together if is_dense else 1
    port = Port(machine, instruction, max(together * bits // 8, 1))
    steps = 1 if is_dense else fragment.together

    def places(selection: Selection) -> Callable[[int, int], np.ndarray]:
        """Returns the addresses, one per lane, for a register and an element in it."""
        lanes, start = machine.lanes_of(selection) % WARP, addresses(selection)
        line: int | np.ndarray = fragment.shape[1] if is_dense else fragment.shape[0]
        if strides is not None:
            line = pick(strides, selection).astype(np.int64)

        def at(register: int, step: int) -> np.ndarray:
            outer, inner = fragment.outer[register][lanes], fragment.inner[register][lanes] + step
            element = outer * line + inner if is_dense else inner * line + outer
            return start + element * bits // 8

        return at

    if operation == "load":
        destinations = [machine.destination(r, register_type) for r in registers]

        def load(selection: Selection) -> None:
            at, count = places(selection), machine.lanes_of(selection).size
            for i in range(len(fragment.outer)):
                columns = np.zeros((count, steps), f"u{port.size}")
                for step in range(steps):
                    place = at(i, step)
                    for space, part, lanes, chosen in port.parts(place, selection):
                        columns[chosen, step] = port.read(space, part, lanes)
                value = columns.view(destinations[i].dtype).reshape(-1)
                for destination in destinations[i :: len(fragment.outer)]:
                    destination[selection] = value

        return machine.from_some(load)

    sources = [machine.source(r, register_type) for r in registers]

    def store(selection: Selection) -> None:
        at, count = places(selection), machine.lanes_of(selection).size
        for i, source in enumerate(sources):
            values = np.ascontiguousarray(np.broadcast_to(pick(source, selection), count))
            columns = values.view(f"u{port.size}").reshape(count, steps)
            for step in range(steps):
                for space, part, lanes, chosen in port.parts(at(i, step), selection):
                    port.write(space, part, lanes, columns[chosen, step])

    return machine.from_some(store)


def _mma(machine: Machine, instruction: Instruction) -> Alu:
    m, n, k, known = _SHAPES[machine.one_of(_SHAPES)]
    types = instruction.types
    if len(types) == 2:
        types = (types[0], "f16", "f16", types[1])
    if not instruction.has("mma"):
        raise machine.unsupported("wmma.load, wmma.store or wmma.mma is due")
    check_types(machine, known, types)
    d_type, a_type, b_type, c_type = types
    names = zip("dabc", types, strict=True)
    fragments = [_fragment(m, n, k, name, type_name) for name, type_name in names]
    counts = [fragment.registers for fragment in fragments]
    d, a, b, c = map(machine.elements, instruction.operands, counts)
    n_a, n_b = len(fragments[1].outer), len(fragments[2].outer)
    per_column_block = accumulators(m, c_type)
    saturate = instruction.has("satfinite")
    for register in a:
        machine.register(register)

    def compute(*registers: np.ndarray) -> tuple[np.ndarray, ...]:
        full = for_all_lanes(registers)
        added = full[n_a + n_b :]
        matrix = product(
            matrix_of_a(full[:n_a], a_type, m),
            matrix_of_a(full[n_a:][:n_b], b_type, n),
            instruction,
        )
        found: list[np.ndarray] = []
        for block in range(n // 8):
            part = matrix[:, :, 8 * block :][:, :, :8]
            own = added[block * per_column_block :][:per_column_block]
            found += registers_of_d(part + matrix_of_c(own, c_type), d_type, saturate)
        return tuple(found)

    return alu_of_product(types, d, (*a[:n_a], *b[:n_b]), c, compute)


_FLOATS = "bf16 tf32 f64"
_INTEGERS = "s8 u8 s4 u4 b1"
_PLACES = f"{' '.join(_SHAPES)} row col"
_MOVES = f"{_PLACES} load store a b c d {SPACES}"
_PRODUCTS = f"{_PLACES} mma"

FORMS = (
    Form("wmma", _move, (2, 3), (f"f16 f32 s32 {_FLOATS} {_INTEGERS}",), _MOVES, WARP_WIDE),
    Form("wmma", _mma, (4,), ("f16 f32", "f16 f32"), _PRODUCTS, WARP_WIDE),
    Form(
        "wmma",
        _mma,
        (4,),
        ("f32 f64", _FLOATS, _FLOATS, "f32 f64"),
        _PRODUCTS,
        f"{WARP_WIDE} {NEAREST}",
    ),
    Form(
        "wmma",
        _mma,
        (4,),
        ("s32", _INTEGERS, _INTEGERS, "s32"),
        f"{_PRODUCTS} satfinite xor and popc",
        WARP_WIDE,
    ),
)
