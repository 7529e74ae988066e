"""A look at registers and shared memory while a kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flash_helpers.ptx.read.flow import Phase
from flash_helpers.ptx.read.module import Instruction, Operand
from flash_helpers.ptx.run.asynchronous.warpgroups import ComputedProduct
from flash_helpers.ptx.run.machine import Machine


@dataclass(frozen=True)
class Observation:
    """An instruction just executed by some lanes of a batch of blocks. `lanes`: numbered over the
    batch; whole warps for warp-wide instructions."""

    machine: Machine
    instruction: Instruction
    phase: Phase
    lanes: np.ndarray

    @property
    def blocks(self) -> np.ndarray:
        """`ctaid` of each lane's block, (lanes, 3)."""
        geometry = self.machine.geometry
        return np.array(geometry.blocks)[geometry.block_of(self.lanes)]

    @property
    def warps(self) -> np.ndarray:
        """Each lane's warp, numbered within its block."""
        return self.machine.geometry.warp_of(self.lanes)

    def value(self, operand: Operand, type_name: str) -> np.ndarray:
        """An operand as a PTX type, one element per lane; registers written hold their new value.
        Raises UnsupportedInstruction for an operand that is no scalar."""
        array = self.machine.source(operand, type_name)
        return np.broadcast_to(array, (self.machine.lanes,))[self.lanes].copy()

    def shared(self, block: tuple[int, int, int]) -> np.ndarray:
        """The bytes of a block's shared memory, without copies that no thread has waited for."""
        shared = self.machine.shared
        start = self.machine.geometry.blocks.index(block) * shared.stride
        return shared.data[start : start + shared.size].copy()


@dataclass(frozen=True)
class Observer:
    """The instructions to look at, and callbacks that are given them.

    `wants`: called once for every instruction of the kernel that is not control flow. `see`: called
    each time that lanes have executed a wanted instruction. `see_product`: called each time that a
    `wgmma` is computed, which happens when its group retires, not when it is issued. Products of a
    warp that accumulate in the same registers come in their order.
    """

    wants: Callable[[Instruction], bool]
    see: Callable[[Observation], None]
    see_product: Callable[[ComputedProduct], None] | None = None
