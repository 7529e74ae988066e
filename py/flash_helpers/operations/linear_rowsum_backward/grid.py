"""The problems that the choice of a kernel of linear_rowsum_backward is measured on, and the
kernels that compete there. Standard library only."""

from __future__ import annotations

import math
from dataclasses import replace

from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.operations.linear_rowsum_backward.problems import measured
from flash_helpers.registry.problem import Element

GRID_FEATURES = (64, 256, 1024, 4096, 16384)
WARPS = (4, 8, 16)
ROWS = (16, 32, 64, 128)  # of dx or dW that a thread block writes

GROUPS = {
    f"linear_rowsum_backward_{dtype.short}": tuple(
        replace(measured(features), dtype=dtype) for features in GRID_FEATURES
    )
    for dtype in (Element.BF16, Element.FP32)
}


def competing(problem: LinearRowsumBackward) -> list[tuple[str, dict[str, int]]]:
    """Return the step and the fields of each config that competes."""
    shapes = [{"n_warps": warps, "rows": rows} for warps in WARPS for rows in ROWS]
    return [("lb1", {}), *(("lb2", shape) for shape in shapes)]


def distance(one: LinearRowsumBackward, other: LinearRowsumBackward) -> float:
    """Return how far apart two problems are, in octaves of the bytes of a row, and a little of the
    number of rows of both matrices."""
    of_row, *of_rows = (
        abs(math.log2(a / b))
        for a, b in (
            (one.in_features * one.dtype.bytes, other.in_features * other.dtype.bytes),
            (one.rows, other.rows),
            (one.out_features, other.out_features),
        )
    )
    return of_row + sum(of_rows) / 64
