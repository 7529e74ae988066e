"""The widths that the choice of a kernel of softmax_backward is measured on, and the kernels that
compete there. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.operations.rows_backward.problem import RowsBackward
from flash_helpers.operations.rows_backward.problems import measured
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_clusters import (
    ONE_BLOCK_CLUSTERS,
    ONE_BLOCK_WARPS,
    competing_clusters,
)
from flash_helpers.registry.row_threads import (
    CHUNK_REGISTERS,
    GRID_WIDTHS,
    Fields,
    competing_shapes,
    octaves,
)

GROUPS = {
    f"softmax_backward_{dtype.short}": tuple(
        replace(measured(width), dtype=dtype) for width in GRID_WIDTHS
    )
    for dtype in (Element.BF16, Element.FP32)
}
MOST_THREADS = 1024  # of a row


def competing(problem: RowsBackward) -> list[tuple[str, Fields]]:
    """Return the step and the fields of each config that competes."""
    registers = 2 * CHUNK_REGISTERS  # of y and of dy
    shapes = competing_shapes(problem.width, problem.dtype, MOST_THREADS, registers)
    wide = competing_clusters(
        problem.width, problem.dtype, warps=ONE_BLOCK_WARPS, clusters=ONE_BLOCK_CLUSTERS
    )
    return [("f1", shape) for shape in shapes] + [("t1", shape) for shape in wide]


distance = octaves
