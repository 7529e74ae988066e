"""Collects or raises the faults that the watcher finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import SimulatorError, Site, Thread
from flash_helpers.ptx.read.flow import Program


@dataclass
class FaultLog:
    """Faults of one launch: the first one is raised, or all are kept, one for each instruction."""

    program: Program
    keep_going: bool
    faults: dict[tuple[type[SimulatorError], Site], SimulatorError] = field(default_factory=dict)

    def go_on_with(self, faults: Iterable[SimulatorError]) -> None:
        """Adds faults of an earlier launch of the kernel, which count on."""
        self.faults |= {(type(fault), fault.site): fault for fault in faults}

    def site(self, position: int) -> Site:
        """Where in the kernel an instruction of the program stands."""
        instruction = self.program.instructions[position]
        location = instruction.location
        return Site(
            kernel=self.program.function.name,
            ptx_line=instruction.line,
            opcode=instruction.opcode,
            source=None if location is None else str(location),
        )

    def report(
        self,
        kind: type[SimulatorError],
        detail: str,
        position: int,
        thread: Thread | None = None,
        address: int | None = None,
        count: int = 1,
    ) -> None:
        """Raises the fault, or adds it to the log. position: index of the instruction in the
        program. count: of the lanes that show it."""
        site = self.site(position)
        known = self.faults.get((kind, site))
        if known is not None:
            known.count += count
            return
        error = kind(detail, site, thread, address, count)
        if not self.keep_going:
            raise error
        self.faults[kind, site] = error


@dataclass(frozen=True)
class Geometry:
    """Which thread every lane of a batch is. blocks: `ctaid` of each. threads: of a block."""

    blocks: tuple[tuple[int, int, int], ...]
    threads: int

    @property
    def warps_per_block(self) -> int:
        """Warps of a block, the last of which may be short."""
        return -(-self.threads // WARP)

    @property
    def lanes_per_block(self) -> int:
        """Lanes of a block's warps, those beyond its threads included."""
        return WARP * self.warps_per_block

    @property
    def lanes(self) -> int:
        """Lanes of all blocks."""
        return len(self.blocks) * self.lanes_per_block

    @property
    def warps(self) -> int:
        """Warps of all blocks."""
        return len(self.blocks) * self.warps_per_block

    def thread(self, lane: int | np.integer) -> Thread:
        """The thread that a lane of the batch is."""
        block, rest = divmod(int(lane), self.lanes_per_block)
        return Thread(self.blocks[block], rest // WARP, rest % WARP)
