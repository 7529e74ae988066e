"""Comparison and selection (PTX ISA 9.0, "Comparison and Selection Instructions")."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from flash_helpers.ptx.read.module import Instruction, Pair
from flash_helpers.ptx.read.types import SCALAR_TYPES
from flash_helpers.ptx.run.forms import BITS, FLOATS, INTEGERS, Form
from flash_helpers.ptx.run.machine import Alu, Machine
from flash_helpers.ptx.run.rounding import F16, bf16_to_f32, flush

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
_COMBINE: Mapping[str, Comparison] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _comparison(machine: Machine, instruction: Instruction, type_name: str) -> Comparison:
    """Of values in registers of the type; of a packed one, both halves, (values, 2)."""
    is_float = SCALAR_TYPES[type_name].is_float
    table = _FLOAT if is_float else _INTEGER
    compare = table[machine.one_of(table)]
    if type_name.endswith("x2"):
        return lambda a, b: compare(_halves(a, type_name), _halves(b, type_name))
    if type_name == "bf16":
        return lambda a, b: compare(bf16_to_f32(a), bf16_to_f32(b))
    if instruction.has("ftz") and is_float:
        return lambda a, b: compare(flush(a), flush(b))
    return compare


def _halves(x: np.ndarray, type_name: str) -> np.ndarray:
    pairs = np.ascontiguousarray(x).view(np.uint16).reshape(-1, 2)
    return pairs.view(F16) if type_name == "f16x2" else bf16_to_f32(pairs)


def _combination(machine: Machine, instruction: Instruction) -> Comparison:
    """How the result is combined with a predicate, if there is one."""
    if len(instruction.operands) == 3:
        return lambda result: result
    return _COMBINE[machine.one_of(_COMBINE)]


def _sources(instruction: Instruction) -> tuple:
    _, a, b, *rest = instruction.operands
    type_name = instruction.types[-1]
    return (a, type_name), (b, type_name), *((c, "pred") for c in rest)


def _setp(machine: Machine, instruction: Instruction) -> Alu:
    type_name, target = instruction.types[-1], instruction.operands[0]
    compare = _comparison(machine, instruction, type_name)
    combine = _combination(machine, instruction)
    sources = _sources(instruction)
    if isinstance(target, Pair):
        results = ((target.first, "pred"), (target.second, "pred"))
    elif type_name.endswith("x2"):
        raise machine.unsupported("two destinations are expected")
    else:
        results = ((target, "pred"),)

    def both(x: np.ndarray, y: np.ndarray, *c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = compare(x, y)
        first, second = found.T if found.ndim == 2 else (found, ~found)
        return combine(first, *c), combine(second, *c)

    if isinstance(target, Pair):
        return Alu(results, sources, both)
    if len(sources) == 2:
        return Alu(results, sources, compare)
    return Alu(results, sources, lambda x, y, c: combine(compare(x, y), c))


def _set(machine: Machine, instruction: Instruction) -> Alu:
    """set: 1.0 or all ones where the comparison holds."""
    target_type, type_name = instruction.types
    compare = _comparison(machine, instruction, type_name)
    combine = _combination(machine, instruction)
    ones = {"bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}
    scalar = SCALAR_TYPES[target_type]
    true = scalar.dtype.type(1) if scalar.kind == "f" else ~scalar.dtype.type(0)

    def compute(x: np.ndarray, y: np.ndarray, *c: np.ndarray) -> np.ndarray:
        found = compare(x, y)
        if found.ndim == 2:
            low, high = (np.uint32(ones.get(target_type, 0xFFFF)) * combine(h, *c) for h in found.T)
            return low | high << np.uint32(16)
        one = scalar.dtype.type(ones[target_type]) if target_type in ones else true
        return np.where(combine(found, *c), one, scalar.dtype.type(0))

    return Alu(((instruction.operands[0], target_type),), _sources(instruction), compute)


def _selp(machine: Machine, instruction: Instruction) -> Alu:
    target, a, b, c = instruction.operands
    type_name = instruction.types[-1]
    return Alu(
        ((target, type_name),),
        ((c, "pred"), (a, type_name), (b, type_name)),
        lambda p, x, y: np.where(p, x, y),
    )


def _slct(machine: Machine, instruction: Instruction) -> Alu:
    type_name, chooser = instruction.types
    target, a, b, c = instruction.operands
    return Alu(
        ((target, type_name),),
        ((c, chooser), (a, type_name), (b, type_name)),
        lambda s, x, y: np.where(s >= 0, x, y),
    )


_ALL = f"{BITS} {INTEGERS} {FLOATS}"

FORMS = (
    Form("setp", _setp, (3, 4), (_ALL,)),
    Form("set", _set, (3, 4), (f"u16 s16 u32 s32 {FLOATS}", _ALL)),
    Form("selp", _selp, (4,), (_ALL,)),
    Form("slct", _slct, (4,), (_ALL, "s32 f32")),
)
