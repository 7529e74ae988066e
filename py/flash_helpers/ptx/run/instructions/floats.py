"""Floating-point instructions, scalar and packed.

f32, f64: IEEE, with one rounding. f16 and bf16 are computed in float32 or float64 and rounded once.
The `.approx` functions are computed in double precision and rounded to nearest: within half an ulp,
where the hardware is allowed one or two (PTX ISA 9.0, "Floating-Point Instructions").
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.instructions.forms import FLOATS, HALVES, SINGLES, Builder, Form
from flash_helpers.ptx.run.machine import Alu, Compute, Machine
from flash_helpers.ptx.run.numbers.rounding import (
    F32,
    F64,
    ROUNDINGS,
    add_odd,
    clamp_to_one,
    flush,
    fma_f64,
    not_negative,
    on_registers,
    rounded,
)

_LIMITS: Mapping[str, Compute] = {"sat": clamp_to_one, "relu": not_negative}


def _same(instruction: Instruction, function: Compute) -> Alu:
    """All operands have the opcode's type; `.ftz`, `.sat` and `.relu` go around the function."""
    type_name = instruction.types[-1]
    ftz = instruction.has("ftz")
    limits = [limit for name, limit in _LIMITS.items() if instruction.has(name)]

    def limited(*arrays: np.ndarray) -> np.ndarray:
        value = flush(function(*map(flush, arrays))) if ftz else function(*arrays)
        for limit in limits:
            value = limit(value)
        return value

    compute = on_registers(type_name, limited if ftz or limits else function)
    return Alu.of(instruction, compute, type_name)


def _plain(function: Compute) -> Builder:
    return lambda machine, instruction: _same(instruction, function)


def _rounding(machine: Machine, instruction: Instruction) -> str:
    mode = instruction.first(ROUNDINGS) or "rn"
    if mode != "rn" and instruction.types[-1] != "f32":
        raise machine.unsupported("directed rounding of this type")
    return mode


# The function of each instruction, and a function with the bits that decide the rounding to
# float32. No product has more than 53 bits, and no quotient or root of 24-bit numbers lies so near
# a float32 that 53 bits do not tell on which side.
_ARITHMETIC: Mapping[str, tuple[Compute, Compute]] = {
    "add": (np.add, add_odd),
    "sub": (np.subtract, lambda a, b: add_odd(a, -b)),
    "mul": (np.multiply, np.multiply),
    "div": (np.divide, np.divide),
    "rcp": (np.reciprocal, np.reciprocal),
    "sqrt": (np.sqrt, np.sqrt),
}


def _arithmetic(machine: Machine, instruction: Instruction) -> Alu:
    mode = _rounding(machine, instruction)
    function, in_double = _ARITHMETIC[instruction.name]

    def directed(*arrays: np.ndarray) -> np.ndarray:
        return rounded(in_double(*(a.astype(F64) for a in arrays)), F32, mode)

    return _same(instruction, function if mode == "rn" else directed)


def _fma(machine: Machine, instruction: Instruction) -> Alu:
    type_name, mode = instruction.types[-1], _rounding(machine, instruction)

    def once(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        exact = add_odd(np.multiply(a, b, dtype=F64), c.astype(F64))
        return exact if type_name.startswith("bf16") else rounded(exact, a.dtype, mode)

    return _same(instruction, fma_f64 if type_name == "f64" else once)


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


_APPROXIMATE: Mapping[str, Compute] = {
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "tanh": np.tanh,
}


def _approximate(machine: Machine, instruction: Instruction) -> Alu:
    function = _APPROXIMATE[instruction.name]
    return _same(instruction, lambda x: function(x.astype(F64)).astype(x.dtype))


_TESTS: Mapping[str, Compute] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
}


def _testp(machine: Machine, instruction: Instruction) -> Alu:
    test = _TESTS[machine.one_of(_TESTS)]
    return Alu.of(instruction, test, "pred", instruction.types[-1])


FORMS = (
    Form("add sub mul", _arithmetic, (3,), (FLOATS,)),
    Form("mad", _fma, (4,), (SINGLES,)),
    Form("fma", _fma, (4,), (FLOATS,)),
    Form("div", _arithmetic, (3,), (SINGLES,)),
    Form("rcp sqrt", _arithmetic, (2,), (SINGLES,)),
    Form("min max", _minmax, (3, 4), (FLOATS,)),
    Form("abs", _plain(np.abs), (2,), (FLOATS,)),
    Form("neg", _plain(np.negative), (2,), (FLOATS,)),
    # The sign comes from the first source, the magnitude from the second.
    Form("copysign", _plain(lambda a, b: np.copysign(b, a)), (3,), (SINGLES,)),
    Form("ex2", _plain(np.exp2), (2,), (f"{HALVES} f32",)),
    Form("tanh", _approximate, (2,), (f"{HALVES} f32",)),
    Form("lg2 sin cos", _approximate, (2,), ("f32",)),
    Form("rsqrt", _approximate, (2,), (SINGLES,)),
    Form("testp", _testp, (2,), (SINGLES,)),
)
