"""Differences between the machine code of two kernels, with renamed registers told apart."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

from flash_helpers.ptx.read.flow import Phase
from flash_helpers.sass.analyse.alignment import Keys, Matching, common_subsequence, gaps
from flash_helpers.sass.analyse.counts import Bucket, count_changes, with_buckets
from flash_helpers.sass.analyse.phases import phases
from flash_helpers.sass.analyse.ptx_links import read_kernel_ptx
from flash_helpers.sass.analyse.values import Value, agrees, is_fixed, one_to_one, register_values
from flash_helpers.sass.read.opcodes import classify
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Instruction, Kernel, SassError
from flash_helpers.sass.read.registers import operation_accesses

FILLER = "filler"

_PHASES = list(Phase)
_CONTROL_MASK = ((1 << 128) - 1) ^ ((1 << 105) - 1)
# Where a kernel's parameters begin in constant bank 0 (EIATTR_PARAM_CBANK of our own cubins).
_PARAMETERS_AT = {80: 0x160, 86: 0x160, 89: 0x160, 90: 0x210}

_NUMBERED = re.compile(r"(?<![\w.])(UR|UP|R|P|B|SB)\d+\b")
_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_HEXADECIMAL = re.compile(r"0x[0-9a-f]+")
_PTX_REGISTER = re.compile(r"%([a-z]+)(?:\d+\b|<\d+>)")
_PTX_LABEL = re.compile(r"\$\w+")
_PTX_NAME = re.compile(rf"{_PTX_REGISTER.pattern}|{_PTX_LABEL.pattern}")
_NAMESPACE = re.compile(r"_ZN(?P<length>\d+)(?P<rest>\w+)")


class Likeness(str, Enum):
    """Degree of likeness of an instruction and its counterpart."""

    IDENTICAL = "identical"
    SCHEDULED = "scheduled otherwise"
    ENCODED = "prints alike, encoded differently"
    RENAMED = "renamed"
    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"


MEANING = {
    Likeness.IDENTICAL: "the same 16 bytes",
    Likeness.SCHEDULED: "the same but for the control word",
    Likeness.ENCODED: "the same text, yet other bits besides the control word",
    Likeness.RENAMED: "the same but for labels, addresses and registers, renamed one to one",
    Likeness.CHANGED: "the same opcode, with other values, operands or modifiers",
    Likeness.ADDED: "no counterpart before",
    Likeness.REMOVED: "no counterpart after",
}
ALIKE = frozenset({Likeness.IDENTICAL, Likeness.SCHEDULED, Likeness.ENCODED, Likeness.RENAMED})


@dataclass(frozen=True, slots=True)
class Side:
    """An instruction, its phase, and its class of opcodes, or FILLER."""

    instruction: Instruction
    phase: Phase
    group: str


@dataclass(frozen=True, slots=True)
class Change:
    """An instruction before and after; one of the two is None if it was added or removed.

    `moved`: it stands elsewhere among its neighbours, or in another phase.
    """

    likeness: Likeness
    moved: bool
    before: Side | None
    after: Side | None

    @property
    def side(self) -> Side:
        """The instruction after, or before if it was removed."""
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def is_news(self) -> bool:
        """False for an instruction that stayed in its place and says the same."""
        return self.moved or self.likeness not in ALIKE


class Tally(NamedTuple):
    """Instructions of one class in one phase.

    Each field is a number of instructions. `before`, `after`: all of them. `alike`: those that
    stayed and say the same. `changed`: those that stayed, with other operands. `moved`: those that
    stand elsewhere in the phase. `moved_out`, `moved_in`: those that moved to and from another
    phase. `added`, `removed`: those without a counterpart.
    """

    before: int
    after: int
    alike: int
    changed: int
    moved: int
    moved_out: int
    moved_in: int
    added: int
    removed: int


@dataclass(frozen=True)
class KernelDiff:
    """Two kernels, and the relation of each instruction of the one to an instruction of the other.

    `changes`: in the order of the second kernel, phase by phase; removed instructions stand at
    their old place. Padding is left out. `by_ptx`: False if one of the kernels has no PTX to align
    them by.
    """

    before: Kernel
    after: Kernel
    changes: tuple[Change, ...]
    by_ptx: bool

    @cached_property
    def equal(self) -> bool:
        """True only if both kernels are the same encodings in the same order, padding included."""
        return [i.encoding for i in self.before.instructions] == [
            i.encoding for i in self.after.instructions
        ]

    @cached_property
    def likenesses(self) -> Counter[Likeness]:
        """Number of instructions by likeness, moved or not."""
        return Counter(change.likeness for change in self.changes)

    @property
    def moved(self) -> int:
        """Number of instructions that stand elsewhere."""
        return sum(change.moved for change in self.changes)

    def tallies(self) -> dict[Phase, dict[str, Tally]]:
        """The tally of each class of instructions in each phase."""
        found: dict[tuple[Phase, str], Counter[str]] = defaultdict(Counter)
        for change in self.changes:
            for side, name in ((change.before, "before"), (change.after, "after")):
                if side is not None:
                    found[side.phase, side.group][name] += 1
            for side, what in _happened(change):
                found[side.phase, side.group][what] += 1
        tallies: dict[Phase, dict[str, Tally]] = {phase: {} for phase in Phase}
        for (phase, group), counts in sorted(
            found.items(), key=lambda item: (-item[1]["before"] - item[1]["after"], item[0][1])
        ):
            tallies[phase][group] = Tally(*(counts[name] for name in Tally._fields))
        return tallies

    def opcode_deltas(self) -> list[tuple[str, float, float]]:
        """Opcodes whose number changed: (opcode, before, after), the largest change first."""
        before, after = (
            Counter(s.instruction.opcode for s in sides if s is not None and s.group != FILLER)
            for sides in ([c.before for c in self.changes], [c.after for c in self.changes])
        )
        return count_changes(before, after)


def _happened(change: Change) -> Iterator[tuple[Side, str]]:
    """The columns of `Tally` that a change counts in, besides before and after."""
    before, after = change.before, change.after
    if before is None or after is None:
        yield change.side, change.likeness.value
    elif before.phase != after.phase:
        yield before, "moved_out"
        yield after, "moved_in"
    elif change.moved:
        yield after, "moved"
    else:
        yield after, "alike" if change.likeness in ALIKE else "changed"


def normalised(instruction: Instruction, capability: int) -> str:
    """An instruction's text without the numbers of registers, predicates and barriers, without
    `.reuse`, and with its jump's target as "label"; parameters count from where they begin."""

    def constant(match: re.Match[str]) -> str:
        offset = int(match[1], 16) - _PARAMETERS_AT.get(capability, 0)
        return f"param[{offset:#x}]" if offset >= 0 else match[0]

    operands = instruction.operands.replace(".reuse", "")
    if instruction.target is not None:
        operands = _HEXADECIMAL.sub("label", operands)
    operands = _NUMBERED.sub(r"\1", _CONSTANT.sub(constant, operands))
    return " ".join((_NUMBERED.sub(r"\1", instruction.predicate), instruction.opcode, operands))


@lru_cache(maxsize=1 << 14)  # a page asks for the lines of a kernel and its parent again and again
def normalised_ptx(text: str, symbol: str) -> str:
    """A PTX instruction without the numbers of registers and labels, without the kernel's symbol,
    and without the namespace that it stands in."""
    text = _PTX_REGISTER.sub(r"%\1", " ".join(text.replace(symbol, "kernel").split()))
    if found := _NAMESPACE.match(symbol):
        namespace = f"_ZN{found['length']}{found['rest'][: int(found['length'])]}"
        text = text.replace(namespace, "_ZN")
    return _PTX_LABEL.sub("$", text)


def ptx_names(text: str) -> tuple[str, ...]:
    """The registers and labels of a PTX instruction, which `normalised_ptx` leaves out."""
    return tuple(match[0] for match in _PTX_NAME.finditer(text))


def _likeness(before: Instruction, after: Instruction) -> Likeness:
    """The likeness of two instructions whose normalised texts agree."""
    if before.encoding == after.encoding:
        return Likeness.IDENTICAL
    if (before.encoding ^ after.encoding) & ~_CONTROL_MASK == 0:
        return Likeness.SCHEDULED
    if before.text.replace(".reuse", "") == after.text.replace(".reuse", ""):
        return Likeness.ENCODED
    return Likeness.RENAMED


def block_phases(kernel: Kernel) -> list[Phase]:
    """The phase of each block; those of the padding count to the epilogue."""
    parts = phases(kernel)
    found = [Phase.EPILOGUE] * len(kernel.blocks)
    for block in parts.prologue:
        found[block] = Phase.PROLOGUE
    for block in parts.main_loop.blocks if parts.main_loop else ():
        found[block] = Phase.MAIN_LOOP
    return found


@lru_cache(maxsize=2)
def _sides(kernel: Kernel) -> Sequence[Side]:
    """All instructions but the padding, phase by phase."""
    phase_of = block_phases(kernel)
    sides = [
        Side(
            i,
            phase_of[i.block],
            FILLER if kind is Bucket.FILLER else classify(i.opcode, i.operands),
        )
        for i, kind in with_buckets(kernel)
        if kind is not Bucket.PADDING
    ]
    return sorted(sides, key=lambda side: _PHASES.index(side.phase))


class _PtxRow(NamedTuple):
    phase: Phase
    line: int
    text: str
    name: str


@lru_cache(maxsize=2)
def _ptx_rows(kernel: Kernel) -> Sequence[_PtxRow] | None:
    """The PTX instructions, phase by phase; None if there is no PTX that can be read."""
    try:
        ptx = read_kernel_ptx(kernel)
    except SassError:
        return None
    rows = [
        _PtxRow(ptx.phase(n), i.line, normalised_ptx(ptx.text(i.line), kernel.symbol), i.name)
        for n, i in enumerate(ptx.program.instructions)
    ]
    return sorted(rows, key=lambda row: _PHASES.index(row.phase))


# The identity of the PTX of a line in both kernels: a number that its counterpart shares, None
# without a counterpart; and its normalised text.
_Identities = Mapping[int | None, tuple[int | None, str]]


def _align_ptx(a: Sequence[_PtxRow], b: Sequence[_PtxRow]) -> list[_Identities]:
    """Pair the PTX instructions of each phase: by their text, then in between by their name."""
    pairs = common_subsequence([(r.phase, r.text) for r in a], [(r.phase, r.text) for r in b])
    for in_a, in_b in gaps(pairs, len(a), len(b)):
        rest = common_subsequence(
            [(a[i].phase, a[i].name) for i in in_a], [(b[j].phase, b[j].name) for j in in_b]
        )
        pairs += [(in_a[i], in_b[j]) for i, j in rest]
    found: list[_Identities] = []
    for rows, indices in ((a, [i for i, _ in pairs]), (b, [j for _, j in pairs])):
        number_of = {rows[index].line: number for number, index in enumerate(indices)}
        found.append({row.line: (number_of.get(row.line), row.text) for row in rows})
    return found


def _keys(
    sides: Sequence[Side], capability: int, identities: _Identities | None
) -> Iterator[tuple[str, Hashable | None, Hashable | None, Hashable | None]]:
    """Four keys per instruction: its text; text and PTX; opcode, class and PTX; text and text of
    the PTX."""
    for side in sides:
        text = normalised(side.instruction, capability)
        if identities is None:
            yield text, text, None, text
            continue
        pair, ptx = identities.get(side.instruction.ptx_line, (None, None))
        yield (
            text,
            None if pair is None else (text, pair),
            None if pair is None else (side.instruction.base, side.group, pair),
            None if ptx is None else (text, ptx),
        )


def diff_kernels(before: Kernel, after: Kernel) -> KernelDiff:
    """Relate each instruction of one kernel to one of another, padding left out.

    The PTX of both is aligned first: within each phase by its text without the numbers of
    registers, then by its opcodes. Machine code is then paired in five rounds, each with the
    instructions that the rounds before left:

    1. instructions that say the same and came from the same PTX, in order;
    2. the same instructions out of order (moved);
    3. instructions that say the same, in order;
    4. instructions from the same PTX with the same opcode (changed);
    5. instructions that say the same and came from PTX that reads the same, out of order (moved).

    Registers are renamed consistently: two instructions say the same if one renaming of all values
    of the first kernel (`values.one_to_one`) makes the one of the other. Where it does not,
    instructions are matched anew, those that it makes equal first; the remaining ones differ
    (changed).
    """
    sides = (_sides(before), _sides(after))
    ptx_before, ptx_after = _ptx_rows(before), _ptx_rows(after)
    identities: Sequence[_Identities | None] = (None, None)
    if by_ptx := ptx_before is not None and ptx_after is not None:
        identities = _align_ptx(ptx_before, ptx_after)
    keys = (
        zip(*_keys(side, kernel.capability, of), strict=True)
        for side, kernel, of in zip(sides, (before, after), identities, strict=True)
    )
    text, text_and_ptx, opcode_and_ptx, text_and_ptx_text = zip(*keys, strict=True)
    matching = Matching(
        [[side.phase for side in of] for of in sides],
        [_by_address(of) for of in sides],
    )

    def match() -> None:
        matching.align(text_and_ptx)
        matching.relocate(text_and_ptx)
        matching.align(text)
        matching.align(opcode_and_ptx)
        matching.relocate(opcode_and_ptx)
        matching.relocate(text_and_ptx_text)

    match()
    values = _Values(sides, (before, after), text)
    matching.release(values.contradictions(matching, values.renaming(matching)))
    renamed = values.keys(values.followed(matching, values.renaming(matching)))
    matching.align(renamed)
    matching.relocate(renamed)
    match()
    different = values.contradictions(matching, values.renaming(matching))
    return KernelDiff(before, after, tuple(_changes(sides, matching, text, different)), by_ptx)


def _by_address(sides: Sequence[Side]) -> list[int]:
    """The indices of instructions by their address."""
    return sorted(range(len(sides)), key=lambda n: sides[n].instruction.address)


class _Values:
    """Names that must be renamed consistently in the instructions of two kernels: the values that
    they read and write, and the targets of their jumps. `texts`: normalised."""

    def __init__(
        self, sides: Sequence[Sequence[Side]], kernels: Sequence[Kernel], texts: Keys
    ) -> None:
        self._sides, self._texts = sides, texts
        self._of: list[list[tuple[Value, ...]]] = []
        for of, kernel in zip(sides, kernels, strict=True):
            found = register_values(kernel)
            self._of.append(
                [
                    (*found[i.address // INSTRUCTION_BYTES], *_labels(i))
                    for i in (side.instruction for side in of)
                ]
            )
        self._fixed = {v for of in self._of for values in of for v in values if is_fixed(v)}

    def _pair(self, i: int, j: int) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        return self._of[0][i], self._of[1][j]

    def _alike(self, matching: Matching) -> Iterator[tuple[int, int]]:
        """The pairs of one text, in order."""
        before, after = self._texts
        return ((i, j) for j, i in sorted(matching.partner.items()) if before[i] == after[j])

    def renaming(self, matching: Matching) -> dict[Value, Value]:
        """The second kernel's value for each value of the first."""
        return one_to_one((self._pair(i, j) for i, j in self._alike(matching)), self._fixed)

    def contradictions(
        self, matching: Matching, renaming: Mapping[Value, Value]
    ) -> set[tuple[int, int]]:
        """The pairs of one text that print other registers than a renaming would."""
        return {
            (i, j)
            for i, j in self._alike(matching)
            if _likeness(self._sides[0][i].instruction, self._sides[1][j].instruction)
            is Likeness.RENAMED
            and not agrees(renaming, self._pair(i, j))
        }

    def followed(self, matching: Matching, renaming: dict[Value, Value]) -> dict[Value, Value]:
        """A renaming, with the results of free instructions that say and read the same."""
        results: dict[tuple[Hashable, tuple[Value | None, ...]], list[list[Value]]]
        results = defaultdict(list)
        taken = set(renaming.values())
        for j in sorted(matching.free[1]):
            reads, written = self._split(1, j)
            if taken.isdisjoint(written):
                results[self._texts[1][j], tuple(reads)].append(written)
        for i in sorted(matching.free[0]):
            reads, written = self._split(0, i)
            renamed = tuple(renaming.get(value) for value in reads)
            there = results[self._texts[0][i], renamed]
            if reads and there and not any(value in renaming for value in written):
                renaming.update(zip(written, there.pop(0), strict=True))
        return renaming

    def _split(self, which: int, n: int) -> tuple[list[Value], list[Value]]:
        """The values that an instruction of a kernel reads, and those that it writes."""
        found = operation_accesses(self._sides[which][n].instruction)
        parts: tuple[list[Value], list[Value]] = ([], [])
        values = self._of[which][n]
        for access, value in zip(found, values, strict=False):
            parts[access.is_written].append(value)
        parts[0].extend(values[len(found) :])
        return parts

    def keys(self, renaming: Mapping[Value, Value]) -> Keys:
        """Text and values of each instruction, those of the first kernel renamed; None for an
        instruction without a value, or with one that has no new name."""
        renamed = [[renaming.get(v) for v in values] for values in self._of[0]]
        named: list[Sequence[Sequence[Value | None]]] = [renamed, self._of[1]]
        return [
            [
                (text, *values) if values and None not in values else None
                for text, values in zip(texts, of, strict=True)
            ]
            for texts, of in zip(self._texts, named, strict=True)
        ]


def _labels(instruction: Instruction) -> tuple[Value, ...]:
    """The target of its jump, as if that were a value."""
    return () if instruction.target is None else ((instruction.target, "label"),)


def _changes(
    sides: tuple[Sequence[Side], Sequence[Side]],
    matching: Matching,
    texts: Keys,
    different: Container[tuple[int, int]],
) -> Iterator[Change]:
    """`different`: pairs of one text that differ all the same."""
    before, after = sides
    removed = deque(sorted(matching.free[0]))
    phases = [_PHASES.index(side.phase) for side in before]
    starts = {phase: bisect_left(phases, number) for number, phase in enumerate(_PHASES)}

    def gone(end: int) -> Iterator[Change]:
        while removed and removed[0] < end:
            yield Change(Likeness.REMOVED, False, before[removed.popleft()], None)

    for j, side in enumerate(after):
        i, moved = matching.partner.get(j), j in matching.moved
        yield from gone(starts[side.phase] if i is None or moved else i)
        if i is None:
            yield Change(Likeness.ADDED, False, None, side)
            continue
        likeness = Likeness.CHANGED
        if texts[0][i] == texts[1][j] and (i, j) not in different:
            likeness = _likeness(before[i].instruction, side.instruction)
        yield Change(likeness, moved, before[i], side)
    yield from gone(len(before))
