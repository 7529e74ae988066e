"""Comparison and selection (PTX ISA 9.0, "Comparison and Selection Instructions")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from flash_helpers.ptx.read.module import Instruction, Pair
from flash_helpers.ptx.read.types import SCALAR_TYPES
from flash_helpers.ptx.run.instructions.forms import (
    BITS,
    FLOATS,
    INTEGERS,
    OPERATIONS,
    SCALARS,
    Form,
)
from flash_helpers.ptx.run.machine import Alu, Compute, Machine
from flash_helpers.ptx.run.numbers.dtypes import dtype_of
from flash_helpers.ptx.run.numbers.rounding import F32, flush, to_floats, to_registers

Comparison = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


def _either(comparison: Comparison) -> Comparison:
    """The comparison, or unordered."""
    return lambda a, b: comparison(a, b) | _unordered(a, b)


_ORDERED: Mapping[str, Comparison] = {
    "eq": np.equal,
    "ne": lambda a, b: np.less(a, b) | np.greater(a, b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_INTEGER: Mapping[str, Comparison] = {
    **_ORDERED,
    "ne": np.not_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_FLOAT: Mapping[str, Comparison] = {
    **_ORDERED,
    "equ": _either(np.equal),
    "neu": np.not_equal,
    "ltu": _either(np.less),
    "leu": _either(np.less_equal),
    "gtu": _either(np.greater),
    "geu": _either(np.greater_equal),
    "num": lambda a, b: ~_unordered(a, b),
    "nan": _unordered,
}


def comparison(machine: Machine, instruction: Instruction) -> Comparison:
    """The operands that a `setp` or `set` compares: registers of its type; both halves of a packed
    type, (values, 2)."""
    type_name = instruction.types[-1]
    if not SCALAR_TYPES[type_name].is_float:
        return _INTEGER[machine.one_of(_INTEGER)]
    compare = _FLOAT[machine.one_of(_FLOAT)]
    if type_name in ("f16", "f32", "f64") and not instruction.has("ftz"):
        return compare
    flushed = flush if instruction.has("ftz") else lambda x: x
    return lambda a, b: compare(*(flushed(to_floats(x, type_name)) for x in (a, b)))


def _combined(machine: Machine, instruction: Instruction) -> Compute:
    """The result of `comparison`, combined with a predicate if there is one."""
    if len(instruction.operands) == 3:
        return lambda result: result
    combine = OPERATIONS[machine.one_of(("and", "or", "xor"))]
    return lambda result, c: combine(result.T, c).T


def _setp(machine: Machine, instruction: Instruction) -> Alu:
    type_name, (target, *sources) = instruction.types[-1], instruction.operands
    compare, combined = comparison(machine, instruction), _combined(machine, instruction)
    alu = Alu.of(instruction, compare, "pred", type_name, type_name, "pred")

    def both(x: np.ndarray, y: np.ndarray, *c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = compare(x, y)
        first, second = found.T if found.ndim == 2 else (found, ~found)
        return combined(first, *c), combined(second, *c)

    if isinstance(target, Pair):
        return replace(alu, results=((target.first, "pred"), (target.second, "pred")), compute=both)
    if type_name.endswith("x2"):
        raise machine.unsupported("two destinations are expected")
    if len(sources) == 2:
        return alu
    return replace(alu, compute=lambda x, y, c: combined(compare(x, y), c))


def _set(machine: Machine, instruction: Instruction) -> Alu:
    """set: 1.0 or all ones where the comparison holds."""
    target, source = instruction.types
    compare, combined = comparison(machine, instruction), _combined(machine, instruction)
    halves = source.endswith("x2")
    dtype = np.dtype(np.uint16) if halves else dtype_of(target)

    def compute(x: np.ndarray, y: np.ndarray, *c: np.ndarray) -> np.ndarray:
        found = combined(compare(x, y), *c)
        if SCALAR_TYPES[target].is_float:
            return to_registers(found.astype(F32), target)
        ones = np.negative(found.astype(dtype))
        return ones.view(np.uint32).reshape(-1) if halves else ones

    return Alu.of(instruction, compute, target, source, source, "pred")


def _selp(machine: Machine, instruction: Instruction) -> Alu:
    own = instruction.types[-1]
    return Alu.of(instruction, lambda a, b, c: np.where(c, a, b), own, own, own, "pred")


def _slct(machine: Machine, instruction: Instruction) -> Alu:
    own, chooser = instruction.types
    flushed = flush if instruction.has("ftz") else lambda x: x

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return np.where(flushed(c) >= 0, a, b)

    return Alu.of(instruction, compute, own, own, own, chooser)


_ALL = f"{BITS} {INTEGERS} {FLOATS}"

_COMBINED = "and or xor"
_OF_INTEGERS = f"{' '.join(_INTEGER)} {_COMBINED}"
_OF_FLOATS = f"{' '.join(_FLOAT)} {_COMBINED}"
_RESULTS = f"u16 s16 u32 s32 {SCALARS}"

FORMS = (
    Form("setp", _setp, (3, 4), (f"{BITS} {INTEGERS}",), _OF_INTEGERS),
    Form("setp", _setp, (3, 4), ("f32 f16 f16x2",), f"{_OF_FLOATS} ftz"),
    Form("setp", _setp, (3, 4), ("f64 bf16 bf16x2",), _OF_FLOATS),
    Form("set", _set, (3, 4), (_RESULTS, f"{BITS} {INTEGERS}"), _OF_INTEGERS, "ftz"),
    Form("set", _set, (3, 4), (_RESULTS, "f32 f16"), f"{_OF_FLOATS} ftz"),
    Form("set", _set, (3, 4), (_RESULTS, "f64 bf16"), _OF_FLOATS, "ftz"),
    Form("set", _set, (3, 4), ("u32 s32 f16x2", "f16x2"), f"{_OF_FLOATS} ftz"),
    Form("set", _set, (3, 4), ("u32 s32 bf16x2", "bf16x2"), _OF_FLOATS),
    Form("selp", _selp, (4,), (_ALL,)),
    Form("slct", _slct, (4,), (_ALL, "s32")),
    Form("slct", _slct, (4,), (_ALL, "f32"), "ftz"),
)
