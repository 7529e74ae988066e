"""Rules by which poison spreads: for each instruction, the bytes of its results that are poisoned.

Poison is known by the byte. Moves, packing and unpacking, `prmt`, shifts by a literal, conversions
between integers, logic, selection, shuffles, `ldmatrix`, `stmatrix`, `movmatrix` and memory pass on
the bytes that they move; packed 16-bit arithmetic and the pairs that `cvt` makes know their halves.
`and` and `or` are clean where a clean source decides alone, and so is a comparison combined with a
predicate. D[i][j] of an `mma` is poisoned if any of A[i][:], B[:][j] or C[i][j] is (and of a
`wgmma`, when it is computed: `warpgroups`). Every other result of a lane is poisoned as a whole if
any byte of a source is. Where the lanes of a warp see each other, it is poisoned if any source of
the warp is. So a product with a literal zero stays poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.flow import BARRIERS, is_wgmma
from flash_helpers.ptx.read.module import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Vector,
)
from flash_helpers.ptx.read.registers import (
    CARRY,
    CONTROL,
    WITHOUT_EFFECT,
    has_result,
    names_of,
    operands_read,
    scale_d,
    sets_carry,
    targets,
    uses_carry,
)
from flash_helpers.ptx.read.types import SCALAR_TYPES, size_of
from flash_helpers.ptx.run.execute.codes import (
    from_halves,
    full,
    halves,
    octets,
    over_warps,
    transposed,
    union,
    worst,
)
from flash_helpers.ptx.run.instructions.compare import comparison
from flash_helpers.ptx.run.instructions.warps import WHOLE_WARP, member_mask, shuffled_from
from flash_helpers.ptx.run.machine import Machine, pick
from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.run.watch.poison import Codes

Results = Sequence[Codes | None]
"""Codes of each destination, in the order of the operands; None: clean."""
Rule = Callable[[Selection], Results]

_LOADS = frozenset({"ld", "ldu", "ldmatrix", "atom"})
_WARP_WIDE = frozenset({"vote", "match", "redux", "elect", "activemask", "mma", "wmma"})
_PAIRS = frozenset({"f16x2", "bf16x2"})
_PACKED = frozenset({"add", "sub", "mul", "fma", "min", "max", "neg", "abs", "ex2", "tanh"})


@dataclass(frozen=True)
class Plan:
    """The part of an instruction that concerns poison.

    `guard`: its name and its value. `is_of_warp`: whether it needs all lanes of a warp. `uses`:
    operands that must be clean in the lanes that execute: the name in messages, the operands, and
    the number of lanes of a warp that matter. `targets`: names of the registers written, None for a
    sink. `spread`: their codes. `stored`: codes of the word that it writes to memory. `load`:
    distributes the codes of words that were read to lanes, (bytes, lanes). `sources`: names of the
    registers that it may read, other than the guard.
    """

    guard: tuple[str, Callable[[Selection], np.ndarray]] | None
    is_visible: bool
    is_branch: bool
    is_of_warp: bool
    uses: tuple[tuple[str, tuple[Operand, ...], int], ...]
    targets: tuple[str | None, ...]
    spread: Rule
    stored: Callable[[Selection], Codes | None] | None
    load: Callable[[np.ndarray, Codes], tuple[np.ndarray, Results]]
    sources: frozenset[str]


class Rules:
    """The rules by which the poison of a batch passes through its instructions."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.poison = machine.poison

    def plan(self, instruction: Instruction) -> Plan:
        """The plan of the instruction at the machine's position."""
        name, guard, written = instruction.name, instruction.guard, targets(instruction)
        read = operands_read(instruction)
        values = [o for o in read if not isinstance(o, Address)]
        spread = self._rule(instruction, len(written), values)
        return Plan(
            guard=None if guard is None else (guard.name, self.machine.predicate(guard)),
            is_visible=name == "atom" or name in CONTROL or not has_result(instruction),
            is_branch=name == "bra",
            is_of_warp=name in WHOLE_WARP,
            uses=self._uses(instruction, read),
            targets=written,
            spread=spread,
            stored=self._stored(instruction, values),
            load=self._load_rule(instruction, len(written)),
            sources=frozenset(names_of(read)),
        )

    def _uses(
        self, instruction: Instruction, sources: Sequence[Operand]
    ) -> tuple[tuple[str, tuple[Operand, ...], int], ...]:
        name = instruction.name
        count = WARP
        if name.endswith("matrix"):
            count = 8 * int((instruction.first(("x1", "x2", "x4")) or "x4")[1:])
        addresses = tuple(o for o in sources if isinstance(o, Address))
        uses: list[tuple[str, tuple[Operand, ...], int]] = (
            [("its address", addresses, count)] if addresses else []
        )
        others = {
            "cp": "the number of bytes that it copies",
            "brx": "the index of this branch",
            **dict.fromkeys(BARRIERS, "an operand of this barrier"),
            "tensormap": "a value of this tensor map",
            "wgmma": "a descriptor or scale-d of this wgmma",
        }
        if name in others:
            values = tuple(o for o in sources if not isinstance(o, Address | Vector))
            if name == "wgmma" and instruction.has("sp"):
                # The metadata count in some lanes only: `instructions.wgmma` looks at those.
                values = tuple(o for o in values if o != instruction.operands[3])
            uses.append((others[name], values, WARP))
        return tuple(uses)

    def codes(self, operands: Iterable[Operand], selection: Selection) -> list[Codes | None]:
        """Codes of all registers among operands."""
        return [self.poison.of(name, selection) for name in names_of(operands)]

    def _of(self, operand: Operand, selection: Selection, size: int | None = None) -> Codes | None:
        """Codes of the low `size` bytes of a source, or of all."""
        if not isinstance(operand, Register):
            return None
        codes = self.poison.of(operand.name, selection)
        return codes if codes is None else codes[:size]

    def _values(self, operand: Operand, type_name: str) -> Callable[[Selection], np.ndarray]:
        if type_name == "pred":
            return self.machine.predicate(operand)
        return partial(pick, self.machine.source(operand, type_name))

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
                return np.concatenate([full(c, size, lanes) for c in codes])

            return stored
        if name in ("atom", "red"):
            return lambda selection: worst(*self.codes(values, selection))
        if name == "stmatrix":
            return partial(self._store_matrices, _elements(values[0]), instruction.has("trans"))
        if name not in ("cp", "wgmma", "tensormap") and not has_result(instruction):
            return partial(self._any_of_warp, values)
        return None

    def _any_of_warp(self, operands: Sequence[Operand], selection: Selection) -> Codes | None:
        codes = worst(*self.codes(operands, selection))
        return over_warps(codes, self.machine.lanes_of(selection))

    def _load_rule(
        self, instruction: Instruction, count: int
    ) -> Callable[[np.ndarray, Codes], tuple[np.ndarray, Results]]:
        if instruction.name in ("ld", "ldu", "atom", "red"):
            return lambda lanes, codes: (lanes, np.split(codes, count) if count else ())
        if instruction.name == "shfl":
            return lambda lanes, codes: (lanes, (codes, None)[:count])
        if instruction.name == "ldmatrix" and instruction.has("m8n8"):
            return partial(self._load_matrices, count, instruction.has("trans"))

        def anything(lanes: np.ndarray, codes: Codes) -> tuple[np.ndarray, Results]:
            return lanes, [over_warps(codes, lanes)] * count

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
        words = [full(c, 4, lanes).T.reshape(-1, 1, 8, 8, 2) for c in codes]
        matrices = np.concatenate(words, axis=1)
        if trans:
            matrices = matrices.swapaxes(2, 3)
        rows = np.zeros((lanes // WARP, WARP, 16), np.int64)
        rows[:, : 8 * len(codes)] = matrices.reshape(len(rows), -1, 16)
        return rows.reshape(-1, 16).T

    # -- registers ---------------------------------------------------------------------------------

    def _rule(self, instruction: Instruction, count: int, sources: Sequence[Operand]) -> Rule:
        """`count`: number of destinations. `sources`: the operands without destinations and
        addresses."""
        name, types = instruction.name, instruction.types
        if is_wgmma(instruction):
            return self._accumulator(instruction)
        if name in _LOADS or name in CONTROL or not has_result(instruction):
            # Codes from memory are in `load`.
            return lambda selection: (None,) * count
        if uses_carry(instruction) or sets_carry(instruction):
            return self._carried(instruction, count, sources)
        if name == "mov":
            return self._mov(instruction, count, sources[0])
        if name in ("and", "or"):
            return self._and_or(instruction, sources)
        if name in ("xor", "not", "lop3") and count == 1:
            size = size_of(types[-1])
            return lambda selection: [union(*(self._of(o, selection, size) for o in sources))]
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
            return self._resize(types[0], types[1], sources[0])
        if types and types[-1] in _PAIRS and name in _PACKED:
            return lambda selection: [
                from_halves(union(*(halves(self._of(o, selection, 4)) for o in sources)))
            ]
        if name in ("shl", "shr") and isinstance(sources[1], Immediate):
            return self._shift(instruction, sources[0], int(sources[1].value))
        if name == "prmt" and len(instruction.modifiers) == 1:
            return self._prmt(sources)
        if name == "shfl":
            return self._shfl(instruction, count, sources)
        if name == "movmatrix":
            return lambda selection: [transposed(self._of(sources[0], selection, 4))]
        if name == "mma" and has_rows_and_columns(instruction):
            return self._mma(instruction)
        if name in _WARP_WIDE:
            return self._any_of_group(instruction, count, sources)
        return lambda selection: [worst(*self.codes(sources, selection))] * count

    def _carried(self, instruction: Instruction, count: int, sources: Sequence[Operand]) -> Rule:
        uses = uses_carry(instruction)

        def spread(selection: Selection) -> Results:
            flag = self.poison.of(CARRY, selection) if uses else None
            return [worst(*self.codes(sources, selection), flag)] * count

        return spread

    def _mov(self, instruction: Instruction, count: int, source: Operand) -> Rule:
        size = size_of(instruction.types[-1])
        if isinstance(source, Vector):
            elements = source.elements
            part = size // len(elements)

            def pack(selection: Selection) -> Results:
                lanes = self.machine.lanes_of(selection).size
                codes = (full(self._of(e, selection, part), part, lanes) for e in elements)
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
            codes = [full(self._of(o, selection), size_of(type_name), lanes) for o in sources]
            decided = [
                (c == 0) & (octets(value(selection), lanes) == deciding)
                for c, value in zip(codes, values, strict=True)
            ]
            return [np.where(decided[0] | decided[1], 0, np.maximum(*codes))]

        return spread

    def _select(
        self, size: int, takes_first: Callable[[Selection], np.ndarray], sources: Sequence[Operand]
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
            return [union(chosen, worst(self._of(chooser, selection)))]

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
                compared = list(full(union(*map(halves, of_sources)), 2, lanes)[:, None])
            else:
                compared = [full(worst(*of_sources), 1, lanes)] * 2
            if not rest:
                return compared[: 1 + is_pair]
            found = compare(*(value(selection) for value in values))
            both = found.T if by_half else (found, ~found)
            other = full(self._of(rest[0], selection), 1, lanes)
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
            codes = (worst(self._of(o, selection)) for o in reversed(sources))
            return [np.concatenate([full(c, 2, lanes) for c in codes])]

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
            both = np.concatenate([full(self._of(o, selection), 4, lanes) for o in (a, b)])
            chosen = np.broadcast_to(pick(selectors, selection), (lanes,)).astype(np.int64)
            columns = np.arange(lanes)
            result = np.stack([both[chosen >> 4 * i & 7, columns] for i in range(4)])
            return [union(result, worst(self._of(chooser, selection)))]

        return spread

    def _shfl(self, instruction: Instruction, count: int, sources: Sequence[Operand]) -> Rule:
        value, *how = sources
        lanes_read = shuffled_from(self.machine, instruction)

        def spread(selection: Selection) -> Results:
            index, _ = lanes_read()
            which = worst(*(self._of(o, selection) for o in how))
            moved = self._of(value, index[selection], 4)
            return [union(moved, which), which][:count]

        return spread

    def _any_of_group(
        self, instruction: Instruction, count: int, sources: Sequence[Operand]
    ) -> Rule:
        """The worst code of the lanes that take part with a lane."""
        machine = self.machine
        members = member_mask(machine, instruction)

        def spread(selection: Selection) -> Results:
            codes = worst(*self.codes(sources, selection))
            if codes is None or members is None:
                return [over_warps(codes, machine.lanes_of(selection))] * count
            everywhere = np.zeros(machine.lanes, np.int64)
            everywhere[selection] = codes[0]
            taking = machine.fellows(selection, members) & members
            takes_part = (taking.reshape(-1, WARP, 1) & machine.lane_bits[:WARP]) != 0
            most = np.where(takes_part, everywhere.reshape(-1, 1, WARP), 0).max(axis=2)
            return [most.reshape(1, -1)[:, selection]] * count

        return spread

    def _accumulator(self, instruction: Instruction) -> Rule:
        """D of a `wgmma` when it is issued: overwritten where scale-d is false. The poison of A and
        B comes when the product is computed."""
        registers, adds = _elements(instruction.operands[0]), scale_d(instruction)
        assert adds is not None  # the instruction is bound
        holds = self.machine.predicate(adds)

        def spread(selection: Selection) -> Results:
            codes = [self._of(register, selection) for register in registers]
            kept = holds(selection)
            return [None if c is None else np.where(kept, c, 0) for c in codes]

        return spread

    def _mma(self, instruction: Instruction) -> Rule:
        d, a, b, c = (_elements(operand) for operand in instruction.operands)
        d_type, c_type = instruction.types[0], instruction.types[-1]
        size = 8 if c_type == "f64" else 4
        blocks = 1 if instruction.first(("m8n8k4", "m8n8k16", "m8n8k32", "m8n8k128")) else 2

        def lines(registers: Sequence[Operand], selection: Selection, n: int) -> Codes | None:
            """(warps, 8 n): poison of each row of A, or column of B."""
            codes = [worst(self._of(r, selection)) for r in registers]
            if all(x is None for x in codes):
                return None
            lanes = self.machine.lanes_of(selection).size
            by_line = [full(x, 1, lanes).reshape(-1, 8, 4).max(axis=2) for x in codes]
            return np.concatenate([union(*by_line[i::n]) for i in range(n)], axis=1)

        def addend(selection: Selection) -> Codes | None:
            """(warps, blocks, 32 lanes, 2 columns)"""
            codes = [self._of(r, selection, size) for r in c]
            if all(x is None for x in codes):
                return None
            lanes = self.machine.lanes_of(selection).size
            if c_type == "f16":
                pairs = [full(halves(x), 2, lanes) for x in codes]
            else:
                pairs = [
                    np.concatenate([full(worst(x), 1, lanes) for x in codes[i : i + 2]])
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
                return [from_halves(result[:, i].reshape(-1, 2).T) for i in range(blocks)]
            return [result[:, i // 2, :, i % 2].reshape(1, -1) for i in range(2 * blocks)]

        return spread


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def only_computes(instruction: Instruction) -> bool:
    """Whether an instruction changes nothing but registers of lanes that need no others."""
    name = instruction.name
    if name in WITHOUT_EFFECT or name == "bra":
        return True
    alone = name not in _WARP_WIDE and not name.endswith("matrix") and name != "shfl"
    return alone and name != "atom" and has_result(instruction)


def _only_resizes(instruction: Instruction) -> bool:
    integers = {name for name, scalar in SCALAR_TYPES.items() if scalar.kind in "su"}
    return integers.issuperset(instruction.types) and not instruction.has("sat")


def has_rows_and_columns(instruction: Instruction) -> bool:
    """Whether the fragments are those of `tensor`: not sparse, nor those of Volta."""
    shape = instruction.first([m for m in instruction.modifiers if m.startswith("m8n8k")])
    is_volta = shape == "m8n8k4" and instruction.types[1] == "f16"
    return len(instruction.operands) == 4 and not is_volta
