"""Integer, logic and bit instructions (PTX ISA 9.0, "Integer Arithmetic", "Logic and Shift")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from flash_helpers.ptx.errors import UnsupportedInstruction
from flash_helpers.ptx.read.module import Immediate, Instruction, Pair, Sink
from flash_helpers.ptx.read.types import SCALAR_TYPES
from flash_helpers.ptx.run.instructions.forms import (
    BITS,
    INTEGERS,
    OPERATIONS,
    SIGNED,
    Builder,
    Form,
)
from flash_helpers.ptx.run.machine import Action, Alu, Compute, Machine, pick
from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.run.numbers.dtypes import dtype_of

_U32, _U64, _S64 = np.uint32, np.uint64, np.int64
_ALL32 = _U64(0xFFFF_FFFF)


def _same(instruction: Instruction, function: Compute) -> Alu:
    """All operands have the opcode's type."""
    return Alu.of(instruction, function, instruction.types[-1])


def _plain(function: Compute) -> Builder:
    return lambda machine, instruction: _same(instruction, function)


def _counted(function: Compute) -> Builder:
    """The result is a number, whatever the type of the source."""
    return lambda machine, instruction: Alu.of(instruction, function, "u32", instruction.types[-1])


def _operation(machine: Machine, instruction: Instruction) -> Alu:
    return _same(instruction, OPERATIONS[instruction.name])


# -- arithmetic ------------------------------------------------------------------------------------


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product of two integer arrays of one type."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        return (_widened(a) * _widened(b) >> bits).astype(a.dtype)
    ua, ub = a.view(_U64), b.view(_U64)
    half = _U64(32)
    a_low, a_high, b_low, b_high = ua & _ALL32, ua >> half, ub & _ALL32, ub >> half
    low = a_low * b_low
    middle = a_high * b_low + (low >> half)
    cross = a_low * b_high + (middle & _ALL32)
    high = a_high * b_high + (middle >> half) + (cross >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, _U64(0)) - np.where(b < 0, ua, _U64(0))
    return high.view(a.dtype)


def _widened(a: np.ndarray) -> np.ndarray:
    return a.astype(np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}"))


def _saturated(x: np.ndarray) -> np.ndarray:
    """int64 values clamped to int32 (`.sat`)."""
    return np.clip(x, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def _add_sub(machine: Machine, instruction: Instruction) -> Alu | Action:
    if instruction.has("cc"):
        if instruction.has("sat"):
            raise machine.unsupported("a sum that saturates has no carry")
        return _with_carry(machine, instruction)
    function = np.add if instruction.name == "add" else np.subtract
    if instruction.has("sat"):
        return _same(instruction, lambda a, b: _saturated(function(a, b, dtype=_S64)))
    return _same(instruction, function)


def _with_carry(machine: Machine, instruction: Instruction) -> Action:
    """add.cc, addc, sub.cc, subc, mad.cc and madc: the carry flag is one value per lane.

    PTX ISA 9.0, "sub.cc": "the borrow-out value is written to CC.CF"; "subc": d = a - (b + CC.CF).
    The machine has no borrow. IADD3 a, -b leaves the carry of a + ~b + 1, which is 1 where nothing
    is borrowed, and IADD3.X a, ~b adds it. A chain of one kind has the same value either way. Where
    kinds are mixed, as sub.cc with addc, the value here is the machine's.
    """
    name, own = instruction.name, dtype_of(instruction.types[-1])
    type_name = f"u{8 * own.itemsize}"
    target = machine.destination(instruction.operands[0], type_name)
    sources = [machine.source(o, type_name) for o in instruction.operands[1:]]
    uses, sets, high = name.endswith("c"), instruction.has("cc"), instruction.has("hi")
    subtracts = name.startswith("sub")
    carry, dtype = machine.carry, dtype_of(type_name)

    def run_some(selection: Selection) -> None:
        *factors, first, other = (pick(s, selection) for s in sources)
        if factors:
            a, b = factors[0], first
            first = high_product(a.view(own), b.view(own)).view(dtype) if high else a * b
        if subtracts:
            other = ~other
        n = carry[selection].astype(dtype) if uses else dtype.type(subtracts)
        result = first + other + n
        out = (result < first) | ((result == first) & (n > 0))
        target[selection] = result
        if sets:
            carry[selection] = out

    return machine.from_some(run_some)


def _mul_mad(machine: Machine, instruction: Instruction) -> Alu | Action:
    """mul and mad: the low half of the product, the high half, or all of it."""
    type_name = instruction.types[-1]
    has_addend = len(instruction.operands) == 4
    if instruction.has("cc"):
        if instruction.first(("wide", "sat")):
            raise machine.unsupported("only .hi and .lo set the carry flag")
        return _with_carry(machine, instruction)
    if instruction.has("wide"):
        if type_name.endswith("64"):
            raise machine.unsupported("a product of 128 bits")
        wide = f"{type_name[0]}{2 * SCALAR_TYPES[type_name].bits}"

        def product(x: np.ndarray, y: np.ndarray, *z: np.ndarray) -> np.ndarray:
            return sum(z, _widened(x) * _widened(y))

        return Alu.of(instruction, product, wide, type_name, type_name, wide)
    half = high_product if instruction.has("hi") else np.multiply
    if not has_addend:
        return _same(instruction, half)
    add = _addition(machine, instruction)
    return _same(instruction, lambda x, y, z: add(half(x, y), z))


def _addition(machine: Machine, instruction: Instruction) -> Compute:
    """The last step of a mad: `.sat` clamps the sum of the high half and the addend."""
    if not instruction.has("sat"):
        return np.add
    if not instruction.has("hi"):
        raise machine.unsupported("only .hi saturates")
    return lambda high, addend: _saturated(np.add(high, addend, dtype=_S64))


def _mul24(machine: Machine, instruction: Instruction) -> Alu:
    """mul24 and mad24: 32 of the product's 48 bits."""
    shift, add = 16 if instruction.has("hi") else 0, _addition(machine, instruction)

    def product(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
        a24, b24 = ((_widened(x) << 40) >> 40 for x in (a, b))
        part = (a24 * b24 >> shift).astype(a.dtype)
        return add(part, *c) if c else part

    return _same(instruction, product)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division towards zero; by zero gives all ones, as the hardware's sequence does."""
    return np.where(b == 0, ~a.dtype.type(0), (a - np.fmod(a, b)) // b)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Remainder with the sign of a; by zero all ones, as on an H100."""
    return np.where(b == 0, ~a.dtype.type(0), np.fmod(a, b))


def _minmax(machine: Machine, instruction: Instruction) -> Alu:
    if not instruction.has("relu"):
        return _operation(machine, instruction)
    function = OPERATIONS[instruction.name]
    return _same(instruction, lambda a, b: np.maximum(function(a, b), 0))


def _halves(machine: Machine, instruction: Instruction) -> Alu:
    """add, min and max of two 16-bit integers in one register."""
    half = dtype_of(instruction.types[-1].removesuffix("x2"))
    function, relu = OPERATIONS[instruction.name], instruction.has("relu")

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        value = function(*(np.ascontiguousarray(x).view(half).reshape(-1, 2) for x in (a, b)))
        return (np.maximum(value, 0) if relu else value).view(_U32).reshape(-1)

    return Alu.of(instruction, compute, "b32")


def _dot_product(machine: Machine, instruction: Instruction) -> Alu:
    """dp4a and dp2a: packed 8-bit products added to a 32-bit sum."""
    left, right = ("i" if t[0] == "s" else "u" for t in instruction.types)
    wide = instruction.name == "dp2a"
    upper = instruction.has("hi")

    def parts(x: np.ndarray, code: str) -> np.ndarray:
        return np.ascontiguousarray(x).view(code).reshape(x.size, -1).astype(_S64)

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        others = parts(b, f"{right}1")
        if wide:
            others = others[:, 2:] if upper else others[:, :2]
        products = parts(a, f"{left}{2 if wide else 1}") * others
        return (products.sum(axis=1) + c).astype(_S64).astype(_U32)

    return Alu.of(instruction, compute, "u32")


# -- shifts and bytes ------------------------------------------------------------------------------


def _shifted(shift: np.ufunc, a: np.ndarray, n: np.ndarray | np.uint32) -> np.ndarray:
    """a shifted by n bits, or out of its register altogether where n is its width or more."""
    bits = 8 * a.dtype.itemsize
    most = shift(a, np.minimum(n, n.dtype.type(bits - 1)).astype(a.dtype))
    keeps_sign = shift is np.right_shift and a.dtype.kind == "i"
    return most if keeps_sign else np.where(n < bits, most, a.dtype.type(0))


def _shift(machine: Machine, instruction: Instruction) -> Alu:
    """shl and shr: the amount is 32-bit and clamped to the width."""
    type_name, amount = instruction.types[-1], instruction.operands[-1]
    shift = np.left_shift if instruction.name == "shl" else np.right_shift
    literal = amount.integer if isinstance(amount, Immediate) else None
    if literal is not None and 0 <= literal < SCALAR_TYPES[type_name].bits:
        return _same(instruction, shift)
    return Alu.of(instruction, partial(_shifted, shift), type_name, type_name, "u32")


def _funnel_shift(machine: Machine, instruction: Instruction) -> Alu:
    """shf: a 64-bit value {b, a} shifted, 32 bits kept."""
    left, clamp = instruction.has("l"), instruction.has("clamp")

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        n = (np.minimum(c, _U32(32)) if clamp else c & _U32(31)).astype(_U64)
        both = (b.astype(_U64) << _U64(32)) | a
        if left:
            # Shifting by 32 in two steps keeps each step below the width.
            return ((both << n) >> _U64(32)).astype(_U32)
        return (both >> n).astype(_U32)

    return Alu.of(instruction, compute, "u32")


def _lop3(machine: Machine, instruction: Instruction) -> Alu:
    code = instruction.operands[-1]
    if not isinstance(code, Immediate) or code.integer is None:
        raise machine.unsupported("the truth table must be a literal")
    table = code.integer & 0xFF

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray, _: np.ndarray) -> np.ndarray:
        result = np.zeros_like(a + b + c)
        for i in range(8):
            if table >> i & 1:
                term = a if i & 4 else ~a
                term = term & (b if i & 2 else ~b)
                result |= term & (c if i & 1 else ~c)
        return result

    return Alu.of(instruction, compute, "u32")


def _lop3_and_test(machine: Machine, instruction: Instruction) -> Alu:
    """lop3 with a second result: whether the first is not zero, combined with a predicate."""
    *operands, other = instruction.operands
    plain = _lop3(machine, replace(instruction, operands=tuple(operands)))
    target = operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    combine = OPERATIONS[machine.one_of(("and", "or"))]

    def compute(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        *words, given = arrays
        found = np.asarray(plain.compute(*words))
        return found, combine(found != 0, given)

    return Alu(((first, "u32"), (second, "pred")), (*plain.sources, (other, "pred")), compute)


# The selectors of a mode for the values 0..3 of the third source, in the form of that source
# without a mode.
_PRMT_MODES: Mapping[str, tuple[int, ...]] = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def _prmt(machine: Machine, instruction: Instruction) -> Alu:
    """Bytes of {b, a} chosen by four selectors, or by a mode."""
    mode = instruction.first(_PRMT_MODES)

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        both = (b.astype(_U64) << _U64(32)) | a
        selectors = c if mode is None else np.array(_PRMT_MODES[mode], _U32)[c & _U32(3)]
        result = np.zeros(np.broadcast(a, b, c).shape, _U32)
        for i in range(4):
            selector = selectors >> _U32(4 * i)
            byte = (both >> ((selector & _U32(7)).astype(_U64) * _U64(8))) & _U64(0xFF)
            replicated = np.where(byte & _U64(0x80), _U64(0xFF), _U64(0))
            byte = np.where(selector & _U32(8), replicated, byte)
            result |= byte.astype(_U32) << _U32(8 * i)
        return result

    return Alu.of(instruction, compute, "u32")


# -- fields and counts of bits ---------------------------------------------------------------------


def _ones(count: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Words whose lowest bits are set, at most all of them."""
    return ~_shifted(np.left_shift, ~dtype.type(0), count)


def _field(a: np.ndarray, position: np.ndarray | np.uint32, length: np.ndarray) -> np.ndarray:
    """The bits of a from a position on, extended by their sign if a has one."""
    bits = length.dtype.type(8 * a.dtype.itemsize)
    above = bits - np.minimum(length, bits)
    low = _shifted(np.right_shift, a, position)
    return _shifted(np.right_shift, _shifted(np.left_shift, low, above), above)


def _place(instruction: Instruction) -> Callable[[np.ndarray], np.ndarray]:
    """The position or the length of a bit field in the lowest 8 bits of a word.

    The operands "are restricted to the 8-bit value range 0..255", and the semantics take
    `b & 0xff` (PTX ISA 9.0, "bfe", "bfi"). The code that ptxas 13.0 makes of 32-bit types does so,
    too; that of 64-bit types shifts by all of the word. So a larger number is refused there.
    """
    if not instruction.types[-1].endswith("64"):
        return lambda words: words & _U32(0xFF)

    def checked(words: np.ndarray) -> np.ndarray:
        if np.any(words > 255):
            raise UnsupportedInstruction(
                instruction.opcode,
                instruction.line,
                f"a bit field at {words.max()}, or of that length, which the PTX ISA restricts to "
                "0..255: take the lowest 8 bits by and.b32",
            )
        return words

    return checked


def _bfe(machine: Machine, instruction: Instruction) -> Alu:
    type_name = instruction.types[-1]
    place = _place(instruction)

    def compute(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        return _field(a, place(position), place(length))

    return Alu.of(instruction, compute, type_name, type_name, "u32")


def _bfi(machine: Machine, instruction: Instruction) -> Alu:
    type_name = instruction.types[-1]
    place = _place(instruction)

    def compute(
        a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray
    ) -> np.ndarray:
        by = place(position)
        mask = _shifted(np.left_shift, _ones(place(length), a.dtype), by)
        return (b & ~mask) | (_shifted(np.left_shift, a, by) & mask)

    return Alu.of(instruction, compute, type_name, type_name, type_name, "u32")


def _highest_bit(a: np.ndarray) -> np.ndarray:
    """Position of the highest one of an unsigned array, -1 for zero (int64)."""
    filled = a.astype(_U64)
    for step in (1, 2, 4, 8, 16, 32):
        filled |= filled >> _U64(step)
    return np.bitwise_count(filled).astype(_S64) - 1


def _bfind(machine: Machine, instruction: Instruction) -> Alu:
    def compute(a: np.ndarray) -> np.ndarray:
        # A negative number is searched for its highest zero.
        bits = np.where(a < 0, ~a, a).view(f"u{a.itemsize}")
        highest = _highest_bit(bits)
        if instruction.has("shiftamt"):
            highest = np.where(highest >= 0, 8 * a.itemsize - 1 - highest, -1)
        return highest.astype(_U32)

    return Alu.of(instruction, compute, "u32", instruction.types[-1])


def _find_set(machine: Machine, instruction: Instruction) -> Alu:
    """fns: the position of the n-th one of a mask from a base on, upwards or, for a negative n,
    downwards; n = 0 asks for the base itself."""

    def compute(mask: np.ndarray, base: np.ndarray, n: np.ndarray) -> np.ndarray:
        position = np.arange(32)
        bits = (mask[:, None] >> position.astype(_U32) & _U32(1)).astype(bool)
        start, n = base.astype(_S64)[:, None], n[:, None]
        ahead = np.where(n < 0, position <= start, position >= start)
        counted = bits & np.where(n == 0, position == start, ahead)
        upwards = counted.cumsum(axis=1)
        downwards = counted[:, ::-1].cumsum(axis=1)[:, ::-1]
        rank = np.where(n < 0, downwards, upwards)
        hit = counted & (rank == np.maximum(np.abs(n.astype(_S64)), 1))
        return np.where(hit.any(axis=1), hit.argmax(axis=1), 0xFFFF_FFFF).astype(_U32)

    def of_all(*arrays: np.ndarray) -> np.ndarray:
        return compute(*np.broadcast_arrays(*arrays))

    return Alu.of(instruction, of_all, "b32", "b32", "b32", "s32")


def _reversed(a: np.ndarray) -> np.ndarray:
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(a.size, -1)
    bits = np.unpackbits(octets, axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype).reshape(-1)


def _wrapped(instruction: Instruction) -> Compute:
    """Positions and lengths, which `.wrap` takes modulo 32 bits."""
    return (lambda x: x) if instruction.has("clamp") else (lambda x: x & _U32(31))


def _bmsk(machine: Machine, instruction: Instruction) -> Alu:
    wrapped = _wrapped(instruction)

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _shifted(np.left_shift, _ones(wrapped(b), a.dtype), wrapped(a))

    return Alu.of(instruction, compute, "u32")


def _szext(machine: Machine, instruction: Instruction) -> Alu:
    type_name, wrapped = instruction.types[-1], _wrapped(instruction)

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _field(a, _U32(0), wrapped(b))

    return Alu.of(instruction, compute, type_name, type_name, "u32")


_WIDE = "u32 u64 s32 s64"
_LOGIC = f"pred {BITS}"

FORMS = (
    Form("add sub", _add_sub, (3,), ("s32",), "cc sat"),
    Form("add sub", _add_sub, (3,), ("u32 u64 s64",), "cc"),
    Form("add sub", _add_sub, (3,), ("u16 s16",)),
    Form("addc subc", _with_carry, (3,), (_WIDE,), "cc"),
    Form("mul", _mul_mad, (3,), (INTEGERS,), "hi lo wide"),
    Form("mad", _mul_mad, (4,), ("s32",), "hi lo wide cc sat"),
    Form("mad", _mul_mad, (4,), ("u32 u64 s64",), "hi lo wide cc"),
    Form("mad", _mul_mad, (4,), ("u16 s16",), "hi lo wide"),
    Form("madc", _with_carry, (4,), (_WIDE,), "hi lo cc"),
    Form("mul24", _mul24, (3,), ("u32 s32",), "hi lo"),
    Form("mad24", _mul24, (4,), ("u32",), "hi lo"),
    Form("mad24", _mul24, (4,), ("s32",), "hi lo sat"),
    Form("div", _plain(_quotient), (3,), (INTEGERS,)),
    Form("rem", _plain(_remainder), (3,), (INTEGERS,)),
    Form("min max", _minmax, (3,), ("s32",), "relu"),
    Form("min max", _minmax, (3,), ("u16 u32 u64 s16 s64",)),
    Form("add min max", _halves, (3,), ("u16x2",)),
    Form("add", _halves, (3,), ("s16x2",)),
    Form("min max", _halves, (3,), ("s16x2",), "relu"),
    Form("abs", _plain(np.abs), (2,), (SIGNED,)),
    Form("neg", _plain(np.negative), (2,), (SIGNED,)),
    Form("sad", _plain(lambda a, b, c: c + np.where(a > b, a - b, b - a)), (4,), (INTEGERS,)),
    Form("dp4a", _dot_product, (4,), ("u32 s32", "u32 s32")),
    Form("dp2a", _dot_product, (4,), ("u32 s32", "u32 s32"), "hi lo"),
    Form("and or xor", _operation, (3,), (_LOGIC,)),
    Form("not", _plain(np.invert), (2,), (_LOGIC,)),
    Form("cnot", _plain(lambda a: (a == 0).astype(a.dtype)), (2,), (BITS,)),
    Form("shl", _shift, (3,), (BITS,)),
    Form("shr", _shift, (3,), (f"{BITS} {INTEGERS}",)),
    Form("shf", _funnel_shift, (4,), ("b32",), "l r clamp wrap"),
    Form("lop3", _lop3, (5,), ("b32",)),
    Form("lop3", _lop3_and_test, (6,), ("b32",), "and or"),
    Form("prmt", _prmt, (4,), ("b32",), " ".join(_PRMT_MODES)),
    Form("bfe", _bfe, (4,), (_WIDE,)),
    Form("bfi", _bfi, (5,), ("b32 b64",)),
    Form("popc", _counted(np.bitwise_count), (2,), ("b32 b64",)),
    Form("clz", _counted(lambda a: 8 * a.itemsize - 1 - _highest_bit(a)), (2,), ("b32 b64",)),
    Form("bfind", _bfind, (2,), (_WIDE,), "shiftamt"),
    Form("fns", _find_set, (4,), ("b32",)),
    Form("brev", _plain(_reversed), (2,), ("b32 b64",)),
    Form("bmsk", _bmsk, (3,), ("b32",), "clamp wrap"),
    Form("szext", _szext, (3,), ("u32 s32",), "clamp wrap"),
)
