#!/usr/bin/env python3
"""Launch kernels a few times and do nothing else, as a target for profilers."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flash_helpers.console.command_line import (
    make_parser,
    positive,
    run_tool,
)
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import FAMILIES, OPERATIONS, Config, Problem
from flash_helpers.registry.operation import Operation
from flash_helpers.registry.selection import (
    UsageError,
    add_kernel_arguments,
    add_problem_options,
    asked_problem,
    chosen_kernels,
    parse_dtypes,
    require_options_of,
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
  PyTorch's flash backend, for comparison:
    nsys profile python tools/benchmark/run_kernels.py --library pytorch_flash --heads 16 --seq 4096

exit status: 0 all kernels were launched, 2 wrong usage or nothing was run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(
        "Launch each chosen kernel --repeat times on one input, and wait for the end.", EXAMPLES
    )
    add_kernel_arguments(parser)
    libraries = {name: o for o in OPERATIONS.values() for name in o.libraries}
    parser.add_argument(
        "--library", choices=libraries, help="launch a library instead of the kernels"
    )
    parser.add_argument(
        "--operation", choices=OPERATIONS, help="of the library (default: the first that it has)"
    )
    add_problem_options(parser)
    parser.add_argument(
        "--repeat", type=positive, default=1, help="launches per kernel (default 1)"
    )
    parser.add_argument("--device", choices=DEVICE_CHOICES, default="cuda", help="(default: cuda)")
    parser.add_argument(
        "--list",
        action="store_true",
        help="launch nothing: print each kernel's name and the thread blocks of its clusters",
    )
    arguments = parser.parse_args(argv)
    if arguments.library and arguments.kernel:
        parser.error("--library and --kernel exclude each other: leave one out")
    if arguments.library and arguments.list:
        parser.error("--list is of kernels: leave --library out")
    return arguments


def chosen(arguments: argparse.Namespace, backend: Backend) -> list[tuple[Config, Problem]]:
    """Return the kernels asked for, each with its problem. Raises UsageError."""
    problems = {n: asked_problem(arguments, o.small) for n, o in OPERATIONS.items()}
    configs = chosen_kernels(arguments, backend.kernels, problems)
    require_options_of(arguments, {config.family.operation.name for config in configs})
    found = []
    for config in configs:
        problem = problems[config.family.operation.name].in_dtype(config.dtype)
        problem = config.supports.adapted(problem)
        require_supported([config], problem)
        found.append((config, problem))
    return found


def _operation_of(arguments: argparse.Namespace) -> Operation:
    """Return the operation of the library asked for. Raises UsageError if it does not have it."""
    having = {name: o for name, o in OPERATIONS.items() if arguments.library in o.libraries}
    name = arguments.operation or next(iter(having))
    if name not in having:
        raise UsageError(
            f"--library {arguments.library} is none of {name}: it computes {', '.join(having)}"
        )
    return having[name]


def launches(
    arguments: argparse.Namespace, backend: Backend
) -> list[tuple[Problem, Callable[[dict[str, Any]], object]]]:
    """Return the problem, and a function of its tensors, for each requested kernel or dtype.

    Raises UsageError if nothing can be launched.
    """
    if not arguments.library:
        return [
            (problem, partial(_execute, backend, config, problem))
            for config, problem in chosen(arguments, backend)
        ]
    operation = _operation_of(arguments)
    require_options_of(arguments, [operation.name])
    problem = asked_problem(arguments, operation.small)
    baselines = operation.part("baselines")

    def run(tensors: dict[str, Any]) -> object:
        return baselines.run(arguments.library, problem, tensors)

    known = {dtype for f in FAMILIES.values() if f.operation is operation for dtype in f.dtypes}
    dtypes = parse_dtypes(arguments.dtype)
    return [(problem.in_dtype(dtype), run) for dtype in dtypes if dtype in known]


def _execute(backend: Backend, config: Config, problem: Problem, tensors: dict[str, Any]) -> object:
    return backend.execute(config, problem.arranged(tensors), problem.call_options())


def cluster_blocks(config: Config, problem: Problem) -> int:
    """Thread blocks of the largest cluster that a config launches for a problem."""
    device = largest_device(config.family.capabilities[-1])
    call = config.call(problem, problem.strides(), device)
    return max(math.prod(launch.cluster) for launch in call.launches)


def run(arguments: argparse.Namespace) -> None:
    """Launch the kernels. Raises KernelsNotRun and ValueError."""
    import torch  # late, so that --help is fast

    from flash_helpers.runtime.tensors import torch_dtype

    backend = find_backend(arguments.device)
    if arguments.list:
        for config, problem in chosen(arguments, backend):
            print(config.short_form(), cluster_blocks(config, problem))
        return
    for problem, launch in launches(arguments, backend):
        draw = OPERATIONS[problem.operation].part("inputs").draw
        outputs = {
            x.name: torch.empty(x.shape, dtype=torch_dtype(x.element), device=backend.device)
            for x in problem.outputs
        }
        tensors = {**draw("normal", problem, backend.device), **outputs}
        for _ in range(arguments.repeat):
            launch(tensors)
        backend.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the kernels; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_tool(lambda: run(arguments), KernelsNotRun, ValueError)


if __name__ == "__main__":
    sys.exit(main())
