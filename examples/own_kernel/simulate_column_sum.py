#!/usr/bin/env python3
"""Run column_sum in the PTX simulator and check it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from flash_helpers.ptx import DeviceMemory, PtxError, TensorMap, load_ptx

ROWS, COLUMNS = 96, 128
TILE_ROWS, TILE_COLUMNS = 16, 64
TOLERANCE = 1e-4  # of sums of 96 numbers around 1: a few fp32 roundings


def simulate(ptx: Path, seed: int | None) -> float:
    """Run the kernel of a PTX file; the largest error of its output.

    seed: of the random times at which copies complete; None for as late as can be. Raises PtxError,
    with the line, for a copy that was not waited for, a deadlock and the like.
    """
    x = 1 + np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    memory = DeviceMemory()
    x_gmem, y_gmem = memory.upload(x), memory.upload(np.full(COLUMNS, np.nan, np.float32))
    # Dimension 0 is the one whose elements lie side by side.
    tiles = TensorMap("f32", x_gmem, dims=(COLUMNS, ROWS), box=(TILE_COLUMNS, TILE_ROWS))
    load_ptx(ptx).kernel("column_sum").launch(
        grid=COLUMNS // TILE_COLUMNS,
        block=TILE_COLUMNS + 32,
        args=[tiles, y_gmem, ROWS // TILE_ROWS],
        memory=memory,
        seed=seed,
    )
    y = memory.download(y_gmem, (COLUMNS,), np.float32)
    return float(np.abs(y - x.sum(axis=0, dtype=np.float64)).max())


def main() -> int:
    """Simulate and check; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Run PTX of column_sum in the simulator and compare its output with float64.",
        epilog="exit status: 0 it is right, 1 it is wrong or at fault, 2 wrong usage",
    )
    parser.add_argument("ptx", type=Path, help="column_sum.ptx, or another like it")
    parser.add_argument(
        "--seed", type=int, help="copies complete at random times (default: as late as can be)"
    )
    arguments = parser.parse_args()
    ptx = arguments.ptx
    if not ptx.is_file():
        parser.error(f"{ptx} is no file: compile.sh makes it of {ptx.stem}.cu")
    try:
        error = simulate(ptx, arguments.seed)
    except PtxError as fault:
        print(f"{ptx.stem}: {fault}", file=sys.stderr)
        return 1
    is_right = error <= TOLERANCE
    print(f"{ptx.stem}: {'right' if is_right else 'WRONG'}, largest error {error:.1e}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
