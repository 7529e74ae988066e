"""Counts while a launch runs, in the units of `counters`."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.read.flow import BARRIERS, Program
from flash_helpers.ptx.read.module import Instruction
from flash_helpers.ptx.run.counters import Counts

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


class Tally:
    """Counts by instruction of the program while it runs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.issued = np.zeros(len(program.instructions), np.int64)
        self.accesses = [Counts() for _ in program.instructions]

    def shared_access(
        self, position: int, addresses: np.ndarray, size: int, lanes: np.ndarray | None
    ) -> None:
        """Counts a shared access of `size` bytes a lane. lanes: None for all of whole warps."""
        unit = max(size, 4)
        width = 128 // unit
        counts = self.accesses[position]
        units = addresses >> (unit.bit_length() - 1)
        if lanes is None:
            segments = ideal = units.size // width
            phase = np.repeat(np.arange(segments) * width, width)
            counts.shared_requests += units.size // WARP
        else:
            owners = lanes // width
            ideal = _distinct(owners)
            segments = int(owners.max()) + 1
            phase = owners * width
            counts.shared_requests += _distinct(lanes // WARP)
        banks = phase + (units & (width - 1))
        load = np.bincount(banks, minlength=segments * width)
        wavefronts = ideal
        if load.max() > 1:
            # Lanes that name the same word share one access: count each word of a phase once.
            word = np.unique((phase << 32) + units)
            banks = (word >> 32) + (word & (width - 1))
            load = np.bincount(banks, minlength=segments * width)
            wavefronts = int(load.reshape(segments, width).max(axis=1).sum())
        counts.shared_wavefronts += wavefronts
        counts.shared_ideal_wavefronts += ideal
        counts.shared_bytes += units.size * size

    def global_access(
        self, position: int, addresses: np.ndarray, size: int, lanes: np.ndarray | None
    ) -> None:
        """Counts a global access of `size` bytes a lane. lanes: None for all of whole warps."""
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

    def counts(self, position: int) -> Counts:
        """Of one instruction."""
        instruction = self.program.instructions[position]
        issued = int(self.issued[position])
        mma = issued if instruction.name == "mma" else 0
        is_barrier = instruction.name in BARRIERS and not instruction.has("warp")
        return replace(
            self.accesses[position],
            instructions=issued,
            mma=mma,
            mma_flops=2 * mma * _products(instruction) if mma else 0,
            barriers=issued if is_barrier else 0,
            waits=issued if instruction.opcode.startswith("cp.async.wait") else 0,
        )


def _products(instruction: Instruction) -> int:
    """Multiplications of one `mma`: the product of the sizes in its shape, such as m16n8k16."""
    shapes = (_SHAPE.fullmatch(modifier) for modifier in instruction.modifiers)
    return math.prod(map(int, next(filter(None, shapes)).groups()))


def _distinct(values: np.ndarray) -> int:
    ordered = np.sort(values)
    return 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1])) if values.size else 0
