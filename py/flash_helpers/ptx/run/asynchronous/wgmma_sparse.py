"""A sparse A of `wgmma.mma_async.sp`: of each group of columns only half are stored, and metadata
tell which.

PTX ISA 9.0, "Sparse Matrix Storage" and "Sparsity Metadata" of the asynchronous warpgroup
instructions. Of 4 columns 2 are stored, whose numbers have 2 bits each. With tf32 it is 1 of 2
columns, and 4 bits tell which: 0b0100 the first, 0b1110 the second.

Each lane has a word of metadata. With g = lane / 4 and t = lane % 4 it tells of

| elements of | lanes | bits 0 ... 15 | bits 16 ... 31 |
| --- | --- | --- | --- |
| 8 bits | all | row g + 8 (t % 2), stored columns 16 (t / 2) ... | the 8 columns behind these |
| 16 bits | t / 2 = selector | row g, stored columns 8 (t % 2) ... | row g + 8, the same columns |
| 32 bits | t / 2 = selector | row g, stored columns 4 (t % 2) ... | row g + 8, the same columns |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.run.asynchronous.wgmma_fragments import WARP_ROWS
from flash_helpers.ptx.run.numbers.elements import ELEMENTS

_FIRST_OF_TWO, _SECOND_OF_TWO = 0b0100, 0b1110


@dataclass(frozen=True)
class Sparsity:
    """How a sparse A is stored. `type_name`: type of its elements. `selector`: the pair of lanes
    among four whose metadata count."""

    type_name: str
    selector: int

    def counts(self, lanes: np.ndarray) -> np.ndarray:
        """Whether the metadata of each of some lanes count."""
        return (ELEMENTS[self.type_name] == 4) | (lanes % 4 // 2 == self.selector)

    def is_valid(self, metadata: np.ndarray) -> np.ndarray:
        """Whether the metadata of warps, uint32 (warps, 32), have a meaning."""
        if ELEMENTS[self.type_name] > 1:
            return np.ones(len(metadata), bool)
        fields = self._fields(metadata)
        return ((fields == _FIRST_OF_TWO) | (fields == _SECOND_OF_TWO)).all(axis=(1, 2))

    def expanded(self, a: np.ndarray, metadata: np.ndarray) -> np.ndarray:
        """All columns of the rows (warps, 16, stored columns) of each warp."""
        places = self._fields(metadata)
        stored, group = 2, 4
        if ELEMENTS[self.type_name] == 1:
            stored, group = 1, 2
            places = places == _SECOND_OF_TWO
        chosen = places[..., None] == np.arange(group)
        found = np.where(chosen, a[..., None], 0.0)
        found = found.reshape(*a.shape[:2], -1, stored, group).sum(axis=3)
        return found.reshape(*a.shape[:2], -1)

    def _fields(self, metadata: np.ndarray) -> np.ndarray:
        """The numbers in the metadata, (warps, 16 rows, stored columns)."""
        together = ELEMENTS[self.type_name]
        words = np.ascontiguousarray(metadata).reshape(-1, WARP // 4, 4)
        if together == 4:
            # (warp, g, half of the columns, half of the rows)
            parts = words.reshape(-1, WARP // 4, 2, 2).transpose(0, 3, 1, 2)
            halves = np.ascontiguousarray(parts).reshape(-1, WARP_ROWS, 2).view(np.uint16)
        else:
            # (warp, g, t % 2, half of the rows)
            pair = np.ascontiguousarray(words[:, :, 2 * self.selector :][:, :, :2])
            parts = pair.view(np.uint16).reshape(-1, WARP // 4, 2, 2).transpose(0, 3, 1, 2)
            halves = parts.reshape(-1, WARP_ROWS, 2)
        bits = 4 if together == 1 else 2
        shifts = np.arange(0, 16, bits, dtype=np.uint16)
        fields = halves[..., None] >> shifts & np.uint16((1 << bits) - 1)
        return fields.reshape(len(fields), WARP_ROWS, -1)
