"""Runs the blocks of a launch in batches: one after the other; together, where blocks wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from flash_helpers import gpu
from flash_helpers.ptx.errors import InstructionLimitError, NotResidentError
from flash_helpers.ptx.run.execute.scheduler import NO_END, Scheduler
from flash_helpers.ptx.run.memory.regions import DeviceMemory

_PATIENCE = 10_000
"""Instructions per warp after which a batch is first asked whether it waits; the number
doubles each time."""
_TURN = 1_000
"""Instructions per warp after which the next batch has its turn, where several have begun."""

_FAIRNESS_OF_WAITING = 8
"""As `Scheduler.fairness`, of batches with threads that spin."""

Index = tuple[int, int, int]


def most_resident(target: str, threads: int, shared_bytes: int) -> int:
    """Blocks that the largest GPU of a target holds at once, as far as their threads and shared
    memory limit it: PTX does not tell how many registers they take. `shared_bytes`: shared memory
    per block. There is no limit for a target whose limits are not known."""
    capability = gpu.capability_of(target)
    if capability not in gpu.LIMITS or capability not in gpu.MOST_SMS:
        return sys.maxsize
    limits = gpu.LIMITS[capability]
    smem_bytes = limits.smem_bytes + gpu.RESERVED_SMEM_BYTES
    return gpu.MOST_SMS[capability] * min(
        limits.blocks,
        limits.warps // -(-threads // gpu.WARP),
        smem_bytes // (shared_bytes + gpu.RESERVED_SMEM_BYTES),
    )


def run_batches(
    blocks: Sequence[Index],
    per_batch: int,
    most: int,
    begin: Callable[[Sequence[Index]], Scheduler],
    memory: DeviceMemory,
    ended: Callable[[int], None],
    cluster: int = 1,
) -> None:
    """Runs all blocks, in their order.

    A block may wait for a later one only if a GPU holds both at once. So where all threads that
    have begun wait for global memory to change, further blocks begin, until as many are resident as
    the GPU holds. `per_batch`: blocks that begin together. `most`: most blocks that are resident at
    once. `begin`: makes the runner of some blocks. `ended`: called with the number of blocks that
    have ended. `cluster`: blocks that begin together in any case.

    Raises NotResidentError where all resident blocks wait and blocks are left.
    """
    per_batch = -(-per_batch // cluster) * cluster
    resident: list[Scheduler] = []
    left, patience = list(reversed(blocks)), _PATIENCE
    while resident or left:
        if not resident:
            resident.append(begin(_take(left, per_batch)))
            patience = _PATIENCE
        turn = _TURN
        if len(resident) == 1:
            turn = patience if left else NO_END
        for scheduler in tuple(resident):
            if _has_ended(scheduler, turn, left):
                resident.remove(scheduler)
                ended(len(scheduler.machine.geometry.blocks))
        if not left or not resident:
            continue
        # A thread that counts its own attempts does not return to an earlier state.
        if not all(s.is_late for s in resident) and not _all_wait(resident, memory):
            patience *= 2
            continue
        # As many batches again, so that the waiting are not asked anew for each that begins.
        for _ in range(len(resident)):
            live = sum(scheduler.n_live_blocks for scheduler in resident)
            room = (most - live) // cluster * cluster
            if room <= 0 and not any(s.is_late for s in resident):
                raise _not_resident(resident[0], live, left[-1])
            if left and room > 0:
                resident.append(begin(_take(left, min(per_batch, room))))
        for scheduler in resident:
            scheduler.fairness = _FAIRNESS_OF_WAITING


def _take(left: list[Index], count: int) -> tuple[Index, ...]:
    """The next blocks, from the end of the reversed list of blocks that are left."""
    return tuple(left.pop() for _ in range(min(count, len(left))))


def _has_ended(scheduler: Scheduler, turn: int, left: Sequence[Index]) -> bool:
    try:
        return scheduler.run(turn)
    except InstructionLimitError as error:
        if not left:
            raise
        detail = f"{error.detail}. Or it waits for block {left[-1]} or a later one: not resident"
        raise InstructionLimitError(detail, error.site) from None


def _all_wait(resident: Sequence[Scheduler], memory: DeviceMemory) -> bool:
    before = memory.digest()
    return all(scheduler.waits() for scheduler in resident) and memory.digest() == before


def _not_resident(waiting: Scheduler, live: int, following: Index) -> NotResidentError:
    machine = waiting.machine
    lane = int(waiting.threads.live_lanes[0])
    thread = machine.geometry.thread(lane)
    return NotResidentError(
        f"block {thread.block} waits for global memory that no resident block will change: {live} "
        f"blocks are resident and all wait, as many as the largest GPU of {machine.launch.target} "
        f"holds; block {following} and later ones begin when one of them has ended",
        machine.log.site(int(waiting.threads.pc[lane])),
        thread,
    )
