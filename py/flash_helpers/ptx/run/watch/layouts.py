"""A lint for layouts: bytes of a box that a tensor copy or a warp wrote in one layout and that are
read in another one. Nothing is unsafe then, but the numbers are those of other elements.

A box lies in shared memory as rows of 16-byte chunks, which a swizzle moves (`boxes`). An 8 x 8
matrix of `ldmatrix` or `stmatrix`, and a core matrix of `wgmma`, is 8 chunks, each of another row
(PTX ISA 9.0, "ldmatrix", "Asynchronous Warpgroup Level Matrix Shared Memory Layout"). Where box and
matrix are meant alike, the 8 chunks stand in one column of the box, and those of a core matrix in 8
neighbouring rows. `readers` looks at ordinary loads. An ordinary store tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import LayoutLint
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.boxes import CHUNK, Box, swizzled
from flash_helpers.ptx.run.memory.descriptors import Descriptor
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.readers import Placed, Readers, swizzle_name
from flash_helpers.ptx.tensor_map import TensorMap

Wrong = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Which matrices are wrong, by the rows and the columns of their chunks in a box."""

MATRIX_ROWS = 8
"""Chunks of a matrix."""


class Layouts:
    """The layout of each chunk of the shared memory of a batch."""

    def __init__(self, geometry: Geometry, log: FaultLog, stride: int) -> None:
        chunks = len(geometry.blocks) * stride // CHUNK
        self._geometry = geometry
        self._log = log
        self._stride = stride
        # The box that lies there, and the chunk's place in it; the matrix that a stmatrix wrote
        # there, and its instruction. 0 for none.
        self._box = np.zeros(chunks, np.int32)
        self._row = np.zeros(chunks, np.int32)
        self._column = np.zeros(chunks, np.int32)
        self._matrix = np.zeros(chunks, np.int64)
        self._written_at = np.zeros(chunks, np.int32)
        self._matrices = 0
        self._boxes: list[Placed] = []
        self.readers = Readers(geometry, log)

    def forget(self, chunks: np.ndarray) -> None:
        """Chunks are overwritten."""
        self._box[chunks] = self._matrix[chunks] = 0

    def deliver(self, position: int, chunks: np.ndarray, box: Box) -> None:
        """A tensor copy has brought a box, whose chunks are in its order."""
        start = swizzled(chunks[:1] * CHUNK % self._stride, box.map.swizzle_bytes)
        self._boxes.append(Placed(position, box.map, int(start[0])))
        self._box[chunks] = len(self._boxes)
        places = np.arange(chunks.size)
        self._row[chunks], self._column[chunks] = np.divmod(places, _per_row(box.map))

    def write(self, position: int, chunks: np.ndarray) -> None:
        """A stmatrix has written matrices (n, 8)."""
        self._matrix[chunks] = self._matrices + 1 + np.arange(len(chunks))[:, None]
        self._matrices += len(chunks)
        self._written_at[chunks] = position

    def read(self, position: int, lanes: np.ndarray, places: np.ndarray) -> None:
        """Lanes load words, whose places are bytes of the memory of the batch."""
        if not self._boxes:
            return
        numbers = self._box[places // CHUNK]
        if numbers.any():
            self.readers.load(position, lanes, places % self._stride, numbers, self._boxes)

    # -- checks ------------------------------------------------------------------------------------

    def load(self, position: int, lanes: np.ndarray, chunks: np.ndarray) -> None:
        """An ldmatrix reads matrices (n, 8), whose addresses come from lanes."""
        wrong = self._within_a_box(chunks, _spans_columns)
        if wrong.any():
            self._report_torn(
                position, int(lanes[MATRIX_ROWS * wrong.argmax()]), chunks, wrong, "ldmatrix"
            )

    def multiply(
        self, position: int, warps: np.ndarray, bits: Sequence[int], addresses: Sequence[np.ndarray]
    ) -> None:
        """Products of warps read a matrix each. `bits`: its descriptor. `addresses`: as in
        `MatrixOperand`."""
        matrices = np.stack(addresses)
        n, _, width = matrices.shape
        cores = matrices.reshape(n, -1, MATRIX_ROWS, width).swapaxes(2, 3)
        first = warps % len(self._geometry.blocks) * self._stride
        chunks = (cores.reshape(n, -1) + first[:, None]).reshape(-1, MATRIX_ROWS) // CHUNK
        wrong = self._within_a_box(chunks, _is_no_block)
        if wrong.any():
            i = int(wrong.argmax()) * n // len(chunks)
            how = f"wgmma with {swizzle_name(Descriptor.decode(int(bits[i])).swizzle)}"
            self._report_torn(position, int(warps[i]) * WARP, chunks, wrong, how)

    def store(self, position: int, lane: int, chunks: np.ndarray, box: Box) -> None:
        """A tensor copy reads a box, whose chunks are in its order."""
        per_row = _per_row(box.map)
        numbers = self._box[chunks].reshape(-1, per_row)
        rows, columns = (x[chunks].reshape(-1, per_row) for x in (self._row, self._column))
        whole = (numbers > 0) & (numbers == numbers[:, :1])
        goes_on = (np.diff(columns, axis=1) == 1) & (np.diff(rows, axis=1) == 0)
        wrong = whole.all(axis=1) & ~goes_on.all(axis=1)
        if wrong.any():
            i = int(wrong.argmax())
            written_at, tensor_map, _ = self._boxes[numbers[i, 0] - 1]
            if tensor_map.swizzle != box.map.swizzle:
                text = (
                    f"TMA stores with {swizzle_name(box.map.swizzle_bytes)} what TMA wrote with "
                    f"{swizzle_name(tensor_map.swizzle_bytes)}\n    at {self._log.site(written_at)}"
                )
                self._report(position, lane, int(chunks[per_row * i]), text)
        self._check_matrices(position, lane, chunks, box, per_row)

    def _check_matrices(
        self, position: int, lane: int, chunks: np.ndarray, box: Box, per_row: int
    ) -> None:
        """Checks the matrices of stmatrix in a box that a tensor copy stores."""
        matrices = self._matrix[chunks]
        if not matrices.any():
            return
        order = np.argsort(matrices, kind="stable")
        found, first, counts = np.unique(matrices[order], return_index=True, return_counts=True)
        first = first[(counts == MATRIX_ROWS) & (found > 0)]
        if not first.size:
            return
        rows, columns = np.divmod(order[first[:, None] + np.arange(MATRIX_ROWS)], per_row)
        wrong = _spans_columns(rows, columns)
        if wrong.any():
            at = int(order[first[wrong.argmax()]])
            text = (
                f"TMA stores with {swizzle_name(box.map.swizzle_bytes)} what stmatrix wrote\n"
                f"    at {self._log.site(int(self._written_at[chunks[at]]))}\n"
                f"    {_named(rows[wrong.argmax()], columns[wrong.argmax()])}"
            )
            self._report(position, lane, int(chunks[at]), text)

    def _within_a_box(self, chunks: np.ndarray, is_wrong: Wrong) -> np.ndarray:
        """Which matrices (n, 8) lie within one box and are wrong there."""
        boxes = self._box[chunks]
        inside = ((boxes > 0) & (boxes == boxes[:, :1])).all(axis=1)
        return inside & is_wrong(self._row[chunks], self._column[chunks])

    # -- what is said of it ------------------------------------------------------------------------

    def _report_torn(
        self, position: int, lane: int, chunks: np.ndarray, wrong: np.ndarray, how: str
    ) -> None:
        its = chunks[int(wrong.argmax())]
        written_at, tensor_map, _ = self._boxes[self._box[its[0]] - 1]
        text = (
            f"{how} reads bytes that TMA wrote with {swizzle_name(tensor_map.swizzle_bytes)}\n"
            f"    at {self._log.site(written_at)}\n"
            f"    {_named(self._row[its], self._column[its])}"
        )
        self._report(position, lane, int(its[0]), text)

    def _report(self, position: int, lane: int, chunk: int, text: str) -> None:
        thread = self._geometry.thread(lane)
        self._log.lint(LayoutLint, text, position, thread, chunk * CHUNK % self._stride)


def _spans_columns(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Whether matrices (n, 8) take 8 rows of a box and not one column. A warp may take a row for a
    matrix, or any rows."""
    ordered = np.sort(rows, axis=1)
    are_rows = (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
    return are_rows & (columns != columns[:, :1]).any(axis=1)


def _is_no_block(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Whether matrices (n, 8) are not 8 neighbouring rows of one column."""
    return (columns != columns[:, :1]).any(axis=1) | (np.diff(rows, axis=1) != 1).any(axis=1)


def _per_row(tensor_map: TensorMap) -> int:
    """Chunks of a row of a box."""
    return tensor_map.row_bytes // CHUNK


def _named(rows: np.ndarray, columns: np.ndarray) -> str:
    named = (", ".join(map(str, places.tolist())) for places in (rows, columns))
    return "an 8 x 8 matrix has rows {} of the box, in its columns {} of 16 bytes".format(*named)
