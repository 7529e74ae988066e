#!/usr/bin/env python3
"""Measure the host time of a process's first, second and hundredth call of a kernel."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from flash_helpers.compile.cache import FOLDER_VARIABLE, Cache
from flash_helpers.console.command_line import (
    add_commit_argument,
    make_parser,
    output_file,
    positive,
)
from flash_helpers.console.progress import bar
from flash_helpers.kernel_configs import FAMILIES, STEPS, AttentionForward, Element
from flash_helpers.measure.command_line import provenance_here, run_measurement
from flash_helpers.measure.first_call import (
    CALLS,
    EMPTY,
    FILLED,
    LIBRARY,
    FirstCallRecord,
    FirstCalls,
    ProcessTimes,
)
from flash_helpers.runtime.backend import DEVICE_CHOICES, find_backend

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("first_call_process.py")
RESULTS = "benchmarks/results/first_call_h100.json"
STEPS_CALLED = ("v16", "o5", "h30")
PROBLEM = AttentionForward(1, 16, 128, dtype=Element.BF16)

DESCRIPTION = f"""\
Time calls of kernels in processes of their own: the first call, which compiles the kernel if the
cache of compiled kernels is empty, the second and the {CALLS}th. Another process finds the kernel
in the cache. Kernels of the library are compiled at install. On a GPU a call is forward() on a
small problem, and the host does not wait for the GPU. Without one, a call makes or finds the PTX
that the simulator runs for CPU tensors; nothing is simulated. The import of flash_attention is
timed before the calls, without that of PyTorch. Times are medians over the processes.
"""

EXAMPLES = f"""\
examples:
  measure on a GPU, print, and write the file, within two minutes:
    python benchmarks/first_call.py --device cuda --json {RESULTS}
  on a machine without a GPU, with one process for each row:
    python benchmarks/first_call.py --device cpu --repetitions 1

exit status: 0 measured, 1 a process failed, 2 wrong usage or no GPU, 130 interrupted
"""


class ProcessFailed(RuntimeError):
    """A measured process failed; the message holds its last line."""


Measure = Callable[[str, Path], ProcessTimes]
"""Measures a kernel in a new process, whose compiled kernels lie in a folder."""


def run_process(device: str) -> Measure:
    """The function that measures on "cuda" or "cpu"."""

    def measure(kernel: str, folder: Path) -> ProcessTimes:
        # no log of calls, debugging or other setting of the user takes part
        own = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_ATTENTION_")}
        command = [sys.executable, str(PROGRAM), kernel, device, str(CALLS)]
        ended = subprocess.run(
            [*command, *map(str, PROBLEM.shape)],
            env={**own, FOLDER_VARIABLE: str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            *_, last = ended.stderr.strip().splitlines() or [f"status {ended.returncode}"]
            raise ProcessFailed(f"{kernel}: {last}")
        return msgspec.json.decode(ended.stdout.splitlines()[-1], type=ProcessTimes)

    return measure


def measure_kernel(
    kernel: str, measure: Measure, repetitions: int, advance: Callable[[], object]
) -> tuple[list[FirstCallRecord], str]:
    """The records of a kernel, and the compiler. Each repetition has an empty folder, which the
    next process finds filled. advance: called after each repetition. Raises ProcessFailed."""
    times: dict[str, list[ProcessTimes]] = {}
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as folder:
            first = measure(kernel, Path(folder))
            is_compiled = bool(Cache(Path(folder)).entries())
            times.setdefault(EMPTY if is_compiled else LIBRARY, []).append(first)
            if is_compiled:
                times.setdefault(FILLED, []).append(measure(kernel, Path(folder)))
        advance()
    records = [FirstCallRecord.of(kernel, state, found) for state, found in times.items()]
    return records, first.compiler


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("--device", choices=DEVICE_CHOICES, default="auto", help="(default: auto)")
    parser.add_argument(
        "--repetitions",
        type=positive,
        default=5,
        metavar="N",
        help="processes for each row of the table (default: 5)",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="file of the results")
    add_commit_argument(parser)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, command: str) -> int:
    """Measure, print and write; returns the exit status. Raises KernelsNotRun and OSError."""
    backend = find_backend(arguments.device)
    found_here = provenance_here(backend, command, arguments, ROOT)
    families = {name: FAMILIES[STEPS[name].family] for name in STEPS_CALLED}
    fixed = [
        family.fixed_config(STEPS[name], PROBLEM.dtype)
        for name, family in families.items()
        if backend.is_simulator or family.runs_on(found_here.device.capability)
    ]
    measure = run_process(backend.device.type)
    records: list[FirstCallRecord] = []
    with bar(total=len(fixed) * arguments.repetitions, desc="first calls") as shown:
        for config in fixed:
            try:
                found, compiler = measure_kernel(
                    config.short_form(), measure, arguments.repetitions, shown.update
                )
            except ProcessFailed as error:
                print(error, file=sys.stderr)
                return 1
            records += found
    measured = FirstCalls(
        found_here,
        compiler,
        backend.is_simulator,
        PROBLEM.shape,
        PROBLEM.dtype.short,
        tuple(records),
    )
    print(measured.table().text())
    if arguments.json:
        measured.save(arguments.json)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_measurement(run, arguments, "benchmarks/first_call.py", argv, OSError)


if __name__ == "__main__":
    sys.exit(main())
