"""The widths that the choice of a kernel of a norm's backward pass is measured on, and the kernels
that compete there. Standard library only."""

from __future__ import annotations

from flash_helpers.operations.norm.grid import distance
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.norm_backward.problems import measured
from flash_helpers.registry.norm_backward_cluster import competing_clusters
from flash_helpers.registry.norm_backward_staged import competing_stages
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import (
    CHUNK_BYTES,
    CHUNK_REGISTERS,
    GRID_WIDTHS,
    Fields,
    competing_shapes,
    in_dtype,
    with_twice_the_rows,
)

__all__ = ["GROUPS", "competing", "distance"]

GROUPS = {
    f"{'rms' if rms else 'layer'}_norm_backward_{dtype.short}": tuple(
        in_dtype(measured(width, rms), dtype) for width in GRID_WIDTHS
    )
    for rms in (False, True)
    for dtype in (Element.BF16, Element.FP32)
}
GROUPS |= with_twice_the_rows(GROUPS)
MOST_THREADS = 1024  # of a row


def competing(problem: NormBackward) -> list[tuple[str, Fields]]:
    """Return the step and the fields of each config that competes."""
    width, dtype = problem.width, problem.dtype
    stages, clusters = competing_stages(width, dtype), competing_clusters(width, dtype)
    found: list[tuple[str, Fields]] = [
        (step, {**shape, "rms": problem.rms})
        for step, shapes in (("w1", stages), ("w2", stages), ("nc1", clusters))
        for shape in shapes
    ]
    if len(found) > 1:
        return found
    # of x and dy, and a sum or two of each column
    registers = 2 * CHUNK_REGISTERS + (1 if problem.rms else 2) * CHUNK_BYTES // dtype.bytes
    shapes = competing_shapes(width, dtype, MOST_THREADS, registers)
    return found + [("q1" if problem.rms else "e4", shape) for shape in shapes]
