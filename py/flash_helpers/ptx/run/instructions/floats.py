"""Floating-point instructions, scalar and packed.

f32, f64: IEEE, with one rounding. f16 and bf16 are computed in float32 or float64 and rounded once.
The `.approx` functions are computed in double precision and rounded to nearest: within half an ulp,
where the hardware is allowed one or two (PTX ISA 9.0, "Floating-Point Instructions").
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np

from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.instructions.forms import (
    APPROXIMATE,
    DIRECTED,
    HALVES,
    NEAREST,
    SINGLES,
    Builder,
    Form,
)
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


def _sum_downwards(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b rounded to odd; zero is -0 unless both are +0, as where rounding is downwards (IEEE
    754-2019, 6.3)."""
    return -add_odd(-a.astype(F64), -b.astype(F64))


def _arithmetic(machine: Machine, instruction: Instruction) -> Alu:
    mode = instruction.first(ROUNDINGS) or "rn"
    function, in_double = _ARITHMETIC[instruction.name]

    def directed(*arrays: np.ndarray) -> np.ndarray:
        return rounded(in_double(*(a.astype(F64) for a in arrays)), F32, mode)

    if mode == "rm" and instruction.name in ("add", "sub"):
        sign = 1 if instruction.name == "add" else -1
        return _same(instruction, lambda a, b: rounded(_sum_downwards(a, sign * b), F32, mode))

    return _same(instruction, function if mode == "rn" else directed)


def _fast_division(machine: Machine, instruction: Instruction) -> Alu:
    """div.approx (PTX ISA 9.0, "div"): "For 2^126 < |b| < 2^128, if a is infinity, div.approx.f32
    delivers NaN, otherwise it delivers 0", since the reciprocal of b is flushed."""

    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        is_large = (np.abs(b) > F32.type(2.0**126)) & np.isfinite(b)
        return np.where(is_large, a * np.copysign(F32.type(0), b), a / b)

    return _same(instruction, divide)


def _fma(machine: Machine, instruction: Instruction) -> Alu:
    type_name, mode = instruction.types[-1], instruction.first(ROUNDINGS) or "rn"

    def once(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        product = np.multiply(a, b, dtype=F64)
        exact = _sum_downwards(product, c) if mode == "rm" else add_odd(product, c.astype(F64))
        return exact if type_name.startswith("bf16") else rounded(exact, a.dtype, mode)

    return _same(instruction, fma_f64 if type_name == "f64" else once)


def _minmax(machine: Machine, instruction: Instruction) -> Alu:
    """min and max of two or three. `.abs` compares magnitudes; `.xorsign` gives the result the
    product's sign."""
    smaller, keeps_nan = instruction.name == "min", instruction.has("NaN")
    pairs = {False: (np.fmax, np.fmin), True: (np.maximum, np.minimum)}
    number = pairs[keeps_nan][smaller]
    sign = np.float16(-1 if smaller else 1)

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        found = number(a, b)
        if np.count_nonzero(found) == found.size:
            return found
        # "-0.0 < +0.0" (PTX ISA 9.0, "min"); for NumPy they are equal.
        return np.where((a == 0) & (b == 0), sign * (sign * a + sign * b), found)

    if instruction.has("xorsign") and not instruction.has("abs"):
        raise machine.unsupported(".xorsign goes with .abs")

    def of_all(*arrays: np.ndarray) -> np.ndarray:
        return reduce(function, map(np.abs, arrays) if instruction.has("abs") else arrays)

    def signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(np.signbit(a) ^ np.signbit(b), -of_all(a, b), of_all(a, b))

    if instruction.has("xorsign"):
        return _same(instruction, signed)
    return _same(instruction, of_all)


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


_ROUNDED = f"{DIRECTED} ftz"
_F16 = "f16 f16x2"
_BF16 = "bf16 bf16x2"

FORMS = (
    Form("add sub mul", _arithmetic, (3,), ("f32",), f"{_ROUNDED} sat", NEAREST),
    Form("add sub mul", _arithmetic, (3,), ("f32x2",), _ROUNDED, NEAREST),
    Form("add sub mul", _arithmetic, (3,), (_F16,), "ftz sat", NEAREST),
    Form("add sub mul", _arithmetic, (3,), (f"{_BF16} f64",), "", NEAREST),
    Form("mad fma", _fma, (4,), ("f32",), f"{_ROUNDED} sat", NEAREST),
    Form("fma", _fma, (4,), ("f32x2",), _ROUNDED, NEAREST),
    Form("fma", _fma, (4,), (_F16,), "ftz sat relu", NEAREST),
    Form("fma", _fma, (4,), (_BF16,), "relu", NEAREST),
    Form("mad fma", _fma, (4,), ("f64",), "", NEAREST),
    Form("div", _fast_division, (3,), ("f32",), "approx ftz", having="approx"),
    Form("div", _arithmetic, (3,), ("f32",), _ROUNDED, f"{NEAREST} full"),
    Form("div", _arithmetic, (3,), ("f64",), "", NEAREST),
    Form("rcp sqrt", _arithmetic, (2,), ("f32",), _ROUNDED, f"{NEAREST} {APPROXIMATE}"),
    Form("rcp", _arithmetic, (2,), ("f64",), "ftz", f"{NEAREST} {APPROXIMATE}"),
    Form("sqrt", _arithmetic, (2,), ("f64",), "", NEAREST),
    Form("min max", _minmax, (3,), (f"f32 {_F16}",), "ftz NaN xorsign abs"),
    Form("min max", _minmax, (4,), ("f32",), "ftz NaN abs"),
    Form("min max", _minmax, (3,), (_BF16,), "NaN xorsign abs"),
    Form("min max", _minmax, (3,), ("f64",)),
    Form("abs", _plain(np.abs), (2,), (f"f32 {_F16}",), "ftz"),
    Form("abs", _plain(np.abs), (2,), (f"f64 {_BF16}",)),
    Form("neg", _plain(np.negative), (2,), (f"f32 {_F16}",), "ftz"),
    Form("neg", _plain(np.negative), (2,), (f"f64 {_BF16}",)),
    # The sign comes from the first source, the magnitude from the second.
    Form("copysign", _plain(lambda a, b: np.copysign(b, a)), (3,), (SINGLES,)),
    Form("ex2", _plain(np.exp2), (2,), (f"f32 {_BF16}",), "ftz", APPROXIMATE),
    Form("ex2", _plain(np.exp2), (2,), (_F16,), "", APPROXIMATE),
    Form("tanh", _approximate, (2,), (f"{HALVES} f32",), "", APPROXIMATE),
    Form("lg2 sin cos", _approximate, (2,), ("f32",), "ftz", APPROXIMATE),
    Form("rsqrt", _approximate, (2,), (SINGLES,), "ftz", APPROXIMATE),
    Form("testp", _testp, (2,), (SINGLES,), " ".join(_TESTS)),
)
