"""The command line of a benchmark of the simulator: `--json`, and a file with its provenance."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flash_helpers.console.command_line import (
    make_parser,
    output_file,
    print_text,
    run_tool,
    typed_command,
)
from flash_helpers.console.files import write_if_different
from flash_helpers.measure.machine import git_commit, provenance
from flash_helpers.runtime.backend import find_backend

# Measures; returns the document, without its provenance, and the text to print.
Benchmark = Callable[[], tuple[Mapping[str, Any], str]]


def benchmark_main(
    tool: str,
    description: str,
    benchmark: Benchmark,
    root: Path,
    results: Path,
    argv: Sequence[str] | None,
) -> int:
    """Run a benchmark, print its text and write its document; returns the exit status.

    `tool`: the file that a user runs, and `results`: the file that it writes by default, both below
    `root`, the folder of the repository.
    """
    examples = (
        f"examples:\n  measure, and write {results}:\n    python {tool}\n"
        f"  measure, and write elsewhere:\n    python {tool} --json /tmp/{results.name}\n"
    )
    parser = make_parser(description, examples)
    parser.add_argument(
        "--json",
        type=output_file,
        default=root / results,
        metavar="FILE",
        help=f"(default: {results})",
    )
    path = parser.parse_args(argv).json

    def run() -> None:
        machine = simulator_provenance(typed_command(tool, argv), root)
        document, text = benchmark()
        print_text(text)
        document = {"provenance": machine, **document}
        write_if_different(path, json.dumps(document, indent=1) + "\n")

    return run_tool(run, OSError)


def simulator_provenance(command: str, root: Path) -> dict[str, Any]:
    """The record of this moment and of the machine, with its CPU. `command`: as typed. `root`: the
    folder of the repository."""
    import numpy as np  # late, so that --help is fast

    return {
        **asdict(provenance(find_backend("cpu"), command, git_commit(root))),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "numpy": np.__version__,
    }


def processor() -> str:
    """Name of the CPU, if the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
