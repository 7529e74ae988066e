"""Control flow: basic blocks, their order, loops and phases.

The simulator always runs the threads whose block comes first in the order made here. That order is
topological, with every loop contiguous, so threads that diverged meet again at the first block that
all of their paths reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from flash_helpers.ptx.errors import UnsupportedInstruction
from flash_helpers.ptx.read.graph import innermost_loops, strongly_connected_components
from flash_helpers.ptx.read.module import (
    Function,
    Instruction,
    Operand,
    Register,
    Symbol,
    named_by,
    parts,
)

BARRIERS = frozenset({"bar", "barrier"})
"""The barriers of a warp and of a cluster have these names too."""
EXITS = frozenset({"ret", "exit"})

MAX_LOOP_DEPTH = 64
"""Each level costs a walk over all that is inside."""


class Phase(str, Enum):
    """Part of the kernel relative to its main loop. The main loop is the loops with matrix
    products, and the loops with bulk loads that do not lead to them: other warps run these at the
    same time."""

    PROLOGUE = "prologue"
    MAIN_LOOP = "main loop"
    EPILOGUE = "epilogue"


class Ending(Enum):
    """How a basic block ends."""

    NEXT = "next"
    BRANCH = "branch"
    INDEXED = "indexed branch"
    BARRIER = "barrier"
    EXIT = "exit"


@dataclass(frozen=True)
class Block:
    """A basic block: instructions [start, end) of the program, the last of which may be a branch or
    exit.

    `targets`: blocks that a taken branch leads to. `next`: the block that follows when no branch is
    taken; -1 if there is none.
    """

    start: int
    end: int
    ending: Ending
    targets: tuple[int, ...]
    next: int
    phase: Phase

    @property
    def body_end(self) -> int:
        """End of the instructions that are not control flow."""
        return self.end if self.ending is Ending.NEXT else self.end - 1


@dataclass(frozen=True, eq=False)
class Program:
    """A function's instructions in execution order; equal to itself alone. `block_of`: index of
    each instruction's block."""

    function: Function
    instructions: tuple[Instruction, ...]
    blocks: tuple[Block, ...]
    block_of: tuple[int, ...]

    @cached_property
    def registers(self) -> dict[str, str]:
        """Types of the registers that instructions name: fewer than nvcc declares."""
        named = named_by(self.instructions)
        used = dict.fromkeys(o.name for o in named if isinstance(o, Register))
        return {name: self.function.registers[name] for name in used}

    @cached_property
    def retried(self) -> frozenset[int]:
        """The waits for an mbarrier that a loop tries again until they are over."""
        waits = [p for p, i in enumerate(self.instructions) if i.first(("test_wait", "try_wait"))]
        edges = {
            b: [s for s in (*block.targets, block.next) if s >= 0]
            for b, block in enumerate(self.blocks)
        }
        around = innermost_loops(edges, {self.block_of[position] for position in waits})
        loops = ((position, around.get(self.block_of[position], set())) for position in waits)
        return frozenset(position for position, loop in loops if self._decides(position, loop))

    def _decides(self, position: int, loop: set[int]) -> bool:
        """Whether the first result of an instruction decides about the end of a loop."""
        blocks = [self.blocks[b] for b in loop]
        inside = [i for block in blocks for i in self.instructions[block.start : block.end]]
        known, more = set[str](), _results(self.instructions[position])
        while not more <= known:
            known |= more
            users = (i for i in inside if not known.isdisjoint(_registers(i.named())))
            more = {name for instruction in users for name in _results(instruction)}
        return any(
            guard is not None and guard.name in known and not loop.issuperset(leads_to)
            for guard, leads_to in (
                (self.instructions[block.end - 1].guard, (*block.targets, block.next))
                for block in blocks
            )
        )

    def block_at(self, position: int) -> Block:
        """The block of an instruction."""
        return self.blocks[self.block_of[position]]


def _registers(operands: Iterable[Operand]) -> set[str]:
    return {operand.name for operand in operands if isinstance(operand, Register)}


def _results(instruction: Instruction) -> set[str]:
    """The registers of the first operand, where an instruction has its results."""
    return _registers(p for operand in instruction.operands[:1] for p in parts(operand))


def is_wgmma(instruction: Instruction) -> bool:
    """Whether the instruction is a matrix product, a wgmma.mma_async."""
    return instruction.name == "wgmma" and instruction.has("mma_async")


def is_product(instruction: Instruction) -> bool:
    """Whether the instruction multiplies matrices."""
    is_mma = instruction.name == "mma" or (instruction.name == "wmma" and instruction.has("mma"))
    return is_mma or is_wgmma(instruction)


def is_bulk_load(instruction: Instruction) -> bool:
    """Whether the instruction is a bulk copy from global to shared memory."""
    spaces = [m for m in instruction.modifiers if m == "global" or m.startswith("shared")]
    return instruction.has("bulk") and len(spaces) == 2 and spaces[1] == "global"


def _ending(instruction: Instruction) -> Ending:
    if instruction.name == "bra":
        return Ending.BRANCH
    if instruction.name == "brx":
        return Ending.INDEXED
    if instruction.name in EXITS:
        return Ending.EXIT
    if instruction.name in BARRIERS and not instruction.first(("warp", "cluster")):
        return Ending.BARRIER
    return Ending.NEXT


def build_program(function: Function) -> Program:
    """Cuts a function into basic blocks and orders them.

    Raises PtxSyntaxError if something in the function cannot be read; UnsupportedInstruction if it
    is empty, branches to a list that it does not declare, or has more than MAX_LOOP_DEPTH loops
    inside each other.
    """
    if function.problem is not None:
        raise function.problem
    instructions = function.instructions
    leaders = {0} | set(function.labels.values())
    for i, instruction in enumerate(instructions):
        if _ending(instruction) is not Ending.NEXT:
            leaders.add(i + 1)
    starts = sorted(i for i in leaders if i < len(instructions))
    if not starts:
        raise UnsupportedInstruction("(nothing)", function.line, f"{function.name} has no body")
    index_of = {start: b for b, start in enumerate(starts)}

    def block_at(label: str) -> int:
        # A label at the very end stands before the implicit return.
        return index_of.get(function.labels[label], -1)

    blocks: list[Block] = []
    multiplying: set[int] = set()
    loading: set[int] = set()
    for b, (start, end) in enumerate(itertools.pairwise([*starts, len(instructions)])):
        last = instructions[end - 1]
        ending = _ending(last)
        targets: tuple[int, ...] = ()
        if ending is Ending.BRANCH:
            targets = (block_at(_label(last)),)
        elif ending is Ending.INDEXED:
            table = last.operands[-1] if len(last.operands) == 2 else None
            if not isinstance(table, Symbol) or table.name not in function.branch_targets:
                raise UnsupportedInstruction(last.opcode, last.line, "unknown list of targets")
            targets = tuple(block_at(name) for name in function.branch_targets[table.name])
        goes_on = ending in (Ending.NEXT, Ending.BARRIER) or last.guard is not None
        following = b + 1 if goes_on and b + 1 < len(starts) else -1
        blocks.append(Block(start, end, ending, targets, following, Phase.PROLOGUE))
        for does, where in ((is_product, multiplying), (is_bulk_load, loading)):
            if any(map(does, instructions[start:end])):
                where.add(b)

    successors = [[s for s in dict.fromkeys((*b.targets, b.next)) if s >= 0] for b in blocks]
    order, loops, too_deep = _order(successors)
    if too_deep is not None:
        first = instructions[blocks[too_deep].start]
        reason = f"it stands in more than {MAX_LOOP_DEPTH} loops inside each other"
        raise UnsupportedInstruction(first.opcode, first.line, reason)
    phases = _phases(order, loops, successors, multiplying, loading)
    rank = {b: i for i, b in enumerate(order)}
    placed: list[Instruction] = []
    ordered: list[Block] = []
    for b in order:
        block, start = blocks[b], len(placed)
        placed.extend(instructions[block.start : block.end])
        ordered.append(
            replace(
                block,
                start=start,
                end=len(placed),
                targets=tuple(rank.get(t, -1) for t in block.targets),
                next=rank.get(block.next, -1),
                phase=phases[b],
            )
        )
    block_of = [i for i, block in enumerate(ordered) for _ in range(block.start, block.end)]
    return Program(function, tuple(placed), tuple(ordered), tuple(block_of))


def _label(instruction: Instruction) -> str:
    target = instruction.operands[0]
    assert isinstance(target, Symbol)
    return target.name


def _reachable(successors: list[list[int]], start: Iterable[int]) -> set[int]:
    seen: set[int] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(successors[node])
    return seen


def _order(successors: list[list[int]]) -> tuple[list[int], list[set[int]], int | None]:
    """The reachable nodes of a graph from node 0 on, and its outermost loops.

    The order is topological once the edges back to a loop's head are cut. The third result is a
    node inside too many loops, if there is one; the order is not complete then.
    """
    order: list[int] = []
    loops: list[set[int]] = []
    nodes = _reachable(successors, [0])
    # The parts still to be ordered, the first part last: single nodes, and loops with their head
    # and the edges inside.
    pending: list[tuple[set[int], int, Mapping[int, list[int]], int]] = []

    def add(nodes: set[int], entry: int, edges: Mapping[int, list[int]], depth: int) -> None:
        components = strongly_connected_components(edges, nodes, entry)
        index_of = {n: i for i, component in enumerate(components) for n in component}
        # A loop's head is where it is entered: the entry itself, or a target from outside.
        targets = {
            s for n in nodes for s in edges[n] if index_of.get(s, index_of[n]) != index_of[n]
        }
        for component in components:
            heads = {entry} & component or targets & component or component
            pending.append((component, min(heads), edges, depth))
            if depth == 0 and (len(component) > 1 or not component.isdisjoint(edges[min(heads)])):
                loops.append(component)

    add(nodes, 0, dict(enumerate(successors)), 0)
    while pending:
        component, head, edges, depth = pending.pop()
        if len(component) == 1:
            order.append(head)
            continue
        if depth == MAX_LOOP_DEPTH:
            return order, loops, head
        inner = {n: [s for s in edges[n] if s != head and s in component] for n in component}
        add(component, head, inner, depth + 1)
    return order, loops, None


def _phases(
    order: list[int],
    loops: list[set[int]],
    successors: list[list[int]],
    multiplying: set[int],
    loading: set[int],
) -> dict[int, Phase]:
    """`loops`: the outermost ones. `multiplying`, `loading`: nodes that do."""
    main = set().union(*(loop for loop in loops if loop & multiplying))
    if main:
        beside = (loop for loop in loops if loop & loading)
        main |= set().union(*(x for x in beside if not _reachable(successors, x) & main))
    else:
        # A kernel without a matrix loop: its loops are the main part, or everything is.
        main = set().union(*loops) if loops else set(order)
    after = _reachable(successors, [s for b in main for s in successors[b]])
    predecessors: list[list[int]] = [[] for _ in successors]
    for b in order:
        for successor in successors[b]:
            predecessors[successor].append(b)
    before = _reachable(predecessors, main) - main
    phases = {}
    for b in order:
        if b in main or (b in after and b in before):
            phases[b] = Phase.MAIN_LOOP
        elif b in after:
            phases[b] = Phase.EPILOGUE
        else:
            phases[b] = Phase.PROLOGUE
    return phases
