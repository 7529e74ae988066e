"""Collects or raises the faults that the watcher finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flash_helpers.ptx.errors import Lint, SimulatorError, Site, Thread
from flash_helpers.ptx.read.flow import Program


@dataclass
class FaultLog:
    """Faults of one launch: the first one is raised, or all are kept, one for each instruction."""

    program: Program
    keep_going: bool
    faults: dict[tuple[type[SimulatorError], Site | None], SimulatorError] = field(
        default_factory=dict
    )
    lints: dict[tuple[type[Lint], Site | None], Lint] = field(default_factory=dict)

    def go_on_with(self, faults: Iterable[SimulatorError], lints: Iterable[Lint]) -> None:
        """Adds the faults of an earlier launch of the kernel, whose counts continue."""
        self.faults |= {(type(fault), fault.site): fault for fault in faults}
        self.lints |= {(type(lint), lint.site): lint for lint in lints}

    def site(self, position: int) -> Site:
        """The place of an instruction of the program in the kernel."""
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
        """Raises the fault, or adds it to the log. `position`: index of the instruction in the
        program. `count`: number of lanes that show it."""
        site = self.site(position)
        known = self.faults.get((kind, site))
        if known is not None:
            known.count += count
            return
        error = kind(detail, site, thread, address, count)
        if not self.keep_going:
            raise error
        self.faults[kind, site] = error

    def lint(
        self,
        kind: type[Lint],
        detail: str,
        position: int,
        thread: Thread,
        address: int | None = None,
    ) -> None:
        """Adds a lint to the log, one for each instruction and kind."""
        site = self.site(position)
        known = self.lints.setdefault((kind, site), kind(detail, site, thread, address, 0))
        known.count += 1
