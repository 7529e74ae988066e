#!/usr/bin/env python3
"""Train a tiny GPT with attention() and with PyTorch's attention, and compare the losses."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.console.command_line import make_parser, positive
from flash_helpers.console.progress import bar
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.runtime.backend import DEVICE_CHOICES, find_backend

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/training_h200.json"
D_HEADS = (64, 128)

DESCRIPTION = """\
Train a GPT of two layers to add numbers, from one seed: with attention(), with PyTorch's flash
backend (on a CPU, its attention in bf16), and with attention computed in float32. All else is equal
and in bf16. The losses of each step are written, and a table shows how far they are from those of
float32. Differences in rounding grow from step to step. To show how much is due to chance, each
training is repeated from weights that differ by a millionth.
"""

EXAMPLES = f"""\
examples:
  train on a GPU, print and write {RESULTS}:
    python benchmarks/training.py --device cuda
  two steps through the simulator:
    python benchmarks/training.py --device cpu --runs 1 --steps 2 --batch 1 --seq 64 --json two.json

exit status: 0 trained, 2 wrong usage or no GPU, 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_results_arguments(parser, ROOT, RESULTS)
    parser.add_argument(
        "--device", choices=DEVICE_CHOICES, default="cuda", help="cpu simulates (default: cuda)"
    )
    parser.add_argument(
        "--runs", type=positive, default=6, metavar="N", help="of each training (default: 6)"
    )
    parser.add_argument("--steps", type=positive, default=200, metavar="N", help="(default: 200)")
    parser.add_argument("--batch", type=positive, default=16, metavar="N", help="(default: 16)")
    parser.add_argument("--seq", type=positive, default=256, metavar="N", help="(default: 256)")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, command: str) -> None:
    """Train, print and write. Raises KernelsNotRun without the device."""
    backend = find_backend(arguments.device)

    import torch  # late, so that --help is fast

    import flash_attention
    from flash_helpers.measure.training import Attention, losses
    from flash_helpers.measure.training_runs import (
        FLOAT32,
        LAB,
        PYTORCH,
        Training,
        TrainingRecord,
        TrainingRuns,
    )

    sdpa = torch.nn.functional.scaled_dot_product_attention
    backends = torch.nn.attention.SDPBackend
    kind = backends.MATH if backend.is_simulator else backends.FLASH_ATTENTION

    def usual(*qkv: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(kind):
            return sdpa(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)

    def in_float32(*qkv: torch.Tensor) -> torch.Tensor:
        with torch.autocast(backend.device.type, enabled=False):
            q, k, v = (x.float().transpose(1, 2) for x in qkv)
            with torch.nn.attention.sdpa_kernel(backends.MATH):
                return sdpa(q, k, v, is_causal=True).transpose(1, 2).to(qkv[0].dtype)

    attentions: dict[str, Attention] = {
        LAB: lambda q, k, v: flash_attention.attention(q, k, v, causal=True),
        PYTORCH: usual,
        FLOAT32: in_float32,
    }
    sizes = (arguments.steps, arguments.batch, arguments.seq)
    asked = [
        (Training(d_head, *sizes, moved=moved), name)
        for d_head in D_HEADS
        for name in attentions
        for moved in range(arguments.runs)
    ]
    records = []
    with bar(asked, desc="training", unit="model") as trainings:
        for training, name in trainings:
            found = losses(training, attentions[name], backend.device, torch.bfloat16)
            records.append(TrainingRecord(training, name, found))
    runs = TrainingRuns(provenance_here(backend, command, arguments, ROOT), "bf16", tuple(records))
    print(runs.table().text())
    runs.save(arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_measurement(run, arguments, "benchmarks/training.py", argv, OSError)


if __name__ == "__main__":
    sys.exit(main())
