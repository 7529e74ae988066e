"""The launch before a programmatic one, which may still run until griddepcontrol.wait.

Which memory it reads and writes is not known, so all of global memory counts. To the order of
events the launch is an agent (`order`). A thread that has waited knows it, and so does every thread
that barriers, mbarriers or flags order behind that thread: the wait makes the launch's memory
operations visible to the whole grid (PTX ISA 9.0, "griddepcontrol").
"""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.errors import LaunchOrderError
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.order import Order


class LaunchBefore:
    """The lanes of a batch that know that the launch before has ended."""

    def __init__(self, geometry: Geometry, order: Order, log: FaultLog) -> None:
        self._geometry = geometry
        self._order = order
        self._log = log
        self._agent = order.agent(0, "the launch before")

    def wait(self, lanes: np.ndarray) -> None:
        """Lanes of the batch wait for its end."""
        self._order.acquire(lanes, [self._order.agent_knowledge(self._agent)])

    def check(self, action: str, position: int, lanes: np.ndarray, addresses: np.ndarray) -> None:
        """Reports lanes that touch global memory, each at an address, without knowing of its end.
        `action`: "read", or any that writes."""
        known = self._order.known_of_agents(lanes, np.full((lanes.size, 1), self._agent))
        early = np.flatnonzero(known[:, 0] == 0)
        if early.size:
            first = int(early[0])
            may = "write" if action == "read" else "read or write"
            self._log.report(
                LaunchOrderError,
                f"{action} that the launch before may still {may}: wait first",
                position,
                self._geometry.thread(lanes[first]),
                int(addresses[first]),
                early.size,
            )
