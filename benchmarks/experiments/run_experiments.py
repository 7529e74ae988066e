#!/usr/bin/env python3
"""Measure the experiments on step o5, and write the tables of their log."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from experiment_tables import loop_table, provenance_line, speed_table
from experiments import CONFIG, DTYPE, EXPERIMENTS, contender, resources, source_digest
from machine_code import ARCHITECTURE, MachineCode, read_machine_code

from flash_helpers.compile.build import requested_jobs
from flash_helpers.compile.cache import Cache
from flash_helpers.compile.compilers import find_compiler
from flash_helpers.compile.cubins import Cubin, read_cubin
from flash_helpers.compile.jit import Jit
from flash_helpers.console.command_line import (
    add_lengths_argument,
    make_parser,
    positive,
    write_or_check,
)
from flash_helpers.console.progress import bar
from flash_helpers.measure.benchmark_tables import replace_between_markers
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.measure.machine import GpuSensor
from flash_helpers.measure.results import (
    FLASH,
    MMA_SYNC,
    RATE_NAMES,
    BenchmarkResults,
    Protocol,
    load_results,
    refuse_another_gpu,
)
from flash_helpers.operations.attention_forward.problems import default_shape
from flash_helpers.registry.selection import UsageError, require_supported
from flash_helpers.runtime.backend import find_backend
from flash_helpers.sass.read.records import SassError

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path("build/experiments")
RESULTS = Path("benchmarks/results/experiments_o5_h200.json")
MACHINE_CODE = Path("benchmarks/results/experiments_o5_sass.json")
DOCS = Path("docs/tuning.md")
SPEED_MARKERS = ("<!-- speed:begin -->", "<!-- speed:end -->")
LOOP_MARKERS = ("<!-- loops:begin -->", "<!-- loops:end -->")
NOT_MEASURED = "Not measured yet: `python benchmarks/experiments/run_experiments.py` does it."
MEASURED_LENGTHS = (1024, 4096)
DEFAULT_ROUNDS = 15

DESCRIPTION = f"""\
Measure the variants of step o5 that docs/tuning.md has not closed yet, beside step o5. Each variant
is compiled for this GPU (into {BUILD}), compared with float64 before and after, and timed beside
PyTorch's flash backend, in CUDA graphs. The order alternates from round to round. All problems have
bf16, 16 heads and d_head 128.
"""

EXAMPLES = f"""\
examples:
  measure, print the table and write {RESULTS}; needs a GPU:
    python benchmarks/experiments/run_experiments.py
  in a copy without git, and keeping the data elsewhere:
    python benchmarks/experiments/run_experiments.py --commit 68cfc22 --json /tmp/experiments.json
  read the machine code of the loops into {MACHINE_CODE}; needs nvdisasm:
    python benchmarks/experiments/run_experiments.py --sass
  put the tables into {DOCS}; needs neither a GPU nor a compiler:
    python benchmarks/experiments/run_experiments.py --write-docs
  does the log agree with the data, and was the machine code made from these sources? (1 if not)
    python benchmarks/experiments/run_experiments.py --write-docs --check

exit status: 0 every experiment was right and timed, or the files are current; 1 an experiment
failed, or --check found something stale; 2 wrong usage, no GPU or no compiler; 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--sass", action="store_true", help="instead: read the machine code of the loops"
    )
    action.add_argument(
        "--write-docs", action="store_true", help=f"instead: put the tables into {DOCS}"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="with --write-docs: write nothing; print a diff and exit 1 if stale",
    )
    add_lengths_argument(parser, "--seq", MEASURED_LENGTHS, "sequence lengths")
    parser.add_argument(
        "--rounds",
        type=positive,
        default=DEFAULT_ROUNDS,
        help=f"samples per experiment (default: {DEFAULT_ROUNDS})",
    )
    add_results_arguments(parser, ROOT, RESULTS)
    arguments = parser.parse_args(argv)
    if arguments.check and not arguments.write_docs:
        parser.error("--check goes with --write-docs")
    return arguments


def compile_experiments(architecture: int) -> list[Cubin]:
    """Compile all experiments, in the log's order. Raises BuildError."""
    jit = Jit(ROOT, Cache(ROOT / BUILD), find_compiler, requested_jobs(os.environ))
    compiled = jit.get([experiment.unit() for experiment in EXPERIMENTS], f"sm_{architecture}")
    return [read_cubin(each, CONFIG) for each in compiled]


def measure(arguments: argparse.Namespace, command: str) -> BenchmarkResults:
    """Compile, verify and time all experiments, and write the results.

    Raises KernelsNotRun without a GPU, BuildError, and ValueError or OSError for a bad file.
    """
    import torch  # late, so that --help is fast

    from flash_helpers.measure.benchmark import library_contender, n_steps, run_benchmark
    from flash_helpers.measure.rates import mma_sync_work
    from flash_helpers.measure.timing import make_timer

    backend = find_backend("cuda")
    found = provenance_here(backend, command, arguments, ROOT)
    refuse_another_gpu(arguments.json, found.gpu)
    seq_lens = sorted(set(arguments.seq))
    for seq_len in seq_lens:
        require_supported([CONFIG], default_shape(seq_len))
    compiled = compile_experiments(int(found.compute_capability.replace(".", "")))

    torch.zeros(1, device=backend.device)  # makes PyTorch's context current
    operation = CONFIG.family.operation
    own = (contender(cubin, backend.execute) for cubin in compiled)
    contenders = [library_contender(FLASH, operation), *own]
    protocol = Protocol(rounds=arguments.rounds)
    total = len(seq_lens) * n_steps(len(contenders), protocol)
    with bar(total=total, desc="experiments", unit="step") as shown:
        run = run_benchmark(
            {DTYPE: contenders},
            seq_lens,
            backend.device,
            make_timer(backend.device, protocol),
            protocol,
            GpuSensor(backend.device),
            rate_works={MMA_SYNC: lambda dtype: mma_sync_work(dtype, backend.device)},
            advance=shown.update,
            shape_for=default_shape,
        )
    if run.skipped:
        skipped = run.skipped[0]
        raise UsageError(f"seq {skipped.size} {skipped.reason}: use a shorter --seq")
    results = BenchmarkResults(
        provenance=found, protocol=protocol, resources=tuple(map(resources, compiled)), **vars(run)
    )
    results.save(arguments.json)
    return results


def documented(root: Path, results: Path) -> tuple[str, str]:
    """The log's text as it is and as it should be.

    Raises OSError, or ValueError for a bad file or missing markers.
    """
    old = (root / DOCS).read_text(encoding="utf-8")
    speed = NOT_MEASURED
    if results.exists():
        measured = load_results(results)
        speed = f"{speed_table(measured).markdown()}\n\n{provenance_line(measured)}"
    code = MachineCode.load(root / MACHINE_CODE)
    made = f"{code.compiler}, {code.architecture}."
    new = replace_between_markers(old, speed, *SPEED_MARKERS)
    new = replace_between_markers(new, f"{loop_table(code).markdown()}\n\n{made}", *LOOP_MARKERS)
    return old, new


def write_docs(arguments: argparse.Namespace) -> int:
    """Update or check the log; returns the exit status. Raises as `documented` does."""
    old, new = documented(ROOT, arguments.json)
    status = write_or_check(ROOT / DOCS, old, new, arguments.check)
    if arguments.check and MachineCode.load(ROOT / MACHINE_CODE).sources != source_digest(ROOT):
        print(f"{MACHINE_CODE} was made from other sources: run with --sass, then --write-docs")
        return 1
    return status


def write_machine_code() -> int:
    """Compile the experiments, and write the facts of their loops. Raises BuildError and
    SassError."""
    compiled = compile_experiments(ARCHITECTURE)
    code = read_machine_code(bar(compiled, desc="disassembling", unit="kernel"), ROOT)
    code.save(ROOT / MACHINE_CODE)
    print(loop_table(code).text())
    return 0


def run(arguments: argparse.Namespace, command: str) -> int:
    """Measure, read or write; returns the exit status. Raises as `measure`, `write_docs` and
    `write_machine_code` do."""
    if arguments.write_docs:
        return write_docs(arguments)
    if arguments.sass:
        return write_machine_code()
    results = measure(arguments, command)
    print(speed_table(results).text())
    for rate in results.rates:
        if rate.failure:
            print(f"{RATE_NAMES[rate.name]}: {rate.failure}")
    for m in results.failures:
        print(f"{m.name} at {m.size}: {m.failure}")
    return 1 if results.failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, read or write; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_measurement(
        run, arguments, "run_experiments.py", argv, OSError, SassError, ValueError
    )


if __name__ == "__main__":
    sys.exit(main())
