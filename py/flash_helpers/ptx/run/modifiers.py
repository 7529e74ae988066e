"""Modifiers of opcodes: what none of these names is refused rather than ignored.

The names are those of the PTX ISA 9.0, "Instructions", that a builder reads, or that change nothing
in the simulator (scopes, memory orders, cache hints).
"""

from __future__ import annotations

from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.read.types import TYPE_NAMES

_SPACES = "const global local param shared to"
_MEMORY = (
    "v2 v4 v8 weak volatile relaxed acquire release acq_rel cta cluster gpu sys nc ca cg cs lu cv "
    "wb wt noftz L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last "
    "L1::no_allocate L2::evict_normal L2::evict_first L2::evict_last L2::cache_hint L2::64B "
    "L2::128B L2::256B"
)
_COPIES = "async commit_group wait_group wait_all bulk mbarrier noinc"
_ATOMICS = "add and cas dec exch inc max min or xor"
_COMPARISONS = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan"
_ROUNDINGS = "rn rz rm rp rna rni rzi rmi rpi"
_FLOATS = (
    "approx full ftz sat satfinite relu NaN xorsign abs "
    "finite infinite number notanumber normal subnormal"
)
_INTEGERS = "hi lo wide cc clamp wrap l r shiftamt f4e b4e rc8 ecl ecr rc16 pack"
_CONTROL = "uni sync aligned warp arrive red popc"
_WARPS = "up down bfly idx all any ballot"
_MATRICES = "m8n8 m8n8k4 m16n8k4 m16n8k8 m16n8k16 m16n8k32 row col x1 x2 x4 trans sp"
_POLICIES = "fractional range L2::evict_unchanged"

_KNOWN = TYPE_NAMES | frozenset(
    word
    for words in (
        _SPACES,
        _MEMORY,
        _COPIES,
        _ATOMICS,
        _COMPARISONS,
        _ROUNDINGS,
        _FLOATS,
        _INTEGERS,
        _CONTROL,
        _WARPS,
        _MATRICES,
        _POLICIES,
    )
    for word in words.split()
)


def unknown_modifier(instruction: Instruction) -> str | None:
    """The first modifier that the simulator does not know; None if it knows all."""
    return next((m for m in instruction.modifiers if m not in _KNOWN), None)
