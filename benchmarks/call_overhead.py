#!/usr/bin/env python3
"""Measure the host time per call, beside PyTorch's own attention."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import functools
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flash_helpers.console.command_line import make_parser, positive
from flash_helpers.kernel_configs import AttentionForward, Element
from flash_helpers.measure.call_overhead import (
    ADD_COMPILED,
    CALL_NAMES,
    CUDNN_TRANSPOSED,
    FLASH_COMPILED,
    FLASH_TRANSPOSED,
    LOGGED,
    CallOverhead,
    Contender,
    measure_calls,
)
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.measure.results import CUDNN, FLASH
from flash_helpers.runtime.backend import find_backend

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/call_overhead_h100.json"
PROBLEM = AttentionForward(1, 16, 128, dtype=Element.BF16)
CALLS = 200  # fewer than the driver queues before it makes the host wait

DESCRIPTION = f"""\
Time {CALLS} calls in a row without waiting for the GPU, at a shape so small that the GPU finishes
before the host. The calls are forward() with the kernel that attention() chooses, with and without
an output tensor, and attention(), without a log of calls and with one at each level that writes
without saving tensors. Both are also compiled by torch.compile, beside q + k, the smallest function
to compile. PyTorch's scaled_dot_product_attention runs with its flash and cuDNN backends. All calls
take and return (batch, seq, heads, d_head) tensors, which PyTorch's functions must transpose; they
are also called on tensors that were transposed before. Contenders are interleaved. Times are lower
quartiles over the rounds, and ratios are medians over the rounds of the ratio within each.
"""

EXAMPLES = f"""\
examples:
  measure, print and write {RESULTS}; needs a GPU:
    python benchmarks/call_overhead.py
  in a copy without git, and keeping the data elsewhere:
    python benchmarks/call_overhead.py --commit 68cfc22 --json calls.json
  put the table into the page of the library:
    python tools/docs/build_docs.py docs/using.md

exit status: 0 measured, 2 wrong usage or no GPU, 130 interrupted
"""


def contenders(device: torch.device) -> dict[str, Contender]:
    """The timed calls, by the names of CALL_NAMES."""
    import torch  # late, so that --help is fast
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import flash_attention
    from flash_helpers.runtime.call import calls_logged
    from flash_helpers.runtime.call_log import CallLog, Destination
    from flash_helpers.tune.best import choose_config

    sdpa = torch.nn.functional.scaled_dot_product_attention

    def transposing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """PyTorch's attention, called by a user whose tensors are (batch, seq, heads, d_head)."""
        return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    q, k, v = torch.randn(3, *PROBLEM.shape, device=device).bfloat16().unbind()
    o = torch.empty_like(q)
    config = choose_config(PROBLEM, device)
    compiled_forward = torch.compile(
        lambda q, k, v: flash_attention.forward(config, q, k, v), fullgraph=True
    )
    compiled_add = torch.compile(lambda q, k: q + k, fullgraph=True)
    compiled_attention = torch.compile(flash_attention.attention, fullgraph=True)
    calls = {
        "forward": lambda: flash_attention.forward(config, q, k, v),
        "forward_out": lambda: flash_attention.forward(config, q, k, v, o),
        "attention": lambda: flash_attention.attention(q, k, v),
        "forward_compiled": lambda: compiled_forward(q, k, v),
        "attention_compiled": lambda: compiled_attention(q, k, v),
        ADD_COMPILED: lambda: compiled_add(q, k),
    }
    unlogged = functools.partial(calls_logged, None)  # whatever the environment asks for
    found = {name: Contender(call, unlogged) for name, call in calls.items()}
    for level, name in LOGGED.items():
        log = CallLog(level, Destination(os.devnull))
        found[name] = Contender(calls["attention"], functools.partial(calls_logged, log))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    compiled_transposing = torch.compile(transposing, fullgraph=True)
    calls = {
        (FLASH, SDPBackend.FLASH_ATTENTION): lambda: transposing(q, k, v),
        (FLASH_TRANSPOSED, SDPBackend.FLASH_ATTENTION): lambda: sdpa(*heads_first),
        (FLASH_COMPILED, SDPBackend.FLASH_ATTENTION): lambda: compiled_transposing(q, k, v),
        (CUDNN, SDPBackend.CUDNN_ATTENTION): lambda: transposing(q, k, v),
        (CUDNN_TRANSPOSED, SDPBackend.CUDNN_ATTENTION): lambda: sdpa(*heads_first),
    }
    for (name, backend), call in calls.items():
        found[name] = Contender(call, functools.partial(sdpa_kernel, backend))
    return {name: found[name] for name in CALL_NAMES}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_results_arguments(parser, ROOT, RESULTS)
    parser.add_argument("--rounds", type=positive, default=100, metavar="N", help="(default: 100)")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, command: str) -> None:
    """Measure, print and write. Raises KernelsNotRun without a GPU."""
    backend = find_backend("cuda")
    found = contenders(backend.device)
    gc.disable()  # garbage collection would slow some contender's sample
    try:
        calls = measure_calls(
            found, rounds=arguments.rounds, calls=CALLS, synchronize=backend.synchronize
        )
    finally:
        gc.enable()
    measured = CallOverhead(
        provenance_here(backend, command, arguments, ROOT),
        PROBLEM.shape,
        PROBLEM.dtype.short,
        CALLS,
        calls,
    )
    print(measured.table().text())
    measured.save(arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_measurement(run, arguments, "benchmarks/call_overhead.py", argv, OSError)


if __name__ == "__main__":
    sys.exit(main())
