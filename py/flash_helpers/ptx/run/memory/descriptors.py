"""Matrices of `wgmma` in shared memory: from a 64-bit descriptor to the address of every element.

PTX ISA 9.0, "Shared Memory Matrix Layout" of the asynchronous warpgroup instructions, with its
"Canonical Layouts" and "Matrix Descriptor Format". Elements are read in chunks of 16 bytes: of
neighbours in K of a K-major matrix; of 8 neighbours in M or N of an MN-major one, whose elements
have 16 bits. With L
the leading and S the stride byte offset, a chunk lies behind the start address at

| | no swizzle | W = 32, 64 or 128 bytes |
| --- | --- | --- |
| K-major, row r, chunk c of K | 16 (r % 8) + S (r / 8) + L c | W (r % 8) + S (r / 8) + 16 c |
| MN-major, k, chunk q of M or N | 16 (k % 8) + L (k / 8) + S q | W (k % 8) + S (k / 8) + \
16 (q % w) + L (q / w), w = W / 16 |

The swizzle exchanges the chunks of each row of W bytes by the number of the row: address bits from
4 on are combined by xor with as many bits from 7 on, which count rows of 128 bytes from where the
pattern starts. Patterns start at multiples of 8 W, or as far behind one as the base offset says, in
units of 128 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CHUNK = 16
"""Bytes."""
_PER_CHUNK = 8  # elements of 16 bits

_SWIZZLE_BYTES = (0, 128, 64, 32)  # by the descriptor's upper two bits
_FIELDS = ((0, 14), (16, 14), (32, 14), (49, 3), (62, 2))
_RESERVED = (1 << 64) - 1 - sum((1 << size) - 1 << first for first, size in _FIELDS)


@dataclass(frozen=True)
class Descriptor:
    """A descriptor's fields. `start`, `leading`, `stride`: bytes. `base_offset`: units of 128
    bytes. `swizzle`: the width of its pattern in bytes, 0 for none."""

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int

    @classmethod
    def decode(cls, bits: int) -> Descriptor:
        """Decodes a descriptor. Raises ValueError, with the reason, for bits that are no
        descriptor."""
        if bits & _RESERVED:
            raise ValueError(
                f"the matrix descriptor {bits:#018x} has bits set that belong to none of its fields"
                f" ({bits & _RESERVED:#x}): an offset that was added to it ran over, or its parts "
                "overlap"
            )
        start, leading, stride, base_offset, mode = (
            bits >> first & (1 << size) - 1 for first, size in _FIELDS
        )
        swizzle = _SWIZZLE_BYTES[mode]
        found = cls(CHUNK * start, CHUNK * leading, CHUNK * stride, base_offset, swizzle)
        if base_offset and not found.swizzle:
            raise ValueError(
                f"the matrix descriptor {bits:#018x} has base offset {base_offset} and no swizzle"
            )
        return found


@dataclass(frozen=True)
class MatrixOperand:
    """The A or B of an instruction. `rows`: M (64) or N. `k_major`: the elements of a row are
    neighbours; otherwise those of a column. `chunks`: extent along K, in chunks of a K-major
    matrix: 2, or 4 for the B that a sparse A is multiplied by."""

    rows: int
    k_major: bool
    chunks: int = 2

    def addresses(self, bits: int) -> np.ndarray:
        """Shared addresses of the chunks that a descriptor names, int64: (rows, chunks) of a
        K-major matrix, (8 chunks, rows / 8) of an MN-major one. The array must not be changed.
        Raises ValueError as `Descriptor.decode` does."""
        return _addresses(self, bits)

    def end(self, bits: int) -> int:
        """The address behind the last chunk. Raises ValueError as `addresses` does."""
        return _end(self, bits)

    def rows_at(self, bits: int, first: int, count: int) -> np.ndarray:
        """Addresses of the chunks that hold a slice of rows, which begins and ends at multiples of
        8."""
        if self.k_major:
            return self.addresses(bits)[first : first + count]
        return self.addresses(bits)[:, first // _PER_CHUNK : (first + count) // _PER_CHUNK]

    def matrix(self, chunks: np.ndarray) -> np.ndarray:
        """The matrix (..., rows, K) of the values of the chunks' elements, (..., shape of the
        addresses, elements of a chunk)."""
        if not self.k_major:
            # (..., k, chunk, row in it) to (..., chunk, row in it, k)
            chunks = np.moveaxis(chunks, -3, -1)
        return chunks.reshape(*chunks.shape[:-3], self.rows, -1)


@lru_cache(maxsize=4096)
def _addresses(operand: MatrixOperand, bits: int) -> np.ndarray:
    descriptor = Descriptor.decode(bits)
    leading, stride, width = descriptor.leading, descriptor.stride, descriptor.swizzle
    if operand.k_major:
        if width and width < CHUNK * operand.chunks:
            raise ValueError(
                f"a swizzle of {width} bytes for rows of {CHUNK * operand.chunks}: choose a wider "
                "one, or none"
            )
        row, chunk = np.ix_(np.arange(operand.rows), np.arange(operand.chunks))
        offsets = (width or CHUNK) * (row % 8) + stride * (row // 8)
        offsets = offsets + (CHUNK if width else leading) * chunk
    else:
        k, chunk = np.ix_(
            np.arange(_PER_CHUNK * operand.chunks), np.arange(operand.rows // _PER_CHUNK)
        )
        offsets = (width or CHUNK) * (k % 8) + (stride if width else leading) * (k // 8)
        across = width // CHUNK or 1
        offsets = offsets + CHUNK * (chunk % across)
        offsets = offsets + (leading if width else stride) * (chunk // across)
    found = descriptor.start + offsets
    if width:
        rows = (found >> 7) - descriptor.base_offset
        found ^= (rows & (width // CHUNK - 1)) << 4
    found.setflags(write=False)
    return found


@lru_cache(maxsize=4096)
def _end(operand: MatrixOperand, bits: int) -> int:
    return int(_addresses(operand, bits).max()) + CHUNK
