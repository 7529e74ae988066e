"""Blocks that a warp of a thread block may execute, from branches on its number.

A kernel with warp roles branches on its threads' number. For one warp, most registers hold unknown
values, but registers computed from the number alone hold a small range, which decides the branch.
An unknown value may be anything, so a warp is only excluded from blocks that it cannot reach.
Blocks are assumed to have one dimension. Standard library only.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from flash_helpers.gpu import WARP
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import ALWAYS, BRANCHES, CALLS, NEVER
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, Instruction, Kernel
from flash_helpers.sass.read.registers import accesses

_Range = tuple[int, int]  # the least and the largest value that lanes of the warp may hold

_REGISTER = re.compile(r"(-?)(U?R)(\d+|Z)(?:\.reuse)?")
_PREDICATE = re.compile(r"(!?)(U?P)([0-9T])")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_COMPARISONS = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
_LARGEST = 2**31 - 1
_AND = 0xC0  # as a truth table of operands a, b, c: a and b
_MOVES = frozenset({"MOV", "UMOV", "R2UR"})
_ADDITIONS = frozenset({"IADD3", "UIADD3", "VIADD", "IADD", "UIADD"})
_SHIFTS = frozenset({"SHF", "USHF"})
# All others write unknown values.
_FOLLOWED = _MOVES | _ADDITIONS | _SHIFTS | {
    "S2R", "S2UR", "SHFL", "LOP3", "ULOP3", "IMAD", "LEA", "ULEA", "ISETP", "UISETP", "PLOP3",
    "UPLOP3",
}  # fmt: skip
# Registers that a result takes at most, where the opcode does not tell.
_WIDEST = {opcodes.TENSOR_MEMORY: 128, opcodes.TEXTURE: 4, opcodes.OTHER: 4}
_DECIDED = BRANCHES | {"EXIT", "RET"}  # what ends a block, and by what it is followed


@dataclass
class _State:
    """Known values before an instruction: registers, without sign, and predicates by name."""

    registers: dict[str, _Range] = field(default_factory=dict)
    predicates: dict[str, bool] = field(default_factory=dict)

    def copy(self) -> _State:
        return _State(dict(self.registers), dict(self.predicates))

    def meet(self, other: _State) -> bool:
        """Keep the values that both states know. True if that is less than before."""
        before = len(self.registers) + len(self.predicates)
        self.registers = dict(self.registers.items() & other.registers.items())
        self.predicates = dict(self.predicates.items() & other.predicates.items())
        return len(self.registers) + len(self.predicates) < before

    def value(self, operand: str) -> _Range | None:
        """The range of a register or a constant."""
        if _NUMBER.fullmatch(operand):
            number = int(operand, 16)
            return number, number
        match = _REGISTER.fullmatch(operand)
        if match is None:
            return None
        low_high = (0, 0) if match[3] == "Z" else self.registers.get(match[2] + match[3])
        if low_high is None or not match[1]:
            return low_high
        return -low_high[1], -low_high[0]

    def truth(self, operand: str) -> bool | None:
        """The truth of a predicate; None if unknown."""
        match = _PREDICATE.fullmatch(operand)
        if match is None:
            return None
        known = True if match[3] == "T" else self.predicates.get(match[2] + match[3])
        return known if known is None else known != bool(match[1])


def is_one_dimensional(kernel: Kernel) -> bool:
    """Whether the kernel asks for no other coordinate of a thread than the first."""
    return not any(
        "SR_TID.Y" in i.operands or "SR_TID.Z" in i.operands for i in kernel.instructions
    )


def blocks_of_warps(kernel: Kernel, warps: int) -> list[frozenset[int]]:
    """The indices of the blocks that each of the first `warps` warps of a thread block may
    execute."""
    deciding = _deciding(kernel)
    return [_blocks_of_warp(kernel, deciding, warp) for warp in range(warps)]


def _deciding(kernel: Kernel) -> list[list[Instruction]]:
    """The instructions of each block on which the condition of a branch may depend. No branch reads
    results of the others."""
    found: list[list[Instruction]] = [[] for _ in kernel.blocks]
    needed: list[set[str]] = [set() for _ in kernel.blocks]  # names, where a block begins
    pending = {*range(len(kernel.blocks))}
    while pending:
        block = kernel.blocks[max(pending)]
        pending.remove(block.index)
        first, end = block.start // INSTRUCTION_BYTES, block.end // INSTRUCTION_BYTES
        instructions = kernel.instructions[first:end]
        names = {name for n in block.successors for name in needed[n]}
        if instructions[-1].base in _DECIDED:
            names |= _read(instructions[-1])
        own = []
        for i in reversed(instructions):
            words = _words(i.opcode, i.operands)
            written = {*words.registers, *words.predicates}
            if not written.isdisjoint(names):
                if i.predicate in ALWAYS:
                    names -= written
                names |= _read(i)
            elif words.base not in CALLS:  # which spoil everything
                continue
            own.append(i)
        found[block.index] = own[::-1]
        if names != needed[block.index]:
            needed[block.index] = names
            pending.update(block.predecessors)
    return found


def _read(instruction: Instruction) -> set[str]:
    """Names of the registers and predicates on which `_execute` may depend."""
    operands = instruction.operands if instruction.base in _FOLLOWED | _DECIDED else ""
    found = accesses(instruction.predicate, instruction.opcode, operands)
    return {access.name for access in found if not access.is_written}


def _blocks_of_warp(
    kernel: Kernel, deciding: Sequence[Sequence[Instruction]], warp: int
) -> frozenset[int]:
    before: dict[int, _State] = {0: _State()}
    pending = [0]
    while pending:
        block = kernel.blocks[pending.pop()]
        state = before[block.index].copy()
        for instruction in deciding[block.index]:
            _execute(instruction, state, warp)
        last = kernel.instructions[block.end // INSTRUCTION_BYTES - 1]
        for n in _following(block, last, state):
            if n not in before:
                before[n] = state.copy()
            elif not before[n].meet(state):
                continue
            pending.append(n)
    return frozenset(before)


def _following(block: Block, last: Instruction, state: _State) -> tuple[int, ...]:
    """The blocks that may come next."""
    if last.base not in _DECIDED:
        return block.successors
    conditions = [state.truth(last.predicate.removeprefix("@"))] if last.predicate else []
    if last.base in BRANCHES and "," in last.operands:
        conditions.append(state.truth(last.operands.partition(",")[0].strip()))
    if ".ANY" in last.opcode or ".DIV" in last.opcode or ".CONV" in last.opcode:
        conditions.append(None)
    behind = block.index + 1
    if False in conditions:
        return (behind,) if behind in block.successors else ()
    if None in conditions or last.target == block.end:
        return block.successors
    return tuple(n for n in block.successors if n != behind)


@dataclass(frozen=True)
class _Words:
    """An instruction's text, taken apart. `registers`, `predicates`: names of the registers and
    predicates that it may write."""

    base: str
    modifiers: frozenset[str]
    operands: tuple[str, ...]
    registers: tuple[str, ...]
    predicates: tuple[str, ...]


@lru_cache(maxsize=1 << 14)  # each warp meets the same, and each turn of a loop
def _words(opcode: str, operands: str) -> _Words:
    base, *modifiers = opcode.split(".")
    parts = tuple(operand.strip() for operand in operands.split(","))
    written = [access.name for access in accesses("", opcode, operands) if access.is_written]
    registers = [name for name in written if "R" in name]
    widest = _WIDEST.get(opcodes.classify(opcode))
    if registers and widest:
        kind, number = registers[0].rstrip("0123456789"), int(registers[0].lstrip("UR"))
        registers = [f"{kind}{number + k}" for k in range(widest)]
    predicates = [name for name in written if "P" in name]
    return _Words(base, frozenset(modifiers), parts, tuple(registers), tuple(predicates))


def _execute(instruction: Instruction, state: _State, warp: int) -> None:
    """Update the known values with the results of an instruction."""
    guard = instruction.predicate
    certain = True if guard in ALWAYS else state.truth(guard.removeprefix("@"))
    if guard in NEVER or certain is False:
        return
    words = _words(instruction.opcode, instruction.operands)
    if words.base in CALLS:
        state.registers.clear()
        state.predicates.clear()
        return
    followed = words.base in _FOLLOWED
    found = _result(words, state, warp) if followed and words.registers else None
    truths = _truths(words, state) if followed and words.predicates else {}
    for name in words.registers:
        known = found if name == words.registers[0] else None
        if known is None or (certain is None and state.registers.get(name) != known):
            state.registers.pop(name, None)
        else:
            state.registers[name] = known
    for name in words.predicates:
        truth = truths.get(name)
        if truth is None or (certain is None and state.predicates.get(name) is not truth):
            state.predicates.pop(name, None)
        else:
            state.predicates[name] = truth


def _truths(words: _Words, state: _State) -> Mapping[str, bool | None]:
    """The predicates that a comparison or a truth table writes, as far as they are known."""
    base, modifiers, operands = words.base, words.modifiers, words.operands
    target = operands[0]
    if base in ("ISETP", "UISETP") and len(operands) >= 5 and "EX" not in modifiers:
        compared = _compared(modifiers, state.value(operands[2]), state.value(operands[3]))
        other = state.truth(operands[4])
        # what decides alone: False of what must both hold, True of what either may
        decides = "OR" in modifiers
        if not decides and "AND" not in modifiers:
            return {}
        known = [compared, other]
        return {target: decides if decides in known else None if None in known else not decides}
    if base in ("PLOP3", "UPLOP3") and len(operands) >= 6:
        known = [state.truth(operand) for operand in operands[2:5]]
        table = state.value(operands[5])
        if table is None:
            return {}
        ways = {
            table[0] >> n & 1
            for n in range(8)
            if all(k is None or k == bool(n >> 2 - at & 1) for at, k in enumerate(known))
        }
        return {target: bool(ways.pop())} if len(ways) == 1 else {}
    if base in ("LOP3", "ULOP3") and _PREDICATE.fullmatch(target):
        result = _anded(operands[2:], state)
        if result is not None and (result[0] > 0 or result == (0, 0)):
            return {target: result[0] > 0}
    return {}


def _compared(modifiers: frozenset[str], a: _Range | None, b: _Range | None) -> bool | None:
    """The result of a comparison if it is the same for all lanes; None if it may differ."""
    holds = next((_COMPARISONS[m] for m in modifiers if m in _COMPARISONS), None)
    if holds is None or a is None or b is None or ("U32" in modifiers and min(*a, *b) < 0):
        return None
    # none of the comparisons changes more than once between the ends, but for the equal one
    if holds in (operator.eq, operator.ne):
        if a[1] < b[0] or b[1] < a[0]:
            return holds is operator.ne
        return holds is operator.eq if a == b and a[0] == a[1] else None
    ways = {holds(x, y) for x in a for y in b}
    return ways.pop() if len(ways) == 1 else None


def _result(words: _Words, state: _State, warp: int) -> _Range | None:
    """The register that an instruction writes, as far as it is known."""
    base, modifiers, operands = words.base, words.modifiers, words.operands
    if base in ("S2R", "S2UR"):
        return (WARP * warp, WARP * warp + WARP - 1) if operands[-1] == "SR_TID.X" else None
    if base in _MOVES:
        return state.value(operands[1]) if len(operands) == 2 else None
    if base == "SHFL":  # the value of some lane of the warp
        return state.value(operands[2])
    found: _Range | None = None
    if base in ("LOP3", "ULOP3") and "LUT" in modifiers:
        found = _anded(operands[1 + bool(_PREDICATE.fullmatch(operands[0])) :], state)
    elif base in _SHIFTS and len(operands) == 4:
        found = _shifted(modifiers, [state.value(operand) for operand in operands[1:]])
    elif base in _ADDITIONS and not {"X", "64"} & modifiers:
        terms = [state.value(o) for o in operands[1:] if not _PREDICATE.fullmatch(o)]
        known = [term for term in terms if term is not None]
        if len(known) == len(terms):
            found = (sum(low for low, _ in known), sum(high for _, high in known))
    elif base == "IMAD" and not {"X", "WIDE", "HI"} & modifiers and len(operands) == 4:
        a, b, c = (state.value(operand) for operand in operands[1:])
        if a == (0, 0) or b == (0, 0):
            found = c
        elif a and b and c and min(a[0], b[0]) >= 0:
            found = (a[0] * b[0] + c[0], a[1] * b[1] + c[1])
    elif base in ("LEA", "ULEA") and "HI" in modifiers and len(operands) == 5:
        # how a signed number is divided: nothing is added to one that is not negative
        found = state.value(operands[2]) if state.value(operands[1]) == (0, 0) else None
    return found if found and -_LARGEST <= found[0] <= found[1] <= _LARGEST else None


def _shifted(modifiers: frozenset[str], sources: list[_Range | None]) -> _Range | None:
    """The result of a funnel shift of one word: of the upper word to the right, or the lower word
    to the left."""
    low, by, high = sources
    if by is None or by[0] != by[1] or not 0 <= by[0] < 32:
        return None
    if "R" in modifiers and "HI" in modifiers and high and high[0] >= 0:
        return high[0] >> by[0], high[1] >> by[0]
    if "L" in modifiers and "HI" not in modifiers and low and low[0] >= 0:
        return low[0] << by[0], low[1] << by[0]
    return None


def _anded(operands: tuple[str, ...], state: _State) -> _Range | None:
    """The range of `a & b`, if that is the meaning of the truth table behind three operands."""
    if len(operands) < 4 or state.value(operands[3]) != (_AND, _AND):
        return None
    a, b = state.value(operands[0]), state.value(operands[1])
    if a is None or b is None or b[0] != b[1]:
        return None
    if a[0] < 0:
        return None
    mask = b[0] & 0xFFFFFFFF
    # the upper bits that all values have in common, and any lower ones
    any_below = (1 << (a[0] ^ a[1]).bit_length()) - 1
    return a[0] & ~any_below & mask, (a[0] | any_below) & mask
