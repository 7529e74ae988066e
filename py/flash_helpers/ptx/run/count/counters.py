"""Counts of a finished launch, summed by opcode, phase, role or line of source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np

from flash_helpers.ptx.read.flow import Phase, is_bulk_load, is_product
from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.count.counts import ROLES, Counts, LineCounts, Role
from flash_helpers.ptx.run.count.tally import Tally

Key = TypeVar("Key", bound=Hashable)


class Counters:
    """Counts of a finished launch, by opcode, phase, role or line."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._each = dict(tally.executed())
        self.total = Counts()
        for counts in self._each.values():
            self.total.add(counts)

    def _group(self, key: Callable[[int], Key | None]) -> dict[Key, Counts]:
        """Sums of the counts with one key; counts with None as key are left out."""
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
        """Counts by the role of warps in a block: "producer", warps that issue bulk loads and
        multiply nothing; "consumer", warps that run `mma`, `wmma` or `wgmma`; "others". The
        instructions that warps of more than one role execute are under "several". Only existing
        roles are returned, in this order."""
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

    def by_line(self) -> list[LineCounts]:
        """Counts by line of CUDA source, in order of file and line."""

        def key(position: int) -> tuple[str, int]:
            location = self._instruction(position).location
            return ("", 0) if location is None else (location.file, location.line)

        return [LineCounts(f, n, c) for (f, n), c in sorted(self._group(key).items())]

    def lines_of(self, file: str) -> dict[int, Counts]:
        """Counts by line of one file: each instruction at its innermost frame in that file.

        `file`: compared with the end of the recorded path, so a relative path will do.
        """

        def key(position: int) -> int | None:
            location = self._instruction(position).location
            frames = location.frames() if location else ()
            return next((f.line for f in frames if f"/{f.file}".endswith(f"/{file}")), None)

        return dict(sorted(self._group(key).items()))
