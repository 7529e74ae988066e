"""The widths that the choice of a kernel of a norm of a sum is measured on, and the kernels that
compete there. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.add_norm.problems import measured
from flash_helpers.operations.norm.grid import distance
from flash_helpers.registry.add_norm import MOST_CHUNKS, SUM_REGISTERS
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import GRID_WIDTHS, Fields, competing_shapes

__all__ = ["GROUPS", "competing", "distance"]

GROUPS = {
    f"add_{'rms' if rms else 'layer'}_norm_{dtype.short}": tuple(
        replace(measured(width, rms), dtype=dtype) for width in GRID_WIDTHS
    )
    for rms in (False, True)
    for dtype in (Element.BF16, Element.FP32)
}
MOST_THREADS = 1024  # of a row


def competing(problem: AddNorm) -> list[tuple[str, Fields]]:
    """Return the step and the fields of each config that competes."""
    shapes = competing_shapes(problem.width, problem.dtype, MOST_THREADS, SUM_REGISTERS)
    fitting = ({**shape, "chunks": min(shape["chunks"], MOST_CHUNKS)} for shape in shapes)
    return [("an1", {**shape, "rms": problem.rms}) for shape in fitting]
