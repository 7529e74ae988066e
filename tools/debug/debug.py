#!/usr/bin/env python3
"""Compare the values inside a kernel, such as S and P of attention, with the reference."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash_helpers.console.command_line import (
    make_parser,
    output_folder,
    print_text,
    run_tool,
)
from flash_helpers.console.files import write_if_different
from flash_helpers.kernel_configs import (
    OPERATIONS,
    Config,
    Element,
    Problem,
    config_from_short_form,
    get_kernel_progression_configs,
)
from flash_helpers.ptx import PtxError, SimulatorError
from flash_helpers.registry.selection import (
    DTYPE_CHOICES,
    UsageError,
    add_problem_options,
    all_steps_text,
    asked_problem,
    choose_kernels,
    require_options_of,
    require_supported,
    variant_for,
)
from flash_helpers.runtime.backend import KernelsNotRun

ROOT = Path(__file__).resolve().parents[2]
REFERENCE_FILE, KERNEL_FILE = "debug_pt.txt", "debug_cuda.txt"

DESCRIPTION = f"""\
Run one kernel in the simulator, read Q, K, S, m, l, P, V and O of every block of keys from its
registers, and compare them with blockwise FlashAttention-2 in Python, in the same order and with
the same roundings. {REFERENCE_FILE} holds the reference values and {KERNEL_FILE} the kernel's, line
by line. The last line of the output names the first quantity, block, warp and row that differs.

A kernel with a static row stride gets heads of a tensor with that stride. In family hopper, the
matrices are the operands of wgmma, and its sums when they retire. From h12 on, m is the maximum
that the exponents of a block are taken with; P, l and O are relative to the maximum that it is
raised to. S is not yet masked where a query does not see a key. Blocks of keys that a warp leaves
out are nan in both files.

Of the backward pass it reads Q, K, S, LSE, P, dO, V, dP and delta, the factors "P of dV", "dS of
dK" and "dS of dQ" as they are multiplied, and the sums dV, dK and dQ after each block. The rows of
dq_kernel are queries and its blocks are keys; in the kernel for dK and dV it is the reverse. S, dP
and P are those before the mask, and sums are those before the scale.

--lse compares the LSE as well, with float64. With --device cuda the kernel runs on the GPU, where
only its outputs can be read.
"""

EXAMPLES = """\
examples:
  a step of the hopper family, on a sequence of 256:
    python tools/debug/debug.py h12
  a causal kernel, whose first warpgroup leaves out a block that the second one sees:
    python tools/debug/debug.py h24 --causal --seq 128 --len-k 192
  more queries than keys, grouped heads, another scale:
    python tools/debug/debug.py h20 --seq 200 --len-k 80 --heads 2 --kv-heads 1 --softmax-scale 0.2
  the backward pass, whose kernels are compared one after the other:
    python tools/debug/debug.py b4 --seq 128 --len-k 256
    python tools/debug/debug.py p1 --causal --seq 70 --len-k 99 --heads 2 --kv-heads 1
  small integers as inputs, and the values of warp 1 in the second block of keys:
    python tools/debug/debug.py 3 --range --block 1 --warp 1
    diff debug/debug_pt.txt debug/debug_cuda.txt
  PTX that was edited by hand, or made by nvcc -ptx -lineinfo; the config is that of its kernel:
    python tools/debug/debug.py --ptx my_kernel.ptx

exit status: 0 all quantities agree within rounding, 1 a quantity differs or the watcher found a
fault, 2 wrong usage or nothing was run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("step", nargs="?", metavar="STEP", help="9, v9 or o5: its fixed config")
    parser.add_argument("--kernel", metavar="CONFIG", help="a config's short form, instead")
    parser.add_argument(
        "--dtype",
        choices=DTYPE_CHOICES[:-1],
        help="(default: bf16, or the dtype of --kernel or --ptx)",
    )
    add_problem_options(parser)
    distributions = dict.fromkeys(d for o in OPERATIONS.values() for d in o.distributions)
    parser.add_argument(
        "--inputs", choices=distributions, default="normal", help="(default: normal)"
    )
    parser.add_argument(
        "--range",
        dest="inputs",
        action="store_const",
        const="countable",
        help="short for --inputs countable: small integers that follow from their position",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
    parser.add_argument(
        "--block",
        type=int,
        nargs="+",
        metavar="J",
        help="write these blocks of keys, or of queries in a kernel that walks them (default all)",
    )
    parser.add_argument(
        "--row-block", type=int, default=0, metavar="I", help="write this block of rows (default 0)"
    )
    parser.add_argument("--warp", type=int, help="write the rows of this warp only (default all)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu, the simulator)"
    )
    parser.add_argument(
        "--ptx", type=Path, metavar="FILE", help="simulate this PTX instead of the config's own"
    )
    parser.add_argument(
        "--all-faults", action="store_true", help="print every fault, not only the first"
    )
    parser.add_argument(
        "--lints",
        action="store_true",
        help="print every lint, instead of their number by kind, for a kernel that is right too",
    )
    parser.add_argument(
        "--out", type=output_folder, default=ROOT / "debug", metavar="DIR", help="(default: debug/)"
    )
    return parser.parse_args(argv)


def chosen_config(arguments: argparse.Namespace) -> Config:
    """Return the config that the command line asks for. Raises ValueError if there is none."""
    from flash_helpers.check.debugging import config_of_ptx  # imports torch: no sooner than needed

    if arguments.step and arguments.kernel:
        raise UsageError("STEP and --kernel CONFIG both name a kernel: give one of the two")
    if arguments.kernel:
        config = config_from_short_form(arguments.kernel)
    elif arguments.step:
        dtype = Element.from_name(arguments.dtype or "bf16")
        fixed = get_kernel_progression_configs()
        found = choose_kernels(fixed, [arguments.step], dtype)
        if len(found) != 1:
            raise UsageError(
                f"{arguments.step!r} is not one step: name one, such as v9; the steps are "
                f"{all_steps_text()}"
            )
        (config,) = found
        config = variant_for(config, asked_problem(arguments, config.family.operation.debugged))
    elif arguments.ptx:
        config = config_of_ptx(arguments.ptx)
    else:
        raise UsageError("give a STEP, --kernel CONFIG or --ptx FILE")
    if arguments.dtype not in (None, config.dtype.short):
        raise UsageError(
            f"--dtype {arguments.dtype} is not that of {config.short_form()}: leave --dtype out"
        )
    if arguments.ptx:
        config = config_of_ptx(arguments.ptx, config)
    return config


def chosen_excerpt(arguments: argparse.Namespace, config: Config, problem: Problem) -> Any:
    """Return the part of the trace that is written to the files; None, for all outputs, without a
    trace.

    Raises UsageError for a block or warp that does not exist.
    """
    operation = config.family.operation
    if not operation.has_trace:
        return None
    trace = operation.part("trace.compare")
    excerpt = trace.Excerpt(arguments.row_block, arguments.block, arguments.warp)
    trace.check_excerpt(config, problem, excerpt)
    return excerpt


def compare(arguments: argparse.Namespace) -> int:
    """Run the kernel, write both files and print; returns the exit status.

    Raises KernelsNotRun, OSError, PtxError and ValueError.
    """
    from flash_helpers.check.debugging import compare_with_reference, fault_summary, lint_summary

    config = chosen_config(arguments)
    operation = config.family.operation
    require_options_of(arguments, [operation.name])
    problem = asked_problem(arguments, operation.debugged).in_dtype(config.dtype)
    problem = config.supports.adapted(problem)
    require_supported([config], problem)
    excerpt = chosen_excerpt(arguments, config, problem)
    try:
        found = compare_with_reference(
            config,
            problem,
            distribution=arguments.inputs,
            seed=arguments.seed,
            device=arguments.device,
            ptx=arguments.ptx,
        )
    except SimulatorError as error:  # for example, a kernel that does not end
        print(error)
        return 1
    head = f"{config.short_form()}, {problem}, inputs {arguments.inputs}, seed {arguments.seed}"
    reference, kernel = found.texts(excerpt)
    write_if_different(arguments.out / REFERENCE_FILE, f"{head}\n{reference}")
    write_if_different(arguments.out / KERNEL_FILE, f"{head}\n{kernel}")
    print(f"{head}; {found.ran}")
    print(f"{arguments.out / REFERENCE_FILE} and {KERNEL_FILE} written")
    if found.faults:
        all_of_them = "\n".join(map(str, found.faults))
        print(all_of_them if arguments.all_faults else fault_summary(found.faults))
    first = found.disagreement
    lints = [str(lint) for lint in found.lints]
    if lints and not (arguments.lints or first or found.faults):
        print(lint_summary(lints))
    else:
        print_text("".join(f"lint: {lint}\n" for lint in lints))
    print(f"first difference: {first}" if first else "all quantities agree within rounding")
    return 1 if first or found.faults else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: compare(arguments), KernelsNotRun, OSError, PtxError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
