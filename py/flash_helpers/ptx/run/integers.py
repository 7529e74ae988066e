"""Integer, logic and bit instructions (PTX ISA 9.0, "Integer Arithmetic", "Logic and Shift")."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flash_helpers.ptx.read.module import Immediate, Instruction
from flash_helpers.ptx.read.types import SCALAR_TYPES, dtype_of
from flash_helpers.ptx.run.forms import BITS, INTEGERS, SIGNED, Builder, Form
from flash_helpers.ptx.run.machine import Action, Alu, Compute, Machine, pick
from flash_helpers.ptx.run.shared import Selection

_U32, _U64, _S64 = np.uint32, np.uint64, np.int64
_ALL32 = _U64(0xFFFF_FFFF)


def _same(instruction: Instruction, function: Compute, type_name: str = "") -> Alu:
    """All operands have one type: that of the opcode if none is given."""
    type_name = type_name or instruction.types[-1]
    target, *sources = instruction.operands
    return Alu(((target, type_name),), tuple((s, type_name) for s in sources), function)


def _plain(function: Compute, type_name: str = "") -> Builder:
    return lambda machine, instruction: _same(instruction, function, type_name)


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
    function = np.add if instruction.name == "add" else np.subtract
    if instruction.has("cc"):
        return _with_carry(machine, instruction)
    if instruction.has("sat"):
        return _same(instruction, lambda a, b: _saturated(function(a, b, dtype=_S64)))
    return _same(instruction, function)


def _with_carry(machine: Machine, instruction: Instruction) -> Action:
    """add.cc, addc, sub.cc, subc, mad.cc and madc: the carry flag is one value a lane."""
    name, own = instruction.name, dtype_of(instruction.types[-1])
    type_name = f"u{8 * own.itemsize}"
    target = machine.destination(instruction.operands[0], type_name)
    sources = [machine.source(o, type_name) for o in instruction.operands[1:]]
    uses, sets, high = name.endswith("c"), instruction.has("cc"), instruction.has("hi")
    carry, dtype = machine.carry, dtype_of(type_name)

    def run_some(selection: Selection) -> None:
        *factors, first, other = (pick(s, selection) for s in sources)
        if factors:
            a, b = factors[0], first
            first = high_product(a.view(own), b.view(own)).view(dtype) if high else a * b
        n = carry[selection].astype(dtype) if uses else dtype.type(0)
        if name.startswith("sub"):
            result = first - other - n
            out = (first < other) | ((first == other) & (n > 0))
        else:
            result = first + other + n
            out = (result < first) | ((result == first) & (n > 0))
        target[selection] = result
        if sets:
            carry[selection] = out

    return machine.from_some(run_some)


def _mul_mad(machine: Machine, instruction: Instruction) -> Alu | Action:
    """mul and mad: the low half of the product, the high one, or all of it."""
    type_name = instruction.types[-1]
    target, a, b, *addend = instruction.operands
    if addend and instruction.has("cc"):
        return _with_carry(machine, instruction)
    if instruction.has("wide"):
        if type_name.endswith("64"):
            raise machine.unsupported("a product of 128 bits")
        wide = f"{type_name[0]}{2 * SCALAR_TYPES[type_name].bits}"

        def product(x: np.ndarray, y: np.ndarray, *z: np.ndarray) -> np.ndarray:
            return sum(z, _widened(x) * _widened(y))

        sources = ((a, type_name), (b, type_name), *((c, wide) for c in addend))
        return Alu(((target, wide),), sources, product)
    half = high_product if instruction.has("hi") else np.multiply
    if not addend:
        return _same(instruction, half)
    if instruction.has("hi") and instruction.has("sat"):
        return _same(instruction, lambda x, y, z: _saturated(half(x, y).astype(_S64) + z))
    return _same(instruction, lambda x, y, z: half(x, y) + z)


def _mul24(machine: Machine, instruction: Instruction) -> Alu:
    high = instruction.has("hi")

    def product(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
        a24, b24 = ((_widened(x) << 40) >> 40 for x in (a, b))
        return sum(c, (a24 * b24 >> (16 if high else 0)).astype(a.dtype))

    return _same(instruction, product)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division towards zero; by zero gives all ones, as the hardware's sequence does."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        # NumPy rounds down: one up where the signs differ and something is left.
        quotient += ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(zero, ~a.dtype.type(0), quotient)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(b == 0, a, a - _quotient(a, b) * b)


def _minmax(machine: Machine, instruction: Instruction) -> Alu:
    function = np.minimum if instruction.name == "min" else np.maximum
    if instruction.has("relu"):
        return _same(instruction, lambda a, b: np.maximum(function(a, b), 0))
    return _same(instruction, function)


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

    return _same(instruction, compute, "u32")


# -- shifts and bytes ------------------------------------------------------------------------------


def _shift(machine: Machine, instruction: Instruction) -> Alu:
    """shl and shr: the amount is 32-bit and clamped to the width."""
    type_name = instruction.types[-1]
    scalar = SCALAR_TYPES[type_name]
    target, value, amount = instruction.operands
    arithmetic = scalar.kind == "s"
    function = np.left_shift if instruction.name == "shl" else np.right_shift
    bits = scalar.bits
    if isinstance(amount, Immediate) and 0 <= int(amount.value) < bits:
        return _same(instruction, function)

    def compute(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        shifted = function(a, np.minimum(n, _U32(bits - 1)).astype(a.dtype))
        return shifted if arithmetic else np.where(n >= bits, a.dtype.type(0), shifted)

    return Alu(((target, type_name),), ((value, type_name), (amount, "u32")), compute)


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

    return _same(instruction, compute, "u32")


def _lop3(machine: Machine, instruction: Instruction) -> Alu:
    target, *sources, code = instruction.operands
    if not isinstance(code, Immediate):
        raise machine.unsupported("the truth table must be a literal")
    table = int(code.value) & 0xFF

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        result = np.zeros_like(a + b + c)
        for i in range(8):
            if table >> i & 1:
                term = a if i & 4 else ~a
                term = term & (b if i & 2 else ~b)
                result |= term & (c if i & 1 else ~c)
        return result

    return Alu(((target, "u32"),), tuple((s, "u32") for s in sources), compute)


# Selectors of byte 0..3 of the result for the values 0..3 of the third source.
_PRMT_MODES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def _prmt(machine: Machine, instruction: Instruction) -> Alu:
    """Bytes of {b, a} chosen by four selectors, or by a mode."""
    mode = instruction.first(_PRMT_MODES)

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        both = (b.astype(_U64) << _U64(32)) | a
        result = np.zeros(np.broadcast(a, b, c).shape, _U32)
        for i in range(4):
            if mode is None:
                selector = (c >> _U32(4 * i)) & _U32(0xF)
            else:
                selector = np.array([row[i] for row in _PRMT_MODES[mode]], _U32)[c & _U32(3)]
            byte = (both >> ((selector & _U32(7)).astype(_U64) * _U64(8))) & _U64(0xFF)
            replicated = np.where(byte & _U64(0x80), _U64(0xFF), _U64(0))
            byte = np.where(selector & _U32(8), replicated, byte)
            result |= byte.astype(_U32) << _U32(8 * i)
        return result

    return _same(instruction, compute, "u32")


# -- fields and counts of bits ---------------------------------------------------------------------


def _ones(count: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The lowest bits set, as many as there are at most."""
    bits = 8 * dtype.itemsize
    some = (dtype.type(1) << np.clip(count, 0, bits - 1).astype(dtype)) - dtype.type(1)
    return np.where(count >= bits, ~dtype.type(0), some)


def _bfe(machine: Machine, instruction: Instruction) -> Alu:
    type_name = instruction.types[-1]
    scalar = SCALAR_TYPES[type_name]
    bits = scalar.bits
    target, value, position, length = instruction.operands

    def compute(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        unsigned = a.view(f"u{scalar.size}")
        dtype = unsigned.dtype
        pos, count = ((x & _U32(0xFF)).astype(_S64) for x in (position, length))
        low = np.where(
            pos >= bits, dtype.type(0), unsigned >> np.minimum(pos, bits - 1).astype(dtype)
        )
        field = low & _ones(count, dtype)
        if scalar.kind == "s":
            last = np.clip(pos + count - 1, 0, bits - 1).astype(dtype)
            sign = (unsigned >> last) & dtype.type(1)
            # Above the field, and above the register, the sign bit is repeated.
            keep = _ones(np.minimum(count, np.maximum(bits - pos, 0)), dtype)
            field = np.where((sign == 1) & (count > 0), field | ~keep, field & keep)
        return field.astype(dtype).view(scalar.dtype)

    sources = ((value, type_name), (position, "u32"), (length, "u32"))
    return Alu(((target, type_name),), sources, compute)


def _bfi(machine: Machine, instruction: Instruction) -> Alu:
    type_name = instruction.types[-1]
    dtype, bits = dtype_of(type_name), SCALAR_TYPES[type_name].bits
    target, a, b, position, length = instruction.operands

    def compute(
        a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray
    ) -> np.ndarray:
        pos, count = position & _U32(0xFF), length & _U32(0xFF)
        by = np.minimum(pos, bits - 1).astype(dtype)
        mask = np.where(pos >= bits, dtype.type(0), _ones(count, dtype) << by)
        return (b & ~mask) | ((a << by) & mask)

    sources = ((a, type_name), (b, type_name), (position, "u32"), (length, "u32"))
    return Alu(((target, type_name),), sources, compute)


def _count(compute: Compute) -> Builder:
    """A number, 32-bit, of the bits of a source."""

    def build(machine: Machine, instruction: Instruction) -> Alu:
        target, source = instruction.operands
        return Alu(
            ((target, "u32"),),
            ((source, instruction.types[-1]),),
            lambda a: compute(a).astype(np.int32).view(_U32),
        )

    return build


def _highest_bit(a: np.ndarray) -> np.ndarray:
    """Position of the highest one of an unsigned array, -1 for zero (int64)."""
    result = np.full(a.shape, -1, _S64)
    rest = a.astype(_U64)
    for step in (32, 16, 8, 4, 2, 1):
        big = rest >= _U64(1) << _U64(step)
        result[big] += step
        rest = np.where(big, rest >> _U64(step), rest)
    return result + (a != 0)


def _bfind(machine: Machine, instruction: Instruction) -> Alu:
    scalar = SCALAR_TYPES[instruction.types[-1]]
    amount = instruction.has("shiftamt")

    def found(a: np.ndarray) -> np.ndarray:
        bits = a.view(f"u{scalar.size}")
        # A negative number is searched for its highest zero.
        highest = _highest_bit(np.where(a < 0, ~bits, bits) if scalar.kind == "s" else bits)
        return np.where(highest >= 0, scalar.bits - 1 - highest, -1) if amount else highest

    return _count(found)(machine, instruction)


def _reversed(a: np.ndarray) -> np.ndarray:
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(a.size, -1)
    bits = np.unpackbits(octets, axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype).reshape(-1)


def _limited(clamp: bool, *arrays: np.ndarray) -> list[np.ndarray]:
    return [(np.minimum(x, _U32(32)) if clamp else x & _U32(31)).astype(_U64) for x in arrays]


def _bmsk(machine: Machine, instruction: Instruction) -> Alu:
    clamp = instruction.has("clamp")

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        start, width = _limited(clamp, a, b)
        return ((_ones(width, np.dtype(_U64)) << start) & _ALL32).astype(_U32)

    return _same(instruction, compute, "u32")


def _szext(machine: Machine, instruction: Instruction) -> Alu:
    signed, clamp = instruction.types[-1] == "s32", instruction.has("clamp")

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        (width,) = _limited(clamp, b)
        mask = _ones(width, np.dtype(_U64))
        low = a.astype(_U64) & mask
        if signed:
            sign = (low >> (np.maximum(width, _U64(1)) - _U64(1))) & _U64(1)
            low = np.where((sign == 1) & (width > 0), low | ~mask, low)
        return (low & _ALL32).astype(_U32)

    return _same(instruction, compute, "u32")


_WIDE = "u32 u64 s32 s64"
_LOGIC = f"pred {BITS}"

FORMS = (
    Form("add sub", _add_sub, (3,), (INTEGERS,)),
    Form("addc subc", _with_carry, (3,), (_WIDE,)),
    Form("mul", _mul_mad, (3,), (INTEGERS,)),
    Form("mad", _mul_mad, (4,), (INTEGERS,)),
    Form("madc", _with_carry, (4,), (_WIDE,)),
    Form("mul24", _mul24, (3,), ("u32 s32",)),
    Form("mad24", _mul24, (4,), ("u32 s32",)),
    Form("div", _plain(_quotient), (3,), (INTEGERS,)),
    Form("rem", _plain(_remainder), (3,), (INTEGERS,)),
    Form("min max", _minmax, (3,), (INTEGERS,)),
    Form("abs", _plain(np.abs), (2,), (SIGNED,)),
    Form("neg", _plain(np.negative), (2,), (SIGNED,)),
    Form("sad", _plain(lambda a, b, c: c + np.where(a > b, a - b, b - a)), (4,), (INTEGERS,)),
    Form("dp4a dp2a", _dot_product, (4,), ("u32 s32", "u32 s32")),
    Form("and", _plain(np.bitwise_and), (3,), (_LOGIC,)),
    Form("or", _plain(np.bitwise_or), (3,), (_LOGIC,)),
    Form("xor", _plain(np.bitwise_xor), (3,), (_LOGIC,)),
    Form("not", _plain(np.invert), (2,), (_LOGIC,)),
    Form("cnot", _plain(lambda a: (a == 0).astype(a.dtype)), (2,), (BITS,)),
    Form("shl", _shift, (3,), (BITS,)),
    Form("shr", _shift, (3,), (f"{BITS} {INTEGERS}",)),
    Form("shf", _funnel_shift, (4,), ("b32",)),
    Form("lop3", _lop3, (5,), ("b32",)),
    Form("prmt", _prmt, (4,), ("b32",)),
    Form("bfe", _bfe, (4,), (_WIDE,)),
    Form("bfi", _bfi, (5,), ("b32 b64",)),
    Form("popc", _count(np.bitwise_count), (2,), ("b32 b64",)),
    Form("clz", _count(lambda a: 8 * a.itemsize - 1 - _highest_bit(a)), (2,), ("b32 b64",)),
    Form("bfind", _bfind, (2,), (_WIDE,)),
    Form("brev", _plain(_reversed), (2,), ("b32 b64",)),
    Form("bmsk", _bmsk, (3,), ("b32",)),
    Form("szext", _szext, (3,), ("u32 s32",)),
)
