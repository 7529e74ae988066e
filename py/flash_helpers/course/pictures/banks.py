"""Where a tile lies in the banks of shared memory, and what an access to it costs.

A row of a tile is cut into chunks of 16 bytes: what a thread copies at once, and what ldmatrix
reads of one row. Shared memory has 32 banks of 4 bytes; 8 chunks go once around them. (CUDA C++
Programming Guide, "Shared Memory" of compute capability 5.x and later.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from flash_helpers.registry.mma_sync import CHUNK_BYTES

BANKS = 32
BANK_BYTES = 4
BANKS_PER_CHUNK = CHUNK_BYTES // BANK_BYTES
CHUNKS_AROUND = BANKS // BANKS_PER_CHUNK  # chunks that hit each bank once
MATRIX_ROWS = 8  # of one 8 x 8 matrix of ldmatrix; as many addresses make a wavefront

Placement = Callable[[int, int], int]


def straight(row: int, chunk: int) -> int:
    """Step 1: a chunk lies where its number says. Of any row, returns the place in the row."""
    return chunk


def swizzled(row: int, chunk: int) -> int:
    """Step 2: chunk c of row r lies at c ^ (r % 8)."""
    return chunk ^ row % MATRIX_ROWS


def address(row: int, chunk: int, row_bytes: int, place: Placement) -> int:
    """Byte offset of a chunk from the tile's first byte."""
    return row * row_bytes + place(row, chunk) * CHUNK_BYTES


def banks(byte_address: int, size: int = CHUNK_BYTES) -> range:
    """The banks that `size` bytes from an aligned address on lie in."""
    first = byte_address // BANK_BYTES % BANKS
    return range(first, first + size // BANK_BYTES)


def wavefronts(addresses: Iterable[int]) -> int:
    """Passes through the banks that reading chunks at different addresses takes at once."""
    load = Counter(bank for at in addresses for bank in banks(at))
    return max(load.values())
