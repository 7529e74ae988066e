"""Basic blocks and loops of a kernel's machine code. Standard library only.

The ends of basic blocks, since Volta:

- BSSY names where diverged lanes meet again, and BSYNC waits for them there; BREAK takes lanes out
  of that, WARPSYNC waits for lanes by mask. None of these jumps.
- BRA with an operand before its target (`BRA P1, ...`, `BRA.U UP0, ...`, `BRA.DIV UR4, ...`,
  `BRA.CONV ~URZ, ...`) may fall through, although it has no guard.
- CALL goes to a routine in the same section, which ends with RET. But ptxas for sm_80 to sm_89 also
  leaves loops with `@P0 CALL.REL.NOINC`, to code that never returns: that is a plain jump.
- A computed jump (BRX, JMX) goes where the cubin's jump table for it says. Without one, and as
  CALL, it has no known successors; the code that only such jumps reach is analysed too, as if it
  were entered from outside.
- BPT.TRAP ends the launch; what stands behind it is not reached from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flash_helpers.ptx.read.graph import strongly_connected_components
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, Kernel, Loop, Operation

NEVER = ("@!PT", "@!UPT")
ALWAYS = ("", "@PT", "@UPT")

BRANCHES = frozenset({"BRA", "JMP"})
CALLS = frozenset({"CALL", "JCAL"})
COMPUTED_JUMPS = frozenset({"BRX", "BRXU", "JMX", "JMXU"})
_ENDS = frozenset({"EXIT", "RET", "KILL"})
_TRAP = "BPT.TRAP"
JUMPS = BRANCHES | COMPUTED_JUMPS | CALLS | _ENDS


def may_execute(operation: Operation) -> bool:
    """False for an instruction that a guard of @!PT or @!UPT turns off for good."""
    return operation.predicate not in NEVER


def is_jump(operation: Operation) -> bool:
    """True for an instruction after which control may continue elsewhere than at the next
    instruction, or end."""
    return (operation.base in JUMPS or operation.opcode == _TRAP) and may_execute(operation)


def reach(start: int, neighbours: Callable[[int], Iterable[int]]) -> set[int]:
    """The nodes that can be reached from a node of a graph, itself included."""
    found: set[int] = set()
    stack = [start]
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack.extend(neighbours(n))
    return found


def padding_start(operations: Sequence[Operation]) -> int:
    """Index of the first instruction of the padding: the NOPs that fill the section at its end, and
    the jump to itself before them. It is the number of instructions if there is no padding."""
    start = len(operations)
    while start and operations[start - 1].base == "NOP":
        start -= 1
    if start and _jumps_to_itself(operations[start - 1]):
        start -= 1
    if start == len(operations):
        return start
    # what is run is no padding, such as an endless loop at the end
    inside = {operation.address for operation in operations[start:]}
    jumps = any(o.target in inside and is_jump(o) for o in operations[:start])
    runs_on = not start or _falls_through(operations[start - 1])
    return len(operations) if jumps or runs_on else start


def is_trap_stub(kernel: Kernel) -> bool:
    """Whether a kernel only traps, as in an architecture that its author left out: before the
    padding it has one block, which ends with BPT.TRAP."""
    code = kernel.instructions[: padding_start(kernel.instructions)]
    jumps = [operation for operation in code if is_jump(operation)]
    return len(jumps) == 1 and jumps[0].opcode == _TRAP and not _falls_through(jumps[0])


def control_flow(
    operations: Sequence[Operation], jump_tables: Mapping[int, Sequence[int]] | None = None
) -> tuple[tuple[Block, ...], tuple[Loop, ...]]:
    """The basic blocks of a kernel, by address, and its loops, by the address of their headers.

    `operations`: the whole kernel, in order of address. Every instruction is in a block.
    `jump_tables`: the targets of computed jumps, by the address of the jump.

    A loop is a set of blocks in which each block can reach each other block; loops with one header
    are merged. Where control can enter such a set at several blocks, the first block reached from
    the entry counts as the header. A routine that is called from one loop only is part of the loop.
    """
    if not operations:
        return (), ()
    graph = _Graph.of(operations, jump_tables or {})
    return graph.blocks, _loops(graph)


def calls_itself(
    operations: Sequence[Operation], jump_tables: Mapping[int, Sequence[int]] | None = None
) -> bool:
    """Whether a routine of a kernel calls itself, directly or through other routines. The arguments
    are those of `control_flow`."""
    if not any(operation.base in CALLS for operation in operations):
        return False
    graph = _Graph.of(operations, jump_tables or {})

    def own(block: int) -> Iterable[int]:
        return (block + 1,) if block in graph.calls else graph.successors[block]

    def callees(routine: int) -> Iterable[int]:
        return [graph.calls[n] for n in reach(routine, own) if n in graph.calls]

    return any(
        routine in reach(callee, callees)
        for routine in set(graph.calls.values())
        for callee in callees(routine)
    )


def _falls_through(operation: Operation) -> bool:
    """Whether control may go on to the next instruction; for a CALL, returns are left aside."""
    if not is_jump(operation):
        return True
    conditional = operation.predicate not in ALWAYS
    if operation.base in BRANCHES:
        conditional = conditional or "," in operation.operands
    return conditional


def _jumps_to_itself(operation: Operation) -> bool:
    return (
        operation.base in BRANCHES
        and operation.target == operation.address
        and not _falls_through(operation)
    )


@dataclass(frozen=True)
class _Graph:
    """A control-flow graph. `successors`: successors of each block. `calls`: for a block that calls
    a routine which returns, the routine's first block. `padding`: the first block of the padding,
    or the number of blocks."""

    blocks: tuple[Block, ...]
    successors: Sequence[tuple[int, ...]]
    calls: Mapping[int, int]
    padding: int

    @classmethod
    def of(cls, operations: Sequence[Operation], tables: Mapping[int, Sequence[int]]) -> _Graph:
        padding = padding_start(operations)
        leaders = _leaders(operations, padding, tables)
        number = {operations[first].address: n for n, first in enumerate(leaders)}
        lasts = [first - 1 for first in [*leaders[1:], len(operations)]]
        jumps: list[list[int]] = []
        falls: list[bool] = []
        calls: dict[int, int] = {}
        for n, last in enumerate(lasts):
            operation = operations[last]
            target = number.get(operation.target) if operation.target is not None else None
            jumps.append([])
            falls.append(_falls_through(operation) and n + 1 < len(lasts))
            if operation.base in COMPUTED_JUMPS and is_jump(operation):
                told = tables.get(operation.address, ())
                jumps[n] += [number[address] for address in told if address in number]
            if not is_jump(operation) or operation.base not in BRANCHES | CALLS:
                continue
            if target is not None:
                jumps[n].append(target)
            if operation.base in CALLS:
                if target is None:
                    # a routine that is not known is taken to come back
                    falls[n] = n + 1 < len(lasts)
                else:
                    calls[n] = target
        returning = _returning([operations[last] for last in lasts], jumps, falls, calls)
        calls = {n: target for n, target in calls.items() if target in returning}
        successors = []
        predecessors: list[list[int]] = [[] for _ in leaders]
        for n, targets in enumerate(jumps):
            goes_on = falls[n] or (n in calls and n + 1 < len(lasts))
            successors.append(tuple(dict.fromkeys([*targets, n + 1] if goes_on else targets)))
            for target in successors[n]:
                predecessors[target].append(n)
        ends = [operations[last].address + INSTRUCTION_BYTES for last in lasts]
        return cls(
            blocks=tuple(
                Block(n, operations[first].address, ends[n], successors[n], tuple(predecessors[n]))
                for n, first in enumerate(leaders)
            ),
            successors=successors,
            calls=calls,
            padding=len(leaders) if padding == len(operations) else leaders.index(padding),
        )


def _leaders(
    operations: Sequence[Operation], padding: int, tables: Mapping[int, Sequence[int]]
) -> list[int]:
    """Indices of the instructions that blocks begin with."""
    index = {operation.address: n for n, operation in enumerate(operations)}
    leaders = {0}
    if padding < len(operations):
        leaders.add(padding)
    for n, operation in enumerate(operations):
        if not is_jump(operation):
            continue
        if n + 1 < len(operations):
            leaders.add(n + 1)
        if operation.base in BRANCHES | CALLS and operation.target in index:
            leaders.add(index[operation.target])
        if operation.base in COMPUTED_JUMPS:
            told = tables.get(operation.address, ())
            leaders.update(index[address] for address in told if address in index)
    return sorted(leaders)


def _returning(
    lasts: Sequence[Operation],
    jumps: Sequence[Sequence[int]],
    falls: Sequence[bool],
    calls: Mapping[int, int],
) -> set[int]:
    """The blocks from which a RET of their own routine can be reached."""
    before: dict[int, set[int]] = defaultdict(set)  # -1 is what comes back
    before[-1] = {n for n, last in enumerate(lasts) if last.base == "RET" and is_jump(last)}
    for n, targets in enumerate(jumps):
        for target in () if n in calls else targets:
            before[target].add(n)
        if falls[n]:
            before[n + 1].add(n)
    found: set[int] = set()
    while (reached := reach(-1, before.__getitem__)) != found:
        found = reached
        # a routine that comes back lets its callers go on
        for caller, routine in calls.items():
            if routine in found:
                before[caller + 1].add(caller)
    return found


_Region = tuple[int, set[int]]  # header of a loop, and its blocks


def _loops(graph: _Graph) -> tuple[Loop, ...]:
    order = _depth_first_order(graph)
    regions = _regions(graph, order)
    _add_routines(graph, [blocks for _, blocks in regions])
    regions.sort(key=lambda region: (region[0], -len(region[1])))
    loops: list[Loop] = []
    for n, (header, blocks) in enumerate(regions):
        around = [(len(other), m) for m, (_, other) in enumerate(regions) if blocks < other]
        parent = min(around)[1] if around else None
        loops.append(Loop(n, header, frozenset(blocks), parent, 1 + len(around)))
    return tuple(loops)


def _depth_first_order(graph: _Graph) -> dict[int, int]:
    """Block to its place in the order in which a search reaches blocks.

    The search begins at the entry, then at each block that nothing reached, padding apart.
    """
    order: dict[int, int] = {}
    for root in range(graph.padding):
        stack = [root]
        while stack:
            n = stack.pop()
            if n in order:
                continue
            order[n] = len(order)
            stack.extend(reversed(graph.successors[n]))
    return order


def _regions(graph: _Graph, order: Mapping[int, int]) -> list[_Region]:
    """The loops as nested strongly connected components: one with its header taken out falls into
    the components that are the loops inside it."""
    regions = []
    pending: list[set[int]] = [set(order)]
    while pending:
        inside = pending.pop()
        for component in strongly_connected_components(graph.successors, inside):
            header = min(component, key=order.__getitem__)
            if len(component) == 1 and header not in graph.successors[header]:
                continue
            regions.append((header, component))
            pending.append(component - {header})
    return regions


def _add_routines(graph: _Graph, regions: Sequence[set[int]]) -> None:
    """Put each routine into the loops from which alone it is called."""
    callers: dict[int, set[int]] = defaultdict(set)
    for caller, routine in graph.calls.items():
        callers[routine].add(caller)
    bodies = {routine: reach(routine, graph.successors.__getitem__) for routine in callers}
    changed = True
    while changed:
        changed = False
        for routine, body in bodies.items():
            for blocks in regions:
                if callers[routine] <= blocks and not body <= blocks:
                    blocks |= body
                    changed = True
