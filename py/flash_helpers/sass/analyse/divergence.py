"""Values in which the warps of a thread block may differ, and the jumps that depend on them.

The lattice of a value is a set of origins; a value without NUMBER and OWN is the same in all warps.

- A value computed from the thread's number has NUMBER. Lane numbers and lane masks do not: they
  differ among the lanes of a warp, and each warp has the same.
- A value that comes with the launch has LAUNCH: an argument, the number of the block, a word of
  memory. The text does not tell it, but all warps have it in common.
- A value has OWN where a warp may differ from the others in a way that no number tells.

The result of a load depends on its address:

- An address that may differ between warps brings OWN. So do local memory, of which each thread has
  its own, and tensor memory, of which each warp reads its own lanes.
- A weak load from an address that all warps have in common brings the same to all warps, from
  constant, global or shared memory: such as the index of a tile, which one thread writes for its
  block. A write between the loads of two warps must be ordered after the one and before the other;
  else it is a data race, whose behaviour is undefined (PTX ISA, "Memory Consistency Model", "Data
  races"). A barrier of the block cannot order it so, since both warps load on one side of it.
  A slot that is handed to one warp after the other can; such a queue is taken for a broadcast.
- A strong load (`LDG.E.STRONG`) is one that may race, as where a flag is polled: OWN, like the
  results of atomics, of SYNCS (whether a phase is over yet), of TRY_ALLOC, of clocks, and of %smid
  and %warpid, which the PTX ISA calls volatile ("Special Registers").

Shuffles, votes and reductions of a warp differ between warps if their operands do. Each warp has
its own rows of the accumulators of HGMMA. Where warps take different ways and meet again, what was
written on one of the ways may differ: behind a loop of differing numbers of turns as well.
Standard library only.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

from flash_helpers.sass.analyse.lane_values import Words
from flash_helpers.sass.analyse.slices import (
    DECIDED,
    Slices,
    last_of,
    read_by,
    words_of,
    written_by_routine,
)
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import ALWAYS, CALLS, reach
from flash_helpers.sass.read.records import Block, Instruction, Kernel


class Origin(enum.Flag):
    """Origins of a value, as the module describes."""

    TOLD = 0
    NUMBER = enum.auto()
    LAUNCH = enum.auto()
    OWN = enum.auto()

    @property
    def differs(self) -> bool:
        """Whether warps may differ in the value."""
        return bool(self & (Origin.NUMBER | Origin.OWN))

    @property
    def is_size(self) -> bool:
        """Whether a branch on the value compares the thread's number with a size of the launch."""
        return self == Origin.NUMBER | Origin.LAUNCH


_SPECIAL = frozenset({"S2R", "S2UR", "CS2R", "CS2UR"})
_TOLD = re.compile(r"SRZ$|SR_(NTID|NWARPID|LANE|[ELG][TQE]MASK)")
_OF_LAUNCH = re.compile(r"SR_(N?CTAID|Cga|SMEMSZ)")
_OF_THREAD = re.compile(r"SR_TID")
# Bank 0 holds the sizes of the launch and the arguments; other banks are filled by the compiler.
_ARGUMENT = re.compile(r"\bc\[0x0\]|\bcx\[")
_LOADS = frozenset(
    {opcodes.CONSTANT_LOAD, opcodes.GLOBAL_LOAD, opcodes.SHARED_LOAD, opcodes.LDMATRIX}
    | {opcodes.TEXTURE}
)
_COMPUTING = frozenset(opcodes.CLASSES) - {
    *(opcodes.TENSOR_MEMORY, opcodes.LOCAL_LOAD, opcodes.ATOMIC, opcodes.BULK_COPY),
    *(opcodes.BARRIER, opcodes.CONTROL_FLOW, opcodes.SPECIAL_REGISTER, opcodes.OTHER),
}
# B2R.RESULT is a reduction of a whole barrier.
_OF_BLOCK = frozenset({"B2R", "B2UR"})


def origin_of(words: Words, read: Origin) -> Origin:
    """The origin of an instruction's results. `read`: that of the operands and the guard."""
    if words.base in _SPECIAL:
        source = words.operands[-1]
        if _TOLD.match(source):
            return read
        if _OF_LAUNCH.match(source):
            return read | Origin.LAUNCH
        return read | (Origin.NUMBER if _OF_THREAD.match(source) else Origin.OWN)
    if words.base in _OF_BLOCK:
        return Origin.LAUNCH
    if any(_ARGUMENT.search(operand) for operand in words.operands):
        read |= Origin.LAUNCH
    kind = opcodes.classify(words.base)
    if kind in _LOADS and words.base != "SUATOM" and "STRONG" not in words.modifiers:
        indexed = kind != opcodes.CONSTANT_LOAD or bool(words.read)
        brought = Origin.OWN if read.differs else Origin.LAUNCH
        return read | brought if indexed else read
    computed = kind in _COMPUTING - _LOADS and words.base not in opcodes.GROUP_TENSOR
    return read if computed else read | Origin.OWN


def jump_origins(kernel: Kernel) -> Mapping[int, Origin]:
    """The origins of the conditions of jumps, by the blocks that they end."""
    return _Divergence(kernel).found


class _Divergence:
    """The origins of values before each block, followed until they stay."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.slices = Slices.of(kernel, lambda words: True)
        self.found: dict[int, Origin] = {}
        self._before: list[dict[str, Origin]] = [{} for _ in kernel.blocks]
        self._behind = _post_dominators(kernel)
        self._pending = {*range(len(kernel.blocks))}
        while self._pending:
            block = kernel.blocks[min(self._pending)]
            self._pending.remove(block.index)
            self._follow(block)

    def _follow(self, block: Block) -> None:
        values = {**self._before[block.index]}
        for i in self.slices.deciding[block.index]:
            words = words_of(i.opcode, i.operands)
            new = origin_of(words, self._read(i, values))
            for name in words.written:
                kept = Origin.TOLD if i.predicate in ALWAYS else _of(values, name)
                values[name] = new | kept
        last = last_of(self.kernel, block)
        if last.base in CALLS:
            changed = written_by_routine(self.kernel, last.target)
            needed = {n for to in block.successors for n in self.slices.needed[to]}
            names = needed if changed is None else needed & changed
            values |= dict.fromkeys(names, Origin.OWN)
        for n in block.successors:
            self._pass(n, values)
        if last.base in DECIDED:
            told = self._read(last, values) | self.found.get(block.index, Origin.TOLD)
            if told != self.found.get(block.index):
                self.found[block.index] = told
                if told.differs:
                    self._meet(block, told)

    @staticmethod
    def _read(instruction: Instruction, values: Mapping[str, Origin]) -> Origin:
        found = Origin.TOLD
        for name in read_by(instruction):
            found |= _of(values, name)
        return found

    def _pass(self, block: int, values: Mapping[str, Origin]) -> None:
        """Add origins to those of values before a block."""
        before = self._before[block]
        for name in self.slices.needed[block] & values.keys():
            if values[name] not in _of(before, name):
                before[name] = _of(before, name) | values[name]
                self._pending.add(block)

    def _meet(self, block: Block, origin: Origin) -> None:
        """Let values differ where warps meet that took different ways from a jump: those which are
        written on the ways."""
        ends = self._behind[block.index] - {block.index}

        def onwards(n: int) -> tuple[int, ...]:
            return () if n in ends else self.kernel.blocks[n].successors

        ways = [reach(n, onwards) for n in block.successors]
        passed = set().union(*ways)
        written = {
            name
            for n in passed - ends
            for i in self.slices.deciding[n]
            for name in words_of(i.opcode, i.operands).written
        }
        for n in passed:
            if sum(n in way for way in ways) > 1:
                self._pass(n, dict.fromkeys(written, origin))


def _of(values: Mapping[str, Origin], name: str) -> Origin:
    return values.get(name, Origin.TOLD)


def _post_dominators(kernel: Kernel) -> list[set[int]]:
    """Of each block, the blocks that every way from it to an end of the kernel passes, itself
    included."""
    all_ = {*range(len(kernel.blocks))}
    found = [{*all_} for _ in kernel.blocks]
    pending = {*all_}
    while pending:
        block = kernel.blocks[max(pending)]
        pending.remove(block.index)
        ends = not block.successors or last_of(kernel, block).base == "EXIT"
        common = set() if ends else set.intersection(*(found[n] for n in block.successors))
        new = common | {block.index}
        if new != found[block.index]:
            found[block.index] = new
            pending.update(block.predecessors)
    return found
