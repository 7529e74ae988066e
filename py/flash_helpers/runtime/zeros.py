"""Device memory of zeros that kernels leave as zeros, so that no call has to clear it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from flash_helpers.runtime import driver

ALIGNMENT = 256  # bytes
ROOM = 2**20  # bytes that are allocated at once
RESERVE = 2**16  # bytes of these that are left for captures of CUDA graphs, which cannot allocate


class Zeros:
    """Memory of one device, zeros wherever no kernel is using it.

    `allocate`: returns the address of so many bytes, zeros from now on, which are never freed.
    """

    def __init__(self, allocate: Callable[[int], int]) -> None:
        self._allocate = allocate
        self._next = self._end = 0  # of the memory that nothing has yet
        self._found: dict[Hashable, tuple[int, int]] = {}  # address and bytes

    def address(self, size: int, stream: int, capture: int | None = None) -> int | None:
        """Return the address of `size` bytes for a stream's kernels, which run one after the other.

        `capture`: number of the capture that records them. Its graph has memory of its own, since
        it may be replayed on any stream. None is returned where a capture finds no memory left.
        """
        if capture is None and self._end - self._next < RESERVE:
            self._add(ROOM)
        key = stream, capture
        found, room = self._found.get(key, (0, 0))
        if room >= size:
            return found
        wanted = -(-max(size, 2 * room) // ALIGNMENT) * ALIGNMENT
        if self._end - self._next < wanted + RESERVE * (capture is None):
            if capture is not None:
                return None
            self._add(wanted + ROOM)
        found = self._next
        self._next += wanted
        self._found[key] = found, wanted
        return found

    def _add(self, size: int) -> None:
        self._next = self._allocate(size)
        self._end = self._next + size


_memory: list[torch.Tensor] = []  # never freed: graphs have addresses in it
_devices: dict[int, Zeros] = {}


def zeros_of(index: int) -> Zeros:
    """Return the memory of a CUDA device."""
    if index not in _devices:

        def allocate(size: int) -> int:
            _memory.append(torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", index)))
            torch.cuda.current_stream(index).synchronize()  # kernels of other streams read it, too
            return _memory[-1].data_ptr()

        _devices[index] = Zeros(allocate)
    return _devices[index]


def address_of_zeros(size: int, index: int, stream: int) -> int | None:
    """Return `Zeros.address` of a CUDA device for one of its streams."""
    capture = driver.capture_of(stream) if stream else None  # the default stream is never captured
    return zeros_of(index).address(size, stream, capture)
