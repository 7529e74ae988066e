#!/usr/bin/env python3
"""A training of flash_attention.multimodal: a model learns to move a sequence by one token, to add
the scaled sum of its context's tokens, and to multiply by a condition.

Each part of the task needs a part of the model: the neighbour needs rotary embedding, the sum needs
joint attention, and the factor needs the adaptive norms. Data are drawn anew in each step.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor, nn

from flash_attention.multimodal import Backend, MultimodalTransformer

VALUES = 4  # of a token, in the sequence and in the context
LENGTH, TOKENS = 8, 2  # of the sequence and of the context
SHOWN = 10  # rows of the table
LEARNT = 0.5  # of the first loss: what the last ones must stay below


@dataclass(frozen=True)
class Task:
    """Sizes of a model, and of its training."""

    width: int = 32
    heads: int = 2
    layers: int = 2
    steps: int = 200
    batch: int = 32
    learning_rate: float = 3e-3
    seed: int = 0


class Model(nn.Module):
    """A multimodal transformer between two linear layers."""

    def __init__(self, task: Task, backend: Backend) -> None:
        super().__init__()
        self.tokens_in = nn.Linear(VALUES, task.width)
        self.layers = MultimodalTransformer(
            *(task.width, task.heads, 2 * task.width, task.layers, LENGTH),
            context_width=VALUES,
            condition_width=1,
            backend=backend,
        )
        self.tokens_out = nn.Linear(task.width, VALUES)

    def forward(self, x: Tensor, condition: Tensor, context: Tensor) -> Tensor:
        """Return (batch, length, values)."""
        return self.tokens_out(self.layers(self.tokens_in(x), condition, context))


def drawn(task: Task, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a batch: the sequence, the condition, the context, and what is to be found."""
    x = torch.randn(task.batch, LENGTH, VALUES, generator=generator)
    context = torch.randn(task.batch, TOKENS, VALUES, generator=generator)
    condition = torch.rand(task.batch, 1, generator=generator) + 0.5
    moved = x.roll(1, 1)
    moved[:, 0] = 0
    added = context.sum(1, keepdim=True) / TOKENS**0.5
    return x, condition, context, (moved + added) * condition[..., None]


def losses(
    task: Task,
    backend: Backend = "auto",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Train a model; return the mean square error of each step.

    dtype: of linear layers and attention, by autocast; weights are float32.
    """
    torch.manual_seed(task.seed)
    model = Model(task, backend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), task.learning_rate)
    generator = torch.Generator().manual_seed(task.seed)
    found = []
    for _ in range(task.steps):
        *given, right = (each.to(device) for each in drawn(task, generator))
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            output = model(*given)
        loss = nn.functional.mse_loss(output.float(), right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def main(argv: list[str] | None = None) -> int:
    """Train, and print the losses; return 0 if they fell, 1 if not."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  python examples/multimodal_training.py\n"
        "  python examples/multimodal_training.py --device cuda --dtype bfloat16 --width 256 "
        "--heads 4 --backend kernels",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = Task()
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--backend", choices=("auto", "torch", "kernels"), default="auto")
    for name in ("width", "heads", "layers", "steps", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name))
    parser.add_argument("--seed", type=int, default=usual.seed)
    options = parser.parse_args(argv)
    sizes = {n: getattr(options, n) for n in ("width", "heads", "layers", "steps", "batch")}
    for name, size in sizes.items():
        if size < 1:
            parser.error(f"{name} {size} is less than 1: pass 1 or more")
    if options.device != "cpu" and not getattr(torch, options.device).is_available():
        parser.error(f"PyTorch finds no {options.device} device: pass --device cpu")
    task = Task(**sizes, seed=options.seed)
    begin = time.perf_counter()
    try:
        found = losses(task, options.backend, options.device, getattr(torch, options.dtype))
    except ValueError as error:  # sizes that do not fit together, or that no kernel takes
        parser.error(str(error))
    seconds = time.perf_counter() - begin
    each = -(-len(found) // SHOWN)
    rows = [
        (n, sum(part) / len(part))
        for n in range(0, len(found), each)
        if (part := found[n : n + each])
    ]
    print(tabulate(rows, ["from step", "mean square error"], floatfmt=".4f"))
    is_learnt = rows[-1][1] < LEARNT * found[0]
    print(f"{len(found)} steps in {seconds:.1f} s; {'learnt' if is_learnt else 'not learnt'}")
    return 0 if is_learnt else 1


if __name__ == "__main__":
    sys.exit(main())
