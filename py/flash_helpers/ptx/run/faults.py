"""Collects or raises the faults that the watcher finds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flash_helpers.ptx.errors import SimulatorError, Site, Thread
from flash_helpers.ptx.read.flow import Program


@dataclass
class FaultLog:
    """Faults of one launch: the first one is raised, or all are kept, one for each instruction."""

    program: Program
    keep_going: bool
    faults: dict[tuple[type[SimulatorError], int], SimulatorError] = field(default_factory=dict)

    def site(self, position: int) -> Site:
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
        """Raises the fault, or adds it to the log.

        Args:
            position: index of the instruction in the program.
            count: number of lanes that show it.
        """
        known = self.faults.get((kind, position))
        if known is not None:
            known.count += count
            return
        error = kind(detail, self.site(position), thread, address, count)
        if not self.keep_going:
            raise error
        self.faults[kind, position] = error


@dataclass(frozen=True)
class Geometry:
    """Which thread every lane of a batch is."""

    blocks: tuple[tuple[int, int, int], ...]
    """``ctaid`` of every block of the batch."""
    threads: int
    """Threads of a block."""

    @property
    def warps_per_block(self) -> int:
        return -(-self.threads // 32)

    @property
    def lanes_per_block(self) -> int:
        return 32 * self.warps_per_block

    @property
    def lanes(self) -> int:
        return len(self.blocks) * self.lanes_per_block

    @property
    def warps(self) -> int:
        return len(self.blocks) * self.warps_per_block

    def thread(self, lane: int | np.integer) -> Thread:
        block, rest = divmod(int(lane), self.lanes_per_block)
        return Thread(self.blocks[block], rest // 32, rest % 32)
