"""Instructions on which the jumps of a kernel depend, block by block. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flash_helpers.sass.analyse.lane_values import Words
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import ALWAYS, BRANCHES, CALLS, COMPUTED_JUMPS, reach
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, Instruction, Kernel
from flash_helpers.sass.read.registers import accesses

DECIDED = BRANCHES | CALLS | COMPUTED_JUMPS | {"EXIT", "RET"}  # what ends a block
LIMIT = "register limit"  # the name under which a state holds what USETMAXREG set

# Registers that a result takes at most, where the opcode does not tell.
_WIDEST = {opcodes.TENSOR_MEMORY: 128, opcodes.TEXTURE: 4, opcodes.OTHER: 4}


@dataclass(frozen=True)
class Slices:
    """Instructions of each block on which the condition of a jump may depend, in order, and the
    registers and predicates from before a block on which such a condition depends."""

    deciding: Sequence[Sequence[Instruction]]
    needed: Sequence[set[str]]

    @classmethod
    def of(cls, kernel: Kernel, goes_on: Callable[[Words], bool]) -> Slices:
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
            if instructions[-1].base in DECIDED:
                names |= read_by(instructions[-1])
            own = []
            for i in reversed(instructions):
                words = words_of(i.opcode, i.operands)
                if not names.isdisjoint(words.written):
                    if i.predicate in ALWAYS:
                        names.difference_update(words.written)
                    names |= read_by(i) if goes_on(words) else read_by_guard(i)
                elif words.base != "USETMAXREG":
                    continue
                own.append(i)
            deciding[block.index] = own[::-1]
            if names != needed[block.index]:
                needed[block.index] = names
                pending.update(block.predecessors)
        return cls(deciding, [names | {LIMIT} for names in needed])


def last_of(kernel: Kernel, block: Block) -> Instruction:
    """The last instruction of a block."""
    return kernel.instructions[block.end // INSTRUCTION_BYTES - 1]


def read_by(instruction: Instruction) -> set[str]:
    """Names of the registers and predicates that an instruction reads, the guard's too."""
    return {*words_of(instruction.opcode, instruction.operands).read} | read_by_guard(instruction)


def read_by_guard(instruction: Instruction) -> set[str]:
    """The predicate that an instruction reads as its guard."""
    if instruction.predicate in ALWAYS:
        return set()
    return {instruction.predicate.removeprefix("@").lstrip("!")}


@lru_cache(maxsize=256)
def written_by_routine(kernel: Kernel, target: int | None) -> frozenset[str] | None:
    """Names that a routine of a kernel may write; None if its code is not known."""
    start = next((block.index for block in kernel.blocks if block.start == target), None)
    if start is None:
        return None
    blocks = reach(start, lambda n: kernel.blocks[n].successors)
    own = [i for i in kernel.instructions if i.block in blocks]
    if any(i.base in CALLS and i.target is None for i in own):
        return None
    return frozenset(n for i in own for n in words_of(i.opcode, i.operands).written)


@lru_cache(maxsize=1 << 14)  # each warp meets the same, and each turn of a loop
def words_of(opcode: str, operands: str) -> Words:
    """An instruction's text, taken apart."""
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
