"""Lanes of a warp that wait for each other at instructions that they must execute together."""

from __future__ import annotations

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import MissingLanesError
from flash_helpers.ptx.run.execute.bound import BoundProgram
from flash_helpers.ptx.run.execute.threads import AT_SYNC, RUNNING, Threads, for_each
from flash_helpers.ptx.run.instructions.warps import WHOLE_WARP
from flash_helpers.ptx.run.machine import Machine, warp_masks


class Meetings:
    """The instructions of a batch at which lanes of a warp meet."""

    def __init__(self, machine: Machine, threads: Threads, bound: BoundProgram) -> None:
        self.machine = machine
        self.program = machine.program
        self.threads = threads
        self.members = bound.members
        self.guards = bound.guards
        self.warp_barriers = bound.warp_barriers

    def join(
        self, position: int, lanes: np.ndarray
    ) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """Returns the lanes that may execute a warp-wide instruction now, and those among them that
        have waited for other lanes of their warp; the remaining lanes wait. Also returns the lanes
        that a bar.warp.sync elsewhere lets go, by its position.

        Lanes wait for those that name the same members. Only the instructions of `WHOLE_WARP` wait
        for threads that have ended (PTX ISA 9.0, "shfl.sync", "vote.sync", "match.sync" and
        "redux.sync": "all non-exited threads corresponding to membermask"). A lane that is
        predicated off waits for none.
        """
        lanes = np.union1d(lanes, self.threads.waiting_at(position))
        members = self.members[position]
        present = self.machine.fellows(lanes, members)
        needed = for_each(members, lanes)
        if self.program.instructions[position].name not in WHOLE_WARP:
            present |= warp_masks(self.machine.gone)
        elsewhere = None
        if position in self.warp_barriers:
            # Those that wait at another bar.warp.sync of the same mask have arrived.
            elsewhere = self._at_other_warp_barriers(position)
            for mask in np.unique(needed):
                here = lanes[needed == mask]
                present[here] |= warp_masks(elsewhere == mask)[here]
        ready = (needed & ~present[lanes]) == 0
        if position in self.guards:
            ready |= ~self.guards[position](lanes)
        self.threads.status[lanes[ready]] = RUNNING
        waiting = lanes[~ready]
        self.threads.pc[waiting] = position
        self.threads.status[waiting] = AT_SYNC
        let_go: list[tuple[int, np.ndarray]] = []
        if elsewhere is not None and elsewhere.any():
            for mask in np.unique(needed[ready]):
                met = np.flatnonzero(elsewhere == mask)
                met = met[np.isin(met // WARP, lanes[ready & (needed == mask)] // WARP)]
                let_go += self.threads.by_position(met)
        return lanes[ready], let_go

    def _at_other_warp_barriers(self, position: int) -> np.ndarray:
        """For each lane the mask of the bar.warp.sync at which it waits, except for the one at the
        position; 0 where it waits at none."""
        masks = np.zeros(self.machine.lanes, np.uint32)
        for other in self.warp_barriers:
            if other != position:
                lanes = self.threads.waiting_at(other)
                masks[lanes] = for_each(self.members[other], lanes)
        return masks

    def report_missing(self, position: int, lanes: np.ndarray) -> None:
        """Reports lanes of a warp that wait for lanes which do not come."""
        members, first = self.members[position], lanes[0]
        needed = int(for_each(members, lanes)[0])
        missing = needed & ~int(self.machine.fellows(lanes, members)[first])
        detail = f"the lanes {needed:#010x} must execute it together, {missing:#010x} do not come"
        ended = int(warp_masks(self.machine.gone)[first]) & missing
        if ended:
            detail += f" ({ended:#010x} have ended)"
        self.machine.log.report(
            MissingLanesError, detail, position, self.machine.geometry.thread(first)
        )
