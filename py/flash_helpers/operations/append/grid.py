"""The problems that the choice of a kernel of append is measured on, and the kernels that compete
there. Standard library only."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flash_helpers.operations.append.problem import Append
from flash_helpers.operations.append.problems import measured

_WARPS = (1, 2, 4, 8)
# Not fewer sequences, since as many sets of inputs are measured in turn as have twice the bytes of
# the L2, and each has 64 operators of PyTorch in a graph.
_BATCHES = (16, 64, 256, 1024)
_PROMPTS = ((1, 512), (1, 8192), (16, 512), (16, 2048))  # sequences and new keys of each

GROUPS = {
    "append_decode": tuple(measured(1, batch) for batch in _BATCHES),
    "append_contiguous": tuple(
        replace(measured(1, batch), page_size=0, pages=0) for batch in _BATCHES
    ),
    "append_prompts": tuple(measured(new, batch) for batch, new in _PROMPTS),
}


def competing(problem: Append) -> list[tuple[str, dict[str, Any]]]:
    """Return the step and the fields of each config that competes."""
    return [("ka1", {"n_warps": n_warps}) for n_warps in _WARPS]


def distance(one: Append, other: Append) -> float:
    """Return how far apart two problems are, in octaves of the bytes of their rows; other kinds of
    caches are a little further."""
    sizes = [problem.rows_moved * problem.d_head for problem in (one, other)]
    octaves = abs(math.log2(sizes[0] / sizes[1]))
    return octaves + 0.25 * ((one.page_size > 0) != (other.page_size > 0))
