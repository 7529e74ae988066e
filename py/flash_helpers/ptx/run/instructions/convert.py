"""cvt, and moves between registers (PTX ISA 9.0, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.read.module import Instruction, Register, Special, Vector
from flash_helpers.ptx.read.types import B128, SCALAR_TYPES, size_of
from flash_helpers.ptx.run.instructions.access import SHARED_CLUSTER, space_of
from flash_helpers.ptx.run.instructions.forms import (
    DIRECTED,
    FLOATS,
    INTEGERS,
    MEMORY,
    NEAREST,
    SPACES,
    Form,
)
from flash_helpers.ptx.run.machine import Alu, Machine
from flash_helpers.ptx.run.memory.regions import RANK_SHIFT, WINDOW_SIZE, WINDOWS
from flash_helpers.ptx.run.numbers.dtypes import dtype_of
from flash_helpers.ptx.run.numbers.rounding import (
    F32,
    INTEGER_ROUNDINGS,
    ROUNDINGS,
    add_odd,
    clamp_to_one,
    flush,
    not_negative,
    round_to_integer,
    to_floats,
    to_fp8,
    to_registers,
)

_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "tf32": 3.4011621342146535e38}


def _float_to_integer(x: np.ndarray, dtype: np.dtype, mode: str) -> np.ndarray:
    """Floats rounded, then clamped to the integer type; NaN becomes 0 (u8, s8, ... too: cvt always
    clamps)."""
    rounded = round_to_integer(x.astype(np.float64), mode)
    limits = np.iinfo(dtype)
    # 2**63 - 1 and 2**64 - 1 are not doubles: test against the next power of two.
    high = float(limits.max) if dtype.itemsize < 8 else 2.0 ** (64 - (dtype.kind == "i"))
    too_big, too_small = rounded >= high, rounded <= float(limits.min)
    safe = np.where(too_big | too_small | np.isnan(rounded), 0.0, rounded)
    result = np.where(too_big, dtype.type(limits.max), safe.astype(dtype))
    result = np.where(too_small, dtype.type(limits.min), result)
    # A NaN converts to 0, except from or to 64 bits: there the top bit is set, as on an H100.
    is_wide = max(dtype.itemsize, x.itemsize) == 8 and dtype.itemsize >= 4
    nan = np.uint64(is_wide << (8 * dtype.itemsize - 1)).astype(dtype)
    return np.where(np.isnan(rounded), nan, result)


def _integer_to_integer(a: np.ndarray, dtype: np.dtype, saturate: bool) -> np.ndarray:
    if saturate:
        limits, bounds = np.iinfo(dtype), np.iinfo(a.dtype)
        a = np.clip(a, max(limits.min, bounds.min), min(limits.max, bounds.max))
    return a.astype(dtype)


def _finite(x: np.ndarray, type_name: str) -> np.ndarray:
    """Values between the largest numbers of a type (`.satfinite`); a NaN stays."""
    limit = x.dtype.type(_LARGEST[type_name])
    return np.where(np.isnan(x), x, np.clip(x, -limit, limit))


def _exact_double(a: np.ndarray) -> np.ndarray:
    """Integers as doubles rounded to odd."""
    if a.dtype.itemsize < 8:
        return a.astype(np.float64)
    low = a & a.dtype.type(0x7FF)
    return add_odd((a - low).astype(np.float64), low.astype(np.float64))


def _cvt(machine: Machine, instruction: Instruction) -> Alu:
    target, source = instruction.types
    mode = instruction.first(ROUNDINGS) or "rn"
    integer_mode = instruction.first(INTEGER_ROUNDINGS)
    sat, relu, ftz = (instruction.has(m) for m in ("sat", "relu", "ftz"))
    finite, dtype = instruction.has("satfinite"), dtype_of(target)

    def from_float(a: np.ndarray) -> np.ndarray:
        x = to_floats(a, source)
        return flush(x) if ftz and x.dtype == F32 else x

    def float_to_float(a: np.ndarray) -> np.ndarray:
        x = from_float(a)
        x = round_to_integer(x, integer_mode) if integer_mode else x
        x = not_negative(x) if relu else x
        x = clamp_to_one(x) if sat else x
        x = _finite(x, target) if finite else x
        result = to_registers(x, target, mode)
        return flush(result) if ftz and result.dtype == F32 else result

    def float_to_integer(a: np.ndarray) -> np.ndarray:
        return _float_to_integer(from_float(a), dtype, integer_mode or "rzi")

    def integer_to_float(a: np.ndarray) -> np.ndarray:
        if sat:
            return to_registers((a > 0).astype(F32), target)
        if target in ("f64", "f32") and mode == "rn":
            return a.astype(dtype)
        # A 64-bit integer may not fit a double: keep the lower bits as a sticky bit.
        return to_registers(_exact_double(a), target, mode)

    def integer_to_integer(a: np.ndarray) -> np.ndarray:
        return _integer_to_integer(a, dtype, sat)

    compute = {
        (True, True): float_to_float,
        (True, False): float_to_integer,
        (False, True): integer_to_float,
        (False, False): integer_to_integer,
    }[SCALAR_TYPES[source].is_float, SCALAR_TYPES[target].is_float]
    bits = SCALAR_TYPES[target].bits
    if SCALAR_TYPES[target].kind == "f" and machine.width(instruction.operands[0]) > bits:
        # PTX ISA 9.0, "Operand Size Exceeding Instruction-Type Size": the bits are extended.
        return Alu.of(instruction, lambda a: compute(a).view(f"u{bits // 8}"), f"b{bits}", source)
    return Alu.of(instruction, compute, target, source)


def _cvt_pair(machine: Machine, instruction: Instruction) -> Alu:
    """cvt.rn.f16x2.f32 d, a, b: a goes to the upper half."""
    target = instruction.types[0].removesuffix("x2")
    relu, finite = (instruction.has(m) for m in ("relu", "satfinite"))
    mode = instruction.first(ROUNDINGS) or "rn"

    def half(x: np.ndarray) -> np.ndarray:
        x = not_negative(x) if relu else x
        x = _finite(x, target) if finite else x
        return to_registers(x, target, mode).view(np.uint16)

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return half(a).astype(np.uint32) << np.uint32(16) | half(b)

    return Alu.of(instruction, compute, "b32", "f32")


def _cvt_to_fp8(machine: Machine, instruction: Instruction) -> Alu:
    """cvt.rn.satfinite.e4m3x2.f32 d, a, b: a goes to the upper byte. From f16x2: half by half."""
    target, source = instruction.types
    scalar, relu = target.removesuffix("x2"), instruction.has("relu")
    if not (instruction.has("rn") and instruction.has("satfinite")):
        raise machine.unsupported("this conversion is .rn.satfinite")

    def code(x: np.ndarray) -> np.ndarray:
        return to_fp8(not_negative(x) if relu else x, scalar).astype(np.uint16)

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return code(a) << np.uint16(8) | code(b)

    def halves(a: np.ndarray) -> np.ndarray:
        low, high = to_floats(a, source).astype(F32).T
        return pair(high, low)

    if source == "f32":
        return Alu.of(instruction, pair, "b16", source)
    return Alu.of(instruction, halves, "b16", "b32")


def _cvt_from_fp8(machine: Machine, instruction: Instruction) -> Alu:
    """cvt.rn.f16x2.e4m3x2: every number of 8 bits is one of 16."""
    scalar, relu = instruction.types[1].removesuffix("x2"), instruction.has("relu")

    def compute(a: np.ndarray) -> np.ndarray:
        x = to_floats(np.ascontiguousarray(a).view(np.uint8), scalar)
        x = not_negative(x) if relu else x
        halves = np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))
        return halves.view(np.uint32)

    return Alu.of(instruction, compute, "b32", "b16")


def _cvt_pack(machine: Machine, instruction: Instruction) -> Alu:
    """cvt.pack.sat: two s32 saturated and packed, above the low part of a third source."""
    target = instruction.types[0]
    bits = SCALAR_TYPES[target].bits

    def part(x: np.ndarray) -> np.ndarray:
        clipped = _integer_to_integer(x.astype(np.int64), dtype_of(target), saturate=True)
        return clipped.view(f"u{bits // 8}").astype(np.uint32)

    def compute(x: np.ndarray, y: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        both = part(x) << np.uint32(bits) | part(y)
        return rest[0] << np.uint32(16) | both if rest else both

    return Alu.of(instruction, compute, "u32", "s32", "s32", "u32")


def _mov(machine: Machine, instruction: Instruction) -> Alu:
    target, source = instruction.operands
    type_name = instruction.types[-1]
    if isinstance(target, Vector):
        part = _part_type(machine, target, type_name)

        def unpack(a: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(a).view(dtype_of(part)).reshape(len(a), -1).T

        results = tuple((element, part) for element in target.elements)
        return Alu(results, ((source, type_name),), unpack)
    if isinstance(source, Vector):
        part = _part_type(machine, source, type_name)

        def pack(*arrays: np.ndarray) -> np.ndarray:
            rows = np.stack(np.broadcast_arrays(*arrays), axis=-1)
            whole = rows.view(dtype_of(type_name))
            return whole if type_name == B128 else whole.reshape(-1)

        sources = tuple((element, part) for element in source.elements)
        return Alu(((target, type_name),), sources, pack)
    if isinstance(source, Register) and type_name not in ("pred", B128):
        type_name = f"b{SCALAR_TYPES[type_name].bits}"
    return Alu.of(instruction, lambda a: a, type_name)


def _part_type(machine: Machine, vector: Vector, type_name: str) -> str:
    count = len(vector.elements)
    bits, rest = divmod(8 * size_of(type_name), count) if count else (0, 0)
    if rest or bits not in (8, 16, 32, 64):
        raise machine.unsupported(f"{count} parts of a .{type_name}")
    return f"b{bits}"


def _cvta(machine: Machine, instruction: Instruction) -> Alu:
    """Between a state space and generic addresses; global addresses are generic already."""
    offset = np.uint64(WINDOWS.get(space_of(instruction), 0))
    function = np.subtract if instruction.has("to") else np.add
    return Alu.of(instruction, lambda a: function(a, offset), instruction.types[-1])


def _isspacep(machine: Machine, instruction: Instruction) -> Alu:
    space = machine.one_of((*WINDOWS, SHARED_CLUSTER, "global", "const"))
    target, address = instruction.operands

    def within(a: np.ndarray, window: str) -> np.ndarray:
        start = WINDOWS[window]
        return (a >= np.uint64(start)) & (a < np.uint64(start + WINDOW_SIZE))

    def compute(a: np.ndarray, rank: np.ndarray) -> np.ndarray:
        if space in ("global", "const"):
            is_global = ~np.any([within(a, window) for window in WINDOWS], axis=0)
            return is_global & (space == "global")
        if space in ("local", "param"):
            return within(a, space)
        block = a.astype(np.int64) - WINDOWS["shared"] >> RANK_SHIFT
        if space == SHARED_CLUSTER:
            return (block >= 0) & (block <= machine.geometry.cluster)
        return (block == 0) | (block == rank.astype(np.int64) + 1)

    sources = (address, "u64"), (Special("%cluster_ctarank"), "u32")
    return Alu(((target, "pred"),), sources, compute)


_NUMBERS = f"u8 s8 {INTEGERS}"
_WHOLE = " ".join(INTEGER_ROUNDINGS)
_FP8 = "e4m3x2 e5m2x2"

FORMS = (
    Form("cvt", _cvt, (2,), (_NUMBERS, _NUMBERS), "sat"),
    # A float that becomes an integer is clamped with .sat and without.
    Form("cvt", _cvt, (2,), (_NUMBERS, "f32"), f"{_WHOLE} ftz", "sat"),
    Form("cvt", _cvt, (2,), (_NUMBERS, "f16 bf16 f64"), _WHOLE, "sat"),
    # No integer is subnormal.
    Form("cvt", _cvt, (2,), ("f32", _NUMBERS), f"{DIRECTED} sat", f"{NEAREST} ftz"),
    Form("cvt", _cvt, (2,), ("f16 bf16 f64", _NUMBERS), f"{DIRECTED} sat", NEAREST),
    Form("cvt", _cvt, (2,), ("f32", "f32"), f"{_WHOLE} ftz sat"),
    *(Form("cvt", _cvt, (2,), (t, t), f"{_WHOLE} sat") for t in ("f16", "bf16", "f64")),
    Form("cvt", _cvt, (2,), ("f32", "f16"), "sat", "ftz"),
    Form("cvt", _cvt, (2,), ("f32", "bf16"), "ftz sat", f"{NEAREST} {DIRECTED}"),
    Form("cvt", _cvt, (2,), ("f32", "f64"), f"{DIRECTED} ftz sat", NEAREST),
    Form("cvt", _cvt, (2,), ("f16", "f32"), f"{DIRECTED} ftz sat relu satfinite", NEAREST),
    Form("cvt", _cvt, (2,), ("f16", "bf16 f64"), f"{DIRECTED} sat", NEAREST),
    Form("cvt", _cvt, (2,), ("bf16", "f32"), f"{DIRECTED} ftz relu satfinite", NEAREST),
    Form("cvt", _cvt, (2,), ("bf16", "f16 f64"), DIRECTED, NEAREST),
    Form("cvt", _cvt, (2,), ("f64", "f32"), "ftz sat"),
    Form("cvt", _cvt, (2,), ("f64", "f16"), "sat"),
    Form("cvt", _cvt, (2,), ("f64", "bf16"), "sat", f"{NEAREST} {DIRECTED}"),
    Form("cvt", _cvt, (2,), ("tf32", "f32"), "rna rz relu satfinite", NEAREST),
    Form("cvt", _cvt_pair, (3,), ("f16x2 bf16x2", "f32"), "rz relu satfinite", NEAREST),
    Form("cvt", _cvt_to_fp8, (3,), (_FP8, "f32"), "rn satfinite relu"),
    Form("cvt", _cvt_to_fp8, (2,), (_FP8, "f16x2"), "rn satfinite relu"),
    Form("cvt", _cvt_from_fp8, (2,), ("f16x2", _FP8), "relu", NEAREST),
    Form("cvt", _cvt_pack, (3,), ("u16 s16", "s32"), "", "sat", having="pack"),
    Form("cvt", _cvt_pack, (4,), ("u8 s8", "s32", "b32"), "", "sat", having="pack"),
    Form("mov", _mov, (2,), (f"pred {MEMORY} {FLOATS} {B128}",)),
    Form("cvta", _cvta, (2,), ("u32 u64",), f"to {SPACES}"),
    Form("isspacep", _isspacep, (2,), (), SPACES),
)
