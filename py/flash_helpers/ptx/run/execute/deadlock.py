"""The report of threads that sleep forever."""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.errors import DeadlockError
from flash_helpers.ptx.run.execute.barriers import BlockBarriers
from flash_helpers.ptx.run.execute.sleepers import Sleepers
from flash_helpers.ptx.run.execute.threads import ASLEEP, AT_SYNC, DONE, Threads
from flash_helpers.ptx.run.machine import Machine


class Deadlock:
    """The first cluster with sleeping lanes, in a batch where no thread can run.

    `stuck`: its lanes that have not ended. `keys`: the barriers at which some of them have arrived.
    """

    def __init__(
        self, machine: Machine, threads: Threads, barriers: BlockBarriers, sleepers: Sleepers
    ) -> None:
        geometry = self._geometry = machine.geometry
        self._log = machine.log
        self._threads = threads
        self._barriers = barriers
        self._sleepers = sleepers
        self._first = int(threads.having(ASLEEP)[0])
        cluster = geometry.cluster_of(self._first)
        live = threads.live_lanes
        self.stuck = live[geometry.cluster_of(live) == cluster]
        self.owners = range(cluster * geometry.cluster, (cluster + 1) * geometry.cluster)
        self.keys = barriers.of_blocks(self.owners)

    def end(self) -> None:
        """Reports which threads wait for what, and ends the cluster."""
        ended = sum(self._threads.ended_of(owner).size for owner in self.owners)
        waiting, stories = self._waiting()
        lines = (
            f"no warp can go on; {_count(ended)} {'has' if ended == 1 else 'have'} ended",
            *waiting,
            *self._arrived(),
            *stories,  # last, since a message that is too long is cut at its end
        )
        position, thread = int(self._threads.pc[self._first]), self._geometry.thread(self._first)
        self._log.report(DeadlockError, "\n    ".join(lines), position, thread)
        for key in self.keys:
            del self._barriers.arrivals[key]
        self._threads.status[self.stuck] = DONE

    def _waiting(self) -> tuple[list[str], list[str]]:
        """The reason for each block, instruction and barrier at which threads wait, and what has
        happened there."""
        geometry, threads, stuck = self._geometry, self._threads, self.stuck
        names = np.zeros(geometry.lanes, np.int64)
        for key in self.keys:
            for arrival in self._barriers.arrivals[key]:
                if arrival.barrier.waits:
                    names[arrival.lanes] = key[1]
        groups = np.stack(
            [geometry.block_of(stuck), threads.pc[stuck], threads.status[stuck], names[stuck]]
        )
        told, stories = [], []
        for group in np.unique(groups, axis=1).T:
            owner, position, status, name = group.tolist()
            lanes = stuck[(groups == group[:, None]).all(axis=0)]
            story = None
            if status == ASLEEP:
                wait = self._sleepers.waits[position]
                reason = wait.reason(lanes)
                story = wait.story(lanes) if wait.story else None
            elif status == AT_SYNC:
                reason = "for the other lanes of the warp"
            else:
                reason = f"for {self._barriers.state(owner, name)}"
            warps = np.unique(geometry.warp_of(lanes)).tolist()
            named = f"warp {warps[0]}" if len(warps) == 1 else f"warps {_listed(warps)}"
            who = f"{named} of block {geometry.blocks[owner]}"
            waits = "waits" if lanes.size == 1 else "wait"
            told.append(
                f"{_count(lanes.size)} ({who}) {waits}\n"
                f"      {reason} (at {self._log.site(position).brief})"
            )
            if story:
                stories.append(f"where threads of {who} wait, {story}")
        return told, stories

    def _arrived(self) -> list[str]:
        """The state of each barrier at which threads have arrived and none waits."""
        return [
            f"no thread waits at a barrier of block {self._geometry.blocks[key[0]]}\n"
            f"      {self._barriers.state(*key)}"
            for key in self.keys
            if not any(arrival.barrier.waits for arrival in self._barriers.arrivals[key])
        ]


def _listed(numbers: list[int]) -> str:
    """Numbers in words, "0 to 7" where all between are among them."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _count(threads: int) -> str:
    return f"{threads} thread" if threads == 1 else f"{threads} threads"
