"""Values that registers hold, and whether two kernels name them consistently.

A register holds one value after another, and compilers give the values of two builds different
registers. A value here is a web: writes of a register and the reads that they reach, joined where
several writes reach one read. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from flash_helpers.sass.read.flow import ALWAYS
from flash_helpers.sass.read.opcodes import IMAD_MOVE, classify
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, Instruction, Kernel
from flash_helpers.sass.read.registers import Access, operation_accesses

Value = tuple[int, str]  # the place that identifies the value, and the register's name there

T = TypeVar("T", bound=Hashable)

_ENTRY = -1  # place of the initial value of a register


@lru_cache(maxsize=2)  # each step of a progression is compared with its parent, then is one
def register_values(kernel: Kernel) -> Sequence[tuple[Value, ...]]:
    """The value of each of the `accesses` of each instruction.

    A write under a guard joins the register's old value, unless the reads have the same guard, or
    another write has the opposite one. The initial value of a register is identified by the
    register's name. A copy has the value of its original. Calls are assumed to change nothing.
    """
    return _Webs(kernel).values()


class _Webs:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.accesses = [operation_accesses(i) for i in kernel.instructions]
        self.joined: dict[Value, Value] = {}
        self.demanded: list[tuple[Block, str]] = []
        # of each block and register, the instructions that write it
        self.writes: dict[tuple[int, str], list[int]] = defaultdict(list)
        for n, (instruction, accesses) in enumerate(
            zip(kernel.instructions, self.accesses, strict=True)
        ):
            for name in {access.name for access in accesses if access.is_written}:
                self.writes[instruction.block, name].append(n)

    def values(self) -> list[tuple[Value, ...]]:
        found = [
            tuple(self._value(n, access) for access in accesses)
            for n, accesses in enumerate(self.accesses)
        ]
        while self.demanded:
            block, name = self.demanded.pop()
            entry = self._entry(block, name)
            for n in block.predecessors:
                before = self.kernel.blocks[n]
                end = before.end // INSTRUCTION_BYTES
                self._join(entry, self._reaching(before, end, name, ""))
            if block.index == 0 or not block.predecessors:
                self._join(entry, (_ENTRY, name))
        rooted = [tuple(map(self._root, values)) for values in found]
        copied = self._copies(rooted)
        return [tuple(copied.get(value, value) for value in values) for values in rooted]

    def _copies(self, found: Sequence[Sequence[Value]]) -> dict[Value, Value]:
        """The original of each value that is a copy. Original and copy are written at one place
        each: a register that is written again elsewhere may have changed since it was copied."""
        writes = Counter(
            value
            for accesses, values in zip(self.accesses, found, strict=True)
            for access, value in zip(accesses, values, strict=True)
            if access.is_written
        )
        source_of: dict[Value, Value] = {}
        for n, values in enumerate(found):
            if _is_copy(self.kernel.instructions[n]) and len(values) == 2:
                copy, source = values
                source = source_of.get(source, source)
                if writes[copy] == writes[source] == 1 and not is_fixed(copy):
                    source_of[copy] = source
        return source_of

    def _value(self, n: int, access: Access) -> Value:
        if access.is_written:
            return n, access.name
        instruction = self.kernel.instructions[n]
        block = self.kernel.blocks[instruction.block]
        return self._reaching(block, n, access.name, instruction.predicate)

    def _reaching(self, block: Block, n: int, name: str, guard: str) -> Value:
        """The value of a register before instruction `n` of a block, read under a guard."""
        covered = set() if guard in ALWAYS else {_opposite(guard)}
        found: list[Value] = []
        writes = self.writes.get((block.index, name), [])
        for write in reversed(writes[: bisect_left(writes, n)]):
            guard = self.kernel.instructions[write].predicate
            known = guard not in ALWAYS and not self._is_written(guard, block, write, n)
            if known and guard in covered:
                continue
            found.append((write, name))
            if guard in ALWAYS or (known and _opposite(guard) in covered):
                break
            if known:
                covered.add(guard)
        else:
            found.append(self._entry(block, name))
        for other in found[1:]:
            self._join(found[0], other)
        return found[0]

    def _is_written(self, guard: str, block: Block, start: int, end: int) -> bool:
        """Whether a guard's predicate changes from one instruction of a block to another."""
        writes = self.writes.get((block.index, guard.lstrip("@!")), [])
        return bisect_left(writes, start) < bisect_left(writes, end)

    def _entry(self, block: Block, name: str) -> Value:
        """The value in a register at the start of a block; instructions have numbers from 0."""
        entry = (_ENTRY - 1 - block.index, name)
        if entry not in self.joined:
            self.joined[entry] = entry
            self.demanded.append((block, name))
        return entry

    def _root(self, value: Value) -> Value:
        root = value
        while self.joined.setdefault(root, root) != root:
            root = self.joined[root]
        while self.joined[value] != root:
            self.joined[value], value = root, self.joined[value]
        return root

    def _join(self, a: Value, b: Value) -> None:
        a, b = sorted((self._root(a), self._root(b)), key=lambda value: value[0] == _ENTRY)
        self.joined[a] = b


def _is_copy(instruction: Instruction) -> bool:
    """Whether an instruction copies one register into another, and nothing else."""
    if instruction.predicate not in ALWAYS:
        return False
    if instruction.base in ("MOV", "UMOV"):
        return True
    return classify(instruction.opcode, instruction.operands) == IMAD_MOVE


def _opposite(guard: str) -> str:
    return guard.replace("@!", "@") if guard.startswith("@!") else guard.replace("@", "@!")


def one_to_one(
    pairs: Iterable[tuple[Sequence[T], Sequence[T]]], fixed: Iterable[T] = ()
) -> dict[T, T]:
    """The one-to-one renaming that agrees with most names in pairs of equally long sequences. Where
    names contradict each other, the renaming that stands in more pairs wins, or else the first one.

    `fixed`: names that stand for themselves.
    """
    votes = Counter(both for pair in pairs for both in zip(*pair, strict=True))
    found = {name: name for name in fixed}
    taken = set(found)
    for (a, b), _ in votes.most_common():
        if a not in found and b not in taken:
            found[a] = b
            taken.add(b)
    return found


def agrees(renaming: Mapping[T, T], pair: tuple[Sequence[T], Sequence[T]]) -> bool:
    """Whether one sequence of names, renamed, is the other."""
    return all(renaming.get(a) == b for a, b in zip(*pair, strict=True))


def is_fixed(value: Value) -> bool:
    """Whether a value is the initial value of a register."""
    return value[0] == _ENTRY
