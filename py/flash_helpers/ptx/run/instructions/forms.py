"""Forms of instructions: their names, modifiers, types and numbers of operands.

An instruction that no table has is refused, not ignored. The names are those of the PTX ISA 9.0,
"Instructions", that a builder reads, or that change nothing in the simulator (scopes, memory
orders, cache hints).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

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

_MODIFIERS = frozenset(
    word
    for words in (
        # state spaces, memory
        "const global local param shared shared::cluster to v2 v4 v8 weak volatile relaxed "
        "acquire release acq_rel "
        "cta cluster gpu sys nc ca cg cs lu cv wb wt noftz L1::evict_normal L1::evict_unchanged "
        "L1::evict_first L1::evict_last L1::no_allocate L2::evict_normal L2::evict_unchanged "
        "L2::evict_first L2::evict_last L2::cache_hint L2::64B L2::128B L2::256B fractional range",
        # copies, atomics
        "async commit_group wait_group wait_all bulk mbarrier noinc tensor reduce prefetch L2 tile "
        "mma_async fence 1d 2d 3d 4d 5d mbarrier::complete_tx::bytes bulk_group read "
        "multicast::cluster "
        "add and cas dec exch inc max min or xor",
        # mbarriers
        "init inval expect_tx complete_tx test_wait try_wait parity arrive_drop noComplete "
        "pending_count "
        # comparisons, roundings, floats, integers
        "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan "
        "rn rz rm rp rna rni rzi rmi rpi approx full ftz sat satfinite relu NaN xorsign abs "
        "finite infinite number notanumber normal subnormal "
        "hi lo wide cc clamp wrap l r shiftamt f4e b4e rc8 ecl ecr rc16 pack",
        # changes of tensor maps
        "replace cp_fenceproxy tensormap::generic b1024 global_address rank box_dim global_dim "
        "global_stride element_stride elemtype interleave_layout swizzle_mode swizzle_atomicity "
        "fill_mode",
        # control, warps, matrices
        "uni sync aligned warp arrive wait red popc up down bfly idx all any ballot "
        "m8n8 m8n8k4 m8n8k16 m8n8k32 m8n8k128 m16n8k4 m16n8k8 m16n8k16 m16n8k32 m16n8k64 m16n8k128 "
        "m16n8k256 m16n16k16 m32n8k16 m8n32k16 m16n16k8 row col x1 x2 x4 trans "
        "load store mma a b c d",
        # matrices of a warpgroup
        "sp " + " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16, 32, 64, 256)),
    )
    for word in words.split()
)

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
    separated by spaces. `having`: a modifier that these instructions have, where another form is
    for instructions without it.
    """

    names: str
    build: Builder
    operands: tuple[int, ...]
    types: tuple[str, ...] = ()
    having: str | None = None

    def fits(self, instruction: Instruction) -> bool:
        """Whether an instruction of its name has this form by its types."""
        if self.having is not None and not instruction.has(self.having):
            return False
        return not self.operands or len(instruction.operands) in self.operands


# By name and types; several of them differ in the number of operands.
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


def check_modifiers(machine: Machine, instruction: Instruction) -> None:
    """Raises UnsupportedInstruction, with the feature's name, for features that are not simulated,
    or that the target of the text lacks, and for a modifier that is not known."""
    written_for = machine.launch.written_for
    for modifier, pattern in _TARGETS.get(instruction.name, {}).items():
        if (not modifier or instruction.has(modifier)) and not fnmatch(written_for, pattern):
            raise machine.unsupported(
                f"the text has .target {written_for}, and this needs {pattern}: compile for sm_90a"
            )
    for opcode, what in _REFUSED.get(instruction.name, ()):
        if f"{instruction.opcode}.".startswith(f"{opcode}."):
            raise machine.unsupported(f"{what} are not simulated")
    for modifier in instruction.modifiers:
        if modifier in _NOT_SIMULATED_WITH:
            raise machine.unsupported(f"{_NOT_SIMULATED_WITH[modifier]} are not simulated")
        if modifier not in _MODIFIERS and modifier not in OPCODE_TYPES:
            raise machine.unsupported(f"the modifier .{modifier} is not known")


def find_form(machine: Machine, instruction: Instruction, forms: Forms) -> Form:
    """The form of an instruction.

    Raises UnsupportedInstruction if its opcode, a type or the number of its operands is not known.
    """
    known = forms.get(instruction.name)
    if known is None:
        raise machine.unsupported()
    fitting = known.get(instruction.types)
    if fitting is None:
        types = ".".join(instruction.types)
        raise machine.unsupported(f"the type .{types} is not known" if types else "it has no type")
    form = next((form for form in fitting if form.fits(instruction)), None)
    if form is None:
        count = len(instruction.operands)
        counts = " or ".join(str(n) for f in fitting for n in f.operands)
        raise machine.unsupported(f"{count} operands where {counts} are due")
    return form
