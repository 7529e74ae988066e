"""Registers that instructions read and write, and those that a kernel may read before it writes
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flash_helpers.ptx.read.flow import BARRIERS, EXITS, Program, is_wgmma
from flash_helpers.ptx.read.module import (
    Address,
    Compound,
    Immediate,
    Instruction,
    Operand,
    Register,
    Sink,
    parts,
)

CARRY = ""
"""The carry flag's name among registers."""
CONTROL = BARRIERS | EXITS | {"trap", "brkpt", "bra", "brx", "call"}
WITHOUT_EFFECT = frozenset(
    {"nanosleep", "prefetch", "prefetchu", "pmevent", "discard", "applypriority"}
)
"""The simulator has no caches and no clock, so hints change nothing."""


def has_result(instruction: Instruction) -> bool:
    """Whether the first operand is written at once. Where it is an address, the instruction
    stores."""
    name, operands = instruction.name, instruction.operands
    if name in BARRIERS:
        return instruction.has("red")
    if name == "wgmma":  # its results come when its group retires
        return False
    return name not in CONTROL and bool(operands) and not isinstance(operands[0], Address)


def targets(instruction: Instruction) -> tuple[str | None, ...]:
    """Names of the registers that an instruction writes, None for a sink."""
    if not has_result(instruction) and not is_wgmma(instruction):
        return ()
    named = [o for o in parts(instruction.operands[0]) if isinstance(o, Register | Sink)]
    carry = (CARRY,) if sets_carry(instruction) else ()
    return (*(o.name if isinstance(o, Register) else None for o in named), *carry)


def operands_read(instruction: Instruction) -> tuple[Operand, ...]:
    """The operands that an instruction may read. The accumulator of a `wgmma` is read unless
    scale-d is a literal 0."""
    if instruction.name in WITHOUT_EFFECT:
        return ()
    operands = instruction.operands
    scale = scale_d(instruction) if is_wgmma(instruction) else None
    overwrites = isinstance(scale, Immediate) and not scale.value
    return operands[1:] if overwrites or has_result(instruction) else operands


def scale_d(product: Instruction) -> Operand | None:
    """The operand of a `wgmma` that says whether D is added to; None if there are too few. It is
    behind the matrices, and the metadata of a sparse A."""
    return next(iter(product.operands[5 if product.has("sp") else 3 :]), None)


def uses_carry(instruction: Instruction) -> bool:
    return instruction.name in ("addc", "subc", "madc")


def sets_carry(instruction: Instruction) -> bool:
    return instruction.has("cc") and instruction.name.removesuffix("c") in ("add", "sub", "mad")


def names_of(operands: Iterable[Operand]) -> Iterator[str]:
    """Names of the registers among operands and their parts."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.name
        elif isinstance(operand, Compound):
            yield from operand.register_names


def registers_of(instruction: Instruction) -> set[str]:
    """Names of the registers that an instruction reads or writes, with the carry flag."""
    if instruction.name in WITHOUT_EFFECT:
        return set()
    guard = instruction.guard
    names = set(names_of((*instruction.operands, *([guard] if guard else []))))
    if uses_carry(instruction) or sets_carry(instruction):
        names.add(CARRY)
    return names


@dataclass(frozen=True)
class Unset:
    """Registers that a kernel may read before it has written them.

    `names`: these registers. `positions`: the instructions that read or write them. `ends`: by the
    first instruction of a block, those of them that nothing reads from there on, though something
    does on another way from where the ways part.
    """

    names: frozenset[str] = frozenset()
    positions: frozenset[int] = frozenset()
    ends: Mapping[int, frozenset[str]] = field(default_factory=dict)


def unset_registers(program: Program) -> Unset:
    """The registers of a program that are live where it begins.

    A register is live at the start of a block if the block reads it first, or a following block
    does and the block does not write it (Aho, Lam, Sethi and Ullman, "Compilers", 2006, section
    9.2.5).
    """
    blocks = program.blocks
    own = [_read_and_written(program.instructions[b.start : b.end]) for b in blocks]
    following = [[s for s in (*b.targets, b.next) if s >= 0] for b in blocks]
    live = [read for read, _ in own]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(blocks))):
            read, written = own[i]
            now = read.union(*(live[s] - written for s in following[i]))
            changed |= len(now) > len(live[i])
            live[i] = now
    names = frozenset(live[0])
    ends: dict[int, frozenset[str]] = {}
    for successors in following if names else ():
        out = names.intersection(set().union(*(live[s] for s in successors)))
        for successor in successors:
            start = blocks[successor].start
            ends[start] = ends.get(start, frozenset()) | (out - live[successor])
    instructions = enumerate(program.instructions) if names else ()
    positions = (i for i, each in instructions if not names.isdisjoint(registers_of(each)))
    return Unset(names, frozenset(positions), {at: over for at, over in ends.items() if over})


def _read_and_written(instructions: Iterable[Instruction]) -> tuple[set[str], set[str]]:
    """Registers that a block reads before it writes them, and those that it writes. A register
    written under a predicate counts as written for instructions under the same predicate."""
    read: set[str] = set()
    written: set[str] = set()
    # By a predicate and whether it is negated, the registers written under it.
    under: dict[tuple[str, bool], set[str]] = {}
    for instruction in instructions:
        guard = instruction.guard
        needed = set(names_of(operands_read(instruction))) - written
        done = set(filter(None, targets(instruction)))
        if guard is not None:
            needed -= under.get((guard.name, guard.negated), set())
            needed |= {guard.name} - written
        read |= needed
        for name in done if under else ():
            under.pop((name, False), None)
            under.pop((name, True), None)
        if guard is None:
            written |= done
        else:
            mine = under.setdefault((guard.name, guard.negated), set())
            mine |= done
            written |= mine & under.get((guard.name, not guard.negated), set())
    return read, written
