#!/usr/bin/env python3
"""Launch kernels a few times and do nothing else: something to put under a profiler."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from flash_helpers.console.command_line import (
    add_problem_arguments,
    make_parser,
    positive,
    run_tool,
)
from flash_helpers.kernel_configs import AttentionForward, DType
from flash_helpers.measure.ncu_bench import LIBRARY_KERNELS
from flash_helpers.registry.selection import (
    add_kernel_arguments,
    chosen_kernels,
    parse_dtypes,
    require_supported,
)
from flash_helpers.runtime.backend import DEVICE_CHOICES, Backend, KernelsNotRun, find_backend

EXAMPLES = """\
examples:
  all counters of one kernel:
    ncu --set full --kernel-name regex:forward_kernel \\
      python tools/benchmark/run_kernels.py --kernel v16 --dtype bf16 --heads 16 --seq 4096
  memory errors, also of causal kernels on more keys than queries:
    compute-sanitizer python tools/benchmark/run_kernels.py --kernel 1..3
    compute-sanitizer python tools/benchmark/run_kernels.py --kernel h21..h24 --causal --len-k 777
  PyTorch's flash backend, to look at beside them:
    nsys profile python tools/benchmark/run_kernels.py --library flash --heads 16 --seq 4096

exit status: 0 all were launched, 2 wrong usage or nothing was run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(
        "Launch each chosen kernel --repeat times on one input, and wait.", EXAMPLES
    )
    add_kernel_arguments(parser)
    parser.add_argument(
        "--library",
        choices=LIBRARY_KERNELS,
        help="launch a library's attention instead of the kernels",
    )
    parser.add_argument("--batch", type=positive, default=1, help="(default: 1)")
    parser.add_argument("--heads", type=positive, default=1, help="(default: 1)")
    parser.add_argument("--seq", type=positive, default=512, help="sequence length (default: 512)")
    parser.add_argument(
        "--len-k", type=positive, metavar="N", help="number of keys (default: as many as --seq)"
    )
    add_problem_arguments(parser, "a config with a mask is launched so in any case")
    parser.add_argument("--repeat", type=positive, default=1, help="launches of each (default: 1)")
    parser.add_argument("--device", choices=DEVICE_CHOICES, default="cuda", help="(default: cuda)")
    arguments = parser.parse_args(argv)
    if arguments.library and arguments.kernel:
        parser.error("--library does not go with --kernel: launch one or the other")
    if arguments.library and arguments.causal and arguments.len_k not in (None, arguments.seq):
        parser.error(
            "--causal --library takes as many keys as queries: PyTorch's mask is aligned to "
            "the top left, leave out --len-k"
        )
    return arguments


def launches(
    arguments: argparse.Namespace, backend: Backend, shape: AttentionForward
) -> list[tuple[DType, Callable[..., object]]]:
    """Dtype and function of q, k, v and o for each kernel or dtype asked for. Raises
    UsageError."""
    dtypes = parse_dtypes(arguments.dtype)
    if arguments.library:
        from flash_helpers.measure.benchmark import run_library

        name, _ = LIBRARY_KERNELS[arguments.library]
        return [
            (dtype, lambda q, k, v, o: run_library(name, q, k, v, shape.causal)) for dtype in dtypes
        ]
    configs = chosen_kernels(arguments, backend.kernels, shape)
    for config in configs:
        causal = shape.causal or config.supports.causal
        require_supported([config], replace(shape, causal=causal))
    return [
        (config.dtype, lambda *tensors, config=config: backend.forward(config, *tensors))
        for config in configs
    ]


def run(arguments: argparse.Namespace) -> None:
    """Launch the kernels. Raises KernelsNotRun and ValueError."""
    import torch  # which --help does not wait for

    from flash_helpers.check.inputs import make_inputs

    shape = AttentionForward(
        arguments.batch,
        arguments.heads,
        arguments.seq,
        len_k=arguments.len_k,
        kv_heads=arguments.kv_heads,
        causal=arguments.causal,
    )
    backend = find_backend(arguments.device)
    for dtype, launch in launches(arguments, backend, shape):
        q, k, v = make_inputs("normal", shape, getattr(torch, dtype.torch_name), backend.device)
        output = torch.empty_like(q)
        for _ in range(arguments.repeat):
            launch(q, k, v, output)
        backend.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the kernels; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: run(arguments), KernelsNotRun, ValueError)


if __name__ == "__main__":
    sys.exit(main())
