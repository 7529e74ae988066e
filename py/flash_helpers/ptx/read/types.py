"""PTX scalar types and how they map to NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ScalarType:
    """A PTX fundamental type.

    dtype: the NumPy type of one value. Types that NumPy does not have (bf16, packed pairs, tf32)
    are held as the unsigned integer of their width. kind: s signed, u unsigned, b bits, f NumPy
    float, x other float, p bool.
    """

    name: str
    dtype: np.dtype
    kind: str

    @property
    def size(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return 8 * self.size

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type, packed ones included."""
        return self.kind in "fx"


def _scalar_types() -> dict[str, ScalarType]:
    table = {}
    for size in (1, 2, 4, 8):
        for kind, prefix in (("s", "i"), ("u", "u"), ("b", "u")):
            name = f"{kind}{8 * size}"
            table[name] = ScalarType(name, np.dtype(f"{prefix}{size}"), kind)
    for name, code in (("f16", "f2"), ("f32", "f4"), ("f64", "f8")):
        table[name] = ScalarType(name, np.dtype(code), "f")
    for name, code in (("bf16", "u2"), ("f16x2", "u4"), ("bf16x2", "u4"), ("tf32", "u4")):
        table[name] = ScalarType(name, np.dtype(code), "x")
    table["pred"] = ScalarType("pred", np.dtype(bool), "p")
    return table


SCALAR_TYPES = _scalar_types()

B128 = "b128"
"""Registers of this type are pairs of 64-bit words; only moves and memory know it."""

TYPE_NAMES = frozenset(SCALAR_TYPES) | {B128}


def dtype_of(name: str) -> np.dtype:
    """How NumPy holds a value of a PTX type; of B128 it is one of two words."""
    return np.dtype(np.uint64) if name == B128 else SCALAR_TYPES[name].dtype


def size_of(name: str) -> int:
    """Bytes of a value of a PTX type."""
    return 16 if name == B128 else SCALAR_TYPES[name].size
