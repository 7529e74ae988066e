#!/usr/bin/env python3
"""Plant a mistake in a kernel, and see how the tools find it."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.check.faults import all_faults, chosen_faults
from flash_helpers.console.command_line import make_parser, print_text, run_tool
from flash_helpers.ptx import PtxError
from flash_helpers.registry.selection import STEP_NAMES
from flash_helpers.runtime.backend import KernelsNotRun, find_backend

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = """\
Plant a mistake in a kernel's PTX, such as a missing barrier or a wait that is off by one, and run
the kernel in the simulator on a small problem. Either the watcher names the line of CUDA source, or
the check of the output fails and the first wrong quantity is printed. The PTX comes from the
installed package, so that neither a GPU nor nvcc is needed; the installed kernels do not change.
"""

EXAMPLES = """\
examples:
  list all mistakes:
    python tools/debug/plant_fault.py --list
  step 1 without one of its barriers:
    python tools/debug/plant_fault.py 1 copies of the next V
  all mistakes of step 3, one after the other:
    python tools/debug/plant_fault.py v3

exit status: 0 every mistake was caught, 1 a mistake was not, 2 wrong usage or nothing was run,
130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("step", nargs="?", metavar="STEP", help=STEP_NAMES)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="only mistakes whose name, as --list prints it, has these words in this order",
    )
    parser.add_argument("--list", action="store_true", help="only list the mistakes")
    arguments = parser.parse_args(argv)
    if not arguments.step and not arguments.list:
        parser.error("name a STEP, such as v3, or use --list")
    return arguments


def plant(names: Sequence[str]) -> int:
    """Plant each fault, run and print; returns the exit status. Raises KernelsNotRun, OSError,
    PtxError and ValueError."""
    from flash_helpers.check import planting  # imports torch: late, so that --help is fast

    find_backend("cpu")
    all_caught, faults = True, all_faults()
    for name in names:
        config = faults[name].config
        planted = planting.plant(faults[name])
        print(f"{name}\n{config.short_form()}, {planting.problem_of(config)}")
        print(planting.planted_text(planted, ROOT), flush=True)
        if not planting.is_built_from(ROOT, config):
            print(
                "the line numbers do not match: the kernel was built from other sources",
                file=sys.stderr,
            )
        outcome = planting.run_planted(planted)
        print(f"{planting.outcome_text(outcome, ROOT)}\n")
        all_caught &= outcome.is_caught
    return 0 if all_caught else 1


def run(arguments: argparse.Namespace) -> int:
    """List or plant; returns the exit status. Raises as `plant` does."""
    names = chosen_faults(arguments.step, arguments.words)
    if arguments.list:
        print_text("\n".join([*names, ""]))
        return 0
    return plant(names)


def main(argv: Sequence[str] | None = None) -> int:
    """List or plant; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: run(arguments), KernelsNotRun, OSError, PtxError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
