"""A tiny GPT that learns to add, trained with one attention or another, and its losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from flash_helpers.measure.training_runs import MOVED, Training

# Takes q, k and v of shape (batch, seq, heads, d_head), and returns the output of causal attention.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SIGNS = "0123456789+=\n"
LAYERS = 2


class Block(nn.Module):
    """A layer: attention, then two linear layers, each added to what it reads."""

    def __init__(self, width: int, d_head: int, attention: Attention) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.d_head = d_head
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, of the shape of x: (batch, seq, width)."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, self.d_head)).unbind(2)
        x = x + self.output(self.attention(q, k, v).flatten(-2))
        return x + self.feed_forward(self.norms[1](x))


class Gpt(nn.Module):
    """A GPT of LAYERS layers over SIGNS."""

    def __init__(self, training: Training, attention: Attention) -> None:
        super().__init__()
        width = training.width
        self.signs = nn.Embedding(len(SIGNS), width)
        self.places = nn.Embedding(training.seq, width)
        self.layers = nn.Sequential(
            *(Block(width, training.d_head, attention) for _ in range(LAYERS)), nn.LayerNorm(width)
        )
        self.logits = nn.Linear(width, len(SIGNS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, seq, signs) of the sign after each of text (batch, seq)."""
        places = torch.arange(text.shape[1], device=text.device)
        return self.logits(self.layers(self.signs(text) + self.places(places)))


def sums(training: Training) -> Iterator[torch.Tensor]:
    """Yield batches of text as indices into SIGNS, (batch, seq + 1): sums such as "17+5=22", a line
    each."""
    generator = torch.Generator().manual_seed(training.seed)
    while True:
        rows = []
        for _ in range(training.batch):
            pairs = torch.randint(100, (training.seq // 5 + 1, 2), generator=generator).tolist()
            text = "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)
            rows.append([SIGNS.index(sign) for sign in text[: training.seq + 1]])
        yield torch.tensor(rows)


def losses(
    training: Training, attention: Attention, device: torch.device, dtype: torch.dtype
) -> tuple[float, ...]:
    """Train a GPT and return the loss of each step, in nats per sign.

    `dtype`: of the linear layers and of attention's inputs; weights are
    float32.
    """
    torch.manual_seed(training.seed)
    model = Gpt(training, attention)
    if training.moved:
        _move(model, training.moved)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), training.learning_rate)
    found = []
    for text, _ in zip(sums(training), range(training.steps), strict=False):
        text = text.to(device)
        with torch.autocast(device.type, dtype):
            logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return tuple(torch.stack(found).tolist())


@torch.no_grad()
def _move(model: nn.Module, seed: int) -> None:
    """Change each weight by MOVED of it, up or down."""
    generator = torch.Generator().manual_seed(seed)
    for weights in model.parameters():
        is_up = torch.rand(weights.shape, generator=generator) < 0.5
        weights.mul_(1 + MOVED * torch.where(is_up, 1.0, -1.0))
