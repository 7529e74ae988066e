"""Live registers of a kernel, found backwards through its control flow.

The counts are those of `nvdisasm -plr -lrm count`, which has none for cubins before CUDA 13, and
which spends most of its time on them. Its rules were found by comparing all kernels of the library:

- R1, the stack pointer, is live to the end of the kernel.
- Behind a call nothing is live that its routine has written, and in a routine nothing that only its
  callers need. A jump of sm_80 to sm_89 that is written as a CALL (see `flow`) is a jump here.
  nvdisasm takes it for a call, and forgets registers of the loop that it closes.
- A block also begins at the instructions that the cubin's attributes name: those that lanes execute
  together, and those of mbarriers.
- A register that an instruction writes under a guard may keep its former value, which is live
  before it. But a block asks nothing of the blocks before it for a register that it only writes
  under a guard and never reads. A uniform guard counts as none.

docs/sass.md has the share of equal counts. nvdisasm counts no predicate for the P2R that reads it:
for sm_90 that is every difference. At the end of a loop with HMMA, it keeps three operands of the
last HMMA, which the loop's head writes. Other differences for sm_90a, of one to four registers at
about twenty instructions of a kernel at most, are not explained.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import ALWAYS, CALLS, COMPUTED_JUMPS, may_execute, reach
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, LiveRegisters, Operation
from flash_helpers.sass.read.registers import accesses, unprinted_reads

# Bits of a set of registers: the first of each kind.
_FIRST_BIT = {"R": 0, "P": 256, "UR": 264, "UP": 328, "B": 336}
_KINDS = (("R", 256), ("P", 8), ("UR", 64), ("UP", 8))  # in the order of LiveRegisters
_STACK_POINTER = 1 << 1
_ALL = -1


def why_unknown(
    operations: Sequence[Operation], jump_tables: Mapping[int, Sequence[int]], is_function: bool
) -> str:
    """The reason why the live registers of a kernel are not known; "" if they are."""
    if is_function:
        return "it is a device function, and its callers tell what is live at its end"
    for operation in operations:
        if not may_execute(operation):
            continue
        if operation.base in COMPUTED_JUMPS and operation.address not in jump_tables:
            return f"the jump at {operation.address:#06x} has no table of targets"
        if operation.base in CALLS and operation.target is None:
            return f"the call at {operation.address:#06x} leaves the kernel's own code"
        if opcodes.classify(operation.opcode) == opcodes.OTHER:
            return f"the opcode {operation.opcode} is not known"
    return ""


def live_registers(
    operations: Sequence[Operation], blocks: Sequence[Block], starts: Sequence[int] = ()
) -> list[LiveRegisters]:
    """The live registers at each instruction of a kernel: those that it reads, writes, or leaves
    with a value needed later.

    `blocks`: its basic blocks, as `flow.control_flow` finds them. `starts`: addresses that begin a
    block, too.
    """
    uses = [_Use.of(operation) for operation in operations]
    spans = _split(blocks, _written_by_routines(operations, blocks, uses), starts)
    needed = [0] * len(spans)  # before each span
    passed = []
    for span in spans:
        exposed = written = 0
        for use in reversed(uses[span.first : span.end]):
            exposed = exposed & ~use.replaced | use.read
            written |= use.written
        passed.append((exposed, ~written))
    pending = set(range(len(spans)))
    while pending:
        n = max(pending)
        pending.discard(n)
        exposed, kept = passed[n]
        before = exposed | _needed_after(spans[n], needed) & kept
        if before != needed[n]:
            needed[n] = before
            pending.update(spans[n].predecessors)
    found: list[LiveRegisters] = [_count(0)] * len(operations)
    for span in spans:
        after = _needed_after(span, needed)
        for n in range(span.end - 1, span.first - 1, -1):
            use = uses[n]
            found[n] = _count(after | use.read | use.written)
            after = after & ~use.replaced | use.read
    return found


@dataclass
class _Span:
    """A part of a block: the instructions from index `first` up to, not including, `end`.
    `successors`: the spans that may follow, each with the registers that keep their value on the
    way to it."""

    first: int
    end: int
    successors: tuple[tuple[int, int], ...]
    predecessors: list[int]


def _written_by_routines(
    operations: Sequence[Operation], blocks: Sequence[Block], uses: Sequence[_Use]
) -> dict[tuple[int, int], int]:
    """The registers that a routine writes, by the block that calls it and the block behind."""
    calls = {
        block.index: block.successors[0]
        for block in blocks
        if operations[block.end // INSTRUCTION_BYTES - 1].base in CALLS
        and block.index + 1 in block.successors[1:]
    }

    def own(block: int) -> Iterable[int]:
        return (block + 1,) if block in calls else blocks[block].successors

    found = {}
    for caller, routine in calls.items():
        inside = (blocks[n] for n in reach(routine, own))
        parts = (uses[b.start // INSTRUCTION_BYTES : b.end // INSTRUCTION_BYTES] for b in inside)
        written = (use.written for part in parts for use in part)
        found[caller, caller + 1] = functools.reduce(int.__or__, written, 0)
    return found


def _split(
    blocks: Sequence[Block], lost: Mapping[tuple[int, int], int], starts: Sequence[int]
) -> list[_Span]:
    """The blocks, cut at further addresses. `lost`: registers that lose their value on the way from
    a block to another."""
    cuts = sorted({*starts})
    first_span: list[int] = []
    spans: list[_Span] = []
    for block in blocks:
        first_span.append(len(spans))
        bounds = [block.start, *(at for at in cuts if block.start < at < block.end), block.end]
        for start, end in itertools.pairwise(bounds):
            indices = (start // INSTRUCTION_BYTES, end // INSTRUCTION_BYTES)
            spans.append(_Span(*indices, ((len(spans) + 1, _ALL),), []))
    for block in blocks:
        last = (*first_span, len(spans))[block.index + 1] - 1
        spans[last].successors = tuple(
            (first_span[n], ~lost.get((block.index, n), 0)) for n in block.successors
        )
    for n, span in enumerate(spans):
        for successor, _ in span.successors:
            spans[successor].predecessors.append(n)
    return spans


def _needed_after(span: _Span, needed: Sequence[int]) -> int:
    after = _STACK_POINTER
    for successor, kept in span.successors:
        after |= needed[successor] & kept
    return after


@dataclass(frozen=True, slots=True)
class _Use:
    """Sets of registers of an instruction. `replaced`: those whose former value is gone."""

    read: int
    written: int
    replaced: int

    @classmethod
    def of(cls, operation: Operation) -> _Use:
        use = _printed_use(operation.predicate, operation.opcode, operation.operands)
        if unprinted := unprinted_reads(operation):
            read = functools.reduce(int.__or__, map(_bit, unprinted))
            return cls(use.read | read, use.written, use.replaced)
        return use


@functools.lru_cache(maxsize=1 << 16)
def _printed_use(predicate: str, opcode: str, operands: str) -> _Use:
    read = written = 0
    for access in accesses(predicate, opcode, operands):
        if access.is_written:
            written |= _bit(access.name)
        else:
            read |= _bit(access.name)
    replaces = predicate in ALWAYS or "UP" in predicate
    return _Use(read, written, written if replaces else 0)


@functools.cache
def _bit(name: str) -> int:
    kind = name.rstrip("0123456789")
    return 1 << _FIRST_BIT[kind] + int(name[len(kind) :])


@functools.lru_cache(maxsize=1 << 16)
def _count(registers: int) -> LiveRegisters:
    numbers = (
        (registers >> _FIRST_BIT[kind] & (1 << width) - 1).bit_count() for kind, width in _KINDS
    )
    return LiveRegisters(*numbers)
