"""Records for the contents of a PTX file."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from flash_helpers.ptx.errors import PtxSyntaxError, is_header


@dataclass(frozen=True)
class Location:
    """A line of CUDA source, and the call that it was inlined into, if any."""

    file: str
    line: int
    column: int
    inlined_at: Location | None = None

    def frames(self) -> tuple[Location, ...]:
        """This line, then every caller outwards."""
        found, location = [self], self.inlined_at
        while location is not None:
            found.append(location)
            location = location.inlined_at
        return tuple(found)

    def __str__(self) -> str:
        """The chain of calls, cut to what its reader wrote: the line itself and the callers outside
        of header folders, the inner and the outer ones of many, and how many are left out."""
        frames = self.frames()
        own = [i for i, frame in enumerate(frames) if not is_header(frame.file)]
        shown = sorted({0, *(own or [len(frames) - 1])})
        if len(shown) > _INNER + _OUTER:
            shown = [*shown[:_INNER], *shown[-_OUTER:]]
        text = f"{self.file}:{self.line}"
        for before, i in pairwise(shown):
            if i - before > _HIDDEN + 1:
                text += f", … {i - before - 1} more, inlined at {frames[i].file}:{frames[i].line}"
                continue
            for frame in frames[before + 1 : i + 1]:
                text += f", inlined at {frame.file}:{frame.line}"
        return text


_INNER, _OUTER = 4, 2
"""Frames that are shown of many."""
_HIDDEN = 2
"""Frames that are shown although others could stand for them, since naming their number is hardly
shorter."""


@dataclass(frozen=True)
class Register:
    """A virtual register, by a name that is unique within its function. `negated`: `!%p`, the
    complement of a predicate."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal. `float_bits`: 32 or 64 for `0f...` and `0d...`, whose bits are in `value`."""

    value: int | float
    float_bits: int = 0

    @property
    def integer(self) -> int | None:
        """The value of an integer literal, None for any other literal."""
        return self.value if isinstance(self.value, int) and not self.float_bits else None


@dataclass(frozen=True)
class Symbol:
    """The address of a variable (or the name of a label or a function), plus an offset."""

    name: str
    offset: int = 0


class Compound:
    """An operand that has parts. Instructions share operands, so that each is taken apart once."""

    def inner(self) -> tuple[Operand, ...]:
        """The parts that are no parts of parts."""
        raise NotImplementedError

    @cached_property
    def parts(self) -> tuple[Operand, ...]:
        """All parts, without itself."""
        return tuple(part for each in self.inner() for part in parts(each))

    @cached_property
    def register_names(self) -> tuple[str, ...]:
        """Names of the registers among its parts."""
        return tuple(part.name for part in self.parts if isinstance(part, Register))


@dataclass(frozen=True)
class Address(Compound):
    """`[base + offset]`. `coordinates`: the place in a tensor that `[base + offset, {a, b, ...}]`
    names."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()

    def inner(self) -> tuple[Operand, ...]:
        """See `Compound`."""
        return (self.base, *self.coordinates)


@dataclass(frozen=True)
class Vector(Compound):
    """`{a, b, ...}`."""

    elements: tuple[Operand, ...]

    def inner(self) -> tuple[Operand, ...]:
        """See `Compound`."""
        return self.elements


@dataclass(frozen=True)
class Pair(Compound):
    """`a|b`: two destinations."""

    first: Operand
    second: Operand

    def inner(self) -> tuple[Operand, ...]:
        """See `Compound`."""
        return (self.first, self.second)


@dataclass(frozen=True)
class Arguments(Compound):
    """`(a, b, ...)` of a call."""

    elements: tuple[Operand, ...]

    def inner(self) -> tuple[Operand, ...]:
        """See `Compound`."""
        return self.elements


@dataclass(frozen=True)
class Sink:
    """`_`: a destination that is never read."""


Operand = Register | Special | Immediate | Symbol | Address | Vector | Pair | Arguments | Sink


def parts(operand: Operand) -> tuple[Operand, ...]:
    """The operand and all of its parts."""
    return (operand, *operand.parts) if isinstance(operand, Compound) else (operand,)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    `opcode`: the opcode with all modifiers, as written. `line`: line of the PTX text, from 1.
    `name`: the opcode before the first dot. `types`: the modifiers that are types, in order.
    `refusal`: the reason why it cannot be run; empty unless the text tells one.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    location: Location | None
    name: str
    modifiers: tuple[str, ...]
    types: tuple[str, ...]
    refusal: str = ""

    def named(self) -> list[Operand]:
        """All operands with their parts, and the guard."""
        found = [part for operand in self.operands for part in parts(operand)]
        return [*found, self.guard] if self.guard else found

    def has(self, modifier: str) -> bool:
        """Whether the opcode has a modifier."""
        return modifier in self.modifiers

    def first(self, names: Collection[str]) -> str | None:
        """The first of its modifiers that is in `names`."""
        return next((m for m in self.modifiers if m in names), None)


def named_by(instructions: Iterable[Instruction]) -> list[Operand]:
    """All operands of instructions with their parts, and the guards. An operand that instructions
    share comes once."""
    distinct: dict[int, Operand] = {}
    for instruction in instructions:
        for operand in instruction.operands:
            distinct[id(operand)] = operand
        if instruction.guard is not None:
            distinct[id(instruction.guard)] = instruction.guard
    return [part for operand in distinct.values() for part in parts(operand)]


@dataclass(frozen=True)
class StoredAddress:
    """An address, or a part of one, in an initial value (PTX ISA 9.0, "Variable Initialization").
    `offset`: offset of its first byte in the variable. `size`: bytes. `shift`: number of low bits
    of the address that are cut off."""

    offset: int
    size: int
    symbol: Symbol
    shift: int = 0


@dataclass(frozen=True)
class Variable:
    """A variable in shared, local, const, global or param space.

    `size`: bytes; 0 for an `extern` array whose size the launch gives. `initial`: its first bytes,
    with zeros where `addresses` go; None without an initial value. `line`: line of the PTX text,
    from 1. `problem`: the reason why it cannot be read, if there is one; then only name and line
    are known.
    """

    name: str
    space: str
    type: str
    size: int
    alignment: int
    initial: bytes | None = None
    addresses: tuple[StoredAddress, ...] = ()
    external: bool = False
    line: int = 0
    problem: PtxSyntaxError | None = None


@dataclass(frozen=True)
class Function:
    """An entry (kernel) or a device function.

    `directives`: `.maxntid`, `.reqntid`, `.minnctapersm` and similar ones. `registers`: type of
    each register by its name. `labels`: index of the instruction that follows each label.
    `branch_targets`: the labels of each `.branchtargets` list, by its name. `problem`: the part
    that cannot be read, if there is one; everything behind it is missing.
    """

    name: str
    is_entry: bool
    parameters: tuple[Variable, ...]
    results: tuple[Variable, ...]
    line: int
    directives: dict[str, tuple[int, ...]]
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problem: PtxSyntaxError | None = None


@dataclass(frozen=True)
class Module:
    """A whole PTX file. `version`: such as 8.7. `target`: the first that `.target` names, such as
    sm_90a. `functions`, `variables`: the functions and variables that it defines, by name; some may
    have a problem."""

    version: str
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]

    @property
    def entries(self) -> tuple[Function, ...]:
        """The kernels."""
        return tuple(f for f in self.functions.values() if f.is_entry)
