"""The widths that the choice of a kernel of a norm is measured on, and the kernels that compete
there. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.problems import measured
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_clusters import competing_clusters
from flash_helpers.registry.row_threads import (
    GRID_WIDTHS,
    Fields,
    competing_shapes,
    octaves,
    shapes_in_flight,
)

GROUPS = {
    f"{'rms' if rms else 'layer'}_norm_{dtype.short}": tuple(
        replace(measured(width, rms), dtype=dtype) for width in GRID_WIDTHS
    )
    for rms in (False, True)
    for dtype in (Element.BF16, Element.FP32)
}
MOST_THREADS = 1024  # of a row
_OTHER_NORM = 100.0  # octaves


def competing(problem: Norm) -> list[tuple[str, Fields]]:
    """Return the step and the fields of each config that competes."""
    shapes = competing_shapes(problem.width, problem.dtype, MOST_THREADS)
    clusters = competing_clusters(problem.width, problem.dtype)
    found = [("a1", {**shape, "rms": problem.rms}) for shape in clusters]
    if problem.rms:
        return [("r1", shape) for shape in shapes] + found
    one, several = [("n4", s) for s in shapes], [("n5", s) for s in shapes_in_flight(shapes)]
    return one + several + found


def distance(one: Norm, other: Norm) -> float:
    """Return how far apart two problems are, in octaves of the bytes of their rows."""
    return octaves(one, other) + _OTHER_NORM * (one.rms != other.rms)
