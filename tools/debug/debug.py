#!/usr/bin/env python3
"""Where does a kernel go wrong? Its own Q, K, S, m, l, P, V and O beside the right ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flash_helpers.check.blockwise import blockwise_forward, finish
from flash_helpers.check.debugging import Excerpt, excerpt_text, first_disagreement, shipped_ptx
from flash_helpers.check.inputs import DISTRIBUTIONS, AttentionShape, make_inputs
from flash_helpers.check.trace import trace_forward
from flash_helpers.command_line import make_parser, run_tool
from flash_helpers.files import write_if_different
from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
)
from flash_helpers.ptx import PtxError, SimulatorError
from flash_helpers.registry.selection import UsageError, config_that_runs, require_whole_blocks
from flash_helpers.runtime.backend import KernelsNotRun, find_backend
from flash_helpers.runtime.simulator import load_kernel

ROOT = Path(__file__).resolve().parents[2]
REFERENCE_FILE, KERNEL_FILE = "debug_pt.txt", "debug_cuda.txt"

DESCRIPTION = f"""\
Run one kernel in the simulator, read Q, K, S, m, l, P, V and O of every block of keys from its
registers, and compare them with blockwise FlashAttention-2 in Python, which has the same order and
the same roundings. {REFERENCE_FILE} holds the right values and {KERNEL_FILE} the kernel's, line by
line; the last line of the output names the first quantity, block, warp and row that differs.
With --device cuda the kernel runs on the GPU, where only its output can be seen.
"""

EXAMPLES = """\
examples:
  the last version, on a sequence of 256:
    python tools/debug/debug.py 16
  inputs that one can count on one's fingers, what warp 1 has in the second block of keys:
    python tools/debug/debug.py 3 --range --block 1 --warp 1
    diff debug/debug_pt.txt debug/debug_cuda.txt
  a kernel that is being worked on, compiled by hand with nvcc -ptx -lineinfo:
    python tools/debug/debug.py 7 --dtype fp16 --ptx my_kernel.ptx

exit status: 0 all agree within rounding, 1 something differs or the watcher found a fault, 2 wrong
usage or nothing was run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "version", nargs="?", metavar="VERSION", help="7 or v7: its config in the progression"
    )
    parser.add_argument("--kernel", metavar="CONFIG", help="a config's short form, instead")
    parser.add_argument(
        "--dtype", choices=[d.short for d in DType], help="(default: bf16, or what --kernel says)"
    )
    parser.add_argument("--seq", type=int, default=256, help="sequence length (default: 256)")
    parser.add_argument("--heads", type=int, default=1, help="number of heads (default: 1)")
    parser.add_argument(
        "--inputs", choices=list(DISTRIBUTIONS), default="normal", help="(default: normal)"
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
        "--ptx", type=Path, metavar="FILE", help="simulate this PTX of the config instead"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "debug", metavar="DIR", help="(default: debug/)"
    )
    return parser.parse_args(argv)


def chosen_config(arguments: argparse.Namespace, shape: AttentionShape) -> FlashForwardKernelConfig:
    """The config that the command line asks for, and that runs on the shape.

    Raises ValueError if there is none.
    """
    if (arguments.version is None) == (arguments.kernel is None):
        raise UsageError("give a VERSION or --kernel CONFIG, one of the two")
    if arguments.kernel is not None:
        config = FlashForwardKernelConfig.from_short_form(arguments.kernel)
        if arguments.dtype not in (None, config.dtype.short):
            raise UsageError(f"--dtype {arguments.dtype} is not that of {arguments.kernel}")
    else:
        dtype = DType.from_name(arguments.dtype or "bf16")
        known = {f"v{c.version}": c for c in get_kernel_progression_configs() if c.dtype == dtype}
        name = f"v{arguments.version.removeprefix('v')}"
        if name not in known:
            raise UsageError(f"version {arguments.version}: choose one of {', '.join(known)}")
        config = known[name]
    config = config_that_runs(config, shape)
    require_whole_blocks([config], shape)
    return config


def check_excerpt(
    arguments: argparse.Namespace, config: FlashForwardKernelConfig, shape: AttentionShape
) -> Excerpt:
    """What is written down. Raises UsageError for a block or warp that does not exist."""
    for name, values, number in (
        ("--block", arguments.block or [], shape.seq_len // config.B_c),
        ("--row-block", [arguments.row_block], shape.seq_len // config.B_r),
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
    shape = AttentionShape(batch=1, n_heads=arguments.heads, seq_len=arguments.seq)
    config = chosen_config(arguments, shape)
    excerpt = check_excerpt(arguments, config, shape)
    dtype = getattr(torch, config.dtype.torch_name)
    q, k, v = make_inputs(arguments.inputs, shape, dtype, seed=arguments.seed)
    expected = tuple(blockwise_forward(config, q, k, v))
    expected_output = finish(expected[-1], q.dtype)
    faults = ""
    if arguments.device == "cuda":
        backend = find_backend("cuda")
        on_device = [x.to(backend.device) for x in (q, k, v)]
        on_device.append(torch.empty_like(on_device[0]))
        backend.forward(config, *on_device)
        output = on_device[-1].cpu()
        steps, compared, ran = (), (), backend.description
    else:
        kernel = load_kernel(config, arguments.ptx or shipped_ptx(config))
        try:
            trace = trace_forward(config, kernel, q, k, v)
        except SimulatorError as error:  # such as a kernel that does not end
            print(error)
            return 1
        steps, compared, output = trace.steps, expected, trace.output
        faults, ran = trace.run.report(), "the simulator"
    head = f"{config.short_form()}, {shape}, inputs {arguments.inputs}, seed {arguments.seed}"
    reference_text = excerpt_text(config, expected, expected_output, excerpt)
    kernel_text = excerpt_text(config, steps, output, excerpt)
    write_if_different(arguments.out / REFERENCE_FILE, f"{head}\n{reference_text}")
    write_if_different(arguments.out / KERNEL_FILE, f"{head}\n{kernel_text}")
    found = first_disagreement(config, steps, output, compared, expected_output)
    print(f"{head}; {ran}")
    print(f"{arguments.out / REFERENCE_FILE} and {KERNEL_FILE} written")
    if faults:
        print(faults)
    print(f"first difference: {found}" if found else "all quantities agree within rounding")
    return 1 if found or faults else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: compare(arguments), KernelsNotRun, OSError, PtxError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
