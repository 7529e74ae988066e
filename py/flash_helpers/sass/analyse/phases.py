"""Prologue, main loop and epilogue of a kernel, the executions of each part, and unrolling.

Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from flash_helpers.sass.analyse.counts import Counts, count_blocks
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import may_execute, padding_start, reach
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, Instruction, Kernel, Loop

# Longer walks are given up.
_MOST_STEPS = 1_000_000
# ptxas makes one of these of one PTX instruction, so that more of them are copies.
_ONE_TO_ONE = (
    opcodes.TENSOR,
    opcodes.LDMATRIX,
    opcodes.ASYNC_COPY,
    opcodes.GLOBAL_LOAD,
    opcodes.GLOBAL_STORE,
    opcodes.SHARED_STORE,
    opcodes.SHUFFLE,
    opcodes.FP32,
)


# Opcodes that a wait queries with, and the other opcodes that may stand in it.
_ASKING = ("SYNCS.PHASECHK", "USETMAXREG.TRY_ALLOC", ".STRONG.")
_WITHOUT_WORK = (
    opcodes.BARRIER, opcodes.CONTROL_FLOW, opcodes.NOP, opcodes.PREDICATE, opcodes.VOTE,
    opcodes.UNIFORM, opcodes.MOVE, opcodes.IMAD_MOVE, opcodes.SPECIAL_REGISTER,
    opcodes.CONSTANT_LOAD, opcodes.INTEGER_ADD, opcodes.LOGIC,
)  # fmt: skip


class NotDeterminedError(ValueError):
    """The text of a kernel does not tell how often a part of it is executed."""


@dataclass(frozen=True)
class Phases:
    """Indices of blocks. `main_loop`: None in a kernel without loops.

    `prologue`: blocks from which the main loop can be reached. `epilogue`: the rest of the code.
    """

    prologue: tuple[int, ...]
    main_loop: Loop | None
    epilogue: tuple[int, ...]


@dataclass(frozen=True)
class PhaseCounts:
    """The text of each phase, counted; main_loop is None in a kernel without loops."""

    prologue: Counts
    main_loop: Counts | None
    epilogue: Counts

    @property
    def named(self) -> dict[str, Counts]:
        """The phases that the kernel has, by name, in order."""
        main = {} if self.main_loop is None else {"main loop": self.main_loop}
        return {"prologue": self.prologue, **main, "epilogue": self.epilogue}


@dataclass(frozen=True)
class Unit:
    """The unit of work of a kernel's loops, one or several in an iteration.

    `name`: such as "block of keys". `tensor`: tensor instructions per warp and unit.
    """

    name: str
    tensor: int


@dataclass(frozen=True)
class Unrolling:
    """Signs that a loop's body was copied.

    `by_ptxas`: number of instructions that one PTX line most often became in the loop, among
    opcodes that ptxas makes one for one; None without PTX lines. `by_source`: number of PTX lines
    that one CUDA line at one inlining site most often became, among the loop's tensor instructions
    (or among all opcodes made one for one, if there are none); `#pragma unroll` shows here. None
    without source lines.
    """

    by_ptxas: int | None
    by_source: int | None


def code_of(kernel: Kernel) -> tuple[Block, ...]:
    """The blocks before the padding."""
    padding = padding_start(kernel.instructions) * INSTRUCTION_BYTES
    return tuple(block for block in kernel.blocks if block.start < padding)


def is_wait(kernel: Kernel, loop: Loop) -> bool:
    """Whether a loop only waits: it polls an mbarrier's phase, free registers or a word in memory,
    and does no work."""
    parts = [kernel.blocks[n] for n in loop.blocks]
    words = [slice(b.start // INSTRUCTION_BYTES, b.end // INSTRUCTION_BYTES) for b in parts]
    body = [i for part in words for i in kernel.instructions[part] if may_execute(i)]

    def asks(instruction: Instruction) -> bool:
        return any(part in instruction.opcode for part in _ASKING)

    # most loops do work, which soon tells
    return all(
        opcodes.classify(i.opcode, i.operands) in _WITHOUT_WORK or asks(i) for i in body
    ) and any(map(asks, body))


def is_replay(kernel: Kernel, loop: Loop) -> bool:
    """Whether a loop only executes an instruction of the uniform datapath once per different value
    of its operand among the lanes. ptxas makes such a loop where it does not know that all lanes
    have one value."""
    last = kernel.instructions[kernel.blocks[max(loop.blocks)].end // INSTRUCTION_BYTES - 1]
    return last.opcode == "BRA.U.ANY" and last.target == kernel.blocks[loop.header].start


def cold_blocks(kernel: Kernel, loop: Loop) -> frozenset[int]:
    """Blocks of a loop that only wait; an iteration without waiting skips them."""
    cold: set[int] = set()
    for other in kernel.loops:
        if other.blocks < loop.blocks and is_wait(kernel, other):
            cold |= other.blocks if can_turn_without(kernel, loop, other.blocks) else set()
    grown = True
    while grown:
        only = {
            n
            for n in loop.blocks - cold
            if kernel.blocks[n].predecessors and cold.issuperset(kernel.blocks[n].predecessors)
        }
        cold |= only
        grown = bool(only)
    return frozenset(cold)


def can_turn_without(kernel: Kernel, loop: Loop, blocks: Set[int]) -> bool:
    """Whether an iteration can pass by some blocks of a loop."""

    def following(n: int) -> list[int]:
        return [m for m in kernel.blocks[n].successors if m in loop.blocks - blocks]

    return loop.header not in blocks and any(
        loop.header in reach(n, following) for n in following(loop.header)
    )


def main_loop(kernel: Kernel) -> Loop | None:
    """The innermost loop with more than a fifth of the tensor instructions of the loop that has the
    most; it is run most often. Instructions of inner loops do not count. A loop around it may hold
    four peeled copies of its body.

    Among loops of equal depth it is the one with the most tensor instructions; in a kernel without
    them the longest loop, then the innermost. Waits are left out.
    """
    own: Counter[int] = Counter()
    tensor: Counter[int] = Counter()
    for instruction in kernel.instructions:
        if instruction.loop is not None and may_execute(instruction):
            own[instruction.loop] += 1
            tensor[instruction.loop] += opcodes.classify(instruction.opcode) == opcodes.TENSOR
    return working_loop([n for n in kernel.loops if not is_wait(kernel, n)], tensor, own)


def working_loop(
    loops: Sequence[Loop], wanted: Mapping[int, int], own: Mapping[int, int]
) -> Loop | None:
    """The loop where the work is done: see `main_loop`. `wanted`: instructions that are the work,
    by index of the loop. `own`: all instructions."""
    most = max((wanted[loop.index] for loop in loops), default=0)

    def rank(loop: Loop) -> tuple[int, ...]:
        found = wanted[loop.index]
        depth = loop.depth if most and 5 * found > most else 0
        return depth, found, own[loop.index], loop.depth, -loop.index

    return max(loops, key=rank, default=None)


def phases(kernel: Kernel) -> Phases:
    """The blocks of each phase. A loop around the main loop is split at the main loop's header."""
    main = main_loop(kernel)
    code = [block.index for block in code_of(kernel)]
    if main is None:
        return Phases(tuple(code), None, ())
    before = reach(main.header, lambda block: kernel.blocks[block].predecessors)
    outside = [block for block in code if block not in main.blocks]
    around = [loop for loop in kernel.loops if loop.blocks > main.blocks]

    def is_before(block: int) -> bool:
        if any(block in loop.blocks for loop in around):
            return kernel.blocks[block].start < kernel.blocks[main.header].start
        return block in before

    return Phases(
        prologue=tuple(block for block in outside if is_before(block)),
        main_loop=main,
        epilogue=tuple(block for block in outside if not is_before(block)),
    )


def count_phases(kernel: Kernel) -> PhaseCounts:
    """Count the text of each phase."""
    parts = phases(kernel)
    return PhaseCounts(
        prologue=count_blocks(kernel, parts.prologue),
        main_loop=count_blocks(kernel, parts.main_loop.blocks) if parts.main_loop else None,
        epilogue=count_blocks(kernel, parts.epilogue),
    )


def trip_counts(kernel: Kernel, unit: Unit, number: int) -> dict[int, int]:
    """Number of times that each loop of a kernel is run, by index, for a number of units.

    A loop handles the units that its tensor instructions suffice for; tensor instructions outside
    loops handle peeled units. Where there are two loops, the second handles the units that the
    first, unrolled one leaves.

    Raises NotDeterminedError if the tensor instructions do not make whole units, or if there are
    loops without them.
    """
    total: Counter[int | None] = Counter(
        instruction.loop
        for instruction in kernel.instructions
        if opcodes.classify(instruction.opcode) == opcodes.TENSOR and may_execute(instruction)
    )
    for where, tensor in total.items():
        if tensor % unit.tensor:
            place = "outside loops" if where is None else f"in loop {where}"
            raise NotDeterminedError(
                f"{kernel.name} has {tensor} tensor instructions {place}, but a {unit.name} "
                f"takes {unit.tensor}: how many of them these are cannot be told"
            )
    unknown = [n.index for n in kernel.loops if not total[n.index] and not is_wait(kernel, n)]
    if unknown:
        raise NotDeterminedError(
            f"loop {unknown[0]} of {kernel.name} has no tensor instruction of its own: how often "
            "it is run cannot be told"
        )
    left = number - total[None] // unit.tensor
    trips: dict[int, int] = {}
    for loop in sorted(kernel.loops, key=lambda loop: (-total[loop.index], loop.index)):
        trips[loop.index], left = divmod(max(left, 0), total[loop.index] // unit.tensor)
    if left or any(loop.parent is not None for loop in kernel.loops):
        raise NotDeterminedError(
            f"the loops of {kernel.name} do not add up to {number} times a {unit.name}: how "
            "often they are run cannot be told"
        )
    return trips


def block_executions(kernel: Kernel, trips: Mapping[int, int]) -> list[int]:
    """Number of times that a warp executes each block, for given numbers of trips.

    `trips`: by index of a loop, the number of executions of its header each time that the loop is
    entered; 0 if it is skipped.

    A warp is taken not to leave through a guarded EXIT, and to stay together.

    Raises NotDeterminedError if a branch depends on anything but the number of trips.
    """
    loop_of = [kernel.instructions[b.start // INSTRUCTION_BYTES].loop for b in kernel.blocks]
    executed = [0] * len(kernel.blocks)
    iterations: Counter[int] = Counter()
    at = 0
    for _ in range(_MOST_STEPS):
        block = kernel.blocks[at]
        executed[at] += 1
        loop = loop_of[at]
        if loop is not None and kernel.loops[loop].header == at:
            iterations[loop] += 1
        if not block.successors:
            return executed
        following = _choose(kernel, block, loop, trips, iterations)
        while loop is not None and following not in kernel.loops[loop].blocks:
            iterations[loop] = 0
            loop = kernel.loops[loop].parent
        at = following
    raise NotDeterminedError(f"a warp executes more than {_MOST_STEPS} blocks of {kernel.name}")


def unrolling(kernel: Kernel, loop: Loop) -> Unrolling:
    """Signs of unrolling in one loop, the loops inside it left out."""
    body = [i for i in kernel.instructions if i.loop == loop.index and may_execute(i)]
    named = [(opcodes.classify(i.opcode, i.operands), i) for i in body]
    made = [i for name, i in named if name in _ONE_TO_ONE]
    tensor = [i for name, i in named if name == opcodes.TENSOR]
    by_line = Counter((i.ptx_line, i.base) for i in made if i.ptx_line is not None)
    shown = {(i.source, i.ptx_line) for i in tensor or made if i.source and i.ptx_line is not None}
    by_source = Counter(source for source, _ in shown)
    return Unrolling(_most_frequent(by_line.values()), _most_frequent(by_source.values()))


def _most_frequent(numbers: Collection[int]) -> int | None:
    """The number that occurs most often, the smallest of several; None if there are none."""
    counted = Counter(numbers)
    return min(counted, key=lambda number: (-counted[number], number)) if counted else None


def _choose(
    kernel: Kernel,
    block: Block,
    loop: int | None,
    trips: Mapping[int, int],
    iterations: Mapping[int, int],
) -> int:
    """The block that comes next."""
    candidates = list(block.successors)
    if loop is not None and len(candidates) > 1:
        around = kernel.loops[loop]
        staying = [n for n in candidates if n in around.blocks]
        leaving = [n for n in candidates if n not in around.blocks]
        if staying and leaving:
            candidates = leaving if iterations[loop] >= trips.get(loop, 0) else staying
    for other in kernel.loops:
        if len(candidates) > 1 and block.index not in other.blocks:
            header = None if loop is None else kernel.loops[loop].header
            leading = [n for n in candidates if _leads_to(kernel, n, other.header, header)]
            passing = [n for n in candidates if n not in leading]
            if leading and passing:
                candidates = leading if trips.get(other.index, 0) else passing
    if len(candidates) > 1:
        last: Instruction = kernel.instructions[block.end // INSTRUCTION_BYTES - 1]
        raise NotDeterminedError(
            f"the branch at {last.address:#06x} of {kernel.name} ({last.text}) does not depend "
            "on the number of trips alone: what a warp executes cannot be told from the text"
        )
    return candidates[0]


def _leads_to(kernel: Kernel, start: int, target: int, around: int | None) -> bool:
    """Whether a block can be reached from another without passing through a third."""

    def following(block: int) -> list[int]:
        return [n for n in kernel.blocks[block].successors if n != around]

    return start != around and target in reach(start, following)
