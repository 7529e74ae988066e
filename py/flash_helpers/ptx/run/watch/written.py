"""Writes of threads to global memory that bulk copies do not see yet.

Races in global memory are not watched. But where a thread knows a write to global memory, its own
or that of a thread of its cluster, its bulk copy sees it only behind a `fence.proxy.async` that is
not restricted to shared memory (PTX ISA 9.0, "Async Proxy").
"""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.boxes import Box, Span
from flash_helpers.ptx.run.memory.regions import ARENA_BASE, DeviceMemory
from flash_helpers.ptx.run.watch.marks import SITE_BITS, SITE_MASK
from flash_helpers.ptx.run.watch.order import GLOBAL, Knowledge, Order

_LANE_BITS = 16


class GlobalWrites:
    """The last write of a batch to each granule of global memory. `granule`: bytes of the narrowest
    write."""

    def __init__(
        self, geometry: Geometry, order: Order, memory: DeviceMemory, granule: int
    ) -> None:
        self._geometry = geometry
        self._order = order
        self._memory = memory
        self._granule = granule
        # Time, lane and instruction of each write, from the upper bits to the lower ones.
        self._codes = np.zeros(0, np.int64)
        # The lowest address of a write, and the end of the highest one.
        self._low, self._end = 1 << 62, 0

    def note(self, position: int, lanes: np.ndarray, addresses: np.ndarray, size: int) -> None:
        """Lanes write `size` bytes each."""
        count = self._memory.words(1).size // self._granule + 1
        if self._codes.size < count:
            codes, self._codes = self._codes, np.zeros(count, np.int64)
            self._codes[: codes.size] = codes
        code = (self._order.now << _LANE_BITS | lanes) << SITE_BITS | position
        first = (addresses - ARENA_BASE) // self._granule
        for i in range(size // self._granule):
            self._codes[first + i] = code
        self._low = min(self._low, int(addresses.min()))
        self._end = max(self._end, int(addresses.max()) + size)

    def hidden(
        self, lane: int, piece: Box | Span, issued: Knowledge
    ) -> tuple[int, int, int] | None:
        """The first write that the issuer of a bulk copy knows and its copy does not see: lane,
        instruction and address; None if there is none. `issued`: the issuer's knowledge."""
        order, geometry = self._order, self._geometry
        if piece.is_outside or piece.end <= self._low or self._end <= piece.address:
            return None
        (known,), _, (visible,) = order.stacked([issued], GLOBAL + 1)
        rows = (piece.rows - ARENA_BASE) // self._granule
        index = (rows[:, None] + np.arange(-(-piece.row_bytes // self._granule))).reshape(-1)
        codes = self._codes[index[index < self._codes.size]]
        some = np.flatnonzero(codes)
        lanes = codes[some] >> SITE_BITS & ((1 << _LANE_BITS) - 1)
        mine = geometry.cluster_of(lanes) == geometry.cluster_of(lane)
        some, lanes = some[mine], lanes[mine]
        times, places = codes[some] >> SITE_BITS + _LANE_BITS, geometry.place_of(lanes)[None]
        is_known = (lanes == lane) | (order.lanes_in(known[None], places)[0] >= times)
        found = np.flatnonzero(is_known & (times > order.lanes_in(visible[None], places)[0]))
        if not found.size:
            return None
        i = int(found[0])
        address = int(index[some[i]]) * self._granule + ARENA_BASE
        return int(lanes[i]), int(codes[some[i]] & SITE_MASK), address
