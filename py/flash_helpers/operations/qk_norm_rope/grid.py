"""The problems that the choice of a kernel of qk_norm_rope is measured on, and the kernels that
compete there. Standard library only."""

from __future__ import annotations

import math

from flash_helpers import gpu
from flash_helpers.operations.qk_norm_rope.problem import QkNormRope
from flash_helpers.operations.qk_norm_rope.problems import measured
from flash_helpers.registry.row_threads import CHUNK_BYTES, LEAST_ROW_THREADS, MOST_OF_FEW, Fields

_WARPS = (4, 8)
_MOST_THREADS = 128  # of a row; 256 with 2 chunks each had 76% of a copy's speed on an H200
_CHUNKS = (1, 2, 3, 4, 6, 8, 12)  # of a thread
_MOST = 8  # configs for a problem; of more those with fewer warps
_MOST_OF_TOKENS = 4  # chunks of each of three rows
_CONTEXT = 0.25  # octaves between problems with a context and without

GROUPS = {
    "qk_norm_rope_bf16": (
        measured(1024),
        QkNormRope(1, 24, 4096, context=256, rotary=True),
        QkNormRope(1, 24, 4096, rotary=True),
        QkNormRope(64, 2, 186, context=64, rotary=True),
        QkNormRope(64, 1, 186, context=64, rotary=True),
    )
}


def competing(problem: QkNormRope) -> list[tuple[str, Fields]]:
    """Return the step and the fields of each config that competes: threads that have together no
    more chunks than the row, or a few."""
    of_row = problem.width * problem.dtype.bytes // CHUNK_BYTES
    found: list[Fields] = []
    for row_threads in (LEAST_ROW_THREADS << n for n in range(_MOST_THREADS.bit_length())):
        chunks = -(-of_row // row_threads)
        few = row_threads < gpu.WARP and problem.width > row_threads * MOST_OF_FEW
        if few or chunks not in _CHUNKS or row_threads > min(_MOST_THREADS, of_row):
            continue
        for n_warps in _WARPS:
            if n_warps * gpu.WARP >= row_threads:
                shape = {"n_warps": n_warps, "chunks": chunks, "row_threads": row_threads}
                found.append(shape)
    configs = [("qr1", shape) for shape in found]
    configs += [("qr2", shape) for shape in found if shape["chunks"] <= _MOST_OF_TOKENS]
    if len(configs) > _MOST:
        configs = [own for own in configs if own[1]["n_warps"] == _WARPS[0]]
    return configs


def distance(one: QkNormRope, other: QkNormRope) -> float:
    """Return how far apart two problems are, in octaves of the width of a row, and of the number of
    rows a little."""
    of_width, of_rows = (
        abs(math.log2(a / b)) for a, b in ((one.width, other.width), (one.rows, other.rows))
    )
    return of_width + of_rows / 4 + _CONTEXT * ((one.context > 0) != (other.context > 0))
