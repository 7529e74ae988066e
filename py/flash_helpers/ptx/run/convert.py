"""cvt, and moves between registers (PTX ISA 9.0, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from flash_helpers.ptx.read.module import Instruction, Register, Symbol, Vector
from flash_helpers.ptx.read.types import B128, SCALAR_TYPES, size_of
from flash_helpers.ptx.run.integers import Builder
from flash_helpers.ptx.run.machine import Action, Alu, Machine, pick
from flash_helpers.ptx.run.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_SIZE
from flash_helpers.ptx.run.rounding import (
    F16,
    F32,
    INTEGER_ROUNDINGS,
    ROUNDINGS,
    bf16_to_f32,
    f32_to_bf16,
    f64_to_bf16,
    flush,
    odd_f32,
    round_f64,
    round_to_integer,
)
from flash_helpers.ptx.run.shared import Selection

_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}


def _to_float(x: np.ndarray, type_name: str) -> np.ndarray:
    """A source as NumPy floats (f32 for bf16 and tf32)."""
    if type_name == "bf16":
        return bf16_to_f32(x)
    return x.view(F32) if type_name == "tf32" else x


def _narrow(x: np.ndarray, target: str, mode: str) -> np.ndarray:
    """NumPy floats rounded to a float type of PTX."""
    if target == "bf16":
        return f64_to_bf16(x, mode) if x.dtype == np.float64 else f32_to_bf16(
            x.astype(F32), mode)  # fmt: skip
    if target == "tf32":
        return _to_tf32(x.astype(F32), mode)
    dtype = SCALAR_TYPES[target].dtype
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
    rounded = rounded & np.uint32(0xFFFF_E000)
    return np.where(np.isfinite(x), rounded, bits)


def _float_to_integer(x: np.ndarray, dtype: np.dtype, mode: str) -> np.ndarray:
    """Rounded, then clamped to the type; NaN becomes 0 (u8, s8, ... too: cvt always clamps)."""
    rounded = round_to_integer(x.astype(np.float64), mode)
    limits = np.iinfo(dtype)
    low, high = float(limits.min), float(limits.max)
    # 2**63 - 1 and 2**64 - 1 are not doubles: test against the next power of two.
    too_big = rounded >= (high if dtype.itemsize < 8 else 2.0 ** (8 * dtype.itemsize - (
        dtype.kind == "i")))  # fmt: skip
    too_small = rounded <= low
    safe = np.where(too_big | too_small | np.isnan(rounded), 0.0, rounded)
    result = safe.astype(dtype)
    result = np.where(too_big, dtype.type(limits.max), result)
    result = np.where(too_small, dtype.type(limits.min), result)
    # A NaN converts to 0, except to a 64-bit integer: there the top bit is set.
    nan = dtype.type(0)
    if dtype.itemsize == 8:
        nan = np.uint64(1 << 63).astype(dtype)
    return np.where(np.isnan(rounded), nan, result)


def _integer_to_integer(target: str, saturate: bool) -> Callable[[np.ndarray], np.ndarray]:
    dtype = SCALAR_TYPES[target].dtype

    def compute(a: np.ndarray) -> np.ndarray:
        if not saturate:
            return a.astype(dtype)
        limits = np.iinfo(dtype)
        bounds = np.iinfo(a.dtype)
        low = a.dtype.type(max(limits.min, bounds.min))
        high = a.dtype.type(min(limits.max, bounds.max))
        return np.clip(a, low, high).astype(dtype)

    return compute


def cvt(machine: Machine, instruction: Instruction) -> Alu:
    ops = instruction.operands
    if instruction.has("pack"):
        return _cvt_pack(machine, instruction)
    if len(instruction.types) != 2:
        raise machine.unsupported("unknown types")
    target, source = instruction.types
    mode = next((m for m in instruction.modifiers if m in ROUNDINGS), "rn")
    if target in ("f16x2", "bf16x2"):
        return _cvt_pair(instruction, mode)
    integer_mode = next((m for m in instruction.modifiers if m in INTEGER_ROUNDINGS), None)
    source_float = SCALAR_TYPES[source].is_float
    target_float = SCALAR_TYPES[target].is_float
    saturate, relu, ftz = (instruction.has(m) for m in ("sat", "relu", "ftz"))
    saturate = saturate or instruction.has("satfinite")

    def float_to_float(a: np.ndarray) -> np.ndarray:
        x = _to_float(a, source)
        if ftz and x.dtype == F32:
            x = flush(x)
        if integer_mode is not None:
            x = round_to_integer(x, integer_mode)
        if relu:
            x = np.where(x < 0, x.dtype.type(0), x)
        if instruction.has("sat"):
            x = np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1))
        result = _narrow(x, target, mode)
        return flush(result) if ftz and result.dtype == F32 else result

    def float_to_integer(a: np.ndarray) -> np.ndarray:
        x = _to_float(a, source)
        x = flush(x) if ftz and x.dtype == F32 else x
        return _float_to_integer(x, SCALAR_TYPES[target].dtype, integer_mode or "rzi")

    def integer_to_float(a: np.ndarray) -> np.ndarray:
        if target in ("f64", "f32") and mode == "rn":
            return a.astype(SCALAR_TYPES[target].dtype)
        # A 64-bit integer may not fit a double: keep what is below as a sticky bit.
        return _narrow(_exact_double(a), target, mode)

    if source_float and target_float:
        compute = float_to_float
    elif source_float:
        compute = float_to_integer
    elif target_float:
        compute = integer_to_float
    else:
        compute = _integer_to_integer(target, saturate)
    return Alu(((ops[0], target),), ((ops[1], source),), compute)


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


def _cvt_pair(instruction: Instruction, mode: str) -> Alu:
    """cvt.rn.f16x2.f32 d, a, b: a goes to the upper half."""
    target = instruction.types[0][:-2]
    ops = instruction.operands
    relu, ftz = instruction.has("relu"), instruction.has("ftz")
    finite = instruction.has("satfinite")

    def half(x: np.ndarray) -> np.ndarray:
        if ftz:
            x = flush(x)
        if relu:
            x = np.where(x < 0, np.float32(0), x)
        if finite:
            limit = np.float32(65504.0) if target == "f16" else np.float32(3.3895313892515355e38)
            x = np.where(np.isnan(x), x, np.clip(x, -limit, limit))
        return _narrow(x, target, mode).view(np.uint16)

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return half(a).astype(np.uint32) << np.uint32(16) | half(b)

    return Alu(((ops[0], "b32"),), ((ops[1], "f32"), (ops[2], "f32")), compute)


def _cvt_pack(machine: Machine, instruction: Instruction) -> Alu:
    """cvt.pack.sat: two s32 saturated and packed, above the low part of a third source."""
    target, source = instruction.types[:2]
    scalar = SCALAR_TYPES[target]
    if scalar.size > 2:
        raise machine.unsupported()
    limits = np.iinfo(scalar.dtype)
    unsigned = np.dtype(f"u{scalar.size}")

    def part(a: np.ndarray) -> np.ndarray:
        clipped = np.clip(a.astype(np.int64), limits.min, limits.max)
        return clipped.astype(scalar.dtype).view(unsigned).astype(np.uint32)

    def compute(a: np.ndarray, b: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        bits = np.uint32(scalar.bits)
        both = part(a) << bits | part(b)
        if scalar.size == 2:
            return both
        return both if not rest else rest[0] << np.uint32(16) | both

    ops = instruction.operands
    sources = [(ops[1], source), (ops[2], source)]
    if len(ops) > 3:
        sources.append((ops[3], "u32"))
    return Alu(((ops[0], "u32"),), tuple(sources), compute)


def mov(machine: Machine, instruction: Instruction) -> Alu | Action:
    target, source = instruction.operands
    type_name = instruction.types[-1]
    if isinstance(target, Vector):
        return _unpack(machine, target, machine.source(source, type_name), type_name)
    if isinstance(source, Vector):
        return _pack(machine, target, source, type_name)
    if isinstance(source, Symbol):
        value = np.array([machine.symbol(source)], np.uint64)
        dtype = SCALAR_TYPES[type_name].dtype
        return Alu(((target, type_name),), (), lambda: value.astype(dtype))
    if type_name == B128:
        return Alu(((target, type_name),), ((source, type_name),), lambda a: a)
    if isinstance(source, Register) and type_name != "pred":
        type_name = f"b{SCALAR_TYPES[type_name].bits}"
    return Alu(((target, type_name),), ((source, type_name),), lambda a: a)


def _unpack(machine: Machine, target: Vector, source: np.ndarray, type_name: str) -> Action:
    size = size_of(type_name) // len(target.elements)
    part_type = f"b{8 * size}"
    parts = [machine.destination(e, part_type) for e in target.elements]

    def run_some(selection: Selection) -> None:
        value = np.ascontiguousarray(pick(source, selection))
        rows = value.view(f"u{size}").reshape(value.shape[0], -1)
        for i, part in enumerate(parts):
            if part is not None:
                part.put_some(selection, rows[:, i])

    return machine.from_some(run_some)


def _pack(machine: Machine, target: Register, source: Vector, type_name: str) -> Action:
    count = len(source.elements)
    size = size_of(type_name) // count
    parts = [machine.source(e, f"b{8 * size}") for e in source.elements]
    into = machine.register(target)
    wide = into.dtype
    length = into.shape[1:] or (1,)

    def run_some(selection: Selection) -> None:
        lanes = into[selection].shape[0]
        rows = np.empty((lanes, count), f"u{size}")
        for i, part in enumerate(parts):
            rows[:, i] = pick(part, selection)
        value = rows.view(wide).reshape(lanes, *length)
        into[selection] = value if into.ndim == 2 else value[:, 0]

    return machine.from_some(run_some)


def cvta(machine: Machine, instruction: Instruction) -> Alu:
    """Between a state space and generic addresses; global addresses are generic already."""
    target, source = instruction.operands
    type_name = instruction.types[-1]
    space = next((m for m in instruction.modifiers if m in _WINDOWS), None)
    offset = np.uint64(_WINDOWS[space] if space else 0)
    to_space = instruction.has("to")

    def compute(a: np.ndarray) -> np.ndarray:
        return a - offset if to_space else a + offset

    return Alu(((target, type_name),), ((source, type_name),), compute)


def isspacep(machine: Machine, instruction: Instruction) -> Alu:
    target, source = instruction.operands
    space = instruction.modifiers[0]
    if space not in ("shared", "local", "param", "global", "const"):
        raise machine.unsupported()

    def compute(a: np.ndarray) -> np.ndarray:
        if space in _WINDOWS:
            start = np.uint64(_WINDOWS[space])
            return (a >= start) & (a < start + np.uint64(WINDOW_SIZE))
        windows = np.zeros(a.shape, bool)
        for start in _WINDOWS.values():
            windows |= (a >= np.uint64(start)) & (a < np.uint64(start + WINDOW_SIZE))
        return ~windows if space == "global" else np.zeros(a.shape, bool)

    return Alu(((target, "pred"),), ((source, "u64"),), compute)


OPERATIONS: Mapping[str, Builder] = {
    "cvt": cvt,
    "mov": mov,
    "cvta": cvta,
    "isspacep": isspacep,
}
