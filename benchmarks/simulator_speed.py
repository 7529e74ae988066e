#!/usr/bin/env python3
"""Time the simulator on kernels built like those of libraries for compute capability 9.0a.

They are epilogues whose TMA stores are issued by one lane or by all lanes of a warp, matrix
products with a ring of copies, and attention by warp roles. Times are seconds of CPU time, and
seconds per million warp instructions; each is the least of three runs, since machines are shared.
"""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_helpers.console.progress import bar
from flash_helpers.console.tables import Table
from flash_helpers.measure.simulator_benchmark import benchmark_main

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results/simulator_speed.json")
RUNS = 3


def cases() -> Mapping[str, Any]:
    """The launches (`hopper_cases.Case`) by the shape of their kernels."""
    import hopper_cases as hopper  # late: its import computes the inputs of all cases

    return {
        "epilogue, one lane stores": hopper.epilogue("one_lane", 8, 32),
        "epilogue, 32 lanes store": hopper.epilogue("all_lanes", 8, 32),
        "GEMM, a ring of copies": hopper.gemm("gemm_bf16", "bf16", 4, 512, 512, 1024),
        "GEMM, clusters and multicast": hopper.gemm_cluster("bf16", 512, 512, 1024, 4),
        "attention, warp roles": hopper.attention("bf16", 128, 2048, 1, 1, 4),
        "attention, ping-pong": hopper.attention("f16_ping_pong", 64, 2048, 1, 1, 4),
    }


def measure(case: Any) -> dict[str, Any]:
    """CPU time of a case, the least of `RUNS` runs after one that reads its PTX. Raises
    RuntimeError for an output that is not right."""
    from flash_helpers.ptx import DeviceMemory, TensorMap, load_ptx

    kernel = load_ptx(ROOT / f"tests/ptx/kernels/{case.module}.ptx").kernel(case.kernel)
    seconds = []
    for _ in range(1 + RUNS):
        memory = DeviceMemory()
        addresses = {name: memory.upload(array) for name, array in case.buffers.items()}
        arguments = case.bind(addresses, TensorMap.encode)
        cluster = case.cluster if case.cluster != (1, 1, 1) else None
        gc.collect()  # frees the memory of the run before
        began = time.process_time()
        run = kernel.launch(
            case.grid, case.block, case.shared_bytes, arguments, memory, cluster=cluster
        )
        seconds.append(time.process_time() - began)
    output = case.buffers[case.output]
    found = memory.download(addresses[case.output], output.shape, output.dtype)
    if case.error(found) > case.bound:
        raise RuntimeError(f"{case.kernel}: the output is not right")
    instructions, best = run.counters.total.instructions, min(seconds[1:])
    return {
        "kernel": case.kernel,
        "blocks": run.n_blocks,
        "warp_instructions": instructions,
        "cpu_seconds": round(best, 3),
        "seconds_per_million": round(1e6 * best / instructions, 2),
    }


def benchmark() -> tuple[dict[str, Any], str]:
    """Measure each case; returns the document and a table."""
    shapes = cases()
    work = bar(shapes.values(), desc="simulator", unit="kernel")
    records = [{"shape": shape, **measure(case)} for shape, case in zip(shapes, work, strict=True)]
    columns = ("shape", "blocks", "warp_instructions", "cpu_seconds", "seconds_per_million")
    table = Table(columns, [[str(record[c]) for c in columns] for record in records])
    return {
        "cpu_seconds_are": f"the least of {RUNS} runs after one that reads the PTX",
        "kernels": records,
    }, f"{table.text()}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    tool = "benchmarks/simulator_speed.py"
    return benchmark_main(tool, __doc__ or "", benchmark, ROOT, RESULTS, argv)


if __name__ == "__main__":
    sys.exit(main())
