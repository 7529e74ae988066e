"""Positions of the threads of a batch, each with a program counter of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakMethod

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.machine import Machine, pick
from flash_helpers.ptx.run.memory.regions import Selection

RUNNING, AT_SYNC, AT_BARRIER, ASLEEP, DONE = range(5)
"""Status of a thread: it can run; waits for other lanes of its warp; waits at a barrier of the
block; sleeps at an instruction that waits (`machine.Wait`); has ended."""


class Threads:
    """Program counter and status of every lane. `pc`: the instruction that a lane executes next, or
    at which it waits. `ended`: called when threads have ended, after their status is set."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._blocks = machine.program.blocks
        self.pc = np.zeros(machine.lanes, np.int64)
        self.status = np.zeros(machine.lanes, np.int8)
        self.status[machine.thread_ids >= machine.geometry.threads] = DONE
        # Weakly, so that a batch that is done needs no garbage collector to go.
        self.ended: WeakMethod[Callable[[], None]]

    @property
    def live_lanes(self) -> np.ndarray:
        """Lanes whose threads have not ended."""
        return np.flatnonzero(self.status != DONE)

    def having(self, status: int) -> np.ndarray:
        """Lanes with a given status."""
        return np.flatnonzero(self.status == status)

    def waiting_at(self, position: int) -> np.ndarray:
        """Lanes that wait at an instruction for others of their warp."""
        return np.flatnonzero((self.status == AT_SYNC) & (self.pc == position))

    def ended_of(self, block: int) -> np.ndarray:
        """Lanes of a block of the batch whose threads have ended."""
        geometry = self._machine.geometry
        lanes = geometry.lanes_of(block)[: geometry.threads]
        return lanes[self.status[lanes] == DONE]

    def by_position(self, lanes: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Each position at which some of the lanes stand, in order, with these lanes."""
        return [(p, lanes[self.pc[lanes] == p]) for p in np.unique(self.pc[lanes]).tolist()]

    def go(self, selection: Selection, block: int) -> None:
        """Lanes go on at a block of the program, or end if its index is negative."""
        if block >= 0:
            self.pc[selection] = self._blocks[block].start
            return
        self.status[selection] = DONE
        self._machine.end(selection)
        # Lanes that wait for lanes of their warp ask again whether they still must.
        waiting = self.having(AT_SYNC)
        warps = np.unique(self._machine.lanes_of(selection) // WARP)
        self.status[waiting[np.isin(waiting // WARP, warps)]] = RUNNING
        ended = self.ended()
        assert ended is not None
        ended()


@dataclass(frozen=True)
class Group:
    """Lanes that run together, in ascending order. `selection`: a slice where they are contiguous.
    `is_whole`: whether they are all lanes of their warps. `executions`: for each warp of a block,
    the number of blocks in which some of its lanes are among them."""

    lanes: np.ndarray
    selection: Selection
    is_whole: bool
    executions: np.ndarray

    @classmethod
    def of(cls, lanes: np.ndarray, geometry: Geometry) -> Group:
        """The group of some lanes."""
        warps = warps_of(lanes) // len(geometry.blocks)
        executions = np.bincount(warps, minlength=geometry.warps_per_block)
        return cls(lanes, as_selection(lanes), whole_warps(lanes), executions)


def as_selection(lanes: np.ndarray) -> Selection:
    """A slice where the lanes are contiguous: views are cheaper than copies."""
    first, last = int(lanes[0]), int(lanes[-1])
    return slice(first, last + 1) if last - first + 1 == lanes.size else lanes


def for_each(array: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """One value per lane, from an array that may have one value for all."""
    return np.broadcast_to(pick(array, lanes), lanes.shape)


def whole_warps(lanes: np.ndarray) -> bool:
    """Whether lanes, in ascending order, are all of their warps."""
    if lanes.size % WARP:
        return False
    rows = lanes.reshape(-1, WARP)
    return bool((rows[:, 0] % WARP == 0).all() and (rows[:, -1] - rows[:, 0] == WARP - 1).all())


def warps_of(lanes: np.ndarray) -> np.ndarray:
    """The warps of lanes in ascending order, numbered over the batch."""
    warps = lanes // WARP
    return warps[np.flatnonzero(np.r_[True, warps[1:] != warps[:-1]])]
