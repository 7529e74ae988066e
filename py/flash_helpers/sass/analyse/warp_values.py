"""Ways of one warp of a thread block through a kernel, from branches on the warp's number.

A kernel with warp roles branches on its threads' number. For one warp, the registers computed from
this number alone are known (`lane_values`), and such a branch is decided. Where a branch depends on
anything else, the warp may take each way, so that a warp is only excluded from blocks that it
cannot reach. Whether the warps then differ is not known if the condition was computed from the
number, too. A block is assumed to have one dimension, unless the kernel asks for the others: then
no number of a warp tells its threads. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flash_helpers.sass.analyse.lane_values import (
    Lanes,
    WarpState,
    Words,
    differs,
    each_lane,
    is_followed,
    written_values,
)
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import ALWAYS, BRANCHES, CALLS, COMPUTED_JUMPS, reach
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, Instruction, Kernel
from flash_helpers.sass.read.registers import accesses

# Registers that a result takes at most, where the opcode does not tell.
_WIDEST = {opcodes.TENSOR_MEMORY: 128, opcodes.TEXTURE: 4, opcodes.OTHER: 4}
# Where constant bank 0 holds blockDim.x, as the code that ptxas 13.0 makes of it shows.
_THREADS, _THREADS_FROM_100 = 0x0, 0x360
_DECIDED = BRANCHES | CALLS | COMPUTED_JUMPS | {"EXIT", "RET"}  # what ends a block
_BY_LANES = (".ANY", ".DIV", ".CONV")  # branches on what the lanes of a warp have in common
_LIMIT = "register limit"  # the name under which a state holds what USETMAXREG set


@dataclass(frozen=True)
class Decision:
    """The ways that a warp takes at the end of a block. `ways`: the blocks that come next. `known`:
    whether the condition is. `varies`: whether it was computed from the thread's number."""

    ways: tuple[int, ...]
    known: bool
    varies: bool


@dataclass(frozen=True)
class WarpWays:
    """The blocks that a warp may execute. `decisions`: by the block that a jump ends. `limits`:
    registers per thread by USETMAXREG where a block begins; 0 where it was not executed before,
    None where it is not known. `at_exit`: the same numbers where the warp may end."""

    decisions: Mapping[int, Decision]
    limits: Mapping[int, int | None]
    at_exit: frozenset[int | None]

    @property
    def blocks(self) -> frozenset[int]:
        """Indices of the blocks."""
        return frozenset(self.limits)


def _is_one_dimensional(kernel: Kernel) -> bool:
    """Whether the kernel asks for no other coordinate of a thread than the first."""
    return not any(
        "SR_TID.Y" in i.operands or "SR_TID.Z" in i.operands for i in kernel.instructions
    )


def ways_of_warps(kernel: Kernel, threads: int, warps: int) -> list[WarpWays]:
    """The ways of the first `warps` warps of a thread block of a number of threads."""
    slices = _Slices.of(kernel, is_followed)
    varying = _varying(kernel)
    constants = {
        bank: dict(zip(range(0, len(data), 4), memoryview(data).cast("I"), strict=True))
        for bank, data in kernel.constants.items()
    }
    if not _is_one_dimensional(kernel):
        return [_ways_of_warp(kernel, slices, varying, WarpState(None, constants))] * warps
    constants[0] = {_THREADS if kernel.capability < 100 else _THREADS_FROM_100: threads}
    return [
        _ways_of_warp(kernel, slices, varying, WarpState(warp, constants)) for warp in range(warps)
    ]


@dataclass(frozen=True)
class _Slices:
    """Instructions of each block on which the condition of a jump may depend, in order, and the
    registers and predicates from before a block on which such a condition depends."""

    deciding: Sequence[Sequence[Instruction]]
    needed: Sequence[set[str]]

    @classmethod
    def of(cls, kernel: Kernel, goes_on: Callable[[Words], bool]) -> _Slices:
        """The slices of a kernel. None of its jumps depends on results of the other instructions,
        but through those of which `goes_on` is false."""
        deciding: list[list[Instruction]] = [[] for _ in kernel.blocks]
        needed: list[set[str]] = [set() for _ in kernel.blocks]
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
                if not names.isdisjoint(words.written):
                    if i.predicate in ALWAYS:
                        names.difference_update(words.written)
                    names |= _read(i) if goes_on(words) else _read_by_guard(i)
                elif words.base != "USETMAXREG":
                    continue
                own.append(i)
            deciding[block.index] = own[::-1]
            if names != needed[block.index]:
                needed[block.index] = names
                pending.update(block.predecessors)
        return cls(deciding, [names | {_LIMIT} for names in needed])


def _varying(kernel: Kernel) -> frozenset[int]:
    """The blocks whose jumps depend on values that were computed from the thread's number."""
    slices = _Slices.of(kernel, lambda words: True)
    before: list[set[str]] = [set() for _ in kernel.blocks]  # names of registers that vary
    found = set()
    pending = {*range(len(kernel.blocks))}
    while pending:
        block = kernel.blocks[min(pending)]
        pending.remove(block.index)
        names = {*before[block.index]}
        for i in slices.deciding[block.index]:
            words = _words(i.opcode, i.operands)
            if differs(words) or not names.isdisjoint(_read(i)):
                names.update(words.written)
            elif i.predicate in ALWAYS:
                names.difference_update(words.written)
        last = kernel.instructions[block.end // INSTRUCTION_BYTES - 1]
        if not names.isdisjoint(_read(last)):
            found.add(block.index)
        if last.base in CALLS:
            changed = _written_by(kernel, last.target)
            names |= (
                {n for to in block.successors for n in slices.needed[to]}
                if changed is None
                else changed
            )
        for n in block.successors:
            passed = names & slices.needed[n]
            if not passed <= before[n]:
                before[n] |= passed
                pending.add(n)
    return frozenset(found)


def _read(instruction: Instruction) -> set[str]:
    """Names of the registers and predicates that an instruction reads, the guard's too."""
    return {*_words(instruction.opcode, instruction.operands).read} | _read_by_guard(instruction)


def _read_by_guard(instruction: Instruction) -> set[str]:
    return set() if instruction.predicate in ALWAYS else {_guard(instruction).lstrip("!")}


def _guard(instruction: Instruction) -> str:
    return instruction.predicate.removeprefix("@")


def _runs(instruction: Instruction, state: WarpState) -> Lanes | None:
    """The value of an instruction's guard."""
    return 1 if instruction.predicate in ALWAYS else state.value(_guard(instruction))


def _ways_of_warp(
    kernel: Kernel, slices: _Slices, varying: Collection[int], start: WarpState
) -> WarpWays:
    """The ways from a state at the entry. `varying`: blocks whose jumps depend on the thread's
    number."""
    start.set(_LIMIT, 0)
    before = {0: start}
    decisions: dict[int, Decision] = {}
    at_exit: dict[int, int | None] = {}
    pending = {0}
    while pending:
        block = kernel.blocks[min(pending)]  # mostly after the blocks that lead to it
        pending.remove(block.index)
        state = before[block.index].only(slices.needed[block.index])
        for instruction in slices.deciding[block.index]:
            _execute(instruction, state)
        last = kernel.instructions[block.end // INSTRUCTION_BYTES - 1]
        decision = _decision(kernel, block, state, block.index in varying)
        if last.base in _DECIDED:
            decisions[block.index] = decision
        if last.base == "EXIT" and (not decision.known or not decision.ways):
            at_exit[block.index] = _limit(state)
        for n in decision.ways:
            passed = state.only(slices.needed[n])
            if last.base in CALLS and n == block.index + 1:
                _forget_written(kernel, last, passed, slices.needed[n])
            if n not in before:
                before[n] = passed
                pending.add(n)
            elif before[n].meet(passed):
                pending.add(n)
    limits = {n: _limit(state) for n, state in before.items()}
    return WarpWays(decisions, limits, frozenset(at_exit.values()))


def _limit(state: WarpState) -> int | None:
    lanes = state.values.get(_LIMIT)
    return lanes if isinstance(lanes, int) else None


def _forget_written(kernel: Kernel, call: Instruction, state: WarpState, needed: set[str]) -> None:
    """Forget the values of registers that a called routine may write."""
    changed = _written_by(kernel, call.target)
    for name in needed if changed is None else needed & changed:
        state.set(name, None)


@lru_cache(maxsize=256)
def _written_by(kernel: Kernel, target: int | None) -> frozenset[str] | None:
    """Names that a routine of a kernel may write; None if its code is not known."""
    start = next((block.index for block in kernel.blocks if block.start == target), None)
    if start is None:
        return None
    blocks = reach(start, lambda n: kernel.blocks[n].successors)
    own = [i for i in kernel.instructions if i.block in blocks]
    if any(i.base in CALLS and i.target is None for i in own):
        return None
    return frozenset(n for i in own for n in _words(i.opcode, i.operands).written)


def _decision(kernel: Kernel, block: Block, state: WarpState, varies: bool) -> Decision:
    """The blocks that may come next."""
    last = kernel.instructions[block.end // INSTRUCTION_BYTES - 1]
    if last.base not in _DECIDED:
        return Decision(block.successors, True, False)
    conditions = [_runs(last, state)]
    if last.base in BRANCHES and "," in last.operands:
        conditions.append(state.value(last.operands.partition(",")[0].strip()))
    if any(kind in last.opcode for kind in _BY_LANES):
        conditions.append(None)
    behind = tuple(n for n in block.successors if n == block.index + 1)
    ahead = tuple(n for n in block.successors if n != block.index + 1)
    if 0 in conditions:
        return Decision(behind, True, varies)
    known = None not in conditions
    if last.target == block.end:
        ahead = behind
    elif last.base in CALLS:
        ahead = block.successors  # and comes back
    elif last.base in COMPUTED_JUMPS:
        targets = _targets(kernel, block, last, state)
        ahead, known = (block.successors, False) if targets is None else (targets, known)
    if any(condition != 1 for condition in conditions):
        ahead = tuple(dict.fromkeys((*ahead, *behind)))
    return Decision(ahead, known, varies)


def _targets(
    kernel: Kernel, block: Block, jump: Instruction, state: WarpState
) -> tuple[int, ...] | None:
    """The blocks that a computed jump goes to; None if they are not known.

    `BRX R4, -0x20` goes to the sum of R4, the number, and the address of the next instruction.
    """
    parts = [part.strip() for part in jump.operands.split(",")]
    given, offset = state.value(parts[0]), state.value(parts[-1])
    starts = {kernel.blocks[n].start: n for n in block.successors}
    if not jump.base.startswith("BRX") or len(parts) != 2 or given is None or offset is None:
        return None
    told = each_lane(lambda base, number: base + number + block.end, given, offset)
    addresses = {told} if isinstance(told, int) else {*told}
    return tuple(sorted(map(starts.__getitem__, addresses))) if addresses <= {*starts} else None


def _execute(instruction: Instruction, state: WarpState) -> None:
    """Update the known values with the results of an instruction."""
    runs = _runs(instruction, state)
    if runs == 0:
        return
    words = _words(instruction.opcode, instruction.operands)
    if words.base == "USETMAXREG":
        found = {_LIMIT: state.value(words.operands[-1])}
    else:
        found = written_values(words, state)
    for name, new in found.items():
        state.set(name, _guarded(new, state.values.get(name), runs))


def _guarded(new: Lanes | None, old: Lanes | None, runs: Lanes | None) -> Lanes | None:
    """The value of a register behind a write under a guard."""
    if runs == 1 or new == old:
        return new
    if new is None or old is None or runs is None:
        return None
    return each_lane(lambda a, b, p: a if p else b, new, old, runs)


@lru_cache(maxsize=1 << 14)  # each warp meets the same, and each turn of a loop
def _words(opcode: str, operands: str) -> Words:
    base, *modifiers = opcode.split(".")
    parts = tuple(operand.strip() for operand in operands.split(","))
    found = accesses("", opcode, operands)
    written = [access.name for access in found if access.is_written]
    registers = [name for name in written if "R" in name]
    widest = _WIDEST.get(opcodes.classify(opcode))
    if registers and widest:
        kind, number = registers[0].rstrip("0123456789"), int(registers[0].lstrip("UR"))
        registers = [f"{kind}{number + k}" for k in range(widest)]
    others = [name for name in written if "R" not in name]
    read = {access.name for access in found if not access.is_written}
    return Words(base, frozenset(modifiers), parts, (*registers, *others), tuple(read))
