"""`python -m flash_attention replay`: runs a call again that the log of calls saved."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flash_helpers.console.command_line import make_parser, run_tool

if TYPE_CHECKING:
    import torch

    from flash_helpers.runtime.saved_calls import SavedCall

PROGRAM = "python -m flash_attention replay"

DESCRIPTION = """\
Run a call again that FLASH_ATTENTION_LOGLEVEL=10 saved, on the current CUDA device, or in the
simulator if it ran there. Print statistics of its inputs and outputs, and compare the outputs with
the saved ones, if there are any. The same kernel on the same GPU must give the same values, unless
it adds to sums in memory in any order. Such a kernel, another kernel, another GPU or the simulator
rounds otherwise: the Frobenius norm of the difference may be two roundings of the kernel's dtype,
relative to the norm of the saved output.
"""

EXAMPLES = f"""\
examples:
  run the last call of a process that crashed, in the simulator, which names the kernel's fault:
    {PROGRAM} call_4711_12.pt --simulate
  run another kernel on the same tensors:
    {PROGRAM} call_4711_12.pt --kernel o5_bf16_d128_Br128_Bc64_w4

exit status: 0 outputs agree or none were saved, 1 they differ or the kernel has a fault, 2 wrong
usage, a file that is no saved call or a kernel that does not take it, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a call again; returns the exit status."""
    parser = make_parser(DESCRIPTION, EXAMPLES, PROGRAM)
    parser.add_argument("file", type=Path, metavar="FILE", help="file of the call, call_*.pt")
    parser.add_argument("--simulate", action="store_true", help="in the simulator, on the CPU")
    parser.add_argument("--kernel", metavar="CONFIG", help="short form of another config to run")
    arguments = parser.parse_args(argv)
    return run_tool(functools.partial(_replay, arguments), OSError, ValueError, TypeError)


def _replay(arguments: argparse.Namespace) -> int:
    """Run, print and compare; returns the exit status."""
    from flash_helpers.check.errors import relative_bound  # late, so that --help is fast
    from flash_helpers.ptx import PtxError
    from flash_helpers.runtime.call import prepare
    from flash_helpers.runtime.library import resolve
    from flash_helpers.runtime.saved_calls import device_text, load_call
    from flash_helpers.runtime.tensors import torch_dtype

    saved = load_call(arguments.file)
    config = resolve(arguments.kernel or saved.config)
    if reason := config.refusal(saved.problem):
        raise ValueError(reason)
    device = "cpu" if arguments.simulate else saved.device_here()
    call = prepare(config, *saved.tensors(device), **saved.problem.call_options())
    where = device_text(call.output.device)
    print(f"saved: {saved.config.short_form()} on {saved.device}")
    print(f"runs: {call.config.short_form()} on {where}")
    _print_statistics(saved.inputs)
    try:
        call.run()
    except PtxError as error:
        print(error)
        return 1
    found = {name: x.cpu() for name, x in call.outputs.items()}
    _print_statistics(found)
    if saved.outputs is None:
        print("no outputs were saved, so that there is nothing to compare with")
        return 0
    is_same = (call.config, where) == (saved.config, saved.device)
    is_exact = is_same and config.is_deterministic
    bound = 0.0 if is_exact else 2 * relative_bound(torch_dtype(config.dtype))
    compared = {name: found[name] for name in saved.outputs}  # those that the call asked for
    return 0 if all([_agrees(saved, name, x, bound) for name, x in compared.items()]) else 1


def _print_statistics(tensors: Mapping[str, torch.Tensor]) -> None:
    from flash_helpers.runtime.tensor_statistics import TensorStatistics

    for name, x in tensors.items():
        print(f"{name}: {TensorStatistics.of(x)}")


def _agrees(saved: SavedCall, name: str, output: torch.Tensor, bound: float) -> bool:
    """Print the difference of an output from the saved one; return whether it is within the bound
    on the relative difference."""
    from flash_helpers.check.difference import first_wrong
    from flash_helpers.check.errors import measure_error

    assert saved.outputs is not None
    expected = saved.outputs[name].double()
    error = measure_error(output, expected)
    if not (first := first_wrong(name, output, expected, 0.0, saved.problem.axes[name])):
        print(f"{name}: the same values as in the saved output")
        return True
    agrees = error.relative <= bound
    print(
        f"{name}: {'rounded otherwise than' if agrees else 'DIFFERS from'} the saved output, max "
        f"abs difference {error.max_abs:.3e}, relative {error.relative:.3e}, at most {bound:.3e}; "
        f"first {first}"
    )
    return agrees
