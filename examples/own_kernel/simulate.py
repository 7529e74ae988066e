#!/usr/bin/env python3
"""Run row_softmax in the PTX simulator: check it, count it, and name the lines with conflicts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from tabulate import tabulate

from flash_helpers.ptx import DeviceMemory, PtxError, Run, load_ptx

COLUMNS, ROWS_PER_BLOCK = 64, 64
TOLERANCE = 1e-6  # of probabilities: a few fp32 roundings, and those of ex2.approx


def softmax(x: np.ndarray) -> np.ndarray:
    """The softmax of each row in float64."""
    exp = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


def simulate(ptx: Path, blocks: int) -> tuple[Run, float]:
    """Run the kernel of a PTX file; what was counted, and the largest error of its output.

    Raises PtxError, with the line and the lane, for a race, a stray access and the like.
    """
    rng = np.random.default_rng(0)
    x = 4 * rng.standard_normal((blocks * ROWS_PER_BLOCK, COLUMNS), dtype=np.float32) + 1
    memory = DeviceMemory()
    x_gmem, y_gmem = memory.upload(x), memory.upload(np.full_like(x, np.nan))
    kernel = load_ptx(ptx).kernel("row_softmax")
    run = kernel.launch(grid=blocks, block=ROWS_PER_BLOCK, args=[x_gmem, y_gmem], memory=memory)
    y = memory.download(y_gmem, x.shape, np.float32)
    return run, float(np.abs(y - softmax(x)).max())


def report(runs: dict[str, Run]) -> str:
    """The counts of the kernels side by side, then the lines of each that have bank conflicts."""
    totals = [run.counters.total for run in runs.values()]
    rows = [
        ["warp instructions of the PTX", *(t.instructions for t in totals)],
        ["shared requests", *(t.shared_requests for t in totals)],
        ["shared wavefronts", *(t.shared_wavefronts for t in totals)],
        ["bank conflicts", *(t.bank_conflicts for t in totals)],
        ["global sectors", *(t.global_sectors for t in totals)],
        ["barriers", *(t.barriers for t in totals)],
    ]
    lines = [tabulate(rows, ["", *runs], intfmt=",")]
    for name, run in runs.items():
        for line in run.by_line:
            if line.counts.bank_conflicts:
                conflicts, requests = line.counts.bank_conflicts, line.counts.shared_requests
                lines.append(
                    f"{name}: {Path(line.file).name}:{line.line} has {conflicts:,} bank conflicts "
                    f"in {requests:,} requests"
                )
    return "\n".join(lines)


def main() -> int:
    """Check and count; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Run PTX of row_softmax in the simulator, compare its output with softmax in "
        "float64, and count.",
        epilog="exit status: 0 all are right, 1 one is wrong or at fault, 2 wrong usage",
    )
    parser.add_argument("ptx", nargs="+", type=Path, help="row_softmax.ptx, or another like it")
    parser.add_argument("--blocks", type=int, default=2, help="of 64 rows each (default: 2)")
    arguments = parser.parse_args()
    runs, failed = {}, False
    for ptx in arguments.ptx:
        if not ptx.is_file():
            parser.error(f"{ptx} is no file: compile.sh makes it of {ptx.stem}.cu")
        try:
            run, error = simulate(ptx, arguments.blocks)
        except PtxError as fault:
            print(f"{ptx.stem}: {fault}", file=sys.stderr)
            return 1
        right = error <= TOLERANCE
        failed |= not right
        print(f"{ptx.stem}: {'right' if right else 'WRONG'}, largest error {error:.1e}")
        runs[ptx.stem] = run
    print(report(runs))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
