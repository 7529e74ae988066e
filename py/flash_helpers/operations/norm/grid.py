"""The widths that the choice of a kernel of a norm is measured on, and the kernels that compete
there. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.problems import measured
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import GRID_WIDTHS, Fields, competing_shapes, octaves

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
    """Return the family, for its last step, and the fields of each config that competes."""
    family = "rms_norm" if problem.rms else "layer_norm"
    shapes = competing_shapes(problem.width, problem.dtype, MOST_THREADS)
    return [(family, shape) for shape in shapes]


def distance(one: Norm, other: Norm) -> float:
    """Return how far apart two problems are, in octaves of the bytes of their rows."""
    return octaves(one, other) + _OTHER_NORM * (one.rms != other.rms)
