"""What differs between the machine code of two kernels, and what only got another register."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from flash_helpers.ptx.read.flow import Phase
from flash_helpers.sass.analyse.alignment import common_subsequence, gaps
from flash_helpers.sass.analyse.counts import Bucket, count_changes, with_buckets
from flash_helpers.sass.analyse.phases import phases
from flash_helpers.sass.analyse.ptx_links import KernelPtx, read_kernel_ptx
from flash_helpers.sass.read.opcodes import classify
from flash_helpers.sass.read.records import Instruction, Kernel, SassError

FILLER = "filler"

_CONTROL_MASK = ((1 << 128) - 1) ^ ((1 << 105) - 1)
# Where a kernel's parameters begin in constant bank 0 (EIATTR_PARAM_CBANK of our own cubins).
_PARAMETERS_AT = {80: 0x160, 86: 0x160, 89: 0x160, 90: 0x210}

_NUMBERED = re.compile(r"(?<![\w.])(UR|UP|R|P|B|SB)\d+\b")
_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_HEXADECIMAL = re.compile(r"0x[0-9a-f]+")
_PTX_REGISTER = re.compile(r"%([a-z]+)\d+\b")
_PTX_LABEL = re.compile(r"\$\w+")
_NAMESPACE = re.compile(r"_ZN(\d+)(v\d+)")


class Likeness(str, Enum):
    """How alike an instruction and its counterpart are."""

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
    Likeness.RENAMED: "the same but for registers, labels and addresses",
    Likeness.CHANGED: "the same opcode of the same PTX, with other operands or modifiers",
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

    moved: it stands elsewhere among its neighbours, or in another phase.
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
        """False for what stayed where it was and says the same."""
        return self.moved or self.likeness not in ALIKE


class Tally(NamedTuple):
    """Instructions of one class in one phase.

    before, after: how many there are. alike: stayed and say the same. changed: stayed, with other
    operands. moved: stand elsewhere in the phase. moved_out, moved_in: to and from another phase.
    added, removed: without a counterpart.
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
    """Two kernels, and how each instruction of the one relates to one of the other.

    changes: in the order of the second kernel, phase by phase; what was removed stands where it
    was. Padding is left out. by_ptx: False if one of the kernels has no PTX to align them by.
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
        """How many instructions are how alike, moved or not."""
        return Counter(change.likeness for change in self.changes)

    @property
    def moved(self) -> int:
        """How many instructions stand elsewhere."""
        return sum(change.moved for change in self.changes)

    def tallies(self) -> dict[Phase, dict[str, Tally]]:
        """For each phase and each class of instructions in it, what happened to them."""
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


def normalised_ptx(text: str, symbol: str) -> str:
    """A PTX instruction without the numbers of registers and labels, and without the names that
    hold the kernel's version and config."""
    text = _PTX_REGISTER.sub(r"%\1", " ".join(text.replace(symbol, "kernel").split()))
    return _PTX_LABEL.sub("$", _NAMESPACE.sub(lambda m: "_ZN" + m[2][int(m[1]) :], text))


def _likeness(before: Instruction, after: Instruction) -> Likeness:
    """Of two instructions whose normalised texts agree."""
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


def _sides(kernel: Kernel) -> list[Side]:
    phase_of = block_phases(kernel)
    return [
        Side(
            i,
            phase_of[i.block],
            FILLER if kind is Bucket.FILLER else classify(i.opcode, i.operands),
        )
        for i, kind in with_buckets(kernel)
        if kind is not Bucket.PADDING
    ]


def _ptx_or_none(kernel: Kernel) -> KernelPtx | None:
    try:
        return read_kernel_ptx(kernel)
    except SassError:
        return None


@dataclass(frozen=True)
class _PtxIdentity:
    """What identifies the PTX of an instruction in both kernels.

    pair_of: PTX line to a number that the line's counterpart has, too. texts: PTX line to its
    normalised text.
    """

    pair_of: dict[int, int]
    texts: dict[int, str]


class _PtxRow(NamedTuple):
    phase: Phase
    line: int
    text: str
    name: str


def _align_ptx(
    kernels: tuple[Kernel, Kernel], ptx: tuple[KernelPtx, KernelPtx]
) -> tuple[_PtxIdentity, _PtxIdentity]:
    """Pair the PTX instructions phase by phase: by their text, then in between by their name."""
    rows = [
        [
            _PtxRow(
                found.phase(n), i.line, normalised_ptx(found.text(i.line), kernel.symbol), i.name
            )
            for n, i in enumerate(found.program.instructions)
        ]
        for kernel, found in zip(kernels, ptx, strict=True)
    ]
    pairs: list[tuple[_PtxRow, _PtxRow]] = []
    for phase in Phase:
        a, b = ([row for row in side if row.phase is phase] for side in rows)
        aligned = common_subsequence([row.text for row in a], [row.text for row in b])
        pairs += [(a[i], b[j]) for i, j in aligned]
        for in_a, in_b in gaps(aligned, len(a), len(b)):
            rest = common_subsequence([a[i].name for i in in_a], [b[j].name for j in in_b])
            pairs += [(a[in_a[i]], b[in_b[j]]) for i, j in rest]
    before, after = (
        _PtxIdentity(
            {pair[side].line: number for number, pair in enumerate(pairs)},
            {row.line: row.text for row in rows[side]},
        )
        for side in (0, 1)
    )
    return before, after


class _Matching:
    """Pairs of instructions, found step by step; indices into the two lists of sides."""

    def __init__(self, before: Sequence[Side], after: Sequence[Side]) -> None:
        self.sides = (before, after)
        self.in_place: list[tuple[int, int]] = []
        self.moved: list[tuple[int, int]] = []
        self.free = (set(range(len(before))), set(range(len(after))))

    def take(self, pairs: Iterable[tuple[int, int]], moved: bool) -> None:
        for i, j in pairs:
            (self.moved if moved else self.in_place).append((i, j))
            self.free[0].discard(i)
            self.free[1].discard(j)

    def _in_phase(self, which: int, phase: Phase) -> list[int]:
        return [i for i, side in enumerate(self.sides[which]) if side.phase is phase]

    def align(self, keys: tuple[Sequence[Hashable], Sequence[Hashable]]) -> None:
        """Match what is free and has equal keys, phase by phase, in order: nothing crosses what is
        in place already."""
        for phase in Phase:
            a, b = self._in_phase(0, phase), self._in_phase(1, phase)
            at = ({i: n for n, i in enumerate(a)}, {j: n for n, j in enumerate(b)})
            placed = sorted((at[0][i], at[1][j]) for i, j in self.in_place if i in at[0])
            for in_a, in_b in gaps(placed, len(a), len(b)):
                free_a = [a[n] for n in in_a if a[n] in self.free[0]]
                free_b = [b[n] for n in in_b if b[n] in self.free[1]]
                found = common_subsequence(
                    [keys[0][i] for i in free_a], [keys[1][j] for j in free_b]
                )
                self.take([(free_a[i], free_b[j]) for i, j in found], moved=False)

    def relocate(self, keys: tuple[Sequence[Hashable | None], Sequence[Hashable | None]]) -> None:
        """Match what is free and has equal keys wherever it stands; None matches nothing. Those of
        one phase come first."""
        for same_phase in (True, False):
            waiting: dict[Hashable, list[int]] = defaultdict(list)
            for i in sorted(self.free[0]):
                if keys[0][i] is not None:
                    phase = self.sides[0][i].phase if same_phase else None
                    waiting[keys[0][i], phase].append(i)
            found = []
            for j in sorted(self.free[1]):
                phase = self.sides[1][j].phase if same_phase else None
                candidates = waiting.get((keys[1][j], phase))
                if keys[1][j] is not None and candidates:
                    found.append((candidates.pop(0), j))
            self.take(found, moved=True)


def _keys(
    sides: Sequence[Side], capability: int, identity: _PtxIdentity | None
) -> Iterator[tuple[str, Hashable | None, Hashable | None, Hashable | None]]:
    """Of each instruction: its text; text and PTX; opcode, class and PTX; text and text of the
    PTX."""
    for side in sides:
        text = normalised(side.instruction, capability)
        if identity is None:
            yield text, text, None, text
            continue
        line = side.instruction.ptx_line
        pair = None if line is None else identity.pair_of.get(line)
        ptx = None if line is None else identity.texts.get(line)
        yield (
            text,
            None if pair is None else (text, pair),
            None if pair is None else (side.instruction.base, side.group, pair),
            None if ptx is None else (text, ptx),
        )


def diff_kernels(before: Kernel, after: Kernel) -> KernelDiff:
    """Relate each instruction of one kernel to one of another, padding left out.

    The PTX of both is aligned first: within each phase by its text without the numbers of
    registers, then by its opcodes. Machine code is then paired, each step with what the steps
    before left: what says the same and came from the same PTX, in order; the same out of order
    (moved); in order what says the same; what came from the same PTX with the same opcode
    (changed); and out of order what says the same and came from PTX that reads the same (moved).

    Which register holds what is not followed: two instructions that differ only in registers are
    called renamed, even if they read other values.
    """
    sides = (_sides(before), _sides(after))
    found = (_ptx_or_none(before), _ptx_or_none(after))
    identities: tuple[_PtxIdentity | None, _PtxIdentity | None] = (None, None)
    if found[0] is not None and found[1] is not None:
        identities = _align_ptx((before, after), (found[0], found[1]))
    of_before = zip(*_keys(sides[0], before.capability, identities[0]), strict=True)
    of_after = zip(*_keys(sides[1], after.capability, identities[1]), strict=True)
    text, text_and_ptx, opcode_and_ptx, text_and_ptx_text = zip(of_before, of_after, strict=True)
    matching = _Matching(*sides)
    matching.align(_distinct(text_and_ptx))
    matching.relocate(text_and_ptx)
    matching.align(text)
    matching.align(_distinct(opcode_and_ptx))
    matching.relocate(opcode_and_ptx)
    matching.relocate(text_and_ptx_text)
    return KernelDiff(before, after, tuple(_changes(matching, text)), identities != (None, None))


def _distinct(keys: tuple[Sequence[Hashable | None], ...]) -> tuple[list[Hashable], list[Hashable]]:
    """The keys, with each None replaced by something that nothing equals."""
    first, second = ([object() if key is None else key for key in of] for of in keys)
    return first, second


def _changes(matching: _Matching, texts: tuple[Sequence[Hashable], ...]) -> Iterator[Change]:
    before, after = matching.sides
    partner_of = {j: i for i, j in (*matching.in_place, *matching.moved)}
    moved = {j for _, j in matching.moved}

    def change(i: int | None, j: int | None) -> Change:
        if i is None:
            return Change(Likeness.ADDED, False, None, after[j])
        if j is None:
            return Change(Likeness.REMOVED, False, before[i], None)
        likeness = Likeness.CHANGED
        if texts[0][i] == texts[1][j]:
            likeness = _likeness(before[i].instruction, after[j].instruction)
        return Change(likeness, j in moved, before[i], after[j])

    for phase in Phase:
        removed = iter(
            [i for i in sorted(matching.free[0]) if before[i].phase is phase] + [len(before)]
        )
        next_removed = next(removed)
        for j, side in enumerate(after):
            if side.phase is not phase:
                continue
            i = partner_of.get(j)
            if i is not None and j not in moved:
                while next_removed < i:
                    yield change(next_removed, None)
                    next_removed = next(removed)
            yield change(i, j)
        while next_removed < len(before):
            yield change(next_removed, None)
            next_removed = next(removed)
