#!/usr/bin/env python3
"""A training step of one layer of attention on a sequence that several processes share, beside the
same step in one process."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing

from flash_attention import attention
from flash_attention.distributed import positions, ring_attention, shard, unshard

HEADS, D_HEAD, VOCABULARY = 2, 64, 50
WIDTH = HEADS * D_HEAD
CLOSE = 0.02  # of a gradient's largest element: attention rounds to fp16 twice in a ring

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer:
    """An embedding with positions, causal attention, and logits of the next token; fp32 but for
    attention, which is fp16."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def weights(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=generator) / rows**0.5
            return drawn.to(device).requires_grad_()

        self.embedding = weights(VOCABULARY, WIDTH)
        self.heads_in = weights(WIDTH, 3 * WIDTH)
        self.to_logits = weights(WIDTH, VOCABULARY)

    @property
    def weights(self) -> list[torch.Tensor]:
        """All weights, which every process has."""
        return [self.embedding, self.heads_in, self.to_logits]

    def loss(
        self, tokens: torch.Tensor, places: torch.Tensor, labels: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the sum of the losses of these tokens, each (1, tokens)."""
        waves = torch.arange(WIDTH, device=tokens.device) / WIDTH
        x = self.embedding[tokens] + torch.sin(places[:, None] * 100.0**-waves)
        q, k, v = (x @ self.heads_in).half().unflatten(-1, (3, HEADS, D_HEAD)).unbind(2)
        o = attend(q, k, v).flatten(2).float()
        logits = o @ self.to_logits
        return torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")


def step(rank: int, ranks: int, seq: int, device_type: str, store: str) -> None:
    """Compute the loss and the gradients in one of the processes. Raises ArithmeticError for
    results that are not those of one process."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(1)  # every process has the same text
    text = torch.randint(VOCABULARY, (1, seq + 1), generator=generator).to(device)
    tokens, labels = text[:, :-1], text[:, 1:]  # shifted before they are cut

    layer = Layer(device)
    ring = partial(ring_attention, causal=True)
    loss = layer.loss(shard(tokens), positions(seq, device=device), shard(labels), ring)
    loss.backward()
    found = [loss.detach(), *(x.grad for x in layer.weights)]
    for x in found:
        dist.all_reduce(x)  # the loss is a sum over all tokens
    if not torch.equal(unshard(shard(tokens)), tokens):
        raise ArithmeticError("joined shards are not the text")

    if rank == 0:
        alone = Layer(device)
        causal = partial(attention, causal=True)
        right = alone.loss(tokens, torch.arange(seq, device=device), labels, causal)
        right.backward()
        expected = [right.detach(), *(x.grad for x in alone.weights)]
        errors = [
            ((own - x).abs().max() / x.abs().max()).item()
            for own, x in zip(found, expected, strict=True)
        ]
        print(
            f"{seq} tokens in {ranks} processes: loss {found[0].item() / seq:.4f}, in one process "
            f"{right.item() / seq:.4f}; gradients are {'close' if max(errors) < CLOSE else 'off'}"
        )
        if max(errors) >= CLOSE:
            raise ArithmeticError(f"results are off by {max(errors):.3f} of their largest element")
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Start the processes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--seq", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: the simulator and gloo"
    )
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        given = arguments.ranks, arguments.seq, arguments.device, f"file://{folder}/store"
        torch.multiprocessing.spawn(step, args=given, nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
