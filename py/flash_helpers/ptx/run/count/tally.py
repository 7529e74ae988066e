"""Counts while a launch runs, in the units of `counts`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.flow import BARRIERS, Program, is_product, is_wgmma
from flash_helpers.ptx.read.module import Immediate, Instruction, Vector
from flash_helpers.ptx.read.types import SCALAR_TYPES, size_of
from flash_helpers.ptx.run.count.counts import Counts

_WGMMA_ROW = 32
"""Bytes of a row of A, as it is stored, and of a dense B."""
_WAITS = ("cp.async.wait", "cp.async.bulk.wait", "wgmma.wait")
_MBARRIER_WAITS = ("mbarrier.test_wait", "mbarrier.try_wait")
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


@dataclass(frozen=True)
class _SharedRule:
    """The way in which shared memory serves an instruction, by the rules of `counts`. `is_load`:
    parts of a warp may be served together. `each_lane`: lanes that name one word take turns.
    `passes`: wavefronts counted for each one that the addresses need."""

    is_load: bool = False
    each_lane: bool = False
    passes: int = 1


def _shared_rule(program: Program, position: int) -> _SharedRule:
    instruction = program.instructions[position]
    if instruction.name not in ("atom", "red"):
        return _SharedRule(is_load=instruction.name in ("ld", "ldu"))
    if _counts_votes(program, instruction):
        return _SharedRule()
    size = size_of(instruction.types[-1])
    is_float = SCALAR_TYPES[instruction.types[-1]].is_float
    native = instruction.has("exch") or (size == 4 and not is_float and not instruction.has("cas"))
    return _SharedRule(each_lane=True, passes=1 if native else 2)


def _counts_votes(program: Program, instruction: Instruction) -> bool:
    """Whether ptxas makes an atomic an ATOMS.POPC.INC: it adds the literal 1 to a u32, and the old
    value is never read."""
    *target, _, value = instruction.operands
    if not instruction.has("add") or instruction.types[-1] != "u32" or value != Immediate(1):
        return False
    return not any(
        operand in target
        for other in program.instructions
        if other is not instruction
        for operand in other.named()
    )


class Tally:
    """Counts by instruction of the program while it runs.

    `issued`: (instructions, warps of a block), executions by that warp of all blocks. `blocked`: of
    each instruction, warps that fell asleep at it.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.issued = np.zeros((len(program.instructions), 0), np.int64)
        self.blocked = np.zeros(len(program.instructions), np.int64)
        self.accesses = [Counts() for _ in program.instructions]
        self._rules: dict[int, _SharedRule] = {}

    def issued_by(self, warps: int) -> np.ndarray:
        """`issued` of the first warps of a block, to be counted up."""
        missing = max(warps - self.issued.shape[1], 0)
        self.issued = np.pad(self.issued, ((0, 0), (0, missing)))
        return self.issued[:, :warps]

    @property
    def global_requests(self) -> int:
        """The sum over all instructions."""
        return sum(counts.global_requests for counts in self.accesses)

    def shared_access(
        self, position: int, addresses: np.ndarray, size: int, lanes: np.ndarray | None
    ) -> None:
        """Counts a shared access of `size` bytes per lane. `lanes`: None for all lanes of whole
        warps."""
        unit = max(size, 4)
        width = 128 // unit
        counts, rule = self.accesses[position], self._rule(position)
        units = addresses >> (unit.bit_length() - 1)
        if lanes is None:
            segments = ideal = units.size // width
            owners = np.repeat(np.arange(segments), width)
            counts.shared_requests += units.size // WARP
        else:
            owners = lanes // width
            segments, ideal = int(owners.max()) + 1, _distinct(owners)
            counts.shared_requests += _distinct(lanes // WARP)
        if rule.is_load and width < WARP:
            merges = _merges(units, lanes)
            if merges.any():
                owners = np.where(merges, owners & ~1, owners)
                ideal = _distinct(owners)
        phase = owners * width
        banks = phase + (units & (width - 1))
        load = np.bincount(banks, minlength=segments * width)
        wavefronts = ideal
        if load.max() > 1:
            if not rule.each_lane:
                # Lanes that name the same word share one access: count each word of a phase once.
                word = np.unique((phase << 32) + units)
                banks = (word >> 32) + (word & (width - 1))
                load = np.bincount(banks, minlength=segments * width)
            wavefronts = int(load.reshape(segments, width).max(axis=1).sum())
        counts.shared_wavefronts += rule.passes * wavefronts
        counts.shared_ideal_wavefronts += rule.passes * ideal
        counts.shared_bytes += units.size * size

    def _rule(self, position: int) -> _SharedRule:
        rule = self._rules.get(position)
        if rule is None:
            rule = self._rules[position] = _shared_rule(self.program, position)
        return rule

    def global_access(
        self, position: int, addresses: np.ndarray, size: int, lanes: np.ndarray | None
    ) -> None:
        """Counts a global access of `size` bytes per lane. `lanes`: None for all lanes of whole
        warps."""
        counts, sectors = self.accesses[position], addresses >> 5
        if lanes is None:
            rows = np.sort(sectors.reshape(-1, WARP), axis=1)
            counts.global_requests += rows.shape[0]
            counts.global_sectors += rows.shape[0] + int(np.count_nonzero(np.diff(rows, axis=1)))
        else:
            warps = lanes // WARP
            counts.global_requests += _distinct(warps)
            counts.global_sectors += _distinct((warps << 48) + sectors)
        counts.global_bytes += sectors.size * size

    def bulk_copy(
        self, position: int, size: int, sectors: int, copies: int, *, is_request: bool
    ) -> None:
        """Counts equal copies by lanes of a warp. `size`: bytes of shared memory. `sectors`:
        sectors of global memory. `is_request`: they are the first of their warp's execution."""
        counts = self.accesses[position]
        counts.tma_requests += is_request
        counts.tma_boxes += copies
        counts.tma_bytes += copies * size
        counts.tma_sectors += copies * sectors

    def executed(self) -> Iterator[tuple[int, Counts]]:
        """Positions and counts of the instructions that some warp executed."""
        for position, issued in enumerate(self.issued.sum(axis=1).tolist()):
            if issued:
                yield position, self._counts(position, issued)

    def _counts(self, position: int, issued: int) -> Counts:
        instruction = self.program.instructions[position]
        wgmma = issued if is_wgmma(instruction) else 0
        mma = issued if is_product(instruction) and not wgmma else 0
        is_barrier = instruction.name in BARRIERS and not instruction.has("warp")
        is_barrier &= not (instruction.has("cluster") and instruction.has("arrive"))
        counts = copy(self.accesses[position])  # `replace` takes longer, and there are many
        counts.instructions = issued
        counts.mma, counts.wgmma = mma, wgmma
        if mma or wgmma:  # a warp's part of a wgmma is a quarter
            counts.mma_flops = (4 * mma + wgmma) * _products(instruction) // 2
        if wgmma:
            counts.wgmma_bytes = wgmma * _operand_bytes(instruction)
        if is_barrier:
            counts.barriers = issued
        if instruction.opcode.startswith(_WAITS):
            counts.waits = issued
        if instruction.opcode.startswith(_MBARRIER_WAITS):
            counts.mbarrier_waits = issued
        counts.blocked = int(self.blocked[position])
        return counts


def _merges(units: np.ndarray, lanes: np.ndarray | None) -> np.ndarray:
    """For each lane that takes part, whether its warp's load is served in half as many parts."""
    if lanes is None:
        rows = units.reshape(-1, WARP)
        return _in_pairs(rows, rows >= 0).repeat(WARP)
    warps = lanes // WARP
    rows = np.full((int(warps[-1]) + 1, WARP), -1)
    rows[warps, lanes % WARP] = units
    return _in_pairs(rows, rows >= 0)[warps]


def _in_pairs(rows: np.ndarray, active: np.ndarray) -> np.ndarray:
    """For each warp, whether all lanes name the same word as the lane beside them, or all name the
    same word as the lane two away. Inactive lanes do not matter."""
    merges = np.zeros(len(rows), bool)
    for distance in (1, 2):
        pairs, both = (x.reshape(len(rows), -1, 2, distance) for x in (rows, active))
        differ = (pairs[:, :, 0] != pairs[:, :, 1]) & both[:, :, 0] & both[:, :, 1]
        merges |= ~differ.any(axis=(1, 2))
    return merges


def _operand_bytes(instruction: Instruction) -> int:
    """Bytes of shared memory that a warp's part of a `wgmma` reads: its rows of A, unless they are
    in registers, and a quarter of B, which the four warps share."""
    m, n, _ = _shape(instruction)
    a_rows = 0 if isinstance(instruction.operands[1], Vector) else m
    return _WGMMA_ROW * (a_rows + n * (2 if instruction.has("sp") else 1)) // 4


def _shape(instruction: Instruction) -> tuple[int, int, int]:
    """The sizes in its name, such as m16n8k16."""
    shapes = (_SHAPE.fullmatch(modifier) for modifier in instruction.modifiers)
    m, n, k = map(int, next(filter(None, shapes)).groups())
    return m, n, k


def _products(instruction: Instruction) -> int:
    """Multiplications of one `mma`: the product of the sizes in its shape; four times that for
    m8n8k4 of f16, which is four products; half of it where only half of A is stored."""
    times = 4 if instruction.has("m8n8k4") and not instruction.has("f64") else 1
    return times * math.prod(_shape(instruction)) // (2 if instruction.has("sp") else 1)


def _distinct(values: np.ndarray) -> int:
    ordered = np.sort(values)
    return 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1])) if values.size else 0
