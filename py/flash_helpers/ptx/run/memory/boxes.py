"""Addresses of the bytes of a box in a tensor copy.

In shared memory a box lies without gaps, dimension 0 fastest, even if parts of it are outside the
tensor (PTX ISA 9.0, "Tiled Mode").

A swizzle exchanges 16-byte chunks: bits of the shared address from bit 4 on are XORed with as many
bits from bit 7 on ("Swizzling Modes"). So its pattern repeats at multiples of 256, 512 or 1024
bytes of the address, wherever the box begins. Under a swizzle each row begins a multiple of the
swizzle's width behind the first. The gap behind a narrower row is neither written nor counted as
bytes, as measured on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import DTypeLike

from flash_helpers.ptx.tensor_map import TensorMap

CHUNK = 16
"""Bytes of a chunk, which a swizzle moves as a whole."""
SECTOR = 32

_NAN = np.uint16(0x7FF7)
"""The pattern of 16 bits that an H200 fills with, for any type."""


class Box:
    """A box of a tensor whose first element has given coordinates, which may lie outside.

    `coordinates`: one for each dimension, dimension 0 first. `is_stored`: the box goes to global
    memory. Then elements that share 16 bytes of a row with an element inside count as inside too,
    and are overwritten, as measured on an H200. `low`, `high`: along each dimension, the range of
    moved elements that lie inside the tensor.
    """

    def __init__(
        self, tensor_map: TensorMap, coordinates: Sequence[int], *, is_stored: bool = False
    ) -> None:
        self.map = tensor_map
        self.is_stored = is_stored
        self.coordinates = tuple(coordinates)
        sizes = list(tensor_map.dims)
        if is_stored:
            per_chunk = CHUNK // tensor_map.element_bytes
            sizes[0] = -(-sizes[0] // per_chunk) * per_chunk
        low, high = [], []
        for start, step, size, count in zip(
            self.coordinates, tensor_map.element_strides, sizes, tensor_map.moved, strict=True
        ):
            low.append(min(max(-(start // step), 0), count))
            high.append(max(min(-((start - size) // step), count), low[-1]))
        self.low, self.high = tuple(low), tuple(high)

    @property
    def is_whole(self) -> bool:
        """Whether the whole box lies inside the tensor."""
        return self.high == self.map.moved and not any(self.low)

    @cached_property
    def is_outside(self) -> bool:
        """Whether the whole box lies outside the tensor."""
        return any(low == high for low, high in zip(self.low, self.high, strict=True))

    # -- global memory -----------------------------------------------------------------------------

    @cached_property
    def address(self) -> int:
        """The address of the first element inside."""
        return self.map.address + sum(
            (start + low * step) * stride
            for start, low, step, stride in zip(
                self.coordinates, self.low, self.map.element_strides, self._strides, strict=True
            )
        )

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of each row that lie inside."""
        return (self.high[0] - self.low[0]) * self.map.element_bytes

    @cached_property
    def end(self) -> int:
        """Address behind the last element inside."""
        last = sum((n - 1) * step for n, step in zip(*self._outer, strict=True))
        return self.address + last + self.row_bytes

    @property
    def rows(self) -> np.ndarray:
        """Addresses of the rows, without parts outside the tensor, in the order of the box: int64
        (rows,)."""
        if self.is_outside:
            return np.zeros(0, np.int64)
        return _rows(self.address, *self._outer)

    def holds(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """For each address, whether any of the `size` bytes from it belongs to the box."""
        hit = np.zeros(addresses.shape, bool)
        if self.is_outside:
            return hit
        near = np.flatnonzero((addresses < self.end) & (addresses + size > self.address))
        if near.size:
            rows = np.sort(self.rows)
            last = np.searchsorted(rows, addresses[near] + size) - 1
            hit[near] = (last >= 0) & (rows[last] + self.row_bytes > addresses[near])
        return hit

    @property
    def sectors(self) -> int:
        """Sectors of 32 bytes that a copy takes, as an H200 counts them: for each row, the sectors
        of global memory that hold a part of it, and as many sectors as the filled elements take."""
        taken, rows = 0, 0
        if not self.is_outside:
            taken, rows = _sectors_of_rows(
                self.address % SECTOR, self.row_bytes, *map(tuple, self._outer)
            )
        if self.is_stored:
            return taken
        bytes_of_row = self.map.row_bytes
        whole = self.map.box_bytes // bytes_of_row - rows
        left = self.low[0] * self.map.element_bytes
        right = bytes_of_row - left - self.row_bytes
        filled = rows * (_sectors(left) + _sectors(right))
        return taken + filled + whole * _sectors(bytes_of_row)

    @property
    def _strides(self) -> tuple[int, ...]:
        return (self.map.element_bytes, *self.map.strides)

    @cached_property
    def _outer(self) -> tuple[list[int], list[int]]:
        """For each dimension but 0: elements inside, and bytes from one moved element to the
        next."""
        counts = [high - low for low, high in zip(self.low, self.high, strict=True)]
        pairs = zip(self._strides, self.map.element_strides, strict=True)
        return counts[1:], [stride * step for stride, step in pairs][1:]

    def view(self, memory: np.ndarray, base: int, dtype: DTypeLike = np.uint8) -> np.ndarray:
        """The elements inside as a view of global memory, dimension 0 last.

        `memory`: its bytes, uint8, from address `base` on, which must hold all of them. `dtype`: a
        dtype as wide as the elements, or uint8 for their bytes.
        """
        dtype = np.dtype(dtype)
        counts, steps = self._outer
        shape = (*reversed(counts), self.row_bytes // dtype.itemsize)
        start = self.address - base
        return np.lib.stride_tricks.as_strided(
            memory[start : start + self.row_bytes].view(dtype),
            shape,
            (*reversed(steps), dtype.itemsize),
        )

    def inside(self, data: np.ndarray) -> np.ndarray:
        """The part of the whole box's data, in its order, that lies inside, as `view` has it."""
        per_element = data.size // (self.map.box_bytes // self.map.element_bytes)
        shape = (*reversed(self.map.moved[1:]), self.map.moved[0] * per_element)
        ranges = list(zip(self.low, self.high, strict=True))
        low, high = ranges[0]
        slices = [slice(*limits) for limits in reversed(ranges[1:])]
        return data.reshape(shape)[(*slices, slice(low * per_element, high * per_element))]

    def read(self, memory: np.ndarray, base: int) -> np.ndarray:
        """The bytes of the box in its order, uint8 (box_bytes,), filled where outside."""
        if self.is_whole:
            return self.view(memory, base).reshape(-1)  # a copy, unless it lies in one piece
        data = _filling(self.map).copy()
        if not self.is_outside:
            self.inside(data)[...] = self.view(memory, base)
        return data

    @property
    def filled(self) -> np.ndarray:
        """Which bytes of the box lie outside the tensor, bool (box_bytes,)."""
        mask = np.ones(self.map.box_bytes, bool)
        if not self.is_outside:
            self.inside(mask)[...] = False
        return mask


class Span:
    """Contiguous bytes in global memory, with the methods of `Box` that a copy needs."""

    is_whole = True
    is_outside = False

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.end = address + size

    @property
    def rows(self) -> np.ndarray:
        """As `Box.rows`: one row."""
        return np.array([self.address])

    @property
    def row_bytes(self) -> int:
        """As `Box.row_bytes`: all bytes."""
        return self.end - self.address

    def holds(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """As `Box.holds`."""
        return (addresses < self.end) & (addresses + size > self.address)

    @property
    def sectors(self) -> int:
        """As `Box.sectors`."""
        size = self.row_bytes
        return _sectors(self.address % SECTOR + size) if size else 0

    def view(self, memory: np.ndarray, base: int, dtype: DTypeLike = np.uint8) -> np.ndarray:
        """As `Box.view`."""
        return memory[self.address - base : self.end - base].view(dtype)

    def inside(self, data: np.ndarray) -> np.ndarray:
        """As `Box.inside`: all bytes."""
        return data

    def read(self, memory: np.ndarray, base: int) -> np.ndarray:
        """As `Box.read`."""
        return self.view(memory, base)


def first_common(one: Box | Span, other: Box | Span) -> int | None:
    """Address of the first row of a piece of global memory that shares bytes with another piece;
    None if they share none."""
    if one.is_outside or other.is_outside or one.address >= other.end or other.address >= one.end:
        return None
    rows = one.rows
    common = rows[other.holds(rows, one.row_bytes)]
    return int(common[0]) if common.size else None


def _rows(address: int, counts: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """Addresses of rows of which the first is given, by the counts and steps of each dimension."""
    rows = np.array([address])
    for count, step in zip(counts, steps, strict=True):
        rows = (np.arange(count)[:, None] * step + rows).reshape(-1)
    return rows


@lru_cache(maxsize=256)
def _sectors_of_rows(
    address: int, size: int, counts: Sequence[int], steps: Sequence[int]
) -> tuple[int, int]:
    """Sectors of all rows of `size` bytes, and the number of rows."""
    rows = _rows(address, counts, steps)
    return int(((rows + size - 1) // SECTOR - rows // SECTOR + 1).sum()), rows.size


@lru_cache(maxsize=64)
def _filling(tensor_map: TensorMap) -> np.ndarray:
    """A box that lies outside the tensor."""
    value = _NAN if tensor_map.fill == "nan" else np.uint16(0)
    return np.full(tensor_map.box_bytes // 2, value).view(np.uint8)


def _sectors(size: int) -> int:
    return -(-size // SECTOR)


def swizzled(addresses: np.ndarray, swizzle_bytes: int | np.ndarray) -> np.ndarray:
    """Shared addresses under a swizzle of 0, 32, 64 or 128 bytes, or of one for each; its own
    inverse."""
    bits = np.maximum(swizzle_bytes // CHUNK - 1, 0)
    return addresses ^ ((addresses >> 7 & bits) << 4)


@lru_cache(maxsize=256)
def shared_chunks(start: int, tensor_map: TensorMap) -> np.ndarray:
    """Places of the 16-byte chunks of a box, in its order: shared address / 16 of each chunk. The
    array must not be written to.

    `start`: shared address of the box, a multiple of 128.
    """
    row = tensor_map.row_bytes
    rows = np.arange(tensor_map.box_bytes // row) * (tensor_map.swizzle_bytes or row)
    addresses = start + (rows[:, None] + np.arange(0, row, CHUNK)).reshape(-1)
    chunks = swizzled(addresses, tensor_map.swizzle_bytes) // CHUNK
    chunks.flags.writeable = False
    return chunks
