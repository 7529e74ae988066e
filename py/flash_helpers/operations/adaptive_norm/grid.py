"""The problems that the choice of a kernel of adaptive_norm is measured on, and the kernels that
compete there. Standard library only."""

from __future__ import annotations

import math
from typing import Any

from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm
from flash_helpers.operations.adaptive_norm.problems import MEASURED_CONTEXT, MEASURED_WIDTH

_BATCHES = (1, 64, 1024)
_LENGTH = 186
_WIDE = (1024, 3072)  # with the lengths of a model of images and texts
_KINDS: dict[str, dict[str, Any]] = {
    "norm": {},
    "sum_norm": {"change": True, "sum": True},
    "sum": {"change": True, "norm": False},
}
_FIELDS = ("n_warps", "chunks", "row_threads")
_MOST = 6  # configs per problem
# Octaves between problems of other kinds, of twice the width, and with a context and without.
_KIND, _WIDTHS, _CONTEXT = 100.0, 4.0, 2.0

GROUPS = {
    f"adaptive_{kind}_bf16": (
        *(
            AdaptiveNorm(batch, _LENGTH, MEASURED_WIDTH, context=MEASURED_CONTEXT, **options)
            for batch in _BATCHES
        ),
        AdaptiveNorm(64, _LENGTH, MEASURED_WIDTH, **options),
        *(AdaptiveNorm(2, 1024, width, context=154, **options) for width in _WIDE),
    )
    for kind, options in _KINDS.items()
}


def competing(problem: AdaptiveNorm) -> list[tuple[str, dict[str, Any]]]:
    """Return the step and the fields of each config that competes: rows of 1, 2 or 4 chunks per
    thread, in blocks of 4 and of 8 warps."""
    chunk = 16 // problem.dtype.bytes
    widest = max(problem.width, problem.context_width)
    found: list[tuple[int, ...]] = []
    for chunks in (1, 2, 4):
        threads = 1 << max(3, math.ceil(math.log2(widest / (chunk * chunks))))
        for n_warps in (4, 8) if threads <= 128 else (max(8, threads // 32),):
            shape = (n_warps, chunks, threads)
            if threads <= 32 * n_warps <= 1024 and shape not in found:
                found.append(shape)
        if threads == 8:  # the fewest that have a row
            break
    return [("ad1", dict(zip(_FIELDS, shape, strict=True))) for shape in found[:_MOST]]


def distance(one: AdaptiveNorm, other: AdaptiveNorm) -> float:
    """Return how far apart two problems are, in octaves of their tokens; kinds and widths count
    most."""
    tokens = [problem.rows + problem.context_rows for problem in (one, other)]
    octaves = abs(math.log2(tokens[0] / tokens[1]))
    octaves += _WIDTHS * abs(math.log2(one.width / other.width))
    octaves += _CONTEXT * ((one.context > 0) != (other.context > 0))
    kinds = [(problem.change, problem.norm) for problem in (one, other)]
    return octaves + _KIND * (kinds[0] != kinds[1])
