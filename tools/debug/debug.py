#!/usr/bin/env python3
"""Where does a kernel go wrong? Its own Q, K, S, m, l, P, V and O beside the right ones."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flash_helpers.check.problems import DISTRIBUTIONS
from flash_helpers.console.command_line import (
    add_problem_arguments,
    make_parser,
    output_folder,
    run_tool,
)
from flash_helpers.console.files import write_if_different
from flash_helpers.kernel_configs import (
    AttentionForward,
    Config,
    DType,
    config_from_short_form,
    get_kernel_progression_configs,
)
from flash_helpers.ptx import PtxError, SimulatorError
from flash_helpers.registry.selection import (
    STEP_NAMES,
    UsageError,
    choose_kernels,
    require_supported,
    with_mask,
)
from flash_helpers.runtime.backend import KernelsNotRun

if TYPE_CHECKING:
    from flash_helpers.check.debugging import Excerpt

ROOT = Path(__file__).resolve().parents[2]
REFERENCE_FILE, KERNEL_FILE = "debug_pt.txt", "debug_cuda.txt"

DESCRIPTION = f"""\
Run one kernel in the simulator, read Q, K, S, m, l, P, V and O of every block of keys from its
registers, and compare them with blockwise FlashAttention-2 in Python, which has the same order and
the same roundings. {REFERENCE_FILE} holds the right values and {KERNEL_FILE} the kernel's, line by
line; the last line of the output names the first quantity, block, warp and row that differs.
A kernel with a static row stride gets heads of a tensor that has it. Of family hopper the matrices
are those that wgmma multiplies, and its sums when they retire; from h12 on m is what the exponents
of a block are taken with, and P, l and O are relative to what it is raised to; S is not yet hidden
where a query does not see a key. Blocks of keys that a warp leaves out are nan, in both files. With
--device cuda the kernel runs on the GPU, where only its output can be seen.
"""

EXAMPLES = """\
examples:
  a step of the hopper family, on a sequence of 256:
    python tools/debug/debug.py h12
  a causal kernel, whose first warpgroup leaves out a block that the second one sees:
    python tools/debug/debug.py h24 --causal --seq 128 --len-k 192
  more queries than keys, grouped heads, another scale:
    python tools/debug/debug.py h20 --seq 200 --len-k 80 --heads 2 --kv-heads 1 --softmax-scale 0.2
  inputs that one can count on one's fingers, what warp 1 has in the second block of keys:
    python tools/debug/debug.py 3 --range --block 1 --warp 1
    diff debug/debug_pt.txt debug/debug_cuda.txt
  a kernel that is being worked on, compiled by hand with nvcc -ptx -lineinfo; its config is that of
  the file's kernel:
    python tools/debug/debug.py --ptx my_kernel.ptx

exit status: 0 all agree within rounding, 1 something differs or the watcher found a fault, 2 wrong
usage or nothing was run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("step", nargs="?", metavar="STEP", help="9, v9 or o5: its fixed config")
    parser.add_argument("--kernel", metavar="CONFIG", help="a config's short form, instead")
    parser.add_argument(
        "--dtype",
        choices=[d.short for d in DType],
        help="(default: bf16, or what --kernel or --ptx says)",
    )
    parser.add_argument("--seq", type=int, default=256, help="sequence length (default: 256)")
    parser.add_argument("--len-k", type=int, metavar="N", help="number of keys (default: --seq)")
    parser.add_argument("--heads", type=int, default=1, help="number of heads (default: 1)")
    add_problem_arguments(parser, "the last one sees all. Of a STEP its causal kernel runs")
    parser.add_argument(
        "--softmax-scale", type=float, metavar="X", help="(default: 1/sqrt(d_head))"
    )
    parser.add_argument(
        "--inputs", choices=DISTRIBUTIONS, default="normal", help="(default: normal)"
    )
    parser.add_argument(
        "--range",
        dest="inputs",
        action="store_const",
        const="countable",
        help="the same as --inputs countable: small integers known from their position",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    parser.add_argument(
        "--block", type=int, nargs="+", metavar="J", help="write these blocks of keys (default all)"
    )
    parser.add_argument(
        "--row-block", type=int, default=0, metavar="I", help="write this block of rows (default 0)"
    )
    parser.add_argument("--warp", type=int, help="write the rows of this warp only (default all)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu, the simulator)"
    )
    parser.add_argument(
        "--ptx", type=Path, metavar="FILE", help="simulate this PTX instead of the library's"
    )
    parser.add_argument(
        "--all-faults", action="store_true", help="print every fault, not the first"
    )
    parser.add_argument(
        "--out", type=output_folder, default=ROOT / "debug", metavar="DIR", help="(default: debug/)"
    )
    return parser.parse_args(argv)


def chosen_config(arguments: argparse.Namespace) -> Config:
    """The config that the command line asks for. Raises ValueError if there is none."""
    from flash_helpers.check.debugging import config_of_ptx  # and torch, no sooner than needed

    if arguments.step and arguments.kernel:
        raise UsageError("STEP and --kernel CONFIG both name a kernel: give one of the two")
    if arguments.kernel:
        config = config_from_short_form(arguments.kernel)
    elif arguments.step:
        dtype = DType.from_name(arguments.dtype or "bf16")
        fixed = get_kernel_progression_configs()
        found = choose_kernels(fixed, [arguments.step], dtype)
        if len(found) != 1:
            raise UsageError(f"{arguments.step!r} is not one step; name one of {STEP_NAMES}")
        (config,) = found
        if arguments.causal:
            config = with_mask(config)
    elif arguments.ptx:
        config = config_of_ptx(arguments.ptx)
    else:
        raise UsageError("give a STEP, --kernel CONFIG or --ptx FILE")
    if arguments.dtype not in (None, config.dtype.short):
        raise UsageError(f"--dtype {arguments.dtype} is not that of {config.short_form()}")
    if arguments.ptx:
        config = config_of_ptx(arguments.ptx, config)
    return config


def check_excerpt(
    arguments: argparse.Namespace, config: Config, problem: AttentionForward
) -> Excerpt:
    """What is written down. Raises UsageError for a block or warp that does not exist."""
    from flash_helpers.check.debugging import Excerpt

    for name, values, number in (
        ("--block", arguments.block or [], -(-problem.len_k // config.B_c)),
        ("--row-block", [arguments.row_block], -(-problem.len_q // config.B_r)),
        ("--warp", [] if arguments.warp is None else [arguments.warp], config.n_warps),
    ):
        for value in values:
            if not 0 <= value < number:
                raise UsageError(f"{name} {value}: there are 0 to {number - 1}")
    return Excerpt(arguments.row_block, arguments.block, arguments.warp)


def compare(arguments: argparse.Namespace) -> int:
    """Run the kernel, write both files and print; returns the exit status.

    Raises KernelsNotRun, OSError, PtxError and ValueError.
    """
    from flash_helpers.check.debugging import compare_with_reference, fault_summary

    config = chosen_config(arguments)
    problem = AttentionForward(
        1,
        arguments.heads,
        arguments.seq,
        dtype=config.dtype,
        len_k=arguments.len_k,
        kv_heads=arguments.kv_heads,
        causal=arguments.causal or config.supports.causal,
        softmax_scale=arguments.softmax_scale,
    )
    require_supported([config], problem)
    excerpt = check_excerpt(arguments, config, problem)
    try:
        found = compare_with_reference(
            config,
            problem,
            distribution=arguments.inputs,
            seed=arguments.seed,
            device=arguments.device,
            ptx=arguments.ptx,
        )
    except SimulatorError as error:  # such as a kernel that does not end
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
    for lint in found.lints:
        print(f"lint: {lint}")
    first = found.disagreement
    print(f"first difference: {first}" if first else "all quantities agree within rounding")
    return 1 if first or found.faults else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: compare(arguments), KernelsNotRun, OSError, PtxError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
