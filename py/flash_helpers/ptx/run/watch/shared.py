"""Shared memory with its watcher."""

from __future__ import annotations

from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.shared import SharedMemory
from flash_helpers.ptx.run.watch.agents import AgentWatch
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.lanes import LaneWatch
from flash_helpers.ptx.run.watch.marks import Marks
from flash_helpers.ptx.run.watch.order import Order
from flash_helpers.ptx.run.watch.presence import Presence


class WatchedMemory(SharedMemory):
    """Shared memory of a batch, the order of its accesses, and the watchers over lanes and agents,
    which share their marks."""

    def __init__(self, geometry: Geometry, size: int, granule: int, log: FaultLog) -> None:
        super().__init__(geometry, size, granule)
        self.order = Order(geometry)
        self.presence = Presence(geometry, self.order, log)
        self.marks = Marks(self, self.order, log)
        self.lanes = LaneWatch(self, self.marks)
        self.agents = AgentWatch(self.marks, self.presence)
