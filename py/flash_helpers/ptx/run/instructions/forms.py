"""Forms of instructions: their names, modifiers, types and numbers of operands (PTX ISA 9.0,
"Instructions").

An instruction that no table has is refused, not ignored, and so is a modifier that its form does
not name.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property

import numpy as np

from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.read.types import OPCODE_TYPES
from flash_helpers.ptx.run.machine import Action, Alu, Machine

Builder = Callable[[Machine, Instruction], "Alu | Action"]

BITS = "b16 b32 b64"
SIGNED = "s16 s32 s64"
INTEGERS = f"u16 u32 u64 {SIGNED}"
HALVES = "f16 f16x2 bf16 bf16x2"
FLOATS = f"{HALVES} f32 f64"
SINGLES = "f32 f64"
SCALARS = f"f16 bf16 {SINGLES}"
WORDS = f"{BITS} {INTEGERS}"
MEMORY = f"b8 u8 s8 {WORDS} {SINGLES} f16 bf16 f16x2 bf16x2"

OPERATIONS: Mapping[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
"""The functions that instructions, atomics and reductions of these names compute."""

# Modifiers of several forms.
SPACES = "const global local param shared shared::cluster"
VECTORS = "v2 v4 v8"
DIRECTED = "rz rm rp"
WARP_WIDE = "sync aligned"
"""Lanes that a mask or `.aligned` demands are waited for whether the opcode says so or not."""
NEAREST = "rn"
"""The rounding that is computed where an opcode names none."""
APPROXIMATE = "approx"
"""Approximations are rounded to nearest (`floats`)."""
SCOPES = "cta cluster gpu sys"
"""Memory is in order for all threads of the device."""
CACHE_HINTS = (
    "ca cg cs lu cv wb wt nc L2::cache_hint L2::64B L2::128B L2::256B "
    "L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate "
    "L2::evict_normal L2::evict_unchanged L2::evict_first L2::evict_last"
)
"""There are no caches."""

_NOT_SIMULATED: Mapping[str, str] = {
    "surfaces": "suld sust sured suq",
    "textures": "tex tld4 txq istypep",
    "bulk copies of zeros": "st.bulk",
    "asynchronous reductions": "red.async",
    "tensor cores of the fifth generation": "tcgen05",
    "multicast addresses": "multimem",
    "sparse matrices": "mma.sp mma.sp::ordered_metadata",
    "cluster launch control": "clusterlaunchcontrol",
    "allocations on the stack": "alloca stacksave stackrestore",
    "video instructions": " ".join(
        f"v{operation}{width}"
        for operation in ("add", "sub", "absdiff", "min", "max", "avrg", "shl", "shr", "mad", "set")
        for width in ("", "2", "4")
    ),
}
"""Features that the simulator lacks, by name: opcodes, or their beginnings."""

_NOT_SIMULATED_WITH: Mapping[str, str] = {
    "block_scale": "block-scaled matrices",
    "im2col": "im2col copies",
    "im2col_no_offs": "im2col copies",
    "tile::gather4": "copies of rows that are gathered",
    "tile::scatter4": "copies of rows that are scattered",
    "cta_group::1": "pairs of blocks",
    "cta_group::2": "pairs of blocks",
}
"""The same, by a modifier."""

_TARGETS: Mapping[str, Mapping[str, str]] = {
    "wgmma": {"": "sm_90a"},
    "setmaxnreg": {"": "sm_*[af]"},
    "tensormap": {"replace": "sm_*[af]"},
    "redux": {"f32": "sm_10[0-9][af]"},
}
"""Targets of the text that an opcode needs, by its name and a modifier ("Target ISA Notes" of each;
ptxas 13.0 refuses the others)."""

# The opcodes and what they belong to, by name.
_REFUSED: Mapping[str, list[tuple[str, str]]] = defaultdict(list)
for _what, _opcodes in _NOT_SIMULATED.items():
    for _opcode in _opcodes.split():
        _REFUSED[_opcode.partition(".")[0]].append((_opcode, _what))


@dataclass(frozen=True)
class Form:
    """Instructions that are built alike.

    `names`: opcodes up to the first dot, separated by spaces. `operands`: how many there may be;
    none for any number. `types`: for each type in the opcode, in order, the allowed names,
    separated by spaces. `takes`: the modifiers that the builder reads, separated by spaces.
    `ignores`: the modifiers that the instructions may have too, and that change nothing here.
    `having`: a modifier that these instructions have, where another form is for instructions
    without it.
    """

    names: str
    build: Builder
    operands: tuple[int, ...]
    types: tuple[str, ...] = ()
    takes: str = ""
    ignores: str = ""
    having: str | None = None

    def fits(self, instruction: Instruction) -> bool:
        """Whether an instruction of its name and types has this form, its modifiers aside."""
        if self.having is not None and not instruction.has(self.having):
            return False
        return not self.operands or len(instruction.operands) in self.operands

    @cached_property
    def modifiers(self) -> frozenset[str]:
        """All modifiers that its instructions may have, without types."""
        return frozenset(f"{self.takes} {self.ignores} {self.having or ''}".split())


# By name and types; several of them differ in the number of operands, or in modifiers.
Forms = Mapping[str, Mapping[tuple[str, ...], list[Form]]]


def by_name(forms: Iterable[Form]) -> Forms:
    """The forms that each opcode may have."""
    found: defaultdict[str, defaultdict[tuple[str, ...], list[Form]]]
    found = defaultdict(lambda: defaultdict(list))
    for form in forms:
        for name in form.names.split():
            for types in itertools.product(*(known.split() for known in form.types)):
                found[name][types].append(form)
    return {name: dict(of_types) for name, of_types in found.items()}


def check_features(machine: Machine, instruction: Instruction) -> None:
    """Raises UnsupportedInstruction, with the feature's name, for features that are not simulated,
    or that the target of the text lacks."""
    written_for = machine.launch.written_for
    for modifier, pattern in _TARGETS.get(instruction.name, {}).items():
        if (not modifier or instruction.has(modifier)) and not fnmatch(written_for, pattern):
            raise machine.unsupported(
                f"the text has .target {written_for}, and this needs one like {pattern}"
            )
    for opcode, what in _REFUSED.get(instruction.name, ()):
        if f"{instruction.opcode}.".startswith(f"{opcode}."):
            raise machine.unsupported(f"{what} are not simulated")
    for modifier in instruction.modifiers:
        if modifier in _NOT_SIMULATED_WITH:
            raise machine.unsupported(f"{_NOT_SIMULATED_WITH[modifier]} are not simulated")


def check_modifiers(machine: Machine, instruction: Instruction, known: Collection[str]) -> None:
    """Raises UnsupportedInstruction for a modifier that is neither known nor a type."""
    for modifier in instruction.modifiers:
        if modifier not in known and modifier not in OPCODE_TYPES:
            raise machine.unsupported(f"the modifier .{modifier} is not known")


def find_form(machine: Machine, instruction: Instruction, forms: Forms) -> Form:
    """The form of an instruction.

    Raises UnsupportedInstruction if the simulator lacks a feature that it names, or if its opcode,
    a modifier, a type or the number of its operands is not known.
    """
    check_features(machine, instruction)
    named = forms.get(instruction.name)
    if named is None:
        raise machine.unsupported()
    typed = named.get(instruction.types, [])
    fitting = [form for form in typed if form.fits(instruction)]
    written = set(instruction.modifiers) - OPCODE_TYPES
    for form in fitting:
        if written <= form.modifiers:
            return form
    every = frozenset().union(*(f.modifiers for of_types in named.values() for f in of_types))
    check_modifiers(machine, instruction, every)
    if not typed:
        types = ".".join(instruction.types)
        raise machine.unsupported(f"the type .{types} is not known" if types else "it has no type")
    if fitting:
        name = next(m for m in instruction.modifiers if m in written - fitting[0].modifiers)
        raise machine.unsupported(f"the modifier .{name} is not known for this form of it")
    count = len(instruction.operands)
    counts = " or ".join(str(n) for f in typed for n in f.operands)
    raise machine.unsupported(f"{count} operands where {counts} are due")
