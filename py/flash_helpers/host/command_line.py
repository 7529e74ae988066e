"""The command line of `python -m flash_helpers.ptx`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from flash_helpers.console.command_line import make_parser, print_text, run_tool
from flash_helpers.console.tables import Table, json_text, number, records_csv
from flash_helpers.host.errors import HostError
from flash_helpers.ptx.errors import PtxError

if TYPE_CHECKING:
    from flash_helpers.host.launches import FinishedLaunch

PROG = "python -m flash_helpers.ptx"

EXAMPLES = """\
examples:
  kernels of a file of PTX, and what the simulator would refuse
    python -m flash_helpers.ptx check examples/own_kernel/row_softmax.ptx
  a program with its kernels, without a GPU
    python -m flash_helpers.ptx run examples/host_program/matmul.cu
  the same with other options of nvcc, and arguments of the program
    python -m flash_helpers.ptx run examples/host_program/matmul.cu 256 128 128 -- -std=c++20
  copies and products complete at random legal times; suspicious operations are told
    python -m flash_helpers.ptx run --seed 1 --lints examples/host_program/matmul.cu
  what each launch did
    python -m flash_helpers.ptx count examples/host_program/matmul.cu

exit status: 0 right; 1 a kernel is at fault, a call was refused or a kernel would be; 2 wrong
usage; else the program's own"""

_COLUMNS = {
    "warp instructions": "instructions",
    "shared wavefronts": "shared_wavefronts",
    "bank conflicts": "bank_conflicts",
    "global sectors": "global_sectors",
    "TMA bytes": "tma_bytes",
    "mma": "mma",
    "wgmma": "wgmma",
    "barriers": "barriers",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    ours, nvcc_options = given, []
    if "--" in given:
        at = given.index("--")
        ours, nvcc_options = given[:at], given[at + 1 :]
    arguments = _parser().parse_args(ours)
    if arguments.command == "check":
        return run_tool(lambda: _check(arguments), OSError, HostError, PtxError)
    return run_tool(lambda: _run(arguments, nvcc_options), HostError, OSError)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "Check, run and count kernels of CUDA in the simulator, without a GPU.", EXAMPLES, PROG
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="check|run|count")
    check = commands.add_parser("check", help="read a file of PTX, without running it")
    check.add_argument("file", type=Path, metavar="FILE.ptx")
    run = commands.add_parser("run", help="run a program; its launches run in the simulator")
    count = commands.add_parser(
        "count", help="run a program, and show the counts of each launch on stdout"
    )
    for command in (run, count):
        command.add_argument(
            "--seed", type=int, help="complete copies and wgmma at random times of this seed"
        )
        command.add_argument("--lints", action="store_true", help="tell suspicious operations")
        command.add_argument(
            "--keep-going",
            action="store_true",
            help="collect faults instead of ending at the first",
        )
        command.add_argument(
            "--arch",
            default="sm_90a",
            metavar="TARGET",
            help="the GPU, and the target of the PTX (default: sm_90a)",
        )
    form = count.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="all counts of each launch as CSV")
    form.add_argument("--json", action="store_true", help="all counts of each launch as JSON")
    for command in (run, count):
        command.add_argument("file", type=Path, metavar="HOST.cu", help="or a program")
        command.add_argument(
            "arguments",
            nargs=argparse.REMAINDER,
            help="of the program; options of nvcc stand behind --",
        )
    return parser


def _check(arguments: argparse.Namespace) -> int:
    from flash_helpers.host.check import check_file  # NumPy: the help does not wait for it

    text, is_refused = check_file(arguments.file)
    print_text(text)
    return int(is_refused)


def _run(arguments: argparse.Namespace, nvcc_options: list[str]) -> int:
    from flash_helpers.host.launches import Options
    from flash_helpers.host.run import run_program

    counts = arguments.command == "count"
    ended = run_program(
        arguments.file,
        arguments.arguments,
        _target(arguments.arch),
        Options(
            arguments.seed,
            arguments.lints,
            arguments.keep_going,
            sys.stderr if counts else sys.stdout,
        ),
        nvcc_options,
        own_output=sys.stderr.fileno() if counts else None,
    )
    for report in dict.fromkeys(launch.report for launch in ended.launches if launch.report):
        print(report, file=sys.stderr)
    if counts:
        print_text(_counts(ended.launches, arguments))
    return ended.status


def _target(text: str) -> str:
    """sm_90a, from that, compute_90a or 90a."""
    return f"sm_{text.removeprefix('compute_').removeprefix('sm_')}"


def _counts(launches: Sequence[FinishedLaunch], arguments: argparse.Namespace) -> str:
    records = [
        {
            "kernel": launch.kernel,
            "grid": "x".join(map(str, launch.grid)),
            "block": "x".join(map(str, launch.block)),
            "cluster": "x".join(map(str, launch.cluster or ())),
            **asdict(launch.counts),
            "bank_conflicts": launch.counts.bank_conflicts,
        }
        for launch in launches
    ]
    if arguments.json:
        return json_text({"launches": records})
    if not records:
        return "" if arguments.csv else "the program has launched no kernel\n"
    if arguments.csv:
        return records_csv(records)
    shown = {title: key for title, key in _COLUMNS.items() if any(r[key] for r in records)}
    rows = []
    for record, same in groupby(records):  # a loop launches the same kernel many times
        counted = [number(record[key]) for key in shown.values()]
        launch = [str(record[key]) for key in ("kernel", "grid", "block")]
        rows.append([*launch, number(len(list(same))), *counted])
    header = ["kernel", "grid", "block", "launches", *shown]
    return Table(header, rows, align="lll").text() + "\n"
