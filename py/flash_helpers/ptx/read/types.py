"""PTX scalar types."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalarType:
    """A PTX fundamental type.

    `size`: bytes of one value. `kind`: s for signed, u for unsigned, b for bits, f for a float that
    NumPy has, p for bool. x is any other type (bf16, packed pairs, tf32), held as the unsigned
    integer of its width.
    """

    name: str
    size: int
    kind: str

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return 8 * self.size

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type, packed ones included."""
        return self.kind in "fx"


_SIZES = {
    **{f"{kind}{8 * size}": size for size in (1, 2, 4, 8) for kind in "sub"},
    **{"f16": 2, "f32": 4, "f64": 8, "bf16": 2, "f16x2": 4, "bf16x2": 4, "tf32": 4, "pred": 1},
    "f32x2": 8,
}
_KINDS = {"bf16": "x", "f16x2": "x", "bf16x2": "x", "tf32": "x", "f32x2": "x"}

SCALAR_TYPES = {
    name: ScalarType(name, size, _KINDS.get(name, name[0])) for name, size in _SIZES.items()
}

B128 = "b128"
"""Registers of this type are pairs of 64-bit words; only moves and memory know it."""

TYPE_NAMES = frozenset(SCALAR_TYPES) | {B128}

OPCODE_TYPES = TYPE_NAMES | {"e4m3", "e5m2", "e4m3x2", "e5m2x2", "s4", "u4", "b1", "u16x2", "s16x2"}
"""Types that an opcode may name; no register is declared with one of the added ones."""


def size_of(name: str) -> int:
    """Bytes of a value of a PTX type."""
    return 16 if name == B128 else SCALAR_TYPES[name].size
