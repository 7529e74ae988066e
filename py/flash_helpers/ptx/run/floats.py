"""Floating-point instructions, scalar and packed.

f32, f64: IEEE, with one rounding. f16 and bf16 are computed in float32 or float64 and rounded once.
The ``.approx`` functions are computed in double precision and rounded to nearest: within half an
ulp, where the hardware is allowed one or two (PTX ISA 9.0, "Floating-Point Instructions").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.integers import Builder
from flash_helpers.ptx.run.machine import Alu, Machine
from flash_helpers.ptx.run.rounding import (
    F16,
    F32,
    ROUNDINGS,
    add_odd,
    bf16_to_f32,
    f32_to_bf16,
    f64_to_bf16,
    flush,
    fma_f32,
    fma_f64,
    odd_f32,
    round_f64,
)

Function = Callable[..., np.ndarray]

_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")


def is_float_form(instruction: Instruction) -> bool:
    return bool(instruction.types) and instruction.types[-1] in _FLOATS


def rounding_of(instruction: Instruction) -> str:
    return next((m for m in instruction.modifiers if m in ROUNDINGS), "rn")


def packed(type_name: str, function: Function) -> Function:
    """A function of scalars of f16 or float32 (for bf16) made one of the type's registers."""
    if type_name == "f16x2":

        def on_pairs(*arrays: np.ndarray) -> np.ndarray:
            n = max(a.size for a in arrays)
            halves = [np.ascontiguousarray(np.broadcast_to(a, n)).view(F16) for a in arrays]
            return np.ascontiguousarray(function(*halves)).view(np.uint32)

        return on_pairs
    if type_name == "bf16":

        def on_bf16(*arrays: np.ndarray) -> np.ndarray:
            return function(*[bf16_to_f32(a) for a in arrays])

        return on_bf16
    if type_name == "bf16x2":

        def on_bf16_pairs(*arrays: np.ndarray) -> np.ndarray:
            n = max(a.size for a in arrays)
            halves = [
                bf16_to_f32(np.ascontiguousarray(np.broadcast_to(a, n)).view(np.uint16))
                for a in arrays
            ]
            return np.ascontiguousarray(function(*halves)).view(np.uint32)

        return on_bf16_pairs
    return function


def _finished(instruction: Instruction, function: Function) -> Function:
    """Adds ``.ftz``, ``.sat`` and ``.relu`` around a function of NumPy floats."""
    if instruction.has("ftz"):
        inner = function

        def flushed(*arrays: np.ndarray) -> np.ndarray:
            return flush(inner(*[flush(a) for a in arrays]))

        function = flushed
    if instruction.has("sat"):
        unclamped = function

        def clamped(*arrays: np.ndarray) -> np.ndarray:
            value = unclamped(*arrays)
            one = value.dtype.type(1)
            # A NaN saturates to +0.
            return np.fmin(np.fmax(value, value.dtype.type(0)), one)

        function = clamped
    if instruction.has("relu"):
        unlimited = function

        def limited(*arrays: np.ndarray) -> np.ndarray:
            value = unlimited(*arrays)
            return np.where(value < 0, value.dtype.type(0), value)

        function = limited
    return function


def _alu(instruction: Instruction, function: Function, arity: int, *, ufunc: bool = False) -> Alu:
    """An instruction whose sources and result are all of its last type."""
    type_name = instruction.types[-1]
    ops = instruction.operands
    if len(ops) <= arity:
        raise ValueError(f"{len(ops)} operands where {arity + 1} are due")
    plain = not any(instruction.has(m) for m in ("ftz", "sat", "relu"))
    function = _finished(instruction, function)
    if type_name.startswith("bf16"):
        inner = function
        function = packed(type_name, lambda *a: _to_bf16(inner(*a)))
    else:
        function = packed(type_name, function)
    return Alu(
        ((ops[0], type_name),),
        tuple((o, type_name) for o in ops[1 : 1 + arity]),
        function,
        ufunc and plain and type_name in ("f32", "f64"),
    )


def _to_bf16(value: np.ndarray) -> np.ndarray:
    return f32_to_bf16(value) if value.dtype == F32 else f64_to_bf16(value)


def _binary(instruction: Instruction, function: Function) -> Alu:
    """add, sub, mul: exact in a wider type, then rounded once."""
    mode, type_name = rounding_of(instruction), instruction.types[-1]
    if type_name in ("f16", "f16x2"):

        def half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return function(a.astype(F32), b.astype(F32)).astype(F16)

        return _alu(instruction, half, 2)
    if mode != "rn":

        def directed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            if function is np.multiply:
                return round_f64(wide_a * wide_b, F32, mode)
            wide_b = -wide_b if function is np.subtract else wide_b
            return round_f64(add_odd(wide_a, wide_b), F32, mode)

        return _alu(instruction, directed, 2)
    return _alu(instruction, function, 2, ufunc=True)


def add_sub_mul(machine: Machine, instruction: Instruction) -> Alu:
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[instruction.name]
    if rounding_of(instruction) != "rn" and instruction.types[-1] != "f32":
        raise machine.unsupported("directed rounding of this type")
    if len(set(instruction.types)) > 1:
        raise machine.unsupported("mixed precision")
    return _binary(instruction, function)


def fma(machine: Machine, instruction: Instruction) -> Alu:
    type_name, mode = instruction.types[-1], rounding_of(instruction)
    if len(set(instruction.types)) > 1:
        raise machine.unsupported("mixed precision")
    if type_name == "f32":
        return _alu(instruction, lambda a, b, c: fma_f32(a, b, c, mode), 3)
    if mode != "rn":
        raise machine.unsupported("directed rounding of this type")
    if type_name == "f64":
        return _alu(instruction, fma_f64, 3)

    def narrow(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        exact = add_odd(np.multiply(a, b, dtype=np.float64), c.astype(np.float64))
        return exact if a.dtype == F32 else odd_f32(exact).astype(F16)

    return _alu(instruction, narrow, 3)


def div(machine: Machine, instruction: Instruction) -> Alu:
    mode = rounding_of(instruction)
    if mode == "rn" or instruction.types[-1] == "f64":
        return _alu(instruction, np.divide, 2, ufunc=True)

    def directed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        near = np.divide(a, b)
        # The sign of a - near * b, exact in double, says on which side the quotient lies.
        rest = a.astype(np.float64) - near.astype(np.float64) * b.astype(np.float64)
        side = np.where(np.isfinite(rest), np.sign(rest) * np.sign(b), 0)
        wide = near.astype(np.float64)
        nudged = np.nextafter(wide, np.where(side == 0, wide, side * np.inf))
        return round_f64(nudged, F32, mode)

    return _alu(instruction, directed, 2)


def minmax(machine: Machine, instruction: Instruction) -> Alu:
    smaller = instruction.name == "min"
    if instruction.has("NaN"):
        function = np.minimum if smaller else np.maximum
    else:
        function = np.fmin if smaller else np.fmax

    if instruction.has("xorsign"):

        def signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            magnitude = function(np.abs(a), np.abs(b))
            return np.where(np.signbit(a) ^ np.signbit(b), -magnitude, magnitude)

        return _alu(instruction, signed, 2)

    arity = len(instruction.operands) - 1
    if arity == 3:
        return _alu(instruction, lambda a, b, c: function(function(a, b), c), 3)
    return _alu(instruction, function, 2, ufunc=True)


def absolute(machine: Machine, instruction: Instruction) -> Alu:
    return _alu(instruction, np.abs, 1, ufunc=True)


def negate(machine: Machine, instruction: Instruction) -> Alu:
    return _alu(instruction, np.negative, 1, ufunc=True)


def copysign(machine: Machine, instruction: Instruction) -> Alu:
    # The sign comes from the first source, the magnitude from the second.
    return _alu(instruction, lambda a, b: np.copysign(b, a), 2)


def _in_double(function: Function) -> Function:
    def compute(a: np.ndarray) -> np.ndarray:
        return function(a.astype(np.float64)).astype(a.dtype)

    return compute


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return 1.0 / np.sqrt(x)


_UNARY: Mapping[str, Function] = {
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": _in_double(_rsqrt),
    "sin": _in_double(np.sin),
    "cos": _in_double(np.cos),
    "lg2": _in_double(np.log2),
    "tanh": _in_double(np.tanh),
}


def unary(machine: Machine, instruction: Instruction) -> Alu:
    name, mode = instruction.name, rounding_of(instruction)
    if name == "ex2":
        return _alu(instruction, np.exp2, 1, ufunc=True)
    function = _UNARY[name]
    if mode != "rn" and name in ("rcp", "sqrt") and instruction.types[-1] == "f32":
        inner = np.sqrt if name == "sqrt" else np.reciprocal

        def directed(a: np.ndarray) -> np.ndarray:
            # 53 bits decide every case: no quotient or root of 24-bit numbers lies that near a
            # float32 without being one.
            return round_f64(inner(a.astype(np.float64)), F32, mode)

        return _alu(instruction, directed, 1)
    if instruction.types[-1].startswith(("f16", "bf16")):
        return _alu(instruction, _in_double(function), 1)
    return _alu(instruction, function, 1, ufunc=name in ("rcp", "sqrt"))


def testp(machine: Machine, instruction: Instruction) -> Alu:
    tests: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
    }
    name = next(m for m in instruction.modifiers if m in tests)
    ops = instruction.operands
    return Alu(((ops[0], "pred"),), ((ops[1], instruction.types[-1]),), tests[name])


OPERATIONS: Mapping[str, Builder] = {
    "fma": fma,
    "ex2": unary,
    "lg2": unary,
    "sin": unary,
    "cos": unary,
    "tanh": unary,
    "rcp": unary,
    "sqrt": unary,
    "rsqrt": unary,
    "copysign": copysign,
    "testp": testp,
}
"""Instructions that only exist for floats."""

FLOAT_FORMS: Mapping[str, Builder] = {
    "add": add_sub_mul,
    "sub": add_sub_mul,
    "mul": add_sub_mul,
    "mad": fma,
    "div": div,
    "min": minmax,
    "max": minmax,
    "abs": absolute,
    "neg": negate,
}
"""Float forms of instructions that also exist for integers."""
