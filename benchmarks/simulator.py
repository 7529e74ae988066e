#!/usr/bin/env python3
"""Time the simulator: every step at the small shape, and how time grows with the blocks."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flash_helpers.check.problems import SMALL_SHAPE
from flash_helpers.console.command_line import make_parser, output_file, run_tool, typed_command
from flash_helpers.console.files import write_if_different
from flash_helpers.console.progress import bar
from flash_helpers.console.tables import Table
from flash_helpers.kernel_configs import AttentionForward, Config, get_kernel_progression_configs
from flash_helpers.measure.machine import git_commit, provenance
from flash_helpers.runtime.backend import find_backend

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results/simulator.json")
SCALING_SHAPES = (
    AttentionForward(1, 1, 256),
    AttentionForward(1, 1, 512),
    AttentionForward(1, 1, 1024),
    AttentionForward(1, 4, 512),
    AttentionForward(2, 8, 512),
)

EXAMPLES = f"""\
examples:
  measure, and write {RESULTS}:
    python benchmarks/simulator.py
  measure, and write elsewhere:
    python benchmarks/simulator.py --json /tmp/simulator.json
"""


def processor() -> str:
    """The name of the CPU, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def peak_mib() -> float:
    """The most memory that this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def measure(config: Config, shape: AttentionForward) -> dict[str, Any]:
    """One run, its reading of the PTX included if the kernel is run for the first time."""
    import torch  # which --help does not wait for

    import flash_attention
    from flash_helpers.check.inputs import make_inputs

    inputs = make_inputs("normal", shape, getattr(torch, config.dtype.torch_name))
    began = time.perf_counter()
    _, run = flash_attention.simulate(config, *inputs)
    seconds = time.perf_counter() - began
    total = run.counters.total
    launches = config.launch(shape, shape.strides())
    return {
        "config": launches[0].config.short_form(),
        "batch": shape.batch,
        "n_heads": shape.heads,
        "seq_len": shape.seq_len,
        "d_head": shape.d_head,
        "blocks": sum(launch.n_blocks for launch in launches),
        "seconds": round(seconds, 3),
        "warp_instructions": total.instructions,
        "mma": total.mma,
        "peak_mib": round(peak_mib()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    parser = make_parser(__doc__ or "", EXAMPLES)
    parser.add_argument(
        "--json",
        type=output_file,
        default=ROOT / RESULTS,
        metavar="FILE",
        help=f"(default: {RESULTS})",
    )
    arguments = parser.parse_args(argv)
    command = typed_command("benchmarks/simulator.py", argv)
    return run_tool(lambda: run(command, arguments.json), OSError)


def run(command: str, path: Path) -> None:
    """Measure, print and write to `path`. Raises OSError."""
    import numpy as np

    backend = find_backend("cpu")
    configs = get_kernel_progression_configs()
    work = [(config, SMALL_SHAPE) for config in configs]
    work += [(configs[-1], shape) for shape in SCALING_SHAPES]
    records = [measure(*item) for item in bar(work, desc="simulator", unit="run")]
    small, scaling = records[: len(configs)], records[len(configs) :]
    document = {
        "provenance": {
            **asdict(provenance(backend, command, git_commit(ROOT))),
            "cpu": processor(),
            "cores": os.cpu_count(),
            "numpy": np.__version__,
        },
        "seconds_for_all": round(sum(record["seconds"] for record in small), 1),
        "small": small,
        "scaling": scaling,
    }
    columns = ("config", "batch", "n_heads", "seq_len", "blocks", "seconds", "peak_mib")
    print(Table(columns, [[str(record[c]) for c in columns] for record in records]).text())
    print(f"{len(small)} kernels at {SMALL_SHAPE}: {document['seconds_for_all']} s")
    write_if_different(path, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
