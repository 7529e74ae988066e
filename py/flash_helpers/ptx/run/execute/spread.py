"""How poison spreads: for each instruction, which bytes of its results are poisoned.

Poison is known by the byte. Moves, packing and unpacking, `prmt`, shifts by a literal, conversions
between integers, logic, selection, shuffles, `ldmatrix`, `stmatrix`, `movmatrix` and memory pass on
the bytes that they move; packed 16-bit arithmetic and the pairs that `cvt` makes know their halves.
`and` and `or` are clean where a clean source decides alone, and so is a comparison combined with a
predicate. D[i][j] of an `mma` is poisoned if any of A[i][:], B[:][j] or C[i][j] is
(and of a `wgmma`, when it is computed: `warpgroups`). Every other
result is poisoned as a whole in a lane if any byte of a source is; of an instruction in which the
lanes of a warp see each other, if any source of the warp is. So a product with a literal zero stays
poisoned.

A lane whose guard is false keeps what it has; where the guard itself is poisoned, so are the
results, executed or not. A poisoned branch is one more way to select: where the ways that part
there meet again and have only computed registers and loaded, those registers are poisoned there,
whichever way was taken. Any other poisoned branch is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.flow import BARRIERS, EXITS, Ending
from flash_helpers.ptx.read.module import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Sink,
    Vector,
    parts,
)
from flash_helpers.ptx.read.types import SCALAR_TYPES, size_of
from flash_helpers.ptx.run.instructions.access import space_of
from flash_helpers.ptx.run.instructions.compare import comparison
from flash_helpers.ptx.run.instructions.operations import WITHOUT_EFFECT
from flash_helpers.ptx.run.instructions.warps import shuffled_from
from flash_helpers.ptx.run.machine import Action, Machine, pick
from flash_helpers.ptx.run.memory.regions import ALL, Selection
from flash_helpers.ptx.run.watch.poison import CARRY, COUNTS, Codes

Results = Sequence[Codes | None]
"""Of each destination, in the order of the operands; None: clean."""
Rule = Callable[[Selection], Results]

_CONTROL = BARRIERS | EXITS | {"trap", "brkpt", "bra", "brx", "call"}
_LOADS = frozenset({"ld", "ldu", "ldmatrix", "atom"})
_WARP_WIDE = frozenset({"vote", "match", "redux", "elect", "activemask", "mma", "wmma"})
_PAIRS = frozenset({"f16x2", "bf16x2"})


def _union(*several: Codes | None) -> Codes | None:
    """By the byte; of one row and more, the row counts for all."""
    some = [codes for codes in several if codes is not None]
    result = some[0] if some else None
    for codes in some[1:]:
        result = np.maximum(result, codes)
    return result


def _worst(*several: Codes | None) -> Codes | None:
    """One row: the poison of a lane if any byte of any source has some."""
    return _counted(_union(*(c.max(axis=0, keepdims=True) for c in several if c is not None)))


def _counted(codes: Codes | None) -> Codes | None:
    """Poison of what was computed, not only moved."""
    return None if codes is None else np.where(codes, codes | COUNTS, 0)


def _halves(codes: Codes | None) -> Codes | None:
    """Of four bytes, two rows: each half's poison."""
    return None if codes is None else _counted(codes.reshape(2, 2, -1).max(axis=1))


def _of_halves(halves: Codes | None) -> Codes | None:
    return None if halves is None else halves.repeat(2, axis=0)


def _full(codes: Codes | None, size: int, lanes: int) -> Codes:
    """The codes of `size` bytes, zeros for None."""
    if codes is None:
        return np.zeros((size, lanes), np.int64)
    return codes[:size] if len(codes) >= size else np.broadcast_to(codes, (size, lanes))


def _octets(values: np.ndarray, lanes: int) -> np.ndarray:
    """The bytes of one value a lane, or one for all: (bytes, lanes)."""
    whole = np.ascontiguousarray(np.broadcast_to(values, (lanes,)))
    return whole.view(np.uint8).reshape(lanes, -1).T


def _over_warps(codes: Codes | None, lanes: np.ndarray) -> Codes | None:
    """One row: a warp's worst, for each of its lanes."""
    if codes is None:
        return None
    warps, index = np.unique(lanes // WARP, return_inverse=True)
    worst = np.zeros(warps.size, np.int64)
    np.maximum.at(worst, index, codes.max(axis=0))
    return worst[index][None]


@dataclass(frozen=True)
class _Plan:
    """What poison has to do with an instruction.

    holds: the guard's value. uses: what must be clean in the lanes that execute: what it is called
    in messages, the operands, and up to which lane of a warp it matters. targets: names of the
    registers written, None for a sink. spread: their codes. stored: codes of the word that it
    writes to memory. load: which lanes get what of words that were read, (bytes, lanes).
    """

    guard: Register | None
    holds: Callable[[Selection], np.ndarray] | None
    is_visible: bool
    is_branch: bool
    uses: tuple[tuple[str, tuple[Operand, ...], int], ...]
    targets: tuple[str | None, ...]
    spread: Rule
    stored: Callable[[Selection], Codes | None] | None
    load: Callable[[np.ndarray, Codes], tuple[np.ndarray, Results]]


@dataclass(frozen=True)
class _Selection:
    """Where the ways that part at a branch meet, and the registers that are written on them."""

    meets: int
    registers: frozenset[str]


class Spread:
    """Carries the poison of a batch through its instructions."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.poison = machine.poison
        self._plans: dict[int, _Plan] = {}
        self._selections: dict[int, _Selection | None] = {}
        # By the position where ways meet, the registers to poison there, each over all lanes.
        self._due: dict[int, dict[str, Codes]] = {}

    def tracked(self, position: int, action: Action) -> Action:
        """The action, with the poison of its sources taken on."""
        if position in self.machine.refused:
            return action
        instruction = self.machine.program.instructions[position]
        names = {o.name for o in instruction.named() if isinstance(o, Register)}
        if instruction.name in WITHOUT_EFFECT.split():
            names = set()
        if _uses_carry(instruction) or _sets_carry(instruction):
            names.add(CARRY)
        poisoned = self.poison.registers

        due = self._due

        def run() -> None:
            if position in due:
                self._meet(position, ALL)
            if poisoned.keys().isdisjoint(names):
                action.all()
            else:
                self._run(position, ALL, action.all)

        def run_some(selection: Selection) -> None:
            if position in due:
                self._meet(position, selection)
            if poisoned.keys().isdisjoint(names):
                action.some(selection)
            else:
                self._run(position, selection, partial(action.some, selection))

        return Action(run, run_some)

    def load(self, position: int, selection: Selection, codes: Codes) -> None:
        """See `poison.Carrier`."""
        plan = self._plan(position)
        lanes, results = plan.load(self.machine.lanes_of(selection), codes)
        for name, result in zip(plan.targets, results, strict=True):
            if name is not None and result is not None:
                self.poison.add(name, lanes, result)

    def widest_store(self, space: str) -> int:
        """See `poison.Carrier`."""
        stores = (i for i in self.machine.program.instructions if i.name == "st")
        here = (i for i in stores if space_of(i) in (space, "generic"))
        return max((size_of(i.types[-1]) for i in here), default=0)

    def _run(self, position: int, selection: Selection, action: Callable[[], None]) -> None:
        plan, poison, machine = self._plan(position), self.poison, self.machine
        lanes, unsure = selection, None
        if plan.holds is not None:
            unsure = poison.of(plan.guard.name, selection)
            if plan.is_branch:
                self._part(position, selection, unsure)
            elif plan.is_visible:
                poison.report(position, selection, unsure, "its predicate")
            chosen = np.broadcast_to(plan.holds(selection), machine.lanes_of(selection).shape)
            lanes = machine.lanes_of(selection)[chosen]
        if lanes is selection or lanes.size:
            self._check_uses(position, plan, lanes)
            if plan.stored is not None:
                self._store(plan.stored(lanes), lanes)
            for name, codes in zip(plan.targets, plan.spread(lanes), strict=True):
                if name is not None:
                    poison.put(name, lanes, codes)
        if unsure is not None:
            for name in filter(None, plan.targets):
                poison.add(name, selection, unsure)
        action()
        poison.stored = None

    def _check_uses(self, position: int, plan: _Plan, lanes: Selection) -> None:
        for what, operands, count in plan.uses:
            using = lanes
            if count < WARP:
                using = self.machine.lanes_of(lanes)
                using = using[using % WARP < count]
            self.poison.report(position, using, _worst(*self._codes(operands, using)), what)

    def _store(self, codes: Codes | None, lanes: Selection) -> None:
        if codes is not None:
            stored = np.zeros((len(codes), self.machine.lanes), np.int64)
            stored[:, lanes] = codes
            self.poison.stored = stored

    # -- branches ----------------------------------------------------------------------------------

    def _part(self, position: int, selection: Selection, codes: Codes | None) -> None:
        """Lanes come to a branch. codes: of its predicate."""
        if codes is None or not codes.any():
            return
        if position not in self._selections:
            self._selections[position] = self._selected_by(position)
        found = self._selections[position]
        if found is None:
            self.poison.report(position, selection, codes, "the predicate of this branch")
            return
        due = self._due.setdefault(found.meets, {})
        for name in found.registers:
            held = due.setdefault(name, np.zeros((1, self.machine.lanes), np.int64))
            held[:, selection] = np.maximum(held[:, selection], _worst(codes))

    def _meet(self, position: int, selection: Selection) -> None:
        """Lanes come to where ways meet that a poisoned branch parted."""
        due = self._due[position]
        for name, codes in due.items():
            mine = codes[:, selection].copy()
            if mine.any():
                self.poison.add(name, selection, mine)
                codes[:, selection] = 0
        if not any(codes.any() for codes in due.values()):
            del self._due[position]

    def _selected_by(self, position: int) -> _Selection | None:
        """What a branch selects; None if it decides about more than registers."""
        program = self.machine.program
        branch = program.block_at(position)
        registers: set[str] = set()
        ways = {*branch.targets, branch.next}
        last = program.block_of[position]
        while True:
            # Blocks stand in topological order but for the way back to the head of a loop.
            first = min(ways)
            if first <= last:
                return None
            if len(ways) == 1:
                return _Selection(program.blocks[first].start, frozenset(registers))
            block, last = program.blocks[first], first
            for i in range(block.start, block.end):
                if not _only_computes(program.instructions[i]):
                    return None
                registers.update(filter(None, _targets(program.instructions[i])))
            ways.remove(first)
            ways.update(block.targets)
            if block.ending is Ending.NEXT or program.instructions[block.end - 1].guard is not None:
                ways.add(block.next)

    # -- plans -------------------------------------------------------------------------------------

    def _plan(self, position: int) -> _Plan:
        if position not in self._plans:
            self.machine.position = position
            self._plans[position] = self._planned(self.machine.instruction())
        return self._plans[position]

    def _planned(self, instruction: Instruction) -> _Plan:
        name, guard, targets = instruction.name, instruction.guard, _targets(instruction)
        sources = instruction.operands[1:] if _has_result(instruction) else instruction.operands
        values = [o for o in sources if not isinstance(o, Address)]
        spread = self._rule(instruction, len(targets), values)
        return _Plan(
            guard=guard,
            holds=None if guard is None else self.machine.predicate(guard),
            is_visible=name == "atom" or name in _CONTROL or not _has_result(instruction),
            is_branch=name == "bra",
            uses=self._uses(instruction, sources),
            targets=targets,
            spread=spread,
            stored=self._stored(instruction, values),
            load=self._load_rule(instruction, len(targets)),
        )

    def _uses(
        self, instruction: Instruction, sources: Sequence[Operand]
    ) -> tuple[tuple[str, tuple[Operand, ...], int], ...]:
        name = instruction.name
        count = WARP
        if name.endswith("matrix"):
            count = 8 * int((instruction.first(("x1", "x2", "x4")) or "x4")[1:])
        addresses = tuple(o for o in sources if isinstance(o, Address))
        uses = [("its address", addresses, count)] if addresses else []
        others = {
            "cp": "the number of bytes that it copies",
            "brx": "the index of this branch",
            **dict.fromkeys(BARRIERS, "an operand of this barrier"),
            "wgmma": "a descriptor or scale-d of this wgmma",
        }
        if name in others:
            values = tuple(o for o in sources if not isinstance(o, Address | Vector))
            uses.append((others[name], values, WARP))
        return tuple(uses)

    def _codes(self, operands: Iterable[Operand], selection: Selection) -> list[Codes | None]:
        """Codes of all registers among operands."""
        registers = (o for operand in operands for o in parts(operand) if isinstance(o, Register))
        return [self.poison.of(o.name, selection) for o in registers]

    def _of(self, operand: Operand, selection: Selection, size: int | None = None) -> Codes | None:
        """Codes of the low `size` bytes of a source, or of all."""
        if not isinstance(operand, Register):
            return None
        codes = self.poison.of(operand.name, selection)
        return codes if codes is None else codes[:size]

    # -- memory ------------------------------------------------------------------------------------

    def _stored(
        self, instruction: Instruction, values: Sequence[Operand]
    ) -> Callable[[Selection], Codes | None] | None:
        name = instruction.name
        if name == "st":
            elements = _elements(values[0])
            size = size_of(instruction.types[-1])

            def stored(selection: Selection) -> Codes | None:
                codes = [self._of(e, selection, size) for e in elements]
                if all(c is None for c in codes):
                    return None
                lanes = self.machine.lanes_of(selection).size
                return np.concatenate([_full(c, size, lanes) for c in codes])

            return stored
        if name in ("atom", "red"):
            return lambda selection: _worst(*self._codes(values, selection))
        if name == "stmatrix":
            return partial(self._store_matrices, _elements(values[0]), instruction.has("trans"))
        if name not in ("cp", "wgmma") and not _has_result(instruction):
            return partial(self._any_of_warp, values)
        return None

    def _any_of_warp(self, operands: Sequence[Operand], selection: Selection) -> Codes | None:
        codes = _worst(*self._codes(operands, selection))
        return _over_warps(codes, self.machine.lanes_of(selection))

    def _load_rule(
        self, instruction: Instruction, count: int
    ) -> Callable[[np.ndarray, Codes], tuple[np.ndarray, Results]]:
        if instruction.name in ("ld", "ldu", "atom", "red"):
            return lambda lanes, codes: (lanes, np.split(codes, count) if count else ())
        if instruction.name == "ldmatrix" and instruction.has("m8n8"):
            return partial(self._load_matrices, count, instruction.has("trans"))

        def anything(lanes: np.ndarray, codes: Codes) -> tuple[np.ndarray, Results]:
            worst = _over_warps(codes, lanes)
            return lanes, [worst] * count

        return anything

    def _load_matrices(
        self, count: int, trans: bool, lanes: np.ndarray, codes: Codes
    ) -> tuple[np.ndarray, Results]:
        """Row r of matrix i comes from lane 8 i + r; lane (g, t) gets word t of row g."""
        rows = np.zeros((self.machine.lanes, 16), np.int64)
        rows[lanes] = codes.T
        warps = np.unique(lanes // WARP)
        matrices = rows.reshape(-1, WARP, 16)[warps, : 8 * count].reshape(-1, 8, 8, 2)
        if trans:
            matrices = matrices.swapaxes(1, 2)
        words = matrices.reshape(-1, count, WARP, 4)
        getting = (warps[:, None] * WARP + np.arange(WARP)).reshape(-1)
        return getting, [words[:, i].reshape(-1, 4).T for i in range(count)]

    def _store_matrices(
        self, registers: Sequence[Operand], trans: bool, selection: Selection
    ) -> Codes | None:
        """The inverse of `_load_matrices`: lane 8 i + r writes row r of matrix i."""
        codes = [self._of(r, selection, 4) for r in registers]
        if all(c is None for c in codes):
            return None
        lanes = self.machine.lanes_of(selection).size
        words = [_full(c, 4, lanes).T.reshape(-1, 1, 8, 8, 2) for c in codes]
        matrices = np.concatenate(words, axis=1)
        if trans:
            matrices = matrices.swapaxes(2, 3)
        rows = np.zeros((lanes // WARP, WARP, 16), np.int64)
        rows[:, : 8 * len(codes)] = matrices.reshape(len(rows), -1, 16)
        return rows.reshape(-1, 16).T

    # -- registers ---------------------------------------------------------------------------------

    def _rule(self, instruction: Instruction, count: int, sources: Sequence[Operand]) -> Rule:
        """count: of destinations. sources: the operands but for these and addresses."""
        name, types = instruction.name, instruction.types
        if name in _LOADS or name in _CONTROL or not _has_result(instruction):
            # What comes from memory is in `load`.
            return lambda selection: (None,) * count
        if _uses_carry(instruction) or _sets_carry(instruction):
            return self._carried(instruction, count, sources)
        if name == "mov":
            return self._mov(instruction, count, sources[0])
        if name in ("and", "or"):
            return self._and_or(instruction, sources)
        if name in ("xor", "not", "lop3"):
            size = size_of(types[-1])
            return lambda selection: [_union(*(self._of(o, selection, size) for o in sources))]
        if name == "selp":
            return self._select(size_of(types[0]), self.machine.predicate(sources[2]), sources)
        if name == "slct":
            chooser = self.machine.source(sources[2], types[1])
            return self._select(
                size_of(types[0]), lambda selection: pick(chooser, selection) >= 0, sources
            )
        if name == "setp" and count and (len(sources) == 3 or types[-1] in _PAIRS):
            return self._setp(instruction, sources)
        if name == "cvt" and len(sources) == 2 and types[0] in _PAIRS:
            return self._packed_pair(sources)
        if name == "cvt" and len(sources) == 1 and _only_resizes(instruction):
            return self._resize(*types, sources[0])
        if types and types[-1] in _PAIRS and name in _PACKED:
            return lambda selection: [
                _of_halves(_union(*(_halves(self._of(o, selection, 4)) for o in sources)))
            ]
        if name in ("shl", "shr") and isinstance(sources[1], Immediate):
            return self._shift(instruction, sources[0], int(sources[1].value))
        if name == "prmt" and len(instruction.modifiers) == 1:
            return self._prmt(sources)
        if name == "shfl":
            return self._shfl(instruction, count, sources)
        if name == "movmatrix":
            return lambda selection: [_transposed(self._of(sources[0], selection, 4))]
        if name == "mma" and _has_rows_and_columns(instruction):
            return self._mma(instruction)
        if name in _WARP_WIDE:
            return lambda selection: [self._any_of_warp(sources, selection)] * count
        return lambda selection: [_worst(*self._codes(sources, selection))] * count

    def _carried(self, instruction: Instruction, count: int, sources: Sequence[Operand]) -> Rule:
        uses = _uses_carry(instruction)

        def spread(selection: Selection) -> Results:
            flag = self.poison.of(CARRY, selection) if uses else None
            return [_worst(*self._codes(sources, selection), flag)] * count

        return spread

    def _mov(self, instruction: Instruction, count: int, source: Operand) -> Rule:
        size = size_of(instruction.types[-1])
        if isinstance(source, Vector):
            elements = source.elements
            part = size // len(elements)

            def pack(selection: Selection) -> Results:
                lanes = self.machine.lanes_of(selection).size
                codes = (_full(self._of(e, selection, part), part, lanes) for e in elements)
                return [np.concatenate(list(codes))]

            return pack

        def unpack(selection: Selection) -> Results:
            codes = self._of(source, selection, size)
            return [None] * count if codes is None else np.split(codes, count)

        return unpack

    def _and_or(self, instruction: Instruction, sources: Sequence[Operand]) -> Rule:
        type_name = instruction.types[-1]
        deciding = 0 if instruction.name == "and" else 1 if type_name == "pred" else 0xFF
        values = [self._values(operand, type_name) for operand in sources]

        def spread(selection: Selection) -> Results:
            lanes = self.machine.lanes_of(selection).size
            codes = [_full(self._of(o, selection), size_of(type_name), lanes) for o in sources]
            decided = [
                (c == 0) & (_octets(value(selection), lanes) == deciding)
                for c, value in zip(codes, values, strict=True)
            ]
            return [np.where(decided[0] | decided[1], 0, np.maximum(*codes))]

        return spread

    def _values(self, operand: Operand, type_name: str) -> Callable[[Selection], np.ndarray]:
        if type_name == "pred":
            return self.machine.predicate(operand)
        return partial(pick, self.machine.source(operand, type_name))

    def _select(
        self,
        size: int,
        takes_first: Callable[[Selection], np.ndarray],
        sources: Sequence[Operand],
    ) -> Rule:
        first, second, chooser = sources

        def spread(selection: Selection) -> Results:
            a, b = (self._of(o, selection, size) for o in (first, second))
            chosen = None
            if a is not None or b is not None:
                none = np.int64(0)
                chosen = np.where(
                    takes_first(selection), none if a is None else a, none if b is None else b
                )
            return [_union(chosen, _worst(self._of(chooser, selection)))]

        return spread

    def _setp(self, instruction: Instruction, sources: Sequence[Operand]) -> Rule:
        type_name, (a, b, *rest) = instruction.types[-1], sources
        compare = comparison(self.machine, instruction)
        values = [self._values(operand, type_name) for operand in (a, b)]
        is_pair = isinstance(instruction.operands[0], Pair)
        combine = instruction.first(("and", "or", "xor"))
        by_half = type_name in _PAIRS

        def spread(selection: Selection) -> Results:
            lanes = self.machine.lanes_of(selection).size
            of_sources = [self._of(o, selection, size_of(type_name)) for o in (a, b)]
            if by_half:
                compared = _full(_union(*map(_halves, of_sources)), 2, lanes)[:, None]
            else:
                compared = [_full(_worst(*of_sources), 1, lanes)] * 2
            if not rest:
                return compared[: 1 + is_pair]
            found = compare(*(value(selection) for value in values))
            both = found.T if by_half else (found, ~found)
            other = _full(self._of(rest[0], selection), 1, lanes)
            holds = self.machine.predicate(rest[0])(selection)
            results = []
            for codes, truth in zip(compared, both, strict=True):
                result = np.maximum(codes, other)
                if combine != "xor":
                    deciding = combine == "or"
                    decided = (codes == 0) & (truth == deciding)
                    decided |= (other == 0) & (holds == deciding)
                    result = np.where(decided, 0, result)
                results.append(result)
            return results[: 1 + is_pair]

        return spread

    def _packed_pair(self, sources: Sequence[Operand]) -> Rule:
        """Two values narrowed to halves, the first of which is the upper one."""

        def spread(selection: Selection) -> Results:
            lanes = self.machine.lanes_of(selection).size
            codes = (_worst(self._of(o, selection)) for o in reversed(sources))
            return [np.concatenate([_full(c, 2, lanes) for c in codes])]

        return spread

    def _resize(self, target: str, source: str, operand: Operand) -> Rule:
        size, is_signed = size_of(target), SCALAR_TYPES[source].kind == "s"

        def spread(selection: Selection) -> Results:
            codes = self._of(operand, selection, size_of(source))
            if codes is None:
                return [None]
            missing = max(size - len(codes), 0)
            above = codes[-1:].repeat(missing, axis=0)
            return [np.concatenate([codes[:size], above if is_signed else 0 * above])]

        return spread

    def _shift(self, instruction: Instruction, operand: Operand, count: int) -> Rule:
        type_name = instruction.types[-1]
        size = size_of(type_name)
        by, rest = divmod(min(count & 0xFFFF_FFFF, 8 * size), 8)
        is_left = instruction.name == "shl"
        is_signed = SCALAR_TYPES[type_name].kind == "s" and not is_left
        step = -1 if is_left else 1
        # of a byte of the result, the one or two that it is made of
        made_of = [[i + step * n for n in range(by, by + 1 + (rest > 0))] for i in range(size)]

        def spread(selection: Selection) -> Results:
            codes = self._of(operand, selection, size)
            if codes is None:
                return [None]
            result = np.zeros_like(codes)
            for i, sources in enumerate(made_of):
                for j in sources:
                    if 0 <= j < size or (is_signed and j >= size):
                        np.maximum(result[i], codes[min(j, size - 1)], out=result[i])
            return [result]

        return spread

    def _prmt(self, sources: Sequence[Operand]) -> Rule:
        a, b, chooser = sources
        selectors = self.machine.source(chooser, "u32")

        def spread(selection: Selection) -> Results:
            lanes = self.machine.lanes_of(selection).size
            both = np.concatenate([_full(self._of(o, selection), 4, lanes) for o in (a, b)])
            chosen = np.broadcast_to(pick(selectors, selection), (lanes,)).astype(np.int64)
            columns = np.arange(lanes)
            result = np.stack([both[chosen >> 4 * i & 7, columns] for i in range(4)])
            return [_union(result, _worst(self._of(chooser, selection)))]

        return spread

    def _shfl(self, instruction: Instruction, count: int, sources: Sequence[Operand]) -> Rule:
        value, *how = sources
        lanes_read = shuffled_from(self.machine, instruction)

        def spread(selection: Selection) -> Results:
            index, _ = lanes_read()
            which = _worst(*(self._of(o, selection) for o in how))
            moved = self._of(value, index[selection], 4)
            return [_union(moved, which), which][:count]

        return spread

    def _mma(self, instruction: Instruction) -> Rule:
        d, a, b, c = (_elements(operand) for operand in instruction.operands)
        d_type, c_type = instruction.types[0], instruction.types[-1]
        size = 8 if c_type == "f64" else 4
        blocks = 1 if instruction.first(("m8n8k4", "m8n8k16", "m8n8k32", "m8n8k128")) else 2

        def lines(registers: Sequence[Operand], selection: Selection, n: int) -> Codes | None:
            """(warps, 8 n): poison of each row of A, or column of B."""
            codes = [_worst(self._of(r, selection)) for r in registers]
            if all(x is None for x in codes):
                return None
            lanes = self.machine.lanes_of(selection).size
            by_line = [_full(x, 1, lanes).reshape(-1, 8, 4).max(axis=2) for x in codes]
            return np.concatenate([_union(*by_line[i::n]) for i in range(n)], axis=1)

        def addend(selection: Selection) -> Codes | None:
            """(warps, blocks, 32 lanes, 2 columns)"""
            codes = [self._of(r, selection, size) for r in c]
            if all(x is None for x in codes):
                return None
            lanes = self.machine.lanes_of(selection).size
            if c_type == "f16":
                pairs = [_full(_halves(x), 2, lanes) for x in codes]
            else:
                pairs = [
                    np.concatenate([_full(_worst(x), 1, lanes) for x in codes[i : i + 2]])
                    for i in range(0, len(codes), 2)
                ]
            return np.stack(pairs).reshape(blocks, 2, -1, WARP).transpose(2, 0, 3, 1)

        def spread(selection: Selection) -> Results:
            rows, columns, matrix = (
                lines(a, selection, blocks),
                lines(b, selection, 1),
                addend(selection),
            )
            if rows is None and columns is None and matrix is None:
                return [None] * len(d)
            warps = self.machine.lanes_of(selection).size // WARP
            result = np.zeros((warps, blocks, WARP, 2), np.int64) if matrix is None else matrix
            by_place = np.ascontiguousarray(result).reshape(warps, 8 * blocks, 8)
            if rows is not None:
                by_place = np.maximum(by_place, rows[:, :, None])
            if columns is not None:
                by_place = np.maximum(by_place, columns[:, None, :])
            result = by_place.reshape(warps, blocks, WARP, 2)
            if d_type == "f16":
                return [_of_halves(result[:, i].reshape(-1, 2).T) for i in range(blocks)]
            return [result[:, i // 2, :, i % 2].reshape(1, -1) for i in range(2 * blocks)]

        return spread


_PACKED = frozenset({"add", "sub", "mul", "fma", "min", "max", "neg", "abs", "ex2", "tanh"})


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _has_result(instruction: Instruction) -> bool:
    """Whether the first operand is written. Where it is an address, the instruction stores."""
    name, operands = instruction.name, instruction.operands
    if name in BARRIERS:
        return instruction.has("red")
    if name == "wgmma":  # its results come when its group retires
        return False
    return name not in _CONTROL and bool(operands) and not isinstance(operands[0], Address)


def _only_computes(instruction: Instruction) -> bool:
    """Whether an instruction changes nothing but registers of lanes that need no others."""
    name = instruction.name
    if name in WITHOUT_EFFECT.split() or name == "bra":
        return True
    alone = name not in _WARP_WIDE and not name.endswith("matrix") and name != "shfl"
    return alone and name != "atom" and _has_result(instruction)


def _targets(instruction: Instruction) -> tuple[str | None, ...]:
    """Names of the registers that an instruction writes, None for a sink."""
    if not _has_result(instruction):
        return ()
    named = [o for o in parts(instruction.operands[0]) if isinstance(o, Register | Sink)]
    carry = (CARRY,) if _sets_carry(instruction) else ()
    return (*(o.name if isinstance(o, Register) else None for o in named), *carry)


def _uses_carry(instruction: Instruction) -> bool:
    return instruction.name in ("addc", "subc", "madc")


def _sets_carry(instruction: Instruction) -> bool:
    return instruction.has("cc") and instruction.name.removesuffix("c") in ("add", "sub", "mad")


def _only_resizes(instruction: Instruction) -> bool:
    integers = {name for name, scalar in SCALAR_TYPES.items() if scalar.kind in "su"}
    return integers.issuperset(instruction.types) and not instruction.has("sat")


def _has_rows_and_columns(instruction: Instruction) -> bool:
    """Whether the fragments are those of `tensor`: not sparse, nor those of Volta."""
    shape = instruction.first([m for m in instruction.modifiers if m.startswith("m8n8k")])
    is_volta = shape == "m8n8k4" and instruction.types[1] == "f16"
    return len(instruction.operands) == 4 and not is_volta


def _transposed(codes: Codes | None) -> Codes | None:
    """Of an 8 x 8 matrix of 16-bit elements: lane (g, t) holds columns 2t and 2t + 1 of row g."""
    if codes is None:
        return None
    matrix = codes.T.reshape(-1, 8, 8, 2).swapaxes(1, 2)
    return matrix.reshape(-1, 4).T
