"""Threads asleep at instructions that wait, and the conditions to wake them (`machine.Wait`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flash_helpers.ptx.run.execute.threads import ASLEEP, RUNNING, Threads, warps_of
from flash_helpers.ptx.run.machine import Machine, Wait


class Sleepers:
    """The threads of a batch that sleep. `waits`: waits by the position of their instructions."""

    def __init__(self, machine: Machine, threads: Threads, waits: Mapping[int, Wait]) -> None:
        self.waits = waits
        self._threads = threads
        self._phases = machine.phases
        self._transfers = machine.transfers
        self._blocked = machine.tally.blocked
        # The state in which waits gave up, since an mbarrier changed.
        self._stood_still: list[tuple[int, bytes, bytes]] = []

    def those_ready(self, position: int, lanes: np.ndarray) -> np.ndarray:
        """Lanes that may execute an instruction that waits; the others fall asleep."""
        ready = self.waits[position].is_ready(lanes)
        asleep = lanes[~ready]
        if asleep.size:
            self._blocked[position] += warps_of(asleep).size
            self._threads.pc[asleep] = position
            self._threads.status[asleep] = ASLEEP
        return lanes[ready]

    def wake(self) -> bool:
        """Wakes lanes that need not sleep any more; returns whether there are any."""
        self._phases.wanted.clear()
        asleep = self._threads.having(ASLEEP)
        for position, lanes in self._threads.by_position(asleep):
            self._threads.status[lanes[self.waits[position].is_ready(lanes)]] = RUNNING
        return bool((self._threads.status[asleep] == RUNNING).any())

    def help(self) -> bool:
        """Completes copies that sleeping lanes need, until a phase is complete: before that no lane
        can wake. Returns whether there are any. In a random order it completes one, and lanes may
        give up after each."""
        phases = self._phases.complete_phases
        helped = False
        while self._transfers.help(self._phases.wanted):
            helped = True
            if self._phases.complete_phases > phases or self._phases.random is not None:
                break
        return helped

    def give_up(self) -> bool:
        """Wakes lanes whose waits have a time limit, once while nothing else happens; returns
        whether there are any."""
        state = self._phases.version, self._threads.pc.tobytes(), self._threads.status.tobytes()
        if not self._stood_still or self._stood_still[0][0] != state[0]:
            self._stood_still = []
        if state in self._stood_still:
            return False
        self._stood_still.append(state)
        return self._let_give_up(patient=True)

    def _let_give_up(self, *, patient: bool) -> bool:
        asleep = self._threads.having(ASLEEP)
        for position, lanes in self._threads.by_position(asleep):
            wait = self.waits[position]
            if wait.give_up is not None and (patient or not wait.is_patient):
                wait.give_up(lanes)
                self._threads.status[lanes] = RUNNING
        return bool((self._threads.status[asleep] == RUNNING).any())

    def look_after(self) -> None:
        """Checks sleeping threads while other threads run, which may wait for them by spinning."""
        self.wake()
        self._transfers.help(self._phases.wanted)
        self._let_give_up(patient=False)
