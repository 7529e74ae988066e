"""Floating-point instructions, scalar and packed.

f32, f64: IEEE, with one rounding. f16 and bf16 are computed in float32 or float64 and rounded once.
The `.approx` functions are computed in double precision and rounded to nearest: within half an ulp,
where the hardware is allowed one or two (PTX ISA 9.0, "Floating-Point Instructions").
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.forms import FLOATS, HALVES, SINGLES, Builder, Form
from flash_helpers.ptx.run.machine import Alu, Compute, Machine
from flash_helpers.ptx.run.rounding import (
    F16,
    F32,
    ROUNDINGS,
    add_odd,
    bf16_to_f32,
    clamp_to_one,
    f32_to_bf16,
    f64_to_bf16,
    flush,
    fma_f32,
    fma_f64,
    not_negative,
    odd_f32,
    round_f64,
)

_LIMITS: Mapping[str, Compute] = {"sat": clamp_to_one, "relu": not_negative}


def _rounding(instruction: Instruction) -> str:
    return instruction.first(ROUNDINGS) or "rn"


def _bits_to_bits(type_name: str, function: Compute) -> Compute:
    """A function of NumPy floats (float32 for bf16) made one of the type's registers."""
    if type_name in ("f16", "f32", "f64"):
        return function
    pairs, is_bf16 = type_name.endswith("x2"), type_name.startswith("bf16")

    def compute(*arrays: np.ndarray) -> np.ndarray:
        if pairs:
            n = max(a.size for a in arrays)
            half = np.uint16 if is_bf16 else F16
            arrays = [np.ascontiguousarray(np.broadcast_to(a, n)).view(half) for a in arrays]
        value = function(*[bf16_to_f32(a) for a in arrays] if is_bf16 else arrays)
        if is_bf16:
            value = f32_to_bf16(value) if value.dtype == F32 else f64_to_bf16(value)
        return np.ascontiguousarray(value).view(np.uint32) if pairs else value

    return compute


def _same(instruction: Instruction, function: Compute) -> Alu:
    """All operands have the opcode's type; `.ftz`, `.sat` and `.relu` go around the function."""
    type_name = instruction.types[-1]
    target, *sources = instruction.operands
    ftz = instruction.has("ftz")
    limits = [limit for name, limit in _LIMITS.items() if instruction.has(name)]

    def limited(*arrays: np.ndarray) -> np.ndarray:
        value = flush(function(*map(flush, arrays))) if ftz else function(*arrays)
        for limit in limits:
            value = limit(value)
        return value

    compute = _bits_to_bits(type_name, limited if ftz or limits else function)
    return Alu(((target, type_name),), tuple((s, type_name) for s in sources), compute)


def _plain(function: Compute) -> Builder:
    return lambda machine, instruction: _same(instruction, function)


def _only_f32_rounds(machine: Machine, mode: str, type_name: str) -> None:
    if mode != "rn" and type_name != "f32":
        raise machine.unsupported("directed rounding of this type")


def _add_sub_mul(machine: Machine, instruction: Instruction) -> Alu:
    """Exact in a wider type, then rounded once."""
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[instruction.name]
    mode, type_name = _rounding(instruction), instruction.types[-1]
    _only_f32_rounds(machine, mode, type_name)

    def half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return function(a.astype(F32), b.astype(F32)).astype(F16)

    def directed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        if function is np.multiply:
            return round_f64(wide_a * wide_b, F32, mode)
        return round_f64(add_odd(wide_a, -wide_b if function is np.subtract else wide_b), F32, mode)

    if type_name in ("f16", "f16x2"):
        return _same(instruction, half)
    return _same(instruction, function if mode == "rn" else directed)


def _fma(machine: Machine, instruction: Instruction) -> Alu:
    type_name, mode = instruction.types[-1], _rounding(instruction)
    _only_f32_rounds(machine, mode, type_name)

    def narrow(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        exact = add_odd(np.multiply(a, b, dtype=np.float64), c.astype(np.float64))
        return exact if a.dtype == F32 else odd_f32(exact).astype(F16)

    if type_name == "f32":
        return _same(instruction, lambda a, b, c: fma_f32(a, b, c, mode))
    return _same(instruction, fma_f64 if type_name == "f64" else narrow)


def _div(machine: Machine, instruction: Instruction) -> Alu:
    mode = _rounding(instruction)

    def directed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        near = np.divide(a, b)
        # The sign of a - near * b, exact in double, says on which side the quotient lies.
        rest = a.astype(np.float64) - near.astype(np.float64) * b.astype(np.float64)
        side = np.where(np.isfinite(rest), np.sign(rest) * np.sign(b), 0)
        wide = near.astype(np.float64)
        nudged = np.nextafter(wide, np.where(side == 0, wide, side * np.inf))
        return round_f64(nudged, F32, mode)

    nearest = mode == "rn" or instruction.types[-1] == "f64"
    return _same(instruction, np.divide if nearest else directed)


def _minmax(machine: Machine, instruction: Instruction) -> Alu:
    smaller, keeps_nan = instruction.name == "min", instruction.has("NaN")
    pairs = {False: (np.fmax, np.fmin), True: (np.maximum, np.minimum)}
    function = pairs[keeps_nan][smaller]

    def signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        magnitude = function(np.abs(a), np.abs(b))
        return np.where(np.signbit(a) ^ np.signbit(b), -magnitude, magnitude)

    binary = signed if instruction.has("xorsign") else function
    if len(instruction.operands) == 4:
        return _same(instruction, lambda a, b, c: binary(binary(a, b), c))
    return _same(instruction, binary)


_UNARY: Mapping[str, Compute] = {
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "tanh": np.tanh,
}


def _unary(machine: Machine, instruction: Instruction) -> Alu:
    name, mode, type_name = instruction.name, _rounding(instruction), instruction.types[-1]
    function = _UNARY[name]
    exact = name in ("rcp", "sqrt") and type_name in ("f32", "f64")

    def in_double(a: np.ndarray) -> np.ndarray:
        return function(a.astype(np.float64)).astype(a.dtype)

    def directed(a: np.ndarray) -> np.ndarray:
        # 53 bits decide every case: no quotient or root of 24-bit numbers lies that near a float32
        # without being one.
        return round_f64(function(a.astype(np.float64)), F32, mode)

    if exact and mode != "rn" and type_name == "f32":
        return _same(instruction, directed)
    return _same(instruction, function if exact else in_double)


_TESTS: Mapping[str, Compute] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
}


def _testp(machine: Machine, instruction: Instruction) -> Alu:
    target, source = instruction.operands
    test = _TESTS[machine.one_of(_TESTS)]
    return Alu(((target, "pred"),), ((source, instruction.types[-1]),), test)


FORMS = (
    Form("add sub mul", _add_sub_mul, (3,), (FLOATS,)),
    Form("mad", _fma, (4,), (SINGLES,)),
    Form("fma", _fma, (4,), (FLOATS,)),
    Form("div", _div, (3,), (SINGLES,)),
    Form("min max", _minmax, (3, 4), (FLOATS,)),
    Form("abs", _plain(np.abs), (2,), (FLOATS,)),
    Form("neg", _plain(np.negative), (2,), (FLOATS,)),
    # The sign comes from the first source, the magnitude from the second.
    Form("copysign", _plain(lambda a, b: np.copysign(b, a)), (3,), (SINGLES,)),
    Form("ex2", _plain(np.exp2), (2,), (f"{HALVES} f32",)),
    Form("tanh", _unary, (2,), (f"{HALVES} f32",)),
    Form("lg2 sin cos", _unary, (2,), ("f32",)),
    Form("rcp sqrt rsqrt", _unary, (2,), (SINGLES,)),
    Form("testp", _testp, (2,), (SINGLES,)),
)
