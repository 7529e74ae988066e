#!/usr/bin/env python3
"""Compare the numbers of live registers with those of nvdisasm."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.console.command_line import (
    add_architecture_argument,
    add_commit_argument,
    make_parser,
    output_file,
    run_tool,
)
from flash_helpers.console.progress import bar
from flash_helpers.kernel_configs import Config
from flash_helpers.measure.live_registers import RESULTS, compare_kernels
from flash_helpers.measure.machine import git_commit
from flash_helpers.measure.machine_code import listed_configs, own_chosen
from flash_helpers.sass.read.records import SassError

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = """\
Compare the number of live registers at each instruction of the listed kernels, as the tools find it
by data flow, with the number that nvdisasm prints. The tool needs nvdisasm of CUDA 13: pip
install nvidia-cuda-nvdisasm
"""

EXAMPLES = f"""\
examples:
  the kernels for sm_90 and sm_90a, written into {RESULTS}:
    python tools/analysis/check_live_registers.py
  those for sm_80, written elsewhere:
    python tools/analysis/check_live_registers.py --arch sm_80 --json live_registers.json

exit status: 0 compared, 2 wrong usage or a kernel that does not compile, 130 interrupted
"""


def _made_for(architecture: str) -> list[Config]:
    """Listed configs with code for an architecture itself: sm_90 does not stand for sm_90a here."""
    found = listed_configs(architecture)
    return [config for config in found if config.family.target_on(architecture) == architecture]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print and write; returns the exit status."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_architecture_argument(
        parser, "(default: sm_90 sm_90a)", nargs="+", default=["sm_90", "sm_90a"]
    )
    parser.add_argument(
        "--json",
        type=output_file,
        default=ROOT / RESULTS,
        metavar="FILE",
        help=f"(default: {RESULTS})",
    )
    add_commit_argument(parser)
    arguments = parser.parse_args(argv)

    def run() -> None:
        found = compare_kernels(
            {name: own_chosen(name, _made_for(name)) for name in arguments.arch},
            arguments.commit or git_commit(ROOT),
            lambda cubins: bar(cubins, desc="compare", unit="cubin"),
        )
        print(found.table().text())
        found.save(arguments.json)

    return run_tool(run, SassError, OSError)


if __name__ == "__main__":
    sys.exit(main())
