"""mbarrier objects: phases that end when all arrivals and all bytes have come.

This module follows PTX ISA 9.0, "Parallel Synchronization and Communication Instructions:
mbarrier", section by section. An object is kept beside shared memory, not in its eight bytes, which
no other instruction may touch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

MBARRIER_BYTES = 8
MOST = (1 << 20) - 1
"""Most arrivals and bytes that an object can count ("Contents of the mbarrier object")."""

_PENDING_BITS, _PHASE_BITS = 20, 28


class MbarrierMisuse(Exception):
    """An operation whose behaviour the PTX ISA leaves undefined. The object stays as it was."""


@dataclass
class Mbarrier:
    """One object since its mbarrier.init.

    `address`: address in shared memory. `expected`: arrivals of the next phase. `pending`: arrivals
    that the current phase still waits for. `transactions`: its tx-count, bytes that were expected
    and have not come, below zero if they came first. `phase`: phases that are complete. `observed`:
    phases whose completion some thread has seen. `announced`, `delivered`: bytes that the current
    phase was told to expect, and that came. `arrived`: the knowledge that arrivals of the current
    phase release to the lanes that see it complete. `released`: the same for all phases before. The
    caller defines the type of both.
    """

    address: int
    expected: int
    pending: int = field(init=False)
    transactions: int = 0
    phase: int = 0
    observed: int = 0
    announced: int = 0
    delivered: int = 0
    arrived: list[Any] = field(default_factory=list)
    released: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 1 <= self.expected <= MOST:
            raise MbarrierMisuse(f"a count of {self.expected} arrivals: give 1 to {MOST}")
        self.pending = self.expected

    # -- what changes it ---------------------------------------------------------------------------

    def arrive(
        self,
        count: int = 1,
        releases: object = None,
        *,
        drops: bool = False,
        may_complete: bool = True,
    ) -> None:
        """An arrive-on operation ("Arrive-on operation on mbarrier object").

        `releases`: the knowledge that the arrival hands over, if any. `drops`:
        mbarrier.arrive_drop, later phases expect as many fewer. `may_complete`: False for
        .noComplete, which must not complete the phase.
        """
        if not 1 <= count <= MOST:
            raise MbarrierMisuse(f"a count of {count} arrivals: give 1 to {MOST}")
        if count > self.pending:
            raise MbarrierMisuse(
                f"{_times(count, 'arrival')} where the current phase waits for {self.pending} of "
                f"{self.expected}: more threads arrive than mbarrier.init was told, or one twice"
            )
        if self.observed < self.phase:
            raise MbarrierMisuse(
                f"an arrival in phase {self.phase} before any thread has seen phase "
                f"{self.phase - 1} complete: of each phase a test_wait or try_wait must return "
                "true before the next one's first arrival"
            )
        if drops and count > self.expected:
            raise MbarrierMisuse(
                f"{_times(count, 'arrival')} dropped where later phases expect {self.expected}"
            )
        if not may_complete and count == self.pending and not self.transactions:
            raise MbarrierMisuse("an arrival with .noComplete completes the phase")
        self.pending -= count
        if drops:
            self.expected -= count
        self._hand_over(releases)

    def add_pending(self, count: int = 1) -> None:
        """Adds arrivals for which the current phase waits (cp.async.mbarrier.arrive)."""
        if self.pending + count > MOST:
            raise MbarrierMisuse(f"more than {MOST} pending arrivals")
        self.pending += count

    def expect(self, size: int) -> None:
        """An expect-tx operation: `size` more bytes belong to the current phase."""
        if self.transactions + size > MOST:
            raise MbarrierMisuse(
                f"{size} bytes expected besides {self.transactions}: a tx-count is at most "
                f"{MOST}, spread the copies over several phases or mbarriers"
            )
        self.transactions += size
        self.announced += size
        self._turn()

    def complete(self, size: int, releases: object = None) -> None:
        """A complete-tx operation: `size` bytes have come. They may come before they are expected.
        `releases`: as `arrive` has it."""
        if self.transactions - size < -MOST:
            raise MbarrierMisuse(
                f"{size} bytes come where {self.transactions} are expected: a tx-count is at "
                f"least {-MOST}"
            )
        self.transactions -= size
        self.delivered += size
        self._hand_over(releases)

    def _hand_over(self, releases: object) -> None:
        if releases is not None:
            self.arrived.append(releases)
        self._turn()

    def observe(self) -> None:
        """Records that a thread sees the last phase complete."""
        self.observed = self.phase

    def _turn(self) -> None:
        """Begins the next phase if the current one is complete ("Phase Completion of the mbarrier
        object")."""
        if self.pending or self.transactions:
            return
        self.phase += 1
        self.pending = self.expected
        self.announced = self.delivered = 0
        self.released += self.arrived
        self.arrived = []

    # -- what asks it ------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """The 64-bit value that mbarrier.arrive returns: it identifies the object and the phase,
        and has the number of pending arrivals."""
        tag = self.address // MBARRIER_BYTES % (1 << 16)
        phase = self.phase % (1 << _PHASE_BITS)
        return (tag << _PHASE_BITS | phase) << _PENDING_BITS | self.pending

    def is_complete(self, state: int) -> bool:
        """Whether the phase of a state is complete; it must be the current or the last one."""
        phase = phase_of(state)
        if state >> (_PENDING_BITS + _PHASE_BITS) != self.address // MBARRIER_BYTES % (1 << 16):
            raise MbarrierMisuse(f"the state {state:#x} is not one that an arrival here returned")
        if phase not in (self.phase % (1 << _PHASE_BITS), (self.phase - 1) % (1 << _PHASE_BITS)):
            raise MbarrierMisuse(
                f"the state of phase {phase}, which is neither the current phase {self.phase} nor "
                "the one before"
            )
        return phase != self.phase % (1 << _PHASE_BITS)

    def is_complete_parity(self, parity: int) -> bool:
        """Whether the phase of a parity is complete. Of the current and the last phase, the last
        one is complete."""
        if parity not in (0, 1):
            raise MbarrierMisuse(f"a phase parity of {parity}: give 0 or 1")
        return parity != self.phase % 2

    def __str__(self) -> str:
        text = (
            f"mbarrier at {self.address:#x}: phase {self.phase} (parity {self.phase % 2}) waits "
            f"for {self.pending} of {_times(self.expected, 'arrival')}"
        )
        if self.announced or self.delivered:
            text += f" and {self.transactions} bytes ({self.announced} expected, "
            text += f"{self.delivered} came)"
        return text


def phase_of(state: int) -> int:
    """The phase that was going on when an arrival returned a state."""
    return (state >> _PENDING_BITS) % (1 << _PHASE_BITS)


def pending_count(states: np.ndarray) -> np.ndarray:
    """Arrivals that were pending when arrivals returned states, uint64 (mbarrier.pending_count)."""
    return states % np.uint64(1 << _PENDING_BITS)


def _times(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
