"""The widths that the choice of a kernel of softmax is measured on, and the kernels that compete
there. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows.problems import measured
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_clusters import (
    ONE_BLOCK_CLUSTERS,
    ONE_BLOCK_WARPS,
    competing_clusters,
)
from flash_helpers.registry.row_threads import (
    GRID_WIDTHS,
    Fields,
    beside_narrow,
    competing_shapes,
    narrow_in_flight,
    octaves,
    with_twice_the_rows,
)

GROUPS = {
    f"softmax_{dtype.short}": tuple(replace(measured(width), dtype=dtype) for width in GRID_WIDTHS)
    for dtype in (Element.BF16, Element.FP32)
}
GROUPS |= with_twice_the_rows(GROUPS)
MOST_THREADS = 512  # of a row
WIDE_CHUNKS = 8  # of a thread of a cluster
ONE_ROW_WARPS = (8, 16)  # of a block of a cluster that has one row


def competing(problem: Rows) -> list[tuple[str, Fields]]:
    """Return the step and the fields of each config that competes."""
    shapes = competing_shapes(problem.width, problem.dtype, MOST_THREADS)
    wide = competing_clusters(
        problem.width, problem.dtype, WIDE_CHUNKS, ONE_BLOCK_WARPS, ONE_BLOCK_CLUSTERS
    )
    one_row = competing_clusters(problem.width, problem.dtype, WIDE_CHUNKS, ONE_ROW_WARPS)
    narrow = list(narrow_in_flight(problem.width, problem.dtype))
    return [
        *(("s4", shape) for shape in beside_narrow(shapes, narrow)),
        *(("s5", shape) for shape in narrow),
        *(("x3", shape) for shape in one_row),
        *(("x2" if shape["cluster_blocks"] > 1 else "x1", shape) for shape in wide),
    ]


distance = octaves
