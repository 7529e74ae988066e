"""Integer, logic and bit instructions (PTX ISA 9.0, "Integer Arithmetic", "Logic and Shift")."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from flash_helpers.ptx.read.module import Immediate, Instruction
from flash_helpers.ptx.read.types import SCALAR_TYPES
from flash_helpers.ptx.run.machine import Action, Alu, Machine, pick
from flash_helpers.ptx.run.shared import Selection

Builder = Callable[[Machine, Instruction], "Alu | Action"]

_U32, _U64, _S64 = np.uint32, np.uint64, np.int64


def _simple(
    instruction: Instruction, function: Callable, arity: int, type_name: str, *, ufunc: bool = False
) -> Alu:
    ops = instruction.operands
    return Alu(
        ((ops[0], type_name),), tuple((o, type_name) for o in ops[1 : 1 + arity]), function, ufunc
    )


def _bits_type(type_name: str) -> str:
    return "pred" if type_name == "pred" else f"u{SCALAR_TYPES[type_name].bits}"


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product of two integer arrays of one type."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(a.dtype)
    ua, ub = a.view(_U64), b.view(_U64)
    half, mask = _U64(32), _U64(0xFFFF_FFFF)
    a_low, a_high, b_low, b_high = ua & mask, ua >> half, ub & mask, ub >> half
    low = a_low * b_low
    middle = a_high * b_low + (low >> half)
    cross = a_low * b_high + (middle & mask)
    high = a_high * b_high + (middle >> half) + (cross >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, _U64(0)) - np.where(b < 0, ua, _U64(0))
    return high.view(a.dtype)


def _widened(a: np.ndarray) -> np.ndarray:
    return a.astype(np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}"))


def _wide_type(type_name: str) -> str:
    return f"{type_name[0]}{2 * SCALAR_TYPES[type_name].bits}"


def saturated(x: np.ndarray) -> np.ndarray:
    """int64 values clamped to int32 (``.sat``)."""
    return np.clip(x, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def add_sub(machine: Machine, instruction: Instruction) -> Alu | Action:
    name, type_name = instruction.name, instruction.types[-1]
    function = np.add if name.startswith("add") else np.subtract
    if name in ("addc", "subc") or instruction.has("cc"):
        return _with_carry(machine, instruction)
    if instruction.has("sat"):
        return _simple(
            instruction, lambda a, b: saturated(function(a, b, dtype=np.int64)), 2, type_name
        )
    return _simple(instruction, function, 2, type_name, ufunc=True)


def _with_carry(machine: Machine, instruction: Instruction) -> Action:
    """add.cc, addc, sub.cc, subc, mad.cc and madc: the carry flag is one value a lane."""
    name = instruction.name
    type_name = _bits_type(instruction.types[-1])
    target = machine.destination(instruction.operands[0], type_name)
    sources = [machine.source(o, type_name) for o in instruction.operands[1:]]
    signed = instruction.types[-1][0] == "s"
    dtype = SCALAR_TYPES[type_name].dtype
    uses, sets = name in ("addc", "subc", "madc"), instruction.has("cc")
    high = instruction.has("hi")
    carry = machine.carry

    def run_some(selection: Selection) -> None:
        values = [pick(s, selection) for s in sources]
        if name.startswith("mad"):
            a, b, other = values
            if high:
                kind = dtype.str.replace("u", "i") if signed else dtype
                product = high_product(a.view(kind), b.view(kind)).view(dtype)
            else:
                product = a * b
            first = product
        else:
            first, other = values
        n = carry[selection].astype(dtype) if uses else dtype.type(0)
        if name.startswith("sub"):
            result = first - other - n
            out = (first < other) | ((first == other) & (n > 0))
        else:
            result = first + other + n
            out = (result < first) | ((result == first) & (n > 0))
        if target is not None:
            target.put_some(selection, result)
        if sets:
            carry[selection] = out

    return machine.from_some(run_some)


def mul(machine: Machine, instruction: Instruction) -> Alu:
    type_name = instruction.types[-1]
    ops = instruction.operands
    if instruction.has("wide"):
        # Both factors are widened, then multiplied in the wide type.
        def wide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return _widened(a) * _widened(b)

        return Alu(((ops[0], _wide_type(type_name)),), ((ops[1], type_name), (ops[2], type_name)),
                   wide)  # fmt: skip
    if instruction.has("hi"):
        return _simple(instruction, high_product, 2, type_name)
    return _simple(instruction, np.multiply, 2, type_name, ufunc=True)


def mad(machine: Machine, instruction: Instruction) -> Alu | Action:
    type_name = instruction.types[-1]
    if instruction.name == "madc" or instruction.has("cc"):
        return _with_carry(machine, instruction)
    a, b, c = instruction.operands[1:4]
    if instruction.has("wide"):
        wide = _wide_type(type_name)
        return Alu(
            ((instruction.operands[0], wide),),
            ((a, type_name), (b, type_name), (c, wide)),
            lambda x, y, z: _widened(x) * _widened(y) + z,
        )
    if instruction.has("hi"):
        if instruction.has("sat"):
            return _simple(
                instruction,
                lambda x, y, z: saturated(high_product(x, y).astype(_S64) + z),
                3,
                type_name,
            )
        return _simple(instruction, lambda x, y, z: high_product(x, y) + z, 3, type_name)
    return _simple(instruction, lambda x, y, z: x * y + z, 3, type_name)


def _product24(a: np.ndarray, b: np.ndarray, high: bool) -> np.ndarray:
    wide = np.dtype(f"{a.dtype.kind}8")
    shift = wide.type(40)
    a24 = (a.astype(wide) << shift) >> shift
    b24 = (b.astype(wide) << shift) >> shift
    product = a24 * b24
    return (product >> wide.type(16) if high else product).astype(a.dtype)


def mul24(machine: Machine, instruction: Instruction) -> Alu:
    high = instruction.has("hi")
    type_name = instruction.types[-1]
    if instruction.name == "mad24":
        return _simple(instruction, lambda a, b, c: _product24(a, b, high) + c, 3, type_name)
    return _simple(instruction, lambda a, b: _product24(a, b, high), 2, type_name)


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


def div(machine: Machine, instruction: Instruction) -> Alu:
    return _simple(instruction, _quotient, 2, instruction.types[-1])


def rem(machine: Machine, instruction: Instruction) -> Alu:
    return _simple(instruction, _remainder, 2, instruction.types[-1])


def minmax(machine: Machine, instruction: Instruction) -> Alu:
    function = np.minimum if instruction.name == "min" else np.maximum
    type_name = instruction.types[-1]
    if type_name in ("u16x2", "s16x2"):
        raise machine.unsupported()
    if instruction.has("relu"):
        return _simple(instruction, lambda a, b: np.maximum(function(a, b), 0), 2, type_name)
    return _simple(instruction, function, 2, type_name, ufunc=True)


def absolute(machine: Machine, instruction: Instruction) -> Alu:
    return _simple(instruction, np.abs, 1, instruction.types[-1], ufunc=True)


def negate(machine: Machine, instruction: Instruction) -> Alu:
    return _simple(instruction, np.negative, 1, instruction.types[-1], ufunc=True)


def sad(machine: Machine, instruction: Instruction) -> Alu:
    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return c + np.where(a > b, a - b, b - a)

    return _simple(instruction, compute, 3, instruction.types[-1])


# -- logic and shifts --------------------------------------------------------------------------


def logic(machine: Machine, instruction: Instruction) -> Alu:
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[instruction.name]
    return _simple(instruction, function, 2, _bits_type(instruction.types[-1]), ufunc=True)


def complement(machine: Machine, instruction: Instruction) -> Alu:
    return _simple(instruction, np.invert, 1, _bits_type(instruction.types[-1]), ufunc=True)


def cnot(machine: Machine, instruction: Instruction) -> Alu:
    type_name = _bits_type(instruction.types[-1])
    return _simple(instruction, lambda a: (a == 0).astype(a.dtype), 1, type_name)


def shift(machine: Machine, instruction: Instruction) -> Alu:
    """shl and shr: the amount is 32-bit and clamped to the width."""
    type_name = instruction.types[-1]
    scalar = SCALAR_TYPES[type_name]
    left = instruction.name == "shl"
    if left or scalar.kind == "b":
        type_name = _bits_type(type_name)
    target, value, amount = instruction.operands
    arithmetic = not left and scalar.kind == "s"
    function = np.left_shift if left else np.right_shift
    bits = scalar.bits
    if isinstance(amount, Immediate) and 0 <= int(amount.value) < bits:
        return Alu(
            ((target, type_name),), ((value, type_name), (amount, type_name)), function, ufunc=True
        )

    def compute(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        clamped = np.minimum(n, _U32(bits - 1)).astype(a.dtype)
        shifted = function(a, clamped)
        return shifted if arithmetic else np.where(n >= bits, a.dtype.type(0), shifted)

    return Alu(((target, type_name),), ((value, type_name), (amount, "u32")), compute)


def funnel_shift(machine: Machine, instruction: Instruction) -> Alu:
    """shf: a 64-bit value {b, a} shifted, 32 bits kept."""
    left, clamp = instruction.has("l"), instruction.has("clamp")

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        n = (np.minimum(c, _U32(32)) if clamp else c & _U32(31)).astype(_U64)
        both = (b.astype(_U64) << _U64(32)) | a
        if left:
            # Shifting by 32 in two steps keeps each step below the width.
            return ((both << n) >> _U64(32)).astype(_U32)
        return (both >> n).astype(_U32)

    return _simple(instruction, compute, 3, "u32")


def lop3(machine: Machine, instruction: Instruction) -> Alu:
    ops = list(instruction.operands)
    if len(ops) != 5 or not isinstance(ops[4], Immediate):
        raise machine.unsupported("only the form with four sources")
    table = int(ops[4].value) & 0xFF

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        result = np.zeros_like(a + b + c)
        for i in range(8):
            if table >> i & 1:
                term = a if i & 4 else ~a
                term = term & (b if i & 2 else ~b)
                result |= term & (c if i & 1 else ~c)
        return result

    return Alu(((ops[0], "u32"),), ((ops[1], "u32"), (ops[2], "u32"), (ops[3], "u32")), compute)


def prmt(machine: Machine, instruction: Instruction) -> Alu:
    """Bytes of {b, a} chosen by four selectors, or by a mode."""
    mode = next((m for m in instruction.modifiers if m in _PRMT_MODES), None)

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        both = (b.astype(_U64) << _U64(32)) | a
        result = np.zeros(np.broadcast(a, b, c).shape, _U32)
        for i in range(4):
            if mode is None:
                selector = (c >> _U32(4 * i)) & _U32(0xF)
            else:
                choice = np.array([_PRMT_MODES[mode][k][i] for k in range(4)], _U32)
                selector = choice[c & _U32(3)]
            byte = (both >> ((selector & _U32(7)).astype(_U64) * _U64(8))) & _U64(0xFF)
            replicated = np.where(byte & _U64(0x80), _U64(0xFF), _U64(0))
            byte = np.where(selector & _U32(8), replicated, byte)
            result |= byte.astype(_U32) << _U32(8 * i)
        return result

    return _simple(instruction, compute, 3, "u32")


# Selectors of byte 0..3 of the result for the values 0..3 of the third source.
_PRMT_MODES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def bfe(machine: Machine, instruction: Instruction) -> Alu:
    type_name = instruction.types[-1]
    scalar = SCALAR_TYPES[type_name]
    bits = scalar.bits

    def compute(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        unsigned = a.view(f"u{scalar.size}")
        pos, count = (x & _U32(0xFF) for x in (position, length))
        pos, count = np.broadcast_arrays(pos, count)
        one = unsigned.dtype.type(1)
        low = np.where(
            pos >= bits, unsigned.dtype.type(0), unsigned >> np.minimum(pos, bits - 1).astype(
                unsigned.dtype)
        )  # fmt: skip
        mask = np.where(
            count >= bits,
            ~unsigned.dtype.type(0),
            (one << np.minimum(count, bits - 1).astype(unsigned.dtype)) - one,
        )
        field = low & mask
        if scalar.kind == "s":
            last = np.minimum(pos.astype(np.int64) + count - 1, bits - 1)
            sign = (unsigned >> np.maximum(last, 0).astype(unsigned.dtype)) & one
            # Above the field, and above the register, the sign bit is repeated.
            valid = np.minimum(count.astype(np.int64), np.maximum(bits - pos.astype(np.int64), 0))
            keep = np.where(
                valid >= bits,
                ~unsigned.dtype.type(0),
                (one << np.clip(valid, 0, bits - 1).astype(unsigned.dtype)) - one,
            )
            field = np.where((sign == 1) & (count > 0), field | ~keep, field & keep)
        return field.astype(unsigned.dtype).view(scalar.dtype)

    ops = instruction.operands
    return Alu(
        ((ops[0], type_name),), ((ops[1], type_name), (ops[2], "u32"), (ops[3], "u32")), compute
    )


def bfi(machine: Machine, instruction: Instruction) -> Alu:
    type_name = _bits_type(instruction.types[-1])
    bits = SCALAR_TYPES[type_name].bits
    dtype = SCALAR_TYPES[type_name].dtype

    def compute(
        a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray
    ) -> np.ndarray:
        pos, count = position & _U32(0xFF), length & _U32(0xFF)
        one = dtype.type(1)
        field = np.where(
            count >= bits,
            ~dtype.type(0),
            (one << np.minimum(count, bits - 1).astype(dtype)) - one,
        )
        by = np.minimum(pos, bits - 1).astype(dtype)
        mask = np.where(pos >= bits, dtype.type(0), field << by)
        return (b & ~mask) | ((a << by) & mask)

    ops = instruction.operands
    return Alu(
        ((ops[0], type_name),),
        ((ops[1], type_name), (ops[2], type_name), (ops[3], "u32"), (ops[4], "u32")),
        compute,
    )


def _unsigned_unary(
    instruction: Instruction, function: Callable[[np.ndarray], np.ndarray], result: str
) -> Alu:
    ops = instruction.operands
    return Alu(((ops[0], result),), ((ops[1], _bits_type(instruction.types[-1])),), function)


def popc(machine: Machine, instruction: Instruction) -> Alu:
    return _unsigned_unary(instruction, lambda a: np.bitwise_count(a).astype(_U32), "u32")


def highest_bit(a: np.ndarray) -> np.ndarray:
    """Position of the highest one of an unsigned array, -1 for zero (int64)."""
    result = np.full(a.shape, -1, np.int64)
    rest = a.astype(_U64)
    for step in (32, 16, 8, 4, 2, 1):
        big = rest >= _U64(1) << _U64(step)
        result[big] += step
        rest = np.where(big, rest >> _U64(step), rest)
    return result + (a != 0)


def clz(machine: Machine, instruction: Instruction) -> Alu:
    bits = SCALAR_TYPES[instruction.types[-1]].bits
    return _unsigned_unary(instruction, lambda a: (bits - 1 - highest_bit(a)).astype(_U32), "u32")


def bfind(machine: Machine, instruction: Instruction) -> Alu:
    scalar = SCALAR_TYPES[instruction.types[-1]]
    amount = instruction.has("shiftamt")

    def compute(a: np.ndarray) -> np.ndarray:
        bits = a.view(f"u{scalar.size}")
        # A negative number is searched for its highest zero.
        found = highest_bit(np.where(a < 0, ~bits, bits) if scalar.kind == "s" else bits)
        if amount:
            found = np.where(found >= 0, scalar.bits - 1 - found, -1)
        return found.astype(np.int32).view(_U32)

    ops = instruction.operands
    return Alu(((ops[0], "u32"),), ((ops[1], scalar.name),), compute)


def brev(machine: Machine, instruction: Instruction) -> Alu:
    def compute(a: np.ndarray) -> np.ndarray:
        octets = np.ascontiguousarray(a).view(np.uint8).reshape(a.size, -1)
        bits = np.unpackbits(octets, axis=1, bitorder="little")
        return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype).reshape(-1)

    return _unsigned_unary(instruction, compute, _bits_type(instruction.types[-1]))


def dot_product(machine: Machine, instruction: Instruction) -> Alu:
    """dp4a and dp2a: packed 8-bit products added to a 32-bit sum."""
    kinds = [t[0] for t in instruction.types]
    wide = instruction.name == "dp2a"
    upper = instruction.has("hi")

    def parts(x: np.ndarray, kind: str, size: int) -> np.ndarray:
        code = ("i" if kind == "s" else "u") + str(size)
        return np.ascontiguousarray(x).view(code).reshape(x.size, -1).astype(np.int64)

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        left = parts(a, kinds[0], 2 if wide else 1)
        right = parts(b, kinds[1], 1)
        if wide:
            right = right[:, 2:] if upper else right[:, :2]
        return ((left * right).sum(axis=1) + c).astype(np.int64).astype(_U32)

    return _simple(instruction, compute, 3, "u32")


def bmsk(machine: Machine, instruction: Instruction) -> Alu:
    clamp = instruction.has("clamp")

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        start, width = a.astype(_U64), b.astype(_U64)
        if clamp:
            start, width = np.minimum(start, _U64(32)), np.minimum(width, _U64(32))
        else:
            start, width = start & _U64(31), width & _U64(31)
        return ((((_U64(1) << width) - _U64(1)) << start) & _U64(0xFFFF_FFFF)).astype(_U32)

    return _simple(instruction, compute, 2, "u32")


def szext(machine: Machine, instruction: Instruction) -> Alu:
    signed, clamp = instruction.types[-1] == "s32", instruction.has("clamp")

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        width = (np.minimum(b, _U32(32)) if clamp else b & _U32(31)).astype(_U64)
        mask = (_U64(1) << width) - _U64(1)
        low = a.astype(_U64) & mask
        if signed:
            sign = (low >> (np.maximum(width, _U64(1)) - _U64(1))) & _U64(1)
            low = np.where((sign == 1) & (width > 0), low | ~mask, low)
        return (low & _U64(0xFFFF_FFFF)).astype(_U32)

    return _simple(instruction, compute, 2, "u32")


OPERATIONS: Mapping[str, Builder] = {
    "addc": _with_carry,
    "subc": _with_carry,
    "madc": _with_carry,
    "mul24": mul24,
    "mad24": mul24,
    "rem": rem,
    "sad": sad,
    "and": logic,
    "or": logic,
    "xor": logic,
    "not": complement,
    "cnot": cnot,
    "shl": shift,
    "shr": shift,
    "shf": funnel_shift,
    "lop3": lop3,
    "prmt": prmt,
    "bfe": bfe,
    "bfi": bfi,
    "popc": popc,
    "clz": clz,
    "bfind": bfind,
    "brev": brev,
    "dp4a": dot_product,
    "dp2a": dot_product,
    "bmsk": bmsk,
    "szext": szext,
}
"""Instructions that only exist for integers and bits."""

INTEGER_FORMS: Mapping[str, Builder] = {
    "add": add_sub,
    "sub": add_sub,
    "mul": mul,
    "mad": mad,
    "div": div,
    "min": minmax,
    "max": minmax,
    "abs": absolute,
    "neg": negate,
}
"""Integer forms of instructions that also exist for floats."""
