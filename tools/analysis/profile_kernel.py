#!/usr/bin/env python3
"""Count the instructions and memory accesses of kernels in the simulator."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flash_helpers.console.command_line import (
    make_parser,
    print_text,
    run_tool,
)
from flash_helpers.console.tables import json_text
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.measure.kernel_profile import (
    KernelProfile,
    annotated_source_text,
    is_out_of_date,
    profile_kernels,
    profile_text,
    profiles_as_csv,
    profiles_as_json,
    source_as_csv,
    source_as_json,
    source_lines,
)
from flash_helpers.registry.selection import (
    DTYPE_CHOICES,
    KERNEL_NAMES,
    UsageError,
    add_problem_options,
    asked_problem,
    choose_kernels,
    require_options_of,
    variant_for,
)

if TYPE_CHECKING:
    import torch

    from flash_helpers.ptx import Run

ROOT = Path(__file__).resolve().parents[2]

DESCRIPTION = """\
Count the instructions and memory accesses of kernels in the simulator, without a GPU. An
instruction of PTX counts once for each warp that executes it. A wavefront is one pass through the
32 banks of shared memory, and bank conflicts are the wavefronts beyond those that the access needs.
A sector is 32 bytes of global memory. Prologue, main loop and epilogue are the code before, in and
after the loop over the blocks of K and V. Where warps have roles, such as a producer that copies by
TMA and consumers that multiply, each role has its own counts too.
"""

EXAMPLES = """\
examples:
  the bank conflicts that the swizzle removes, and its cost in instructions:
    python tools/analysis/profile_kernel.py 1 2 --seq 512
  the lines of the first step that have bank conflicts:
    python tools/analysis/profile_kernel.py --by-line 1
  the whole progression, one line per step:
    python tools/analysis/profile_kernel.py 1..16
  the instructions that a static row stride saves (the stride of 16 heads):
    python tools/analysis/profile_kernel.py 15 16 --seq 128 --heads 16 --by-opcode
  the cost of a causal kernel's mask, and the savings by skipped blocks:
    python tools/analysis/profile_kernel.py h24 h24_bf16_d128_Br192_Bc80_K3_V3_pp_causal --causal
  two tile shapes of step 7, for a spreadsheet (`python -m flash_attention` lists kernels):
    python tools/analysis/profile_kernel.py v7_bf16_... v7_bf16_... --csv > tiles.csv

exit status: 0 counted, 1 a kernel is at fault, 2 wrong usage, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "kernels",
        nargs="*",
        metavar="KERNEL",
        help=f"{KERNEL_NAMES}; a step stands for its config in the progression",
    )
    add_problem_options(parser)
    parser.add_argument(
        "--dtype",
        choices=DTYPE_CHOICES[:-1],
        default="bf16",
        help="dtype of steps; a short form has its own (default: bf16)",
    )
    parser.add_argument("--by-opcode", action="store_true", help="also count by opcode")
    parser.add_argument(
        "--by-line", metavar="KERNEL", help="instead: print one kernel's source with counts"
    )
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument(
        "--csv", action="store_true", help="CSV on stdout: one row per phase and opcode, or line"
    )
    machine.add_argument("--json", action="store_true", help="JSON on stdout")
    arguments = parser.parse_args(argv)
    if bool(arguments.kernels) == bool(arguments.by_line):
        parser.error("name kernels to compare, or one with --by-line")
    if arguments.by_line and arguments.by_opcode:
        parser.error("--by-opcode does not go with --by-line")
    return arguments


def comparison(profiles: Sequence[KernelProfile], arguments: argparse.Namespace) -> str:
    """Text of the kernels side by side, in the requested format."""
    if arguments.csv:
        return profiles_as_csv(profiles)
    if arguments.json:
        return json_text(profiles_as_json(profiles))
    return profile_text(profiles, arguments.by_opcode) + "\n"


def source(profile: KernelProfile, arguments: argparse.Namespace) -> str:
    """Text of one kernel by line, in the requested format."""
    lines = source_lines(profile, ROOT)
    if is_out_of_date(lines):
        print(
            "the kernel was built from another version of this file, so that the lines do not "
            "match: build it again with pip install .",
            file=sys.stderr,
        )
    if arguments.csv:
        return source_as_csv(profile, lines)
    if arguments.json:
        return json_text(source_as_json(profile, lines))
    return annotated_source_text(profile, lines) + "\n"


def profile(arguments: argparse.Namespace) -> str:
    """The text to print. Raises ValueError, and RuntimeError if a kernel is at fault."""
    import torch  # late, so that --help is fast

    from flash_helpers.runtime import library
    from flash_helpers.runtime.call import prepare
    from flash_helpers.runtime.tensors import torch_dtype

    configs = choose_kernels(
        library.kernels(),
        [arguments.by_line] if arguments.by_line else arguments.kernels,
        Element.from_name(arguments.dtype),
    )
    operations = {config.family.operation.name: config.family.operation for config in configs}
    if len(operations) != 1:
        raise UsageError(
            f"the kernels compute {', '.join(operations)}: name those of one operation"
        )
    (operation,) = operations.values()
    require_options_of(arguments, operations)
    shape = asked_problem(arguments, operation.small)
    configs = [variant_for(config, shape) for config in configs]
    shapes = {config.supports.adapted(shape.in_dtype(config.dtype)) for config in configs}
    if len(shapes) == 1:  # else the first kernel that does not take the problem is named
        (shape,) = shapes
    if arguments.by_line and len(configs) > 1:
        raise UsageError(f"--by-line {arguments.by_line} names {len(configs)} kernels: name one")

    def simulate(config: Config, inputs: Sequence[torch.Tensor]) -> Run:
        problem = shape.in_dtype(config.dtype)
        tensors = dict(zip((x.name for x in problem.inputs), inputs, strict=True)) | {
            x.name: torch.empty(x.shape, dtype=torch_dtype(x.element)) for x in problem.outputs
        }
        return prepare(config, *problem.arranged(tensors), **problem.call_options()).simulate()

    profiles = profile_kernels(configs, shape, simulate)
    return source(profiles[0], arguments) if arguments.by_line else comparison(profiles, arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Count and print; returns the exit status."""
    arguments = parse_arguments(argv)
    try:
        return run_tool(lambda: print_text(profile(arguments)), ValueError)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
