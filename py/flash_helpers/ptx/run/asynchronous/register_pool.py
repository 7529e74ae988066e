"""setmaxnreg: the registers that the warps of a block share (PTX ISA 9.0, "setmaxnreg").

A block begins with the registers per thread that ptxas gave the kernel, and none to spare.
setmaxnreg.dec gives some back to the block's pool, setmaxnreg.inc waits until the pool has enough.
Warps that end give nothing back. How many registers a thread uses is not visible in PTX, so a warp
that uses more than it has is not reported.
"""

from __future__ import annotations

import math

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import RegisterCountError
from flash_helpers.ptx.read.module import Function, Immediate, Instruction
from flash_helpers.ptx.run.asynchronous.together import WARPS, Together
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.order import Order

_UNIT = 8
"""Allocation unit of registers per thread."""
_FEWEST, _MOST = 24, 256
_OF_SM = 65536


def entry_registers(function: Function) -> int | None:
    """Registers per thread when a kernel with setmaxnreg begins, None where it has no effect.

    The number is that of ptxas 13.0. It gives as many as `.maxnreg` says. Without `.maxnreg` it
    gives as many as fit `.minnctapersm` blocks of `.maxntid` threads, counted in whole warpgroups,
    into the registers of a multiprocessor, but no more than the largest number that a setmaxnreg
    names. Without these directives it ignores setmaxnreg: "unable to determine register count at
    entry".
    """
    directives = function.directives
    if "maxnreg" in directives:
        return -(-directives["maxnreg"][0] // _UNIT) * _UNIT
    threads = directives.get("maxntid") or directives.get("reqntid")
    if not threads or "minnctapersm" not in directives:
        return None
    group = WARPS * WARP
    taken = directives["minnctapersm"][0] * -(-math.prod(threads) // group) * group
    named = [i.operands[0] for i in function.instructions if i.name == "setmaxnreg" and i.operands]
    largest = max((o.integer or 0 for o in named if isinstance(o, Immediate)), default=_MOST)
    return min(_OF_SM // taken // _UNIT * _UNIT, largest, _MOST)


class RegisterPool:
    """The registers of the blocks of a batch. `entry`: registers per thread at the start, None if
    setmaxnreg has no effect."""

    def __init__(self, geometry: Geometry, order: Order, log: FaultLog, entry: int | None) -> None:
        self._geometry = geometry
        self._order = order
        self._log = log
        self._has_effect = entry is not None
        self._held = np.full(geometry.warps, entry or 0)
        self._free = np.zeros(len(geometry.blocks), np.int64)
        self._together = Together(geometry, log)
        # How many setmaxnreg each warp has executed, and when the last one.
        self._count = np.zeros(self._together.ended.size, np.int64)
        self._when = np.zeros(self._together.ended.size, np.int64)

    def end(self, warps: np.ndarray) -> None:
        """Records that all threads of some warps have ended."""
        self._together.end(warps)

    def has_enough(self, warps: np.ndarray, count: int) -> np.ndarray:
        """Whether each of the warps may raise its registers to a count, after the warps before
        it."""
        if not self._has_effect:
            return np.ones(warps.size, bool)
        more = np.maximum(count - self._held[warps], 0)
        blocks = warps % len(self._geometry.blocks)
        left = self._free.copy()
        enough = np.zeros(warps.size, bool)
        for i, (block, needed) in enumerate(zip(blocks.tolist(), more.tolist(), strict=True)):
            enough[i] = needed <= left[block]
            left[block] -= needed * enough[i]
        return enough

    def what_it_lacks(self, warp: int, count: int) -> str:
        """Text for a warp that waits because `has_enough` is false for it."""
        n_blocks = len(self._geometry.blocks)
        block = warp % n_blocks
        held = self._held[block::n_blocks].tolist()
        return (
            f"for {count - self._held[warp]} more registers for each thread of a warp; the block "
            f"has {self._free[block]} to spare,\n      and its warps hold {held}"
        )

    def set(self, position: int, warps: np.ndarray, count: int, *, raises: bool) -> None:
        """Warps execute setmaxnreg.inc or .dec."""
        self._together.record(position, warps)
        self._check_synchronised(position, warps)
        held = self._held[warps]
        wrong = held > count if raises else held < count
        if self._has_effect and wrong.any():
            more, what = ("more", "raises") if raises else ("fewer", "lowers")
            text = f"it {what} to {count} what is {held[wrong.argmax()]}, {more} than that"
            self._report(position, warps, wrong, text)
        good = warps[~wrong]
        np.add.at(self._free, good % len(self._geometry.blocks), self._held[good] - count)
        self._held[good] = count

    def _check_synchronised(self, position: int, warps: np.ndarray) -> None:
        """Reports warps whose warpgroup has not synchronised since its last setmaxnreg."""
        mates = np.minimum(self._together.mates[warps], self._geometry.warps - 1)
        known = self._order.known(warps * WARP, self._geometry.place_of(mates * WARP))
        late = (self._count[mates] < self._count[warps][:, None]) | (self._when[mates] > known)
        late &= (self._count[warps] > 0)[:, None] & (mates != warps[:, None])
        if late.any():
            mate = int(mates[late][0]) // len(self._geometry.blocks)
            text = f"no barrier stands between this and the last setmaxnreg of warp {mate}"
            self._report(position, warps, late.any(axis=1), text)
        self._count[warps] += 1
        self._when[warps] = self._order.now

    def _report(self, position: int, warps: np.ndarray, wrong: np.ndarray, text: str) -> None:
        thread = self._geometry.thread(int(warps[wrong.argmax()]) * WARP)
        self._log.report(RegisterCountError, text, position, thread, count=int(wrong.sum()))


def wanted_count(instruction: Instruction) -> int | None:
    """The register count that a setmaxnreg names, None if it may not name that count."""
    operand = instruction.operands[0]
    count = operand.integer if isinstance(operand, Immediate) else None
    is_good = count is not None and _FEWEST <= count <= _MOST and count % _UNIT == 0
    return count if is_good else None
