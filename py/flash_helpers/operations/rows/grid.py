"""The widths that the choice of a kernel of softmax is measured on, and the kernels that compete
there. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows.problems import measured
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import GRID_WIDTHS, Fields, competing_shapes, octaves

GROUPS = {
    f"softmax_{dtype.short}": tuple(replace(measured(width), dtype=dtype) for width in GRID_WIDTHS)
    for dtype in (Element.BF16, Element.FP32)
}
MOST_THREADS = 512  # of a row


def competing(problem: Rows) -> list[tuple[str, Fields]]:
    """Return the family, for its last step, and the fields of each config that competes."""
    shapes = competing_shapes(problem.width, problem.dtype, MOST_THREADS)
    return [("softmax", shape) for shape in shapes]


distance = octaves
