"""The widths that the choice of a kernel of a norm is measured on, and the kernels that compete
there. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from flash_helpers import gpu
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.problems import measured
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_clusters import (
    ONE_BLOCK_WARPS,
    competing_clusters,
)
from flash_helpers.registry.row_threads import (
    CHUNK_BYTES,
    GRID_WIDTHS,
    HALF_CHUNKS,
    LEAST_ROW_THREADS,
    Fields,
    competing_shapes,
    in_dtype,
    narrow_in_flight,
    octaves,
    shapes_in_flight,
    with_twice_the_rows,
)

GROUPS = {
    f"{'rms' if rms else 'layer'}_norm_{dtype.short}": tuple(
        in_dtype(measured(width, rms), dtype) for width in GRID_WIDTHS
    )
    for rms in (False, True)
    for dtype in (Element.BF16, Element.FP32)
}
GROUPS |= with_twice_the_rows(GROUPS)
MOST_THREADS = 512  # of a row
MOST_OF_A_BLOCK = 2**16  # bytes of a row; clusters alone compete for longer ones
LEAST_CHUNKS = 4  # of a thread, where some shape has as many
PERSISTENT_STEPS = ("a6",)  # whose blocks have weights in shared memory
STREAMING = ((32, (1, 2)), (512, (2, 4)), (4096, (4, 8)))
"""Chunks of a thread whose y leaves L2, of rows of up to so many chunks, by a probe on an H200."""
HALF_WARPS = (8, 16)  # of blocks of which an SM has two or four
_OTHER_NORM = 100.0  # octaves


def competing(problem: Norm) -> list[tuple[str, Fields]]:
    """Return the step and the fields of each config that competes: those that were the fastest of
    their kind for some width."""
    width, dtype, rms = problem.width, problem.dtype, problem.rms
    clusters: list[tuple[str, Fields]] = [
        (step, {**shape, "rms": rms})
        for step in PERSISTENT_STEPS
        for shape in _of_small_blocks(width, dtype)
    ]
    if width * dtype.bytes > MOST_OF_A_BLOCK:
        one_row = competing_clusters(width, dtype, HALF_CHUNKS, HALF_WARPS[-1:])
        several = competing_clusters(width, dtype, warps=ONE_BLOCK_WARPS)
        clusters += [(step, {**shape, "rms": rms}) for step in ("a7", "a8") for shape in one_row]
        return clusters + [("a3", {**shape, "rms": rms}) for shape in several]
    found: list[tuple[str, Fields]]
    shapes = competing_shapes(width, dtype, MOST_THREADS)
    narrow = list(narrow_in_flight(width, dtype))
    if width * dtype.bytes == MOST_OF_A_BLOCK:
        clusters += [("a8", {**shape, "rms": rms}) for shape in _of_small_blocks(width, dtype)]
    large = [shape for shape in shapes if shape["chunks"] >= LEAST_CHUNKS] or shapes
    if rms:
        found = [*(("r1", s) for s in large), *(("r2", s) for s in narrow)]
        found += [
            (step, {**shape, "rows_in_flight": 1})
            for step in ("r3", "r4")
            for shape in _streaming(width, dtype)
        ]
        return [*found, *clusters]
    halves = [
        {"n_warps": s["n_warps"], "chunks": s["chunks"], "row_threads": s["n_warps"] * gpu.WARP}
        for s in competing_clusters(width, dtype, HALF_CHUNKS, HALF_WARPS, (1,))
    ]
    found = [("n4", shape) for shape in large]
    found += [("n6", shape) for shape in narrow]
    if not narrow and not halves:
        in_flight = shapes_in_flight(large)
        found += [("n5", shape) for shape in in_flight if shape["rows_in_flight"] == 1]
    found += [
        (step, shape)
        for step in ("n8", "n10")
        for shape in _streaming(width, dtype)
        if shape["row_threads"] >= gpu.WARP * max(2, shape["chunks"])  # else n9 has less to do
        and (step == "n8" or shape["row_threads"] >= gpu.WARP * shape["n_warps"])
    ]
    if narrow:
        found += [("n9", {**shape, "rows_in_flight": 1}) for shape in _streaming(width, dtype)]
    return [*found, *(("n7", shape) for shape in halves), *clusters]


def _streaming(width: int, dtype: Element) -> Iterator[Fields]:
    """Yield shapes of rows in registers."""
    chunks = -(-width * dtype.bytes // CHUNK_BYTES)
    for of_a_thread in next((found for most, found in STREAMING if chunks <= most), ()):
        row_threads = chunks // of_a_thread
        if LEAST_ROW_THREADS <= row_threads <= MOST_THREADS:
            n_warps = max(4, row_threads // gpu.WARP)
            yield {"n_warps": n_warps, "chunks": of_a_thread, "row_threads": row_threads}


def _of_small_blocks(width: int, dtype: Element) -> list[Fields]:
    """Return shapes of clusters with the smallest blocks that hold a row."""
    shapes = (
        competing_clusters(width, dtype, chunks, (n_warps,))
        for n_warps in HALF_WARPS
        for chunks in (HALF_CHUNKS, LEAST_CHUNKS)
    )
    return next((found for found in shapes if found), [])


def distance(one: Norm, other: Norm) -> float:
    """Return how far apart two problems are, in octaves of the bytes of their rows."""
    return octaves(one, other) + _OTHER_NORM * (one.rms != other.rms)
