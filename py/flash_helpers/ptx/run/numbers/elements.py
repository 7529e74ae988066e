"""Elements of matrices: how they lie packed in words, and their values."""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.run.numbers.rounding import to_floats

ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 1, "f64": 1, "s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4}
ELEMENTS |= {"s4": 8, "u4": 8, "b1": 32}
"""Elements of one register, by type."""

RAW = {"f16": "f2", "bf16": "u2", "tf32": "u4", "f64": "f8", "s8": "i1", "u8": "u1"}
RAW |= {"e4m3": "u1", "e5m2": "u1", "s4": "i1", "u4": "u1", "b1": "u1"}
"""NumPy's name of an element's type; that of an unpacked one where it has less than 8 bits."""


def unpacked(words: np.ndarray, type_name: str) -> np.ndarray:
    """The elements in words, as NumPy holds them: along the last axis as many as the words hold."""
    words = np.ascontiguousarray(words)
    if type_name == "b1":
        return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    if type_name in ("s4", "u4"):
        octets = words.view(np.uint8)
        nibbles = np.stack([octets & 0xF, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)
        return nibbles if type_name == "u4" else (nibbles ^ 8).view(np.int8) - np.int8(8)
    return words.view(RAW[type_name])


def values(elements: np.ndarray, type_name: str) -> np.ndarray:
    """Elements as `unpacked` gives them, as float64."""
    if type_name == "tf32":
        # The low 13 bits of a tf32 operand are not used.
        elements = elements & np.uint32(0xFFFF_E000)
    return to_floats(elements, type_name).astype(np.float64)
