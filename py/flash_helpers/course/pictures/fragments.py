"""Which lane holds what of the operands of mma.m16n8k16, and what ldmatrix brings where.

PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix", for 16-bit
A and B and 32-bit C. A register of A and B holds two neighbouring elements. With g = lane / 4 and
t = lane % 4.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = range(32)
MATRIX = 8  # rows and columns of what one register of all lanes holds, of what ldmatrix moves


@dataclass(frozen=True)
class Held:
    """An element of a fragment. register: its number in the lane. row, column: in the operand."""

    lane: int
    register: int
    row: int
    column: int


def a_fragment(lane: int) -> list[Held]:
    """A (16, 16): registers a0 to a3, two elements each."""
    g, t = divmod(lane, 4)
    return [
        Held(lane, i, g + MATRIX * (i % 2), MATRIX * (i // 2) + 2 * t + e)
        for i in range(4)
        for e in range(2)
    ]


def b_fragment(lane: int) -> list[Held]:
    """B (16, 8), depth by columns: registers b0 and b1, two elements each."""
    g, t = divmod(lane, 4)
    return [Held(lane, i, MATRIX * i + 2 * t + e, g) for i in range(2) for e in range(2)]


def c_fragment(lane: int) -> list[Held]:
    """C (16, 8): registers c0 to c3, one element each."""
    g, t = divmod(lane, 4)
    return [Held(lane, i, g + MATRIX * (i // 2), 2 * t + i % 2) for i in range(4)]


@dataclass(frozen=True)
class NamedRow:
    """The row of an 8 x 8 matrix whose address a lane gives to ldmatrix.x4.

    matrix: the register that it goes to. row, chunk: in the 16 x 16 piece, a chunk being 8 columns.
    receivers: the lanes that get the row's four words, in their order.
    """

    lane: int
    matrix: int
    row: int
    chunk: int

    @property
    def receivers(self) -> range:
        return range(4 * (self.lane % MATRIX), 4 * (self.lane % MATRIX) + 4)


def a_order(lane: int) -> NamedRow:
    """The order of mma's A: rows 0-7 and 8-15 of the left chunk, then of the right one. Q's, V's,
    and K's up to step 8."""
    return NamedRow(lane, lane // MATRIX, lane % 16, lane // 16)


def k_order(lane: int) -> NamedRow:
    """K's from step 9 on: both chunks of rows 0-7, then of rows 8-15."""
    return NamedRow(lane, lane // MATRIX, lane // 16 * MATRIX + lane % MATRIX, lane // MATRIX % 2)
