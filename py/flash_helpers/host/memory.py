"""Device memory that a host program shares, and the calls that allocate, copy and free it."""

from __future__ import annotations

import mmap
import os

import numpy as np

from flash_helpers.host.errors import INVALID_VALUE, OUT_OF_MEMORY, CudaError
from flash_helpers.ptx.run.memory.regions import ARENA_BASE, DeviceMemory

DEVICE_BYTES = 16 << 30
"""Bytes of device memory, used or not. A program that asks for more is told so, before this
machine's memory is full."""

_UNWRITTEN = 0xFF
"""Each byte of new memory: NaN as a float of any size, -1 as an integer."""

_DESTINATION, _SOURCE = 1, 2
"""Bits of a cudaMemcpyKind, and of an answer to `copy`: this side is memory of the device."""
_DEVICE_MEMORY = 2
"""cudaMemoryTypeDevice."""
_BY_ADDRESS = 4
"""cudaMemcpyDefault: the addresses tell."""


class SharedMemory(DeviceMemory):
    """Global memory whose bytes are a file, `file`, that another process maps or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.file = os.memfd_create("device memory")
        self._bytes = self._grown(self._bytes.size)

    def _grown(self, size: int) -> np.ndarray:
        os.ftruncate(self.file, size)
        return np.frombuffer(mmap.mmap(self.file, size), np.uint8)

    def close(self) -> None:
        """Gives the file back."""
        os.close(self.file)


class MemoryCalls:
    """The calls of a program that concern memory.

    Memory of cudaMallocManaged and cudaMallocHost is visible to the program, at its address in
    device memory.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._sizes: dict[int, int] = {}
        self._visible: dict[int, int] = {}  # by address, the cudaMemoryType

    def allocate(self, size: int, alignment: int = 256) -> list[int]:
        """cudaMalloc: the address of new memory, which holds no useful values; 0 for 0 bytes."""
        if size == 0:
            return [0]
        used = sum(self._sizes.values())
        if size > DEVICE_BYTES - used:
            raise CudaError(
                OUT_OF_MEMORY,
                f"{size:,} bytes of device memory, and {DEVICE_BYTES - used:,} of "
                f"{DEVICE_BYTES:,} are free: simulate a smaller problem",
            )
        address = self.memory.allocate(size, alignment)
        self._sizes[address] = size
        self._octets(address, size)[:] = _UNWRITTEN
        return [address]

    def allocate_visible(self, size: int, memory_type: int) -> list[int]:
        """cudaMallocManaged, cudaMallocHost: an address that the program can map."""
        if size == 0:
            raise CudaError(INVALID_VALUE, "0 bytes: give at least 1")
        (address,) = self.allocate(size, mmap.PAGESIZE)
        self._visible[address] = memory_type
        return [address]

    def check_visible(self, address: int) -> None:
        """cudaHostGetDevicePointer: refuses memory that kernels cannot access."""
        extent = self.memory.extent(address)
        if extent is None or extent[0] not in self._visible:
            raise CudaError(
                INVALID_VALUE,
                f"{address:#x} is memory that kernels cannot access in the simulator: allocate it "
                "with cudaMallocHost or cudaMallocManaged",
            )

    def pointer(self, address: int) -> list[int]:
        """cudaPointerGetAttributes: the cudaMemoryType, 0 for memory that CUDA does not know."""
        extent = self.memory.extent(address)
        if extent is None:
            return [0]
        return [self._visible.get(extent[0], _DEVICE_MEMORY)]

    def address_taken(self, address: int) -> None:
        """The program's own memory lies where visible memory was to be."""
        raise CudaError(
            OUT_OF_MEMORY, f"the program has memory of its own at {address:#x}: run it once more"
        )

    def bad_host_memory(self, size: int) -> None:
        """The program's side of a copy is not accessible."""
        raise CudaError(
            INVALID_VALUE, f"{size:,} bytes of the program's own memory cannot be accessed"
        )

    def free(self, address: int) -> list[int]:
        """cudaFree: ends an allocation. Returns the bytes that the program sees of it."""
        if address not in self._sizes:
            raise CudaError(INVALID_VALUE, f"no allocation begins at {address:#x}")
        self.memory.free(address)
        size = self._sizes.pop(address)
        if address not in self._visible:
            return [0]
        del self._visible[address]
        return [size]

    def copy(self, to: int, source: int, size: int, kind: int) -> list[int]:
        """cudaMemcpy: which sides are memory of the device, 1 the destination, 2 the source, 3
        both. Copies within the device are done at once, the others by the program."""
        sides = 0
        for side, name, address in (
            (_DESTINATION, "destination", to),
            (_SOURCE, "source", source),
        ):
            is_device = self._is_device(address, size, name)
            sides |= side * is_device
            if kind != _BY_ADDRESS:
                self._check_side(name, address, is_device, bool(kind & side))
        if sides == _DESTINATION | _SOURCE:
            self._octets(to, size)[:] = self._octets(source, size).copy()
        return [sides]

    def fill(self, to: int, value: int, count: int, size: int) -> None:
        """cudaMemset: writes an element of `size` bytes `count` times."""
        if not self._is_device(to, count * size, "destination"):
            raise CudaError(INVALID_VALUE, f"the destination {to:#x} is not device memory")
        element = np.frombuffer(value.to_bytes(8, "little")[:size], np.uint8)
        self._octets(to, count * size).reshape(count, size)[:] = element

    def memory_info(self) -> list[int]:
        """cudaMemGetInfo: free bytes, and all bytes."""
        return [DEVICE_BYTES - sum(self._sizes.values()), DEVICE_BYTES]

    def _octets(self, address: int, size: int) -> np.ndarray:
        return self.memory.words(1)[address - ARENA_BASE :][:size]

    def _is_device(self, address: int, size: int, name: str) -> bool:
        """Whether bytes are device memory. Refuses those that are so only in part."""
        extent = self.memory.extent(address)
        if extent is None:
            if 0 <= address - ARENA_BASE < self.memory.words(1).size:
                place = self.memory.nearest(address)
                raise CudaError(INVALID_VALUE, f"the {name} is not allocated: {place}")
            return False
        start, end = extent
        if address + size > end:
            raise CudaError(
                INVALID_VALUE,
                f"{size:,} bytes at the {name} {address:#x} end {address + size - end:,} bytes "
                f"past its allocation of {end - start:,} bytes",
            )
        return True

    def _check_side(self, name: str, address: int, is_device: bool, wanted: bool) -> None:
        """Refuses a copy of a kind that does not fit its addresses."""
        if wanted and not is_device:
            raise CudaError(INVALID_VALUE, f"the {name} {address:#x} is not device memory")
        extent = self.memory.extent(address)
        if is_device and not wanted and extent is not None and extent[0] not in self._visible:
            raise CudaError(
                INVALID_VALUE,
                f"the {name} {address:#x} is device memory, and the kind of the copy says that it "
                "is the program's",
            )
