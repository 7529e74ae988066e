"""Comparison and selection (PTX ISA 9.0, "Comparison and Selection Instructions")."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from flash_helpers.ptx.read.module import Instruction, Pair, Register
from flash_helpers.ptx.read.types import SCALAR_TYPES
from flash_helpers.ptx.run.integers import Builder
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
    scalar = SCALAR_TYPES[type_name]
    table = _FLOAT if scalar.is_float else _INTEGER
    name = next((m for m in instruction.modifiers if m in table), None)
    if name is None:
        raise machine.unsupported(f"unknown comparison; known are {', '.join(table)}")
    comparison = table[name]
    if type_name == "bf16":
        return lambda a, b: comparison(bf16_to_f32(a), bf16_to_f32(b))
    if instruction.has("ftz") and scalar.is_float:
        return lambda a, b: comparison(flush(a), flush(b))
    return comparison


def _combination(instruction: Instruction) -> Comparison | None:
    return next((_COMBINE[m] for m in instruction.modifiers if m in _COMBINE), None)


def setp(machine: Machine, instruction: Instruction) -> Alu:
    type_name = instruction.types[-1]
    target, a, b, *rest = instruction.operands
    if type_name in ("f16x2", "bf16x2"):
        return _setp_pair(machine, instruction)
    comparison = _comparison(machine, instruction, type_name)
    combine = _combination(instruction)
    sources = ((a, type_name), (b, type_name))
    if not isinstance(target, Pair) and combine is None:
        ufunc = isinstance(comparison, np.ufunc)
        return Alu(((target, "pred"),), sources, comparison, ufunc)
    if combine is not None:
        sources = (*sources, (rest[0], "pred"))

    def compute(x: np.ndarray, y: np.ndarray, *c: np.ndarray) -> tuple[np.ndarray, ...]:
        first = comparison(x, y)
        second = ~first
        if combine is not None:
            first, second = combine(first, c[0]), combine(second, c[0])
        return first, second

    if isinstance(target, Pair):
        return Alu(((target.first, "pred"), (target.second, "pred")), sources, compute)
    return Alu(((target, "pred"),), sources, lambda *arrays: compute(*arrays)[0])


def _halves(type_name: str) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pairs = np.ascontiguousarray(x).view(np.uint16).reshape(-1, 2)
        if type_name == "f16x2":
            pairs = pairs.view(F16)
            return pairs[:, 0], pairs[:, 1]
        return bf16_to_f32(pairs[:, 0]), bf16_to_f32(pairs[:, 1])

    return split


def _pair_comparison(
    machine: Machine, instruction: Instruction, type_name: str
) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    comparison = _comparison(machine, instruction, "f16" if type_name == "f16x2" else "f32")
    split = _halves(type_name)

    def compute(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (x0, x1), (y0, y1) = split(x), split(y)
        return comparison(x0, y0), comparison(x1, y1)

    return compute


def _setp_pair(machine: Machine, instruction: Instruction) -> Alu:
    type_name = instruction.types[-1]
    target, a, b, *rest = instruction.operands
    compare = _pair_comparison(machine, instruction, type_name)
    combine = _combination(instruction)
    sources = ((a, type_name), (b, type_name))
    if combine is not None:
        sources = (*sources, (rest[0], "pred"))
    if not isinstance(target, Pair):
        raise machine.unsupported("two destinations are expected")

    def compute(x: np.ndarray, y: np.ndarray, *c: np.ndarray) -> tuple[np.ndarray, ...]:
        first, second = compare(x, y)
        return (combine(first, c[0]), combine(second, c[0])) if combine else (first, second)

    return Alu(((target.first, "pred"), (target.second, "pred")), sources, compute)


def set_(machine: Machine, instruction: Instruction) -> Alu:
    """set: 1.0 or all ones where the comparison holds."""
    target_type, type_name = instruction.types
    target, a, b, *rest = instruction.operands
    combine = _combination(instruction)
    sources = ((a, type_name), (b, type_name))
    if combine is not None:
        sources = (*sources, (rest[0], "pred"))
    if type_name in ("f16x2", "bf16x2"):
        compare_pair = _pair_comparison(machine, instruction, type_name)
        one = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(target_type, 0xFFFF)

        def compute_pair(x: np.ndarray, y: np.ndarray, *c: np.ndarray) -> np.ndarray:
            low, high = compare_pair(x, y)
            if combine is not None:
                low, high = combine(low, c[0]), combine(high, c[0])
            return low * np.uint32(one) | (high * np.uint32(one)) << np.uint32(16)

        return Alu(((target, target_type),), sources, compute_pair)
    comparison = _comparison(machine, instruction, type_name)
    scalar = SCALAR_TYPES[target_type]
    if target_type == "bf16":
        true = np.uint16(0x3F80)
    else:
        true = scalar.dtype.type(1) if scalar.is_float else ~scalar.dtype.type(0)

    def compute(x: np.ndarray, y: np.ndarray, *c: np.ndarray) -> np.ndarray:
        result = comparison(x, y)
        if combine is not None:
            result = combine(result, c[0])
        return np.where(result, true, scalar.dtype.type(0))

    return Alu(((target, target_type),), sources, compute)


def selp(machine: Machine, instruction: Instruction) -> Alu:
    target, a, b, c = instruction.operands
    type_name = instruction.types[-1]
    if isinstance(a, Register) or isinstance(b, Register):
        scalar = SCALAR_TYPES[type_name]
        if scalar.kind != "f":
            type_name = f"b{scalar.bits}"
    return Alu(
        ((target, type_name),),
        ((c, "pred"), (a, type_name), (b, type_name)),
        lambda p, x, y: np.where(p, x, y),
    )


def slct(machine: Machine, instruction: Instruction) -> Alu:
    type_name, chooser = instruction.types
    target, a, b, c = instruction.operands
    return Alu(
        ((target, type_name),),
        ((c, chooser), (a, type_name), (b, type_name)),
        lambda s, x, y: np.where(s >= 0, x, y),
    )


OPERATIONS: Mapping[str, Builder] = {"setp": setp, "set": set_, "selp": selp, "slct": slct}
