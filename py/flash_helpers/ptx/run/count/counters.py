"""Exact counts of what a launch did.

Units follow Nsight Compute: a *wavefront* is one pass through the shared-memory banks (32 banks of
4 bytes, so at most 128 bytes), a *sector* is 32 bytes of global memory, a *request* is one memory
instruction of one warp. Lanes that name the same word share it. An access without conflicts takes
one wavefront for each part of the warp that is served at a time, and conflicts are the wavefronts
beyond that:

- Accesses of 8 and 16 bytes a lane are served by half and quarter warps, `ldmatrix` and `stmatrix`
  by matrices of 8x8.
- Loads of 8 and 16 bytes are served by whole and half warps if every lane names the same word as
  its neighbour (its number with the lowest bit flipped), or every lane the same as the one two away
  (with the bit above flipped); lanes that do not take part do not matter.
- Lanes of an atomic do not share: those that name one word take turns. Compare-and-swap takes two
  wavefronts where others take one, and so does what ptxas makes of it in a loop: atomics of floats,
  and of 64 bits, except exchanges. Of the loop only this is counted: not its loads, nor that lanes
  of 64 bits go round it together. A literal 1 added to a u32 whose old value nobody reads is
  counted by ptxas over the warp (ATOMS.POPC.INC), like a store.

All of this was measured on an H200 (benchmarks/shared_wavefronts.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from flash_helpers.ptx.read.flow import Phase, is_bulk_load, is_product
from flash_helpers.ptx.read.module import Instruction

if TYPE_CHECKING:
    from flash_helpers.ptx.run.count.tally import Tally

Key = TypeVar("Key", bound=Hashable)

ROLES = ("producer", "consumer", "others", "several")
"""Of warps, as `Counters.by_role` names them."""


@dataclass
class Counts:
    """Counts of one instruction, line, phase or launch; the unit is one warp's execution, of which
    a `wgmma` has four.

    tma_requests: bulk copies, reductions and prefetches, of which each thread that takes part makes
    one of tma_boxes (a box of a tensor, or bytes in a row). tma_bytes: of shared memory that they
    fill or read, in each block that gets them. tma_sectors: those that an SM takes from the L2
    cache or sends there, each row of a box by itself, and with what is filled in outside of the
    tensor; a prefetch has none of either.
    mma_flops: of `mma` and `wgmma`. wgmma_bytes: of the operands of `wgmma` in shared memory, once
    for a warpgroup. They are not part of shared_bytes, and their wavefronts are not known.
    waits: for groups of cp.async, bulk copies and `wgmma`.
    mbarrier_waits: test_wait and try_wait, as often as they return. blocked: warps that fell asleep
    at a wait, for an mbarrier, a `wgmma`, a barrier of the cluster or registers. Who falls asleep
    depends on what is late: here everything is, unless the launch has a seed.
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
    """Counts of some warps. warps: numbered within the block."""

    warps: tuple[int, ...]
    phases: Mapping[Phase, Counts]

    @property
    def total(self) -> Counts:
        """Of all phases."""
        total = Counts()
        for counts in self.phases.values():
            total.add(counts)
        return total


class Counters:
    """Counts of a finished launch, by whatever one asks for."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._each = dict(tally.executed())
        self.total = Counts()
        for counts in self._each.values():
            self.total.add(counts)

    def _group(self, key: Callable[[int], Key | None]) -> dict[Key, Counts]:
        """Sums of what has one key; what has None is left out."""
        grouped: dict[Key, Counts] = defaultdict(Counts)
        for position, counts in self._each.items():
            if (found := key(position)) is not None:
                grouped[found].add(counts)
        return dict(grouped)

    def _instruction(self, position: int) -> Instruction:
        return self.tally.program.instructions[position]

    def by_opcode(self, phase: Phase | None = None) -> dict[str, Counts]:
        """Counts by full opcode, most executed first; of one phase only, if one is given."""

        def key(position: int) -> str | None:
            is_counted = phase is None or self._phase(position) is phase
            return self._instruction(position).opcode if is_counted else None

        grouped = self._group(key)
        return dict(sorted(grouped.items(), key=lambda item: (-item[1].instructions, item[0])))

    def by_phase(self) -> dict[Phase, Counts]:
        """Counts of prologue, main loop and epilogue (all three are present)."""
        found = self._group(self._phase)
        return {phase: found.get(phase, Counts()) for phase in Phase}

    def by_role(self) -> dict[str, Role]:
        """Counts of those who do different work in a block: "producer", warps that issue bulk
        loads and multiply nothing; "consumer", those that run `mma`, `wmma` or `wgmma`; "others";
        and under "several" what warps of more than one of these execute. The roles that are there,
        in this order."""
        issued, instructions = self.tally.issued > 0, self.tally.program.instructions
        loads, multiplies = (
            issued[[does(i) for i in instructions]].any(axis=0)
            for does in (is_bulk_load, is_product)
        )
        kinds = np.select([multiplies, loads], ["consumer", "producer"], "others")

        def key(position: int) -> tuple[str, Phase]:
            found = set(kinds[issued[position]].tolist())
            return found.pop() if len(found) == 1 else "several", self._phase(position)

        grouped = self._group(key)
        roles = {}
        for name in ROLES:
            phases = {phase: grouped.get((name, phase), Counts()) for phase in Phase}
            warps = np.flatnonzero((kinds == name) & issued.any(axis=0))
            if warps.size or any(counts.instructions for counts in phases.values()):
                roles[name] = Role(tuple(warps.tolist()), phases)
        return roles

    def _phase(self, position: int) -> Phase:
        return self.tally.program.block_at(position).phase

    def by_line(self, *, outermost: bool = False) -> list[LineCounts]:
        """Counts by line of CUDA source, in order of file and line. outermost: of inlined code the
        line of the kernel that called it, rather than its own."""

        def key(position: int) -> tuple[str, int]:
            location = self._instruction(position).location
            if location is None:
                return "", 0
            location = location.outermost if outermost else location
            return location.file, location.line

        return [LineCounts(f, n, c) for (f, n), c in sorted(self._group(key).items())]

    def lines_of(self, file: str) -> dict[int, Counts]:
        """Counts by line of one file: each instruction at its innermost frame in that file.

        file: compared with the end of the recorded path, so a relative path will do.
        """

        def key(position: int) -> int | None:
            location = self._instruction(position).location
            frames = location.frames() if location else ()
            return next((f.line for f in frames if f"/{f.file}".endswith(f"/{file}")), None)

        return dict(sorted(self._group(key).items()))
