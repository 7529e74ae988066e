"""Parts that the command lines that measure share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from flash_helpers.console.command_line import (
    add_commit_argument,
    output_file,
    run_tool,
    typed_command,
)
from flash_helpers.measure.machine import Provenance, git_commit, provenance
from flash_helpers.runtime.backend import Backend, KernelsNotRun


def add_results_arguments(
    parser: argparse.ArgumentParser, root: Path, results: str | Path, content: str = "the results"
) -> None:
    """Add `--json`, a file of `content` that is `results` in the repository at `root` by default,
    and `--commit`."""
    parser.add_argument(
        "--json",
        type=output_file,
        default=root / results,
        metavar="FILE",
        help=f"file of {content} (default: {results})",
    )
    add_commit_argument(parser)


def provenance_here(
    backend: Backend, command: str, arguments: argparse.Namespace, root: Path
) -> Provenance:
    """Return the record of this machine and moment, with the commit of `--commit`, or that of the
    repository at `root`."""
    return provenance(backend, command, arguments.commit or git_commit(root))


def run_measurement(
    run: Callable[[argparse.Namespace, str], int | None],
    arguments: argparse.Namespace,
    tool: str,
    argv: Sequence[str] | None,
    *errors: type[Exception],
    kept: str = "nothing was written",
) -> int:
    """Run a tool that measures and writes; return its exit status.

    `run`: takes the arguments and the command as typed in a shell, which is that of `tool`, such as
    "mma_cycles.py". `errors`: as `run_tool` takes them, beside KernelsNotRun. `kept`: what is told
    after Ctrl-C of the measurements until then.
    """
    command = typed_command(tool, argv)
    return run_tool(
        lambda: run(arguments, command),
        KernelsNotRun,
        *errors,
        interrupted=f"interrupted, {kept}",
    )
