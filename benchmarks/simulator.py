#!/usr/bin/env python3
"""Time the simulator: every step at the small shape, shapes with more blocks, and attention by
roles with Hopper's units. Each time is the least of three runs, since machines are shared."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import gc
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_helpers.console.progress import bar
from flash_helpers.console.tables import Table
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import (
    AttentionForward,
    Config,
    Problem,
    get_kernel_progression_configs,
)
from flash_helpers.measure.simulator_benchmark import benchmark_main
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.registry.families import problem_from_record

if TYPE_CHECKING:
    from flash_helpers.ptx import Run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results/simulator.json")
SCALING_SHAPES = (
    AttentionForward(1, 1, 256),
    AttentionForward(1, 1, 512),
    AttentionForward(1, 1, 1024),
    AttentionForward(1, 4, 512),
    AttentionForward(2, 8, 512),
)

HOPPER_ROWS = 512
RUNS = 3


def peak_mib() -> float:
    """Most memory that this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def timed(run: Callable[[], Run]) -> dict[str, Any]:
    """Least time of `RUNS` runs, most memory that the process has held so far, and counts. The
    first run of a kernel also reads its PTX."""
    seconds = []
    for _ in range(RUNS):
        gc.collect()  # frees the memory of the runs before
        began = time.perf_counter()
        total = run().counters.total
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": round(min(seconds), 3),
        "warp_instructions": total.instructions,
        "mma": total.mma,
        "wgmma": total.wgmma,
        "peak_mib": round(peak_mib()),
    }


def measure(config: Config, asked: Problem) -> dict[str, Any]:
    """Time a step's kernel on a problem in the step's dtype."""
    from flash_helpers.check.tensors import tensors_for  # with torch, which --help leaves out
    from flash_helpers.runtime.simulator import load_kernels, run_kernel

    problem = asked.in_dtype(config.dtype)
    inputs = config.family.operation.part("inputs").draw("normal", problem)
    tensors = tensors_for(config, problem, inputs)
    kernels = load_kernels(config)
    call = config.call(problem, problem.strides(), largest_device(config.family.capabilities[0]))
    return {
        "config": config.runs_as(problem.strides()).short_form(),
        "problem": problem.record(),
        "blocks": call.n_blocks,
        **timed(lambda: run_kernel(config, kernels, tensors, **problem.call_options())),
    }


def measure_hopper() -> dict[str, Any]:
    """Time attention by a producer warp and two warpgroups of consumers: one head, and one thread
    block per 128 rows."""
    from hopper_cases import attention  # late: its import computes the inputs of all cases

    from flash_helpers.ptx import DeviceMemory, TensorMap, load_ptx

    blocks = HOPPER_ROWS // 128
    case = attention("bf16", 128, HOPPER_ROWS, heads=1, batches=1, blocks=blocks)
    kernel = load_ptx(ROOT / f"tests/ptx/kernels/{case.module}.ptx").kernel(case.kernel)

    def launch() -> Run:
        memory = DeviceMemory()
        addresses = {name: memory.upload(array) for name, array in case.buffers.items()}
        arguments = case.bind(addresses, TensorMap.encode)
        return kernel.launch(case.grid, case.block, case.shared_bytes, arguments, memory)

    return {
        "config": case.kernel,
        "problem": AttentionForward(1, 1, HOPPER_ROWS).record(),
        "blocks": blocks,
        **timed(launch),
    }


def benchmark() -> tuple[dict[str, Any], str]:
    """Measure each step and each shape; returns the document and a table."""
    configs = get_kernel_progression_configs()
    work: list[tuple[Config, Problem]] = [(c, c.family.operation.small) for c in configs]
    last = [config for config in configs if config.family.operation is OPERATION][-1]
    work += [(last, shape) for shape in SCALING_SHAPES]
    hopper = measure_hopper()  # first, so that the peak of memory is its own
    records = [measure(*item) for item in bar(work, desc="simulator", unit="kernel")]
    small, scaling = records[: len(configs)], records[len(configs) :]
    seconds = round(sum(record["seconds"] for record in small), 1)
    columns = ("config", "problem", "blocks", "seconds", "peak_mib")
    rows = [
        [str({**record, "problem": problem_from_record(record["problem"])}[c]) for c in columns]
        for record in (*records, hopper)
    ]
    table = Table(columns, rows).text()
    return {
        "seconds_are": f"the least of {RUNS} runs",
        "seconds_for_all": seconds,
        "small": small,
        "scaling": scaling,
        "hopper": hopper,
    }, f"{table}\n{len(small)} kernels at {OPERATION.small}: {seconds} s\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    return benchmark_main("benchmarks/simulator.py", __doc__ or "", benchmark, ROOT, RESULTS, argv)


if __name__ == "__main__":
    sys.exit(main())
