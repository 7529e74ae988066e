"""Collects or raises the faults that the watcher finds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from flash_helpers.ptx.errors import Lint, SimulatorError, Site, Thread
from flash_helpers.ptx.read.flow import Program

_Found = TypeVar("_Found", bound=SimulatorError)


@dataclass
class FaultLog:
    """Faults of one launch: the first one is raised, or all are kept, one for each cause."""

    program: Program
    keep_going: bool
    faults: dict[Hashable, SimulatorError] = field(default_factory=dict)
    lints: dict[Hashable, Lint] = field(default_factory=dict)
    _sites: dict[int, Site] = field(default_factory=dict)

    def go_on_with(self, faults: Iterable[SimulatorError], lints: Iterable[Lint]) -> None:
        """Adds the faults of an earlier launch of the kernel, whose counts continue."""
        self.faults |= {fault.cause: fault for fault in faults}
        self.lints |= {lint.cause: lint for lint in lints}

    def site(self, position: int) -> Site:
        """The place of an instruction of the program in the kernel."""
        if position not in self._sites:
            instruction = self.program.instructions[position]
            location = instruction.location
            self._sites[position] = Site(
                kernel=self.program.function.name,
                ptx_line=instruction.line,
                opcode=instruction.opcode,
                source=None if location is None else str(location),
            )
        return self._sites[position]

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
        error = kind(detail, self.site(position), thread, address, count)
        if not self.keep_going:
            raise error
        _add(self.faults, error)

    def lint(
        self,
        kind: type[Lint],
        detail: str,
        position: int,
        thread: Thread,
        address: int | None = None,
    ) -> None:
        """Adds a lint to the log, one for each cause."""
        _add(self.lints, kind(detail, self.site(position), thread, address))


def _add(found: dict[Hashable, _Found], error: _Found) -> None:
    """Adds a fault to those of its cause: the first one stays, with the count of all."""
    first = found.setdefault(error.cause, error)
    if first is not error:
        first.count += error.count
    assert error.site is not None
    first.ptx_lines.add(error.site.ptx_line)
