"""The widths that the choice of a kernel of softmax's gradients is measured on, and the kernels
that compete there. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.operations.rows.grid import MOST_THREADS
from flash_helpers.operations.rows_backward.problem import RowsBackward
from flash_helpers.operations.rows_backward.problems import measured
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import (
    CHUNK_REGISTERS,
    GRID_WIDTHS,
    Fields,
    competing_shapes,
    octaves,
)

GROUPS = {
    dtype.short: tuple(replace(measured(width), dtype=dtype) for width in GRID_WIDTHS)
    for dtype in (Element.BF16, Element.FP32)
}


def competing(problem: RowsBackward) -> list[tuple[str, Fields]]:
    """Return the family, for its last step, and the fields of each config that competes."""
    shapes = competing_shapes(problem.width, problem.dtype, MOST_THREADS, 2 * CHUNK_REGISTERS)
    return [("softmax_backward", shape) for shape in shapes]


distance = octaves
