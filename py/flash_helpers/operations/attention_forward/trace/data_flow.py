"""The writers of the registers that a kernel's instructions read, in its PTX."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from flash_helpers.ptx.read.flow import Program
from flash_helpers.ptx.read.module import Instruction, Operand, Register


class DataFlow:
    """Which writes of a register reach an instruction, on some path, seen through moves."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._position = {i.line: n for n, i in enumerate(program.instructions)}
        self._writes: dict[str, list[int]] = defaultdict(list)
        for position, instruction in enumerate(program.instructions):
            for name in _written(instruction):
                self._writes[name].append(position)
        self._before: list[list[int]] = [[] for _ in program.blocks]
        for b, block in enumerate(program.blocks):
            for following in {*block.targets, block.next} - {-1}:
                self._before[following].append(b)

    def sources(self, reader: Instruction, operand: Operand) -> list[Instruction]:
        """The instructions other than moves that an operand's value may come from."""
        return [i for i in self.through_moves(reader, operand) if i.name != "mov"]

    def through_moves(self, reader: Instruction, operand: Operand) -> list[Instruction]:
        """All writers of an operand's value and, on the way to them, of its copies."""
        found: dict[int, Instruction] = {}
        waiting = [(reader, operand)]
        for at, register in waiting:
            if not isinstance(register, Register):
                continue
            for writer in self._reaching(self._position[at.line], register.name):
                if writer.line not in found:
                    found[writer.line] = writer
                    if writer.name == "mov":
                        waiting.append((writer, writer.operands[1]))
        return list(found.values())

    def shuffle_behind(self, instruction: Instruction) -> Instruction | None:
        """The shuffle that gives one of the instruction's sources."""
        for operand in instruction.operands[1:]:
            for source in self.sources(instruction, operand):
                if source.name == "shfl":
                    return source
        return None

    def row_sums(self) -> list[Instruction]:
        """Each shuffle that begins the sum of a row: its result is added, and its value was not
        shuffled before."""
        sums = [
            shuffle
            for i in self._program.instructions
            if i.name == "add" and "f32" in i.types
            for shuffle in [self.shuffle_behind(i)]
            if shuffle is not None
        ]
        return [
            shuffle
            for shuffle in sums
            if not any(map(self.shuffle_behind, self.sources(shuffle, shuffle.operands[1])))
        ]

    def _reaching(self, position: int, name: str) -> list[Instruction]:
        """The writes of a register that reach an instruction."""
        program, writes = self._program, self._writes[name]
        found: list[Instruction] = []
        seen: set[int] = set()
        waiting = [(program.block_of[position], position)]
        for b, end in waiting:
            for write in reversed(writes[: bisect_left(writes, end)]):
                if write < program.blocks[b].start:
                    waiting += self._unseen_before(b, seen)
                    break
                found.append(program.instructions[write])
                if found[-1].guard is None:
                    break
            else:
                waiting += self._unseen_before(b, seen)
        return found

    def _unseen_before(self, block: int, seen: set[int]) -> list[tuple[int, int]]:
        """The blocks before a block, each with its end."""
        new = [b for b in self._before[block] if b not in seen]
        seen.update(new)
        return [(b, self._program.blocks[b].end) for b in new]


def _written(instruction: Instruction) -> list[str]:
    if instruction.name in ("st", "bar", "bra", "cp") or not instruction.operands:
        return []
    target = instruction.operands[0]
    parts = getattr(target, "elements", None) or (getattr(target, "first", target),)
    return [part.name for part in parts if isinstance(part, Register)]
