"""A check that the four warps of a warpgroup execute warpgroup-wide instructions together."""

from __future__ import annotations

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import WarpgroupError
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.watch.faults import FaultLog

WARPS = 4
"""Warps of a warpgroup: contiguous, the first one's number is a multiple of 4 (PTX ISA 9.0,
"Warpgroup")."""


class Together:
    """The sequence of such instructions of each warpgroup of a batch, and the position of each warp
    in it. `values`: number of uint64 values that belong to each instruction."""

    def __init__(self, geometry: Geometry, log: FaultLog, values: int = 0) -> None:
        self._geometry = geometry
        self._log = log
        n_blocks = len(geometry.blocks)
        # Also of warps that the last warpgroup of a block lacks.
        warps = np.arange(-(-geometry.warps_per_block // WARPS) * WARPS * n_blocks)
        first = warps // n_blocks // WARPS * WARPS
        self.group_of = first // WARPS * n_blocks + warps % n_blocks
        """The warpgroup of each warp, numbered over the batch."""
        self.mates = (first[:, None] + np.arange(WARPS)) * n_blocks + (warps % n_blocks)[:, None]
        """The warps of each warp's warpgroup."""
        self.ended = warps >= geometry.warps
        """Whether a warp has ended, or does not exist."""
        self._done = np.zeros(warps.size, np.int64)
        self._longest = np.zeros(int(self.group_of.max()) + 1, np.int64)
        # Only the first mistake of each warpgroup is reported: those after it follow from it.
        self._reported = np.zeros(self._longest.size, bool)
        self._sequence = np.zeros((self._longest.size, 64, 1 + values), np.uint64)

    def record(self, position: int, warps: np.ndarray, *values: np.ndarray) -> np.ndarray:
        """Reports warps that execute another instruction than their warpgroup did. `values`: one
        value per warp. Returns the values of each warp's warpgroup."""
        entry = np.empty((warps.size, 1 + len(values)), np.uint64)
        entry[:, 0] = position
        for i, value in enumerate(values):
            entry[:, 1 + i] = value
        groups, step = self.group_of[warps], self._done[warps]
        while int(step.max()) >= self._sequence.shape[1]:
            self._sequence = np.concatenate([self._sequence, 0 * self._sequence], axis=1)
        # Of several that come first together, the first warp's.
        new = np.flatnonzero(step >= self._longest[groups])[::-1]
        self._sequence[groups[new], step[new]] = entry[new]
        np.maximum.at(self._longest, groups, step + 1)
        self._done[warps] = step + 1
        found = self._sequence[groups, step]
        wrong = found[:, 0] != position
        if wrong.any():
            site = self._log.site(int(found[wrong.argmax(), 0]))
            what = f"executes this where a warp of its warpgroup executed {site}"
            self._report(position, warps, wrong, what)
        gone = self.ended[self.mates[warps]] & (self._done[self.mates[warps]] <= step[:, None])
        if gone.any():
            mate = int(self.mates[warps][gone][0]) // len(self._geometry.blocks)
            what = f"executes this without warp {mate} of its warpgroup, which has ended"
            if mate >= self._geometry.warps_per_block:
                what = f"is not one of four: its block has {self._geometry.warps_per_block} warps"
            self._report(position, warps, gone.any(axis=1), what)
        return found[:, 1:]

    def end(self, warps: np.ndarray) -> None:
        """Warps end."""
        self.ended[warps] = True
        missing = self._done[warps] < self._longest[self.group_of[warps]]
        if missing.any():
            warp = warps[missing.argmax()]
            position = int(self._sequence[self.group_of[warp], self._done[warp], 0])
            what = "ends without having executed this, as a warp of its warpgroup has"
            self._report(position, warps, missing, what)

    def _report(self, position: int, warps: np.ndarray, wrong: np.ndarray, what: str) -> None:
        wrong = wrong & ~self._reported[self.group_of[warps]]
        if not wrong.any():
            return
        self._reported[self.group_of[warps[wrong]]] = True
        warp = int(warps[wrong.argmax()])
        text = f"warp {warp // len(self._geometry.blocks)} {what}"
        thread = self._geometry.thread(warp * WARP)
        self._log.report(WarpgroupError, text, position, thread, count=int(wrong.sum()))
