"""Exact counts of one thing that a launch did, and their units.

Units follow Nsight Compute. A *wavefront* is one pass through the shared-memory banks: 32 banks of
4 bytes, so at most 128 bytes. A *sector* is 32 bytes of global memory. A *request* is one memory
instruction of one warp. Lanes that name the same word share it. An access without conflicts takes
one wavefront for each part of the warp that is served at a time, and conflicts are the wavefronts
beyond that.

- Accesses of 8 and 16 bytes per lane are served by half and quarter warps, `ldmatrix` and
  `stmatrix` by matrices of 8x8.
- Loads of 8 and 16 bytes are served by whole and half warps in two cases. Either every lane names
  the same word as its neighbour (its number with the lowest bit flipped), or every lane names the
  same word as the lane two away (with the bit above flipped). Inactive lanes do not matter.
- Lanes of an atomic do not share: lanes that name one word take turns. Compare-and-swap takes two
  wavefronts where other atomics take one. So do the atomics that ptxas turns into a loop of it:
  atomics of floats, and of 64 bits, except exchanges. Nothing else of that loop is counted. ptxas
  adds a literal 1 to a u32 whose old value is never read once for the whole warp (ATOMS.POPC.INC),
  which counts like a store.

All of this was measured on an H200 (benchmarks/shared_wavefronts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flash_helpers.ptx.read.flow import Phase

ROLES = ("producer", "consumer", "others", "several")
"""Roles of warps, as `Counters.by_role` names them."""


@dataclass
class Counts:
    """Counts of one instruction, line, phase or launch; the unit is one warp's execution, of which
    a `wgmma` has four.

    `tma_requests`: bulk copies, reductions and prefetches, of which each thread that takes part
    makes one of tma_boxes (a box of a tensor, or bytes in a row). `tma_bytes`: bytes of shared
    memory that they fill or read, in each block that gets them. `tma_sectors`: sectors that an SM
    takes from the L2 cache or sends there, each row of a box by itself, filled elements outside the
    tensor included. A prefetch has no bytes and no sectors.

    `mma_flops`: operations of `mma` and `wgmma`. `wgmma_bytes`: bytes of the operands of `wgmma` in
    shared memory, once per warpgroup. They are not part of shared_bytes, and their wavefronts are
    not known.

    `waits`: waits for groups of cp.async, bulk copies and `wgmma`. `mbarrier_waits`: test_wait and
    try_wait, as often as they return. `blocked`: warps that fell asleep at a wait, for an mbarrier,
    a `wgmma`, a barrier of the cluster or registers. Their number depends on which operations are
    late: in the simulator all are, unless the launch has a seed.
    """

    instructions: int = 0
    shared_requests: int = 0
    shared_wavefronts: int = 0
    shared_ideal_wavefronts: int = 0
    shared_bytes: int = 0
    global_requests: int = 0
    global_sectors: int = 0
    global_bytes: int = 0
    tma_requests: int = 0
    tma_boxes: int = 0
    tma_bytes: int = 0
    tma_sectors: int = 0
    mma: int = 0
    wgmma: int = 0
    mma_flops: int = 0
    wgmma_bytes: int = 0
    barriers: int = 0
    waits: int = 0
    mbarrier_waits: int = 0
    blocked: int = 0

    @property
    def bank_conflicts(self) -> int:
        """Shared-memory wavefronts beyond what the accesses need."""
        return self.shared_wavefronts - self.shared_ideal_wavefronts

    def add(self, other: Counts) -> None:
        """Adds all counts of another."""
        own = vars(self)
        for name, count in vars(other).items():
            if count:  # few are
                own[name] += count


@dataclass(frozen=True)
class LineCounts:
    """Counts of one line of CUDA source."""

    file: str
    line: int
    counts: Counts


@dataclass(frozen=True)
class Role:
    """Counts of some warps. `warps`: numbered within the block."""

    warps: tuple[int, ...]
    phases: Mapping[Phase, Counts]

    @property
    def total(self) -> Counts:
        """The sum over all phases."""
        total = Counts()
        for counts in self.phases.values():
            total.add(counts)
        return total
