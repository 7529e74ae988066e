"""The widths that the choice of a kernel of a norm's backward pass is measured on, and the kernels
that compete there. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.norm_backward.problems import measured
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import GRID_WIDTHS, Fields, competing_shapes, octaves

GROUPS = {
    f"{'rms' if rms else 'layer'}_norm_backward_{dtype.short}": tuple(
        replace(measured(width, rms), dtype=dtype) for width in GRID_WIDTHS
    )
    for rms in (False, True)
    for dtype in (Element.BF16, Element.FP32)
}
MOST_THREADS = 512  # of a row: 1024 have 64 registers each, too few for a chunk and its sums
_OTHER_NORM = 100.0  # octaves


def competing(problem: NormBackward) -> list[tuple[str, Fields]]:
    """Return the step and the fields of each config that competes."""
    step = "q1" if problem.rms else "e4"
    registers = 24 if problem.dtype is not Element.FP32 else 16  # of a chunk and its sums, at most
    shapes = competing_shapes(problem.width, problem.dtype, MOST_THREADS, registers)
    return [(step, shape) for shape in shapes]


def distance(one: NormBackward, other: NormBackward) -> float:
    """Return how far apart two problems are, in octaves of the bytes of their rows."""
    return octaves(one, other) + _OTHER_NORM * (one.rms != other.rms)
