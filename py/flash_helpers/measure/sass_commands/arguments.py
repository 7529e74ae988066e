"""Options that commands of `python -m flash_helpers.sass` share, and what they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flash_helpers.console.command_line import (
    add_architecture_argument,
    not_negative,
    positive,
)
from flash_helpers.measure.machine_code import ARCHITECTURE
from flash_helpers.measure.results import RESULTS
from flash_helpers.registry.selection import UsageError
from flash_helpers.sass.analyse.bound import Launch
from flash_helpers.sass.analyse.matrix import KernelFacts
from flash_helpers.sass.read.choice import NAMED_SO, KernelPath

DEFAULT_ARCHITECTURE = (
    f"default: {ARCHITECTURE}, as in the committed measurements, or else the latest that there is; "
    "for a FILE its only architecture"
)


def add_file_arguments(parser: argparse.ArgumentParser, chosen: str = "") -> None:
    """Add FILE, `--arch` and `--kernel`. `chosen`: what `--kernel` chooses, if not kernels."""
    parser.add_argument("file", metavar="FILE", type=KernelPath.parse, help=NAMED_SO)
    add_architecture_argument(parser, "one architecture (default: all)")
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        help=f"{chosen}a NAME, a pattern with * or ?, or a step of this library (7 or v7..v9); "
        "several may be given (default: all)",
    )


def add_dtype_argument(parser: argparse.ArgumentParser, choices: Sequence[str]) -> None:
    """Add `--dtype`, of steps."""
    parser.add_argument(
        "--dtype",
        choices=choices,
        default="bf16",
        help="dtype of steps; a short form has its own (default: bf16)",
    )


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--threads` and `--smem`, which `with_launch` reads."""
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="of a FILE: threads per block, for occupancy"
    )
    parser.add_argument(
        "--smem",
        type=not_negative,
        default=0,
        metavar="BYTES",
        help="of a FILE: bytes of dynamic shared memory per block (default: 0)",
    )


def with_launch(facts: KernelFacts, arguments: argparse.Namespace) -> KernelFacts:
    """The facts of a kernel in the launch that the arguments ask for. Raises UsageError if they
    leave out the threads of a block and the kernel does not tell them."""
    if arguments.threads is None and not arguments.smem:
        return facts
    threads = arguments.threads or facts.kernel.resources.max_threads
    if threads is None:
        raise UsageError(
            f"--smem needs --threads: {facts.kernel.name} does not say how many a block has"
        )
    return replace(facts, launch=Launch(threads, arguments.smem))


def add_results_argument(parser: argparse.ArgumentParser, purpose: str = "") -> None:
    """Add `--results`. `purpose`: what they are for, after a comma."""
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help=f"results of pt_bench.py{purpose} (default: {RESULTS}, if it exists)",
    )


def add_format_arguments(parser: argparse.ArgumentParser, *, csv: bool) -> None:
    """Add `--markdown` and `--json`, and `--csv` if there is a table."""
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--markdown", action="store_true", help="Markdown on stdout")
    if csv:
        formats.add_argument("--csv", action="store_true", help="CSV on stdout: one row per kernel")
    formats.add_argument("--json", action="store_true", help="JSON on stdout")
