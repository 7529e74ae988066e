"""Global memory of the simulated device."""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

ARENA_BASE = 0x7F00_0000_0000
"""First address of global memory."""
WINDOWS: Mapping[str, int] = {
    "shared": 0x7E00_0000_0000,
    "local": 0x7D00_0000_0000,
    "param": 0x7C00_0000_0000,
}
"""Generic addresses of the first byte of a block's shared memory, of a thread's local memory, and
of the kernel's parameters."""
WINDOW_SIZE = 1 << 32
RANK_SHIFT = 24
"""First bit of the rank in a shared address. In an address that `mapa` returns (PTX ISA 9.0,
"mapa"), the bits from here on are the rank of a block of the cluster plus one. In an address of the
thread's own block they are zero."""

Selection = slice | np.ndarray
ALL = slice(None)

_ALIGNMENT = 256
HEAP_BYTES = 8 << 20
"""Total bytes that device code can hold from malloc (CUDA C++ Programming Guide, "Heap Memory
Allocation": the default)."""
_GUARD = 4096
"""Bytes between allocations that belong to none, so that an access beyond an array is seen."""


class DeviceMemory:
    """Global memory: allocations with gaps between them, every access checked against them."""

    def __init__(self) -> None:
        self._bytes = np.zeros(1 << 16, np.uint8)
        self._used = _GUARD
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._heap: dict[int, int] = {}
        self._heap_left = HEAP_BYTES
        self._freed: dict[int, list[int]] = {}

    def allocate(self, size: int, alignment: int = _ALIGNMENT, behind: int = 0) -> int:
        """Reserves `size` zeroed bytes and returns their address, `behind` bytes behind a multiple
        of 256 and of `alignment`, a power of two."""
        if size <= 0:
            raise ValueError(f"an allocation of {size} bytes: give at least 1")
        start = -(-self._used // alignment) * alignment + behind
        self._used = -(-(start + size + _GUARD) // _ALIGNMENT) * _ALIGNMENT
        if self._used > self._bytes.size:
            self._bytes = self._grown(max(self._used, 2 * self._bytes.size))
        self._starts.append(ARENA_BASE + start)
        self._ends.append(ARENA_BASE + start + size)
        return ARENA_BASE + start

    def _grown(self, size: int) -> np.ndarray:
        """More bytes, `size` in all, which begin as those that there are."""
        grown = np.zeros(size, np.uint8)
        grown[: self._bytes.size] = self._bytes
        return grown

    def free(self, address: int) -> None:
        """Ends an allocation: accesses to it are outside every allocation from now on. Raises
        ValueError for an address that `allocate` or `upload` has not returned, or that is free
        already."""
        i = bisect.bisect_left(self._starts, address)
        if i == len(self._starts) or self._starts[i] != address:
            raise ValueError(f"no allocation begins at {address:#x}: {self.nearest(address)}")
        del self._starts[i], self._ends[i]

    def upload(self, array: npt.ArrayLike, behind: int = 0) -> int:
        """Copies an array (C order) into new global memory and returns its address, `behind` bytes
        behind a multiple of 256."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.allocate(data.size, behind=behind)
        self._bytes[address - ARENA_BASE :][: data.size] = data
        return address

    def download(
        self, address: int, shape: int | Sequence[int], dtype: npt.DTypeLike
    ) -> np.ndarray:
        """A copy of global memory as an array. Raises ValueError if the bytes are not all inside
        one allocation."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = math.prod(shape) * dtype.itemsize
        limits = self.extent(address)
        if limits is None or address + size > limits[1]:
            raise ValueError(
                f"{size} bytes at {address:#x} are not inside one allocation: "
                "download what upload or allocate returned, with its shape and dtype"
            )
        offset = address - ARENA_BASE
        return self._bytes[offset : offset + size].view(dtype).reshape(shape).copy()

    def heap_allocate(self, size: int) -> int:
        """The result of the device's malloc: the address of `size` bytes, 0 if there are none."""
        if not 0 < size <= self._heap_left:
            return 0
        if self._freed.get(size):
            address = self._freed[size].pop()
            i = bisect.bisect(self._starts, address)
            self._starts.insert(i, address)
            self._ends.insert(i, address + size)
        else:
            address = self.allocate(size)
        self._heap[address] = size
        self._heap_left -= size
        return address

    def heap_free(self, address: int) -> bool:
        """Frees an address that `heap_allocate` returned; returns False for any other address.
        Accesses to it are outside every allocation until it is allocated again."""
        size = self._heap.pop(address, None)
        if size is None:
            return False
        self._heap_left += size
        self.free(address)
        self._freed.setdefault(size, []).append(address)
        return True

    def extent(self, address: int) -> tuple[int, int] | None:
        """First address and end of the allocation that holds an address, None if none does."""
        i = bisect.bisect_right(self._starts, address) - 1
        if i < 0 or address >= self._ends[i]:
            return None
        return self._starts[i], self._ends[i]

    def nearest(self, address: int) -> str:
        """Text with the place of an address outside every allocation."""
        if address == 0:
            return "the null pointer"
        i = bisect.bisect_right(self._starts, address) - 1
        if i >= 0 and address - self._ends[i] < 1 << 24:
            size = self._ends[i] - self._starts[i]
            return (
                f"{address - self._ends[i]} bytes past the end of the {size}-byte allocation "
                f"at {self._starts[i]:#x}"
            )
        if i + 1 < len(self._starts) and self._starts[i + 1] - address < 1 << 24:
            size = self._ends[i + 1] - self._starts[i + 1]
            return (
                f"{self._starts[i + 1] - address} bytes before the {size}-byte allocation "
                f"at {self._starts[i + 1]:#x}"
            )
        return "not an address of this device memory"

    def inside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """For each address, whether `size` bytes from it lie in one allocation."""
        if not self._starts:
            return np.zeros(addresses.shape, bool)
        starts = np.array(self._starts)
        ends = np.array(self._ends)
        i = np.searchsorted(starts, addresses, side="right") - 1
        return (i >= 0) & (addresses + size <= ends[np.maximum(i, 0)])

    def offsets(self, addresses: np.ndarray, selection: Selection) -> np.ndarray:
        """Offsets of lanes' addresses in `words`, in bytes."""
        return addresses - ARENA_BASE

    def digest(self) -> bytes:
        """A hash of all its bytes."""
        return hashlib.blake2b(self._bytes[: self._used].data).digest()

    def words(self, size: int) -> np.ndarray:
        """All of memory from ARENA_BASE on, in the form of `word_view`."""
        return word_view(self._bytes, size)

    def outside(self, address: int, size: int) -> str:
        """Text for an access outside every allocation."""
        return f"{size} bytes, {self.nearest(address)}"

    def misaligned(self, address: int, size: int) -> str:
        """Text for an access at an address that is not a multiple of its size."""
        return f"{size} bytes at a global address that is not a multiple of {size}"


class Region:
    """A state space that every lane addresses from 0 on, with the access methods of `DeviceMemory`.

    `data`: the bytes of all lanes. `size`: bytes that one lane sees. `base`: place in `data` of
    each lane's address 0. `name`: its name in messages.
    """

    def __init__(self, data: np.ndarray, size: int, base: np.ndarray, name: str) -> None:
        self.data = data
        self.size = size
        self.base = base
        self.name = name

    def extent(self, address: int) -> tuple[int, int]:
        """First address and end."""
        return 0, self.size

    def inside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """For each address, whether `size` bytes from it are inside."""
        return (addresses >= 0) & (addresses + size <= self.size)

    def offsets(self, addresses: np.ndarray, selection: Selection) -> np.ndarray:
        """Offsets of the selected lanes' addresses in `words`, in bytes."""
        return addresses + self.base[selection]

    def words(self, size: int) -> np.ndarray:
        """The bytes of all lanes, in the form of `word_view`."""
        return word_view(self.data, size)

    def outside(self, address: int, size: int) -> str:
        """Text for an access outside, or misaligned."""
        return f"{size} bytes at offset {address} of {self.size} bytes of {self.name}"

    misaligned = outside


class LocalMemory(Region):
    """Local memory of all lanes, one after the other, which records the bytes that were written.
    `size`: bytes per lane."""

    def __init__(self, lanes: int, size: int) -> None:
        data = np.zeros(lanes * size, np.uint8)
        super().__init__(data, size, size * np.arange(lanes), "local memory")
        self._written = np.zeros_like(data)

    def note(self, action: str, rows: np.ndarray, size: int) -> np.ndarray | None:
        """Records that lanes write words of `size` bytes. For words that they read or change, it
        returns which bytes nothing has written, (words, size), or None. `rows`: index of each word
        in `words(size)`."""
        written = word_view(self._written, size)
        if action == "write":
            written[rows] = ~written.dtype.type(0)
            return None
        words = written[rows]
        if (words == ~written.dtype.type(0)).all():
            return None
        return words.view(np.uint8).reshape(rows.size, size) == 0

    def is_written(self, octets: np.ndarray) -> np.ndarray:
        """Whether bytes of `data` were written."""
        return self._written[octets] != 0


def word_view(data: np.ndarray, size: int) -> np.ndarray:
    """Bytes as unsigned words of 1, 2, 4 or 8 bytes, or as rows of 16 or 32 bytes."""
    return data.view(f"u{size}") if size <= 8 else data.view(np.uint32).reshape(-1, size // 4)


def empty_words(count: int, size: int) -> np.ndarray:
    """Zeros in the form of `word_view`."""
    return word_view(np.zeros(count * size, np.uint8), size)
