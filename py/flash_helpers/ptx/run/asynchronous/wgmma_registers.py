"""The last accesses to the registers of `wgmma`: hazards of accumulators and of A in registers.

A warp may not touch the accumulator, or the A, of a product that it has not waited for (PTX ISA
9.0, "wgmma.wait_group"). A `wgmma.fence` must stand between a warp's access to a register and a
product that uses it, except where products of one shape use an accumulator one after the other.
Another must stand before the first product of all (PTX ISA 9.0, "wgmma.fence").

A `mov` of a constant needs no fence. nvcc moves such an initialisation of accumulators below the
fence of the source. ptxas 13.0 says nothing where all of them are 0, for the product then adds
nothing. For other constants it inserts a fence of its own, as for any value (its message C7519).

Registers that the same products use in the same way are one fragment here. In a stretch of code
without wgmma instructions the state of a fragment does not change after its first access, so only
that access is checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import SimulatorError, WgmmaFenceError, WgmmaRegisterError
from flash_helpers.ptx.read.flow import Program, is_wgmma
from flash_helpers.ptx.read.module import Immediate, Operand, Vector, parts
from flash_helpers.ptx.read.registers import names_of
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.marks import missed_by_wait

Fragments = np.ndarray
"""Indices of fragments."""


class RegisterWatch:
    """Accesses by the warps of a batch to the fragments of a program, with their times; time counts
    wgmma instructions and watched accesses."""

    def __init__(self, program: Program, geometry: Geometry, log: FaultLog) -> None:
        self._program = program
        self._geometry = geometry
        self._log = log
        uses = _uses_of(program)
        self._fragment_of = uses.fragment_of
        self._constant_moves = uses.constant_moves
        self.watched = uses.first_accesses
        """By the index of an instruction, the fragments that it is the first to touch."""
        self._now = 1
        shape = uses.count, geometry.warps
        # Of the newest product that uses a fragment: its group, its position, when it was issued,
        # whether it accumulates there, and its N.
        self._group = np.full(shape, -1)
        self._product = np.zeros(shape, np.int64)
        self._issued = np.full(shape, -1)
        self._accumulates = np.zeros(shape, bool)
        self._n = np.zeros(shape, np.int64)
        # Of the newest access by a thread: when, and where.
        self._touched = np.zeros(shape, np.int64)
        self._access = np.zeros(shape, np.int64)
        self._fenced = np.full(geometry.warps, -1)
        # Groups that each warp has waited for; and of its last wait: when, where, groups left and
        # groups committed before.
        self._waited = np.zeros(geometry.warps, np.int64)
        self._waits = np.full((4, geometry.warps), -1)

    def fragments(self, operands: Iterable[Operand]) -> Fragments:
        """The fragments that operands name."""
        return np.array(sorted(_named(operands, self._fragment_of)), np.int64)

    # -- what warps do -----------------------------------------------------------------------------

    def fence(self, warps: np.ndarray) -> None:
        """Warps execute a wgmma.fence."""
        self._fenced[warps] = self._now
        self._now += 1

    def waited(self, position: int, warps: np.ndarray, committed: np.ndarray, left: int) -> None:
        """Warps have waited for all but so many of the groups that they have committed."""
        self._waited[warps] = np.maximum(self._waited[warps], committed - left)
        for values, value in zip(self._waits, (self._now, position, left, committed), strict=True):
            values[warps] = value
        self._now += 1

    def touch(self, position: int, warps: np.ndarray) -> None:
        """Threads of warps execute the first access to some fragments."""
        fragments = self.watched[position]
        part = fragments[:, None], warps
        flying = self._group[part] >= self._waited[warps]
        self._check(WgmmaRegisterError, position, warps, fragments, flying)
        if position in self._constant_moves:
            return
        self._touched[part] = self._now
        self._access[part] = position
        self._now += 1

    def issue(
        self,
        position: int,
        warps: np.ndarray,
        groups: np.ndarray,
        n: int,
        d: Fragments,
        a: Fragments,
    ) -> None:
        """Warps issue a product. `groups`: group of each warp. `d`, `a`: fragments of the product.
        `n`: columns of D."""
        used = [each for each in ((d, True), (a, False)) if each[0].size]
        fenced = self._fenced[warps]
        for fragments, accumulates in used:
            part = fragments[:, None], warps
            flying = self._group[part] >= self._waited[warps]
            of_d = self._accumulates[part]
            # Products that read one A, or accumulate in one shape, need not wait for each other.
            together = of_d & (self._n[part] == n) if accumulates else ~of_d
            unfenced = (self._issued[part] > fenced) & ~together
            overlaps = flying & ~together & ~(of_d & accumulates)
            self._check(WgmmaRegisterError, position, warps, fragments, overlaps)
            self._check(WgmmaFenceError, position, warps, fragments, unfenced & ~overlaps)
            self._check_touched(position, warps, fragments, self._touched[part] > fenced)
        for fragments, accumulates in reversed(used):
            part = fragments[:, None], warps
            self._group[part] = groups
            self._product[part] = position
            self._issued[part] = self._now
            self._accumulates[part] = accumulates
            self._n[part] = n
        self._now += 1

    # -- what is said of it ------------------------------------------------------------------------

    def why_pending(self, fragment: int, warp: int) -> str:
        """Text for the newest product of a warp that uses a fragment, if a wait of the warp has
        missed it."""
        when, at, left, committed = self._waits[:, warp].tolist()
        if self._issued[fragment, warp] > when:
            return ""
        group, site = int(self._group[fragment, warp]), self._log.site(at)
        missed = missed_by_wait("wgmma.commit_group", group, committed, left, site)
        return f":\n    {missed}"

    def _check(
        self,
        kind: type[SimulatorError],
        position: int,
        warps: np.ndarray,
        fragments: Fragments,
        bad: np.ndarray,
    ) -> None:
        """Reports fragments that are used too early. `bad`: for fragments and warps, whether the
        newest product that used them is too near."""
        if not bad.any():
            return
        i, j = np.argwhere(bad)[0]
        fragment, warp = fragments[i], warps[j]
        what = "an accumulator" if self._accumulates[fragment, warp] else "the A"
        site = self._log.site(int(self._product[fragment, warp]))
        late = f"before it has waited for that{self.why_pending(int(fragment), int(warp))}"
        if kind is WgmmaFenceError:
            late = "with no wgmma.fence since"
        name = self._name(position, int(fragment))
        detail = f"{name}, {what} of the wgmma at {site}\n    of the same warp, {late}"
        self._report(kind, detail, position, warp, bad)

    def _check_touched(
        self, position: int, warps: np.ndarray, fragments: Fragments, bad: np.ndarray
    ) -> None:
        if not bad.any():
            return
        i, j = np.argwhere(bad)[0]
        fragment, warp = fragments[i], warps[j]
        detail = "the first wgmma of a warp, with no wgmma.fence before it"
        if self._touched[fragment, warp]:
            site = self._log.site(int(self._access[fragment, warp]))
            name = self._name(position, int(fragment))
            detail = f"{name}, which was accessed at {site},\n    with no wgmma.fence since"
        self._report(WgmmaFenceError, detail, position, warp, bad)

    def _name(self, position: int, fragment: int) -> str:
        """The first register of a fragment that an instruction names."""
        operands = self._program.instructions[position].operands
        name = next(n for n in names_of(operands) if self._fragment_of.get(n) == fragment)
        return f"it uses register {name}"

    def _report(
        self, kind: type[SimulatorError], detail: str, position: int, warp: int, bad: np.ndarray
    ) -> None:
        thread = self._geometry.thread(warp * WARP)
        self._log.report(kind, detail, position, thread, count=int(bad.any(axis=0).sum()))


@dataclass(frozen=True)
class _Uses:
    """The registers of a program's wgmma. `fragment_of`: the fragment of each register. `count`:
    number of fragments. `constant_moves`: instructions that move constants. `first_accesses`: by
    the index of an instruction, the fragments that it is the first to touch."""

    fragment_of: Mapping[str, int]
    count: int
    constant_moves: frozenset[int]
    first_accesses: Mapping[int, Fragments]


_known: WeakKeyDictionary[Program, _Uses] = WeakKeyDictionary()


def _uses_of(program: Program) -> _Uses:
    """The uses, which are found once for all launches of a program."""
    found = _known.get(program)
    if found is None:
        found = _known[program] = _find_uses(program)
    return found


def _find_uses(program: Program) -> _Uses:
    roles: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for position, instruction in enumerate(program.instructions):
        if is_wgmma(instruction):
            for role, operand in enumerate(instruction.operands[:2]):
                for name in names_of([operand] if isinstance(operand, Vector) else []):
                    roles[name].add((role, position))
    index: dict[frozenset[tuple[int, int]], int] = {}
    fragment_of = {
        name: index.setdefault(frozenset(used), len(index)) for name, used in roles.items()
    }
    if not index:
        return _Uses({}, 0, frozenset(), {})
    moves = _constant_moves(program)
    return _Uses(fragment_of, len(index), moves, _first_accesses(program, fragment_of, moves))


def _first_accesses(
    program: Program, fragment_of: Mapping[str, int], constant_moves: frozenset[int]
) -> dict[int, Fragments]:
    watched: dict[int, Fragments] = {}
    for block in program.blocks:
        seen: set[int] = set()
        set_to_constants: set[int] = set()
        for position in range(block.start, block.end):
            instruction = program.instructions[position]
            if instruction.name == "wgmma":
                seen.clear()
                set_to_constants.clear()
                continue
            is_constant = position in constant_moves
            found = _named(instruction.operands, fragment_of) - seen
            if is_constant:
                found -= set_to_constants
            if found:
                watched[position] = np.array(sorted(found))
            if instruction.guard is None:
                (set_to_constants if is_constant else seen).update(found)
    return watched


def _named(operands: Iterable[Operand], fragment_of: Mapping[str, int]) -> set[int]:
    """The fragments that operands name."""
    return {fragment_of[name] for name in names_of(operands) if name in fragment_of}


def _constant_moves(program: Program) -> frozenset[int]:
    """Indices of the instructions that move constants: literals, or registers to which the same
    basic block has moved some."""
    found = set()
    for block in program.blocks:
        holding: set[str] = set()
        for position in range(block.start, block.end):
            instruction = program.instructions[position]
            is_move = instruction.name == "mov" and len(instruction.operands) == 2
            if not (is_move or holding):
                continue
            written = set(names_of(instruction.operands[:1]))
            holding.difference_update(written)
            if not is_move or instruction.guard is not None:
                continue
            values = [o for o in parts(instruction.operands[1]) if not isinstance(o, Vector)]
            if all(isinstance(o, Immediate) or holding.intersection(names_of([o])) for o in values):
                holding.update(written)
                found.add(position)
    return frozenset(found)
