"""The widths that the choice of a kernel of a norm is measured on, and the kernels that compete
there. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers import gpu
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.problems import measured
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_clusters import (
    ONE_BLOCK_CLUSTERS,
    ONE_BLOCK_WARPS,
    competing_clusters,
)
from flash_helpers.registry.row_threads import (
    GRID_WIDTHS,
    HALF_CHUNKS,
    Fields,
    beside_narrow,
    competing_shapes,
    narrow_in_flight,
    octaves,
    shapes_in_flight,
    with_twice_the_rows,
)

GROUPS = {
    f"{'rms' if rms else 'layer'}_norm_{dtype.short}": tuple(
        replace(measured(width, rms), dtype=dtype) for width in GRID_WIDTHS
    )
    for rms in (False, True)
    for dtype in (Element.BF16, Element.FP32)
}
GROUPS |= with_twice_the_rows(GROUPS)
MOST_THREADS = 1024  # of a row
HALF_WARPS = (8, 16)  # of blocks of which an SM has two or four
_OTHER_NORM = 100.0  # octaves


def competing(problem: Norm) -> list[tuple[str, Fields]]:
    """Return the step and the fields of each config that competes."""
    shapes = competing_shapes(problem.width, problem.dtype, MOST_THREADS)
    clusters = competing_clusters(
        problem.width, problem.dtype, warps=ONE_BLOCK_WARPS, clusters=ONE_BLOCK_CLUSTERS
    )
    found = [
        ("a3" if shape["cluster_blocks"] > 1 else "a2", {**shape, "rms": problem.rms})
        for shape in clusters
    ]
    halves = [
        {"n_warps": s["n_warps"], "chunks": s["chunks"], "row_threads": s["n_warps"] * gpu.WARP}
        for s in competing_clusters(problem.width, problem.dtype, HALF_CHUNKS, HALF_WARPS, (1,))
    ]
    narrow = list(narrow_in_flight(shapes))
    large = beside_narrow(shapes, narrow)
    if problem.rms:
        return [("r1", shape) for shape in large] + [("r2", shape) for shape in narrow] + found
    one, several = [("n4", s) for s in large], [("n6", s) for s in narrow]
    several += [("n7", shape) for shape in halves]
    return one + [("n5", s) for s in narrow or shapes_in_flight(shapes)] + several + found


def distance(one: Norm, other: Norm) -> float:
    """Return how far apart two problems are, in octaves of the bytes of their rows."""
    return octaves(one, other) + _OTHER_NORM * (one.rms != other.rms)
