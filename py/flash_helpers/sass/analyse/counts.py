"""Counts of instructions by kind; instructions that do work are told apart from filler and padding.
Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import ALWAYS, NEVER, padding_start
from flash_helpers.sass.read.records import Instruction, Kernel, Loop, Operation


class Bucket(Enum):
    """The fate of an instruction.

    EXECUTED: it has no guard, or the guard @PT. PREDICATED: a guard decides. FILLER: the guard @!PT
    or @!UPT turns it off for good; ptxas leaves `@!PT LDS RZ, [RZ]` and `@!UPT UIADD3`. PADDING: it
    fills the section behind the code.
    """

    EXECUTED = "executed"
    PREDICATED = "predicated"
    FILLER = "filler"
    PADDING = "padding"


# Operations of one tensor instruction of the most frequent shape, m16n8k16. Figures per tensor
# instruction are per this number of operations, so that other shapes are comparable.
UNIT_OPERATIONS = 4096

WORK = (Bucket.EXECUTED, Bucket.PREDICATED)


def buckets(operations: Sequence[Operation]) -> list[Bucket]:
    """The bucket of each instruction of a whole kernel."""
    padding = padding_start(operations)
    found = [_bucket_of_code(operation) for operation in operations[:padding]]
    return [*found, *[Bucket.PADDING] * (len(operations) - padding)]


def _bucket_of_code(operation: Operation) -> Bucket:
    if operation.predicate in NEVER:
        return Bucket.FILLER
    return Bucket.EXECUTED if operation.predicate in ALWAYS else Bucket.PREDICATED


def with_buckets(kernel: Kernel) -> Iterator[tuple[Instruction, Bucket]]:
    """The instructions of a kernel, each with its bucket."""
    return zip(kernel.instructions, buckets(kernel.instructions), strict=True)


@dataclass(frozen=True)
class Counts:
    """Numbers of instructions: in the text of a kernel or of a part of it, or executed by a warp.

    `by_bucket`: all instructions. `by_opcode`, `by_base`, `by_class`: executed or predicated
    instructions only, the most frequent first, by opcode with modifiers, by opcode without them,
    and by class. `tensor_operations`: operations of the tensor instructions; None where an opcode
    does not tell.
    """

    by_bucket: Mapping[Bucket, int]
    by_opcode: Mapping[str, int]
    by_base: Mapping[str, int]
    by_class: Mapping[str, int]
    tensor_operations: int | None

    @property
    def work(self) -> int:
        """Instructions that are executed, or may be."""
        return sum(self.by_bucket[kind] for kind in WORK)

    @property
    def tensor(self) -> int:
        """Tensor-core instructions."""
        return self.by_class.get(opcodes.TENSOR, 0)

    @property
    def is_usual_tensor(self) -> bool:
        """Whether tensor instructions, if any, take UNIT_OPERATIONS each."""
        return self.tensor_operations == self.tensor * UNIT_OPERATIONS

    def per_tensor(self, number: float) -> float | None:
        """A number of instructions per UNIT_OPERATIONS of the tensor cores; None if the tensor
        operations are zero or not known."""
        return number * UNIT_OPERATIONS / self.tensor_operations if self.tensor_operations else None


def weigh(operations: Iterable[tuple[Operation, Bucket, int]]) -> Counts:
    """Count instructions with known buckets, each as often as its number says."""
    by_bucket: Counter[Bucket] = Counter()
    by_opcode: Counter[str] = Counter()
    by_base: Counter[str] = Counter()
    by_class: Counter[str] = Counter()
    for operation, kind, times in operations:
        by_bucket[kind] += times
        if kind in WORK:
            by_opcode[operation.opcode] += times
            by_base[operation.base] += times
            by_class[opcodes.classify(operation.opcode, operation.operands)] += times
    shapes = [
        (opcodes.tensor_operations(opcode), n)
        for opcode, n in by_opcode.items()
        if opcodes.classify(opcode) == opcodes.TENSOR
    ]
    known = [operations * n for operations, n in shapes if operations is not None]
    return Counts(
        by_bucket={kind: by_bucket[kind] for kind in Bucket},
        by_opcode=_ordered(by_opcode),
        by_base=_ordered(by_base),
        by_class=_ordered(by_class),
        tensor_operations=sum(known) if len(known) == len(shapes) else None,
    )


def count_executed(kernel: Kernel, times: Sequence[int]) -> Counts:
    """Count the instructions that a warp executes. `times`: executions of each block.

    Predicated instructions count whether or not their guard holds, and filler is counted as such,
    since the warp issues both.
    """
    return weigh((i, kind, times[i.block]) for i, kind in with_buckets(kernel) if times[i.block])


def count_all(operations: Sequence[Operation]) -> Counts:
    """Count a whole kernel."""
    return weigh((o, kind, 1) for o, kind in zip(operations, buckets(operations), strict=True))


def count_blocks(kernel: Kernel, blocks: Iterable[int]) -> Counts:
    """Count some of a kernel's blocks, given by their indices."""
    wanted = set(blocks)
    return count_executed(kernel, [int(block.index in wanted) for block in kernel.blocks])


def count_loop(kernel: Kernel, loop: Loop) -> Counts:
    """Count one iteration's text of a loop, with all the loops inside it."""
    return count_blocks(kernel, loop.blocks)


def count_changes(
    before: Mapping[str, float], after: Mapping[str, float]
) -> list[tuple[str, float, float]]:
    """Names whose number changed, with both numbers, the largest change first."""
    rows = ((name, before.get(name, 0), after.get(name, 0)) for name in {*before, *after})
    return sorted(
        (row for row in rows if row[1] != row[2]), key=lambda row: (-abs(row[2] - row[1]), row[0])
    )


def _ordered(counted: Mapping[str, int]) -> Mapping[str, int]:
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))
