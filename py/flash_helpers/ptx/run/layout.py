"""Layout of a kernel's variables, parameters and arguments in their state spaces."""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from flash_helpers import gpu
from flash_helpers.ptx.errors import LaunchError
from flash_helpers.ptx.read.module import Function, Variable
from flash_helpers.ptx.tensor_map import TensorMap

Argument = int | float | bool | np.generic | bytes | TensorMap

WORD = 32
"""Bytes of the widest access."""


def aligned(value: int, alignment: int) -> int:
    """The least multiple of an alignment that is at least a value."""
    return -(-value // alignment) * alignment


def placed(variables: Sequence[Variable]) -> tuple[dict[str, int], int]:
    """Offsets of variables one after the other, and the end of the last one."""
    offsets, end = {}, 0
    for variable in variables:
        offsets[variable.name] = aligned(end, max(variable.alignment, 1))
        end = offsets[variable.name] + variable.size
    return offsets, end


def pack(function: Function, args: Sequence[Argument]) -> tuple[np.ndarray, dict[str, int]]:
    """Arguments laid out as the kernel reads them, and the parameters' offsets."""
    parameters = function.parameters
    if len(args) != len(parameters):
        raise LaunchError(f"{function.name} takes {len(parameters)} arguments, got {len(args)}")
    offsets, end = placed(parameters)
    if end > gpu.MAX_PARAMETER_BYTES:
        raise LaunchError(f"{end} bytes of parameters: the limit is {gpu.MAX_PARAMETER_BYTES}")
    data = np.zeros(aligned(end, WORD), np.uint8)
    for i, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        found = _argument_bytes(i, parameter, value)
        data[offsets[parameter.name] :][: len(found)] = np.frombuffer(found, np.uint8)
    return data, offsets


def _argument_bytes(index: int, parameter: Variable, value: Argument) -> bytes:
    what, size = f"argument {index}", parameter.size
    value = value.encode() if isinstance(value, TensorMap) else value
    if isinstance(value, bytes | bytearray | memoryview):
        if len(bytes(value)) != size:
            raise LaunchError(f"{what} has {len(bytes(value))} bytes, its parameter {size}")
        return bytes(value)
    value = bool(value) if isinstance(value, np.bool_) else value
    if isinstance(value, np.generic) and not isinstance(value, np.integer | np.float64):
        if value.nbytes != size or value.dtype.kind not in "fcV":
            raise LaunchError(
                f"{what} is a {value.dtype} of {value.nbytes} bytes, its parameter has "
                f"{size} (.{parameter.type})"
            )
        if parameter.type[0] in "fb":
            return value.tobytes()
        value = float(value)
    if not isinstance(value, float):
        try:
            value = operator.index(value)
        except TypeError:
            raise LaunchError(
                f"{what} is a {type(value).__name__}: give an int, a NumPy scalar, bytes or a "
                "TensorMap"
            ) from None
    if parameter.type in ("f32", "f64"):
        with suppress(OverflowError):
            return struct.pack("<f" if size == 4 else "<d", float(value))
        raise LaunchError(f"{what} is {value}, which does not fit .{parameter.type}")
    if isinstance(value, float):
        raise LaunchError(f"{what} is a float, its parameter is .{parameter.type}")
    if parameter.type == "b8" and size > 8:
        raise LaunchError(f"{what} is passed by value in {size} bytes: give bytes")
    bits = 8 * size
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise LaunchError(f"{what} is {value}, which does not fit {bits} bits")
    return (value & ((1 << bits) - 1)).to_bytes(size, "little")
