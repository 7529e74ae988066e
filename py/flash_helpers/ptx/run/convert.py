"""cvt, and moves between registers (PTX ISA 9.0, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.read.module import Instruction, Register, Symbol, Vector
from flash_helpers.ptx.read.types import B128, SCALAR_TYPES, dtype_of, size_of
from flash_helpers.ptx.run.forms import FLOATS, MEMORY, WORDS, Form
from flash_helpers.ptx.run.machine import Action, Alu, Machine, pick
from flash_helpers.ptx.run.memory import WINDOW_SIZE, WINDOWS
from flash_helpers.ptx.run.rounding import (
    F16,
    F32,
    INTEGER_ROUNDINGS,
    ROUNDINGS,
    bf16_to_f32,
    clamp_to_one,
    f32_to_bf16,
    f64_to_bf16,
    flush,
    not_negative,
    odd_f32,
    round_f64,
    round_to_integer,
)
from flash_helpers.ptx.run.shared import Selection

_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38}


def _to_float(x: np.ndarray, type_name: str) -> np.ndarray:
    """A source as NumPy floats (f32 for bf16 and tf32)."""
    if type_name == "bf16":
        return bf16_to_f32(x)
    return x.view(F32) if type_name == "tf32" else x


def _narrow(x: np.ndarray, target: str, mode: str) -> np.ndarray:
    """NumPy floats rounded to a float type of PTX."""
    if target == "bf16":
        wide = x.dtype == np.float64
        return f64_to_bf16(x, mode) if wide else f32_to_bf16(x.astype(F32), mode)
    if target == "tf32":
        return _to_tf32(x.astype(F32), mode)
    dtype = dtype_of(target)
    if mode == "rn":
        if dtype == F16 and x.dtype == np.float64:
            x = odd_f32(x)
        return x.astype(dtype)
    return round_f64(x.astype(np.float64), dtype, mode)


def _to_tf32(x: np.ndarray, mode: str) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.uint32)
    if mode == "rna":
        rounded = bits + np.uint32(0x1000)
    elif mode == "rz":
        rounded = bits
    else:
        rounded = bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return np.where(np.isfinite(x), rounded & np.uint32(0xFFFF_E000), bits)


def _float_to_integer(x: np.ndarray, dtype: np.dtype, mode: str) -> np.ndarray:
    """Rounded, then clamped to the type; NaN becomes 0 (u8, s8, ... too: cvt always clamps)."""
    rounded = round_to_integer(x.astype(np.float64), mode)
    limits = np.iinfo(dtype)
    # 2**63 - 1 and 2**64 - 1 are not doubles: test against the next power of two.
    high = float(limits.max) if dtype.itemsize < 8 else 2.0 ** (64 - (dtype.kind == "i"))
    too_big, too_small = rounded >= high, rounded <= float(limits.min)
    safe = np.where(too_big | too_small | np.isnan(rounded), 0.0, rounded)
    result = np.where(too_big, dtype.type(limits.max), safe.astype(dtype))
    result = np.where(too_small, dtype.type(limits.min), result)
    # A NaN converts to 0, except to a 64-bit integer: there the top bit is set.
    nan = dtype.type(0) if dtype.itemsize < 8 else np.uint64(1 << 63).astype(dtype)
    return np.where(np.isnan(rounded), nan, result)


def _integer_to_integer(a: np.ndarray, dtype: np.dtype, saturate: bool) -> np.ndarray:
    if saturate:
        limits, bounds = np.iinfo(dtype), np.iinfo(a.dtype)
        a = np.clip(a, max(limits.min, bounds.min), min(limits.max, bounds.max))
    return a.astype(dtype)


def _exact_double(a: np.ndarray) -> np.ndarray:
    """Integers as doubles rounded to odd."""
    if a.dtype.itemsize < 8:
        return a.astype(np.float64)
    low = (a & a.dtype.type(0x7FF)).astype(np.float64)
    high = (a & ~a.dtype.type(0x7FF)).astype(np.float64)
    total = high + low
    inexact = (total - high) != low
    bits = total.view(np.int64)
    down = np.where((total - high) > low, bits - np.where(total > 0, 1, -1), bits)
    return np.where(inexact, down | 1, bits).view(np.float64)


def _cvt(machine: Machine, instruction: Instruction) -> Alu:
    if instruction.has("pack"):
        raise machine.unsupported("it packs a single source")
    to, what = instruction.operands
    target, source = instruction.types
    mode = instruction.first(ROUNDINGS) or "rn"
    integer_mode = instruction.first(INTEGER_ROUNDINGS)
    sat, relu, ftz = (instruction.has(m) for m in ("sat", "relu", "ftz"))
    dtype = dtype_of(target)
    if mode == "rna" and target != "tf32":
        raise machine.unsupported("this rounding of the type")

    def from_float(a: np.ndarray) -> np.ndarray:
        x = _to_float(a, source)
        return flush(x) if ftz and x.dtype == F32 else x

    def float_to_float(a: np.ndarray) -> np.ndarray:
        x = from_float(a)
        x = round_to_integer(x, integer_mode) if integer_mode else x
        x = not_negative(x) if relu else x
        x = clamp_to_one(x) if sat else x
        result = _narrow(x, target, mode)
        return flush(result) if ftz and result.dtype == F32 else result

    def float_to_integer(a: np.ndarray) -> np.ndarray:
        return _float_to_integer(from_float(a), dtype, integer_mode or "rzi")

    def integer_to_float(a: np.ndarray) -> np.ndarray:
        if target in ("f64", "f32") and mode == "rn":
            return a.astype(dtype)
        # A 64-bit integer may not fit a double: keep what is below as a sticky bit.
        return _narrow(_exact_double(a), target, mode)

    def integer_to_integer(a: np.ndarray) -> np.ndarray:
        return _integer_to_integer(a, dtype, sat or instruction.has("satfinite"))

    compute = {
        (True, True): float_to_float,
        (True, False): float_to_integer,
        (False, True): integer_to_float,
        (False, False): integer_to_integer,
    }[SCALAR_TYPES[source].is_float, SCALAR_TYPES[target].is_float]
    return Alu(((to, target),), ((what, source),), compute)


def _cvt_pair(machine: Machine, instruction: Instruction) -> Alu:
    """cvt.rn.f16x2.f32 d, a, b: a goes to the upper half."""
    target, (to, *sources) = instruction.types[0][:-2], instruction.operands
    relu, ftz, finite = (instruction.has(m) for m in ("relu", "ftz", "satfinite"))
    mode, limit = instruction.first(ROUNDINGS) or "rn", np.float32(_LARGEST[target])

    def half(x: np.ndarray) -> np.ndarray:
        x = flush(x) if ftz else x
        x = not_negative(x) if relu else x
        x = np.where(np.isnan(x), x, np.clip(x, -limit, limit)) if finite else x
        return _narrow(x, target, mode).view(np.uint16)

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return half(a).astype(np.uint32) << np.uint32(16) | half(b)

    return Alu(((to, "b32"),), tuple((s, "f32") for s in sources), compute)


def _cvt_pack(machine: Machine, instruction: Instruction) -> Alu:
    """cvt.pack.sat: two s32 saturated and packed, above the low part of a third source."""
    target, (to, a, b, *low) = instruction.types[0], instruction.operands
    bits = SCALAR_TYPES[target].bits
    if not instruction.has("pack"):
        raise machine.unsupported("only cvt.pack has so many sources")

    def part(x: np.ndarray) -> np.ndarray:
        clipped = _integer_to_integer(x.astype(np.int64), dtype_of(target), saturate=True)
        return clipped.view(f"u{bits // 8}").astype(np.uint32)

    def compute(x: np.ndarray, y: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        both = part(x) << np.uint32(bits) | part(y)
        return rest[0] << np.uint32(16) | both if rest else both

    return Alu(((to, "u32"),), ((a, "s32"), (b, "s32"), *((c, "u32") for c in low)), compute)


def _mov(machine: Machine, instruction: Instruction) -> Alu | Action:
    target, source = instruction.operands
    type_name = instruction.types[-1]
    if isinstance(target, Vector):
        return _unpack(machine, target, machine.source(source, type_name), type_name)
    if isinstance(source, Vector):
        return _pack(machine, target, source, type_name)
    if isinstance(source, Symbol):
        value = np.array([machine.symbol(source)], np.uint64).astype(dtype_of(type_name))
        return Alu(((target, type_name),), (), lambda: value)
    if isinstance(source, Register) and type_name not in ("pred", B128):
        type_name = f"b{SCALAR_TYPES[type_name].bits}"
    return Alu(((target, type_name),), ((source, type_name),), lambda a: a)


def _part_type(machine: Machine, vector: Vector, type_name: str) -> str:
    count = len(vector.elements)
    bits, rest = divmod(8 * size_of(type_name), count) if count else (0, 0)
    if rest or bits not in (8, 16, 32, 64):
        raise machine.unsupported(f"{count} parts of a .{type_name}")
    return f"b{bits}"


def _unpack(machine: Machine, target: Vector, source: np.ndarray, type_name: str) -> Action:
    part_type = _part_type(machine, target, type_name)
    parts = [machine.destination(e, part_type) for e in target.elements]

    def run_some(selection: Selection) -> None:
        value = np.ascontiguousarray(pick(source, selection))
        rows = value.view(dtype_of(part_type)).reshape(value.shape[0], -1)
        for i, part in enumerate(parts):
            part[selection] = rows[:, i]

    return machine.from_some(run_some)


def _pack(machine: Machine, target: Register, source: Vector, type_name: str) -> Action:
    part_type = _part_type(machine, source, type_name)
    parts = [machine.source(e, part_type) for e in source.elements]
    into = machine.destination(target, type_name)

    def run_some(selection: Selection) -> None:
        lanes = into[selection].shape[0]
        rows = np.empty((lanes, len(parts)), dtype_of(part_type))
        for i, part in enumerate(parts):
            rows[:, i] = pick(part, selection)
        into[selection] = rows.view(dtype_of(type_name)).reshape(lanes, *into.shape[1:])

    return machine.from_some(run_some)


def _cvta(machine: Machine, instruction: Instruction) -> Alu:
    """Between a state space and generic addresses; global addresses are generic already."""
    target, source = instruction.operands
    type_name = instruction.types[-1]
    offset = np.uint64(WINDOWS.get(instruction.first(WINDOWS), 0))
    function = np.subtract if instruction.has("to") else np.add
    return Alu(((target, type_name),), ((source, type_name),), lambda a: function(a, offset))


def _isspacep(machine: Machine, instruction: Instruction) -> Alu:
    target, source = instruction.operands
    space = machine.one_of((*WINDOWS, "global", "const"))

    def within(a: np.ndarray, window: str) -> np.ndarray:
        start = WINDOWS[window]
        return (a >= np.uint64(start)) & (a < np.uint64(start + WINDOW_SIZE))

    def compute(a: np.ndarray) -> np.ndarray:
        if space in WINDOWS:
            return within(a, space)
        is_global = ~np.any([within(a, window) for window in WINDOWS], axis=0)
        return is_global & (space == "global")

    return Alu(((target, "pred"),), ((source, "u64"),), compute)


_NUMBERS = f"u8 s8 {WORDS} f16 bf16 f32 f64 tf32"

FORMS = (
    Form("cvt", _cvt, (2,), (_NUMBERS, _NUMBERS)),
    Form("cvt", _cvt_pair, (3,), ("f16x2 bf16x2", "f32")),
    Form("cvt", _cvt_pack, (3,), ("u16 s16", "s32")),
    Form("cvt", _cvt_pack, (4,), ("u8 s8", "s32", "b32")),
    Form("mov", _mov, (2,), (f"pred {MEMORY} {FLOATS} {B128}",)),
    Form("cvta", _cvta, (2,), ("u32 u64",)),
    Form("isspacep", _isspacep, (2,)),
)
