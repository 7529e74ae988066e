#!/usr/bin/env python3
"""Measure attention on sequences that several GPUs share, beside one GPU and PyTorch."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from flash_helpers.console.command_line import make_parser, positive
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.measure.ring_speeds import BOTH, FORWARD, RING, RingSpeed, RingSpeeds
from flash_helpers.runtime.backend import find_backend

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/long_sequences_h200.json"
MOST_ERROR = 2.0**-7  # both results are rounded to bf16, whose unit roundoff is 2^-8
TOKENS = (16384, 65536, 262144)
# Between the processes of a run: where they meet, and where rank 0 leaves its records.
STORE, RECORDS = "LONG_SEQUENCES_STORE", "LONG_SEQUENCES_RECORDS"

DESCRIPTION = """\
Time ring_attention() on sequences that GPUs of one host share, causal in zigzag and without a mask,
forward and with the backward pass, beside attention() on one GPU with as many tokens as each has,
and beside PyTorch's context parallel with its own kernels. Contenders take turns in each round, and
the slowest rank counts. Events tell which share of the transfers no kernel waits for. A second call
is compared with the first, bit by bit, and the results of short sequences with those of one GPU.
The tool starts a process per GPU itself; under torchrun it measures with the processes that run.
"""

EXAMPLES = f"""\
examples:
  measure on one and two GPUs, print and write {RESULTS}:
    python benchmarks/long_sequences.py
  with torchrun, one length:
    torchrun --nproc-per-node 2 benchmarks/long_sequences.py --tokens 65536 --json two.json
  a toy without a GPU, by gloo and the simulator, whose times mean nothing:
    python benchmarks/long_sequences.py --device cpu --tokens 64 --heads 2 --d-head 64 \\
        --rounds 1 --json toy.json

exit status: 0 measured, 1 a process failed or a result is wrong, 2 wrong usage or no GPU
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_results_arguments(parser, ROOT, RESULTS)
    lengths = " ".join(map(str, TOKENS))
    options = (
        ("--ranks", (2,), "numbers of GPUs that share a sequence (default: 2)"),
        ("--tokens", TOKENS, f"lengths of the whole sequence (default: {lengths})"),
    )
    for name, default, text in options:
        parser.add_argument(name, nargs="+", type=positive, default=default, metavar="N", help=text)
    for name, number, text in (
        ("--heads", 16, "heads of Q"),
        ("--kv-heads", None, "heads of K and V (default: those of Q)"),
        ("--d-head", 128, "head size"),
        ("--rounds", 3, "rounds"),
        ("--sample-ms", 250, "least milliseconds of a round's calls"),
    ):
        shown = text if number is None else f"{text} (default: {number})"
        parser.add_argument(name, type=positive, default=number, metavar="N", help=shown)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--no-pytorch", action="store_true", help="leave out PyTorch's context parallel"
    )
    return parser.parse_args(argv)


def problems(arguments: argparse.Namespace, ranks: int) -> list[RingSpeed]:
    """Return an empty record for each problem of a group. Raises ValueError for tokens that zigzag
    does not divide."""
    if wrong := [tokens for tokens in arguments.tokens if tokens % (2 * ranks)]:
        raise ValueError(
            f"--tokens {wrong[0]} with {ranks} GPUs: pass a multiple of {2 * ranks}, two halves "
            "for each"
        )
    kv_heads = arguments.kv_heads or arguments.heads
    sizes = arguments.heads, kv_heads, arguments.d_head, "bf16"
    return [
        RingSpeed("", ranks, tokens // ranks, *sizes, causal, passes)
        for tokens, causal, passes in product(arguments.tokens, (True, False), (FORWARD, BOTH))
    ]


def measure_here(arguments: argparse.Namespace, ranks: int) -> tuple[RingSpeed, ...]:
    """Measure as one of the ranks; return the records in rank 0, and none in others."""
    from long_sequences_process import Measurer  # late, so that --help is fast

    store = os.environ.get(STORE, "env://")
    options = arguments.device, arguments.rounds, arguments.sample_ms, not arguments.no_pytorch
    measurer = Measurer(*options, store)
    return measurer.records(problems(arguments, ranks))


def measure_in_processes(
    arguments: argparse.Namespace, ranks: int, argv: Sequence[str]
) -> tuple[RingSpeed, ...]:
    """Start a process for each rank; return the records of rank 0. Raises
    ChildProcessError if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.json"
        shared = {
            STORE: f"file://{folder}/store",
            RECORDS: str(records),
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        command = [sys.executable, str(Path(__file__).resolve()), *argv]
        processes = [
            subprocess.Popen(command, env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank})
            for rank in map(str, range(ranks))
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise ChildProcessError(
                f"the processes of {ranks} ranks ended with {codes}: see their errors above"
            )
        return RingSpeeds.load(records).speeds


def run(arguments: argparse.Namespace, command: str, argv: Sequence[str]) -> int:
    """Measure, print and write; returns the exit status. Raises KernelsNotRun without a GPU."""
    is_rank = "RANK" in os.environ
    backend = find_backend(arguments.device)
    found: list[RingSpeed] = []
    if is_rank:
        ranks = int(os.environ["WORLD_SIZE"])
        found += measure_here(arguments, ranks)
        if int(os.environ["RANK"]):
            return 0
    else:
        of_ranks = {ranks: problems(arguments, ranks) for ranks in arguments.ranks}
        for ranks, asked in of_ranks.items():
            if why := _too_few(arguments.device, ranks):
                found += [replace(each, name=RING, not_run=why) for each in asked]
            else:
                found += measure_in_processes(arguments, ranks, argv)
    speeds = RingSpeeds(
        provenance_here(backend, command, arguments, ROOT),
        arguments.rounds,
        arguments.sample_ms,
        backend.is_simulator,
        tuple(found),
    )
    if path := os.environ.get(RECORDS):
        speeds.save(Path(path))
        return 0
    print(speeds.table().text())
    speeds.save(arguments.json)
    faults = [(each, text) for each in found for text in _faults(each)]
    for each, text in faults:
        print(f"{each.name}, {each.problem}: {text}", file=sys.stderr)
    return 1 if faults else 0


def _faults(record: RingSpeed) -> list[str]:
    """Return what is wrong with the results of a contender, in words."""
    found = ["a second call gave other bits"] if record.repeats is False else []
    if record.relative_error is not None and record.relative_error > MOST_ERROR:
        found.append(f"results differ from one GPU's by {record.relative_error:.1e} in norm")
    return found


def _too_few(device: str, ranks: int) -> str:
    """Return the reason why a group cannot run here; "" if it can."""
    if device == "cpu":
        return ""
    import torch

    found = torch.cuda.device_count()
    return f"{ranks} GPUs are needed and {found} found" if found < ranks else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    arguments = parse_arguments(argv)
    given = sys.argv[1:] if argv is None else [*argv]
    return run_measurement(
        lambda asked, command: run(asked, command, given),
        *(arguments, "benchmarks/long_sequences.py", argv),
        *(OSError, ValueError),
    )


if __name__ == "__main__":
    sys.exit(main())
