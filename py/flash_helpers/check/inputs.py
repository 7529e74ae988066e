"""Named input distributions: each one brings out errors that another would hide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

# Away from zero, so that an averaged V is a signal and not the noise that averaging leaves.
MEAN = 0.5
# Standard deviation of the scaled logits of `large_logits`: the largest of a few million is about
# five times that, and float32 still resolves it to 1e-4.
LARGE_LOGIT_STD = 60.0
OUTLIER_PERIOD = 61
OUTLIER_K_FACTOR = 6.0
OUTLIER_V_FACTOR = 8.0

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, order=True)
class AttentionShape:
    """Shape of Q, K, V and O: (batch, seq_len, n_heads, d_head)."""

    batch: int
    n_heads: int
    seq_len: int
    d_head: int = 128

    def __post_init__(self) -> None:
        for name in ("batch", "n_heads", "seq_len", "d_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive: use 1 or more")

    @property
    def size(self) -> tuple[int, int, int, int]:
        """The tensor's dimensions, in order."""
        return (self.batch, self.seq_len, self.n_heads, self.d_head)

    @property
    def row_stride(self) -> int:
        """Elements from one position of the sequence to the next in a contiguous tensor."""
        return self.n_heads * self.d_head

    def __str__(self) -> str:
        return f"batch {self.batch}, heads {self.n_heads}, seq {self.seq_len}, d_head {self.d_head}"


@dataclass(frozen=True)
class Distribution:
    """How Q, K and V are drawn.

    draw: (shape, generator) to float32 Q, K and V on the generator's device.
    """

    name: str
    description: str
    draw: Callable[[AttentionShape, torch.Generator], QKV]


def _normal(shape: AttentionShape, generator: torch.Generator, mean: float = MEAN) -> torch.Tensor:
    noise = torch.randn(shape.size, generator=generator, device=generator.device)
    return noise.add_(mean)


def _draw_normal(shape: AttentionShape, generator: torch.Generator) -> QKV:
    return _normal(shape, generator), _normal(shape, generator), _normal(shape, generator)


def _draw_large_logits(shape: AttentionShape, generator: torch.Generator) -> QKV:
    # q . k / sqrt(d_head) of unit normals has standard deviation 1
    factor = LARGE_LOGIT_STD**0.5
    q = _normal(shape, generator, mean=0.0).mul_(factor)
    k = _normal(shape, generator, mean=0.0).mul_(factor)
    return q, k, _normal(shape, generator)


def _draw_constant_rows(shape: AttentionShape, generator: torch.Generator) -> QKV:
    one_value_a_row = AttentionShape(shape.batch, shape.n_heads, shape.seq_len, d_head=1)
    one_value_a_head = AttentionShape(shape.batch, shape.n_heads, seq_len=1, d_head=1)
    q = _normal(one_value_a_row, generator).expand(shape.size).contiguous()
    k = _normal(one_value_a_head, generator).expand(shape.size).contiguous()
    return q, k, _normal(shape, generator)


def _draw_outliers(shape: AttentionShape, generator: torch.Generator) -> QKV:
    q, k, v = _draw_normal(shape, generator)
    scores = torch.rand(shape.seq_len, generator=generator, device=generator.device)
    chosen = scores.topk(-(-shape.seq_len // OUTLIER_PERIOD)).indices
    k[:, chosen] *= OUTLIER_K_FACTOR
    v[:, chosen] *= OUTLIER_V_FACTOR
    return q, k, v


def _draw_countable(shape: AttentionShape, generator: torch.Generator) -> QKV:
    batch, seq, head, column = torch.meshgrid(
        *(torch.arange(n, device=generator.device) for n in shape.size), indexing="ij"
    )
    q = (seq + column) % 3 - 1
    k = (seq + 2 * column + head) % 3 - 1
    v = (batch + seq + head + column) % 16
    return q.float(), k.float(), v.float()


DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        distribution.name: distribution
        for distribution in (
            Distribution("normal", f"normal with mean {MEAN} and deviation 1", _draw_normal),
            Distribution(
                "large_logits",
                f"scaled logits with deviation {LARGE_LOGIT_STD:g}: softmax picks single keys",
                _draw_large_logits,
            ),
            Distribution(
                "constant_rows",
                "each row of Q is one value and all keys are equal: softmax is uniform",
                _draw_constant_rows,
            ),
            Distribution(
                "outliers",
                f"one key in {OUTLIER_PERIOD}, at random, is {OUTLIER_K_FACTOR:g} times as long: "
                "the running maximum jumps",
                _draw_outliers,
            ),
            Distribution(
                "countable",
                "small integers known from their position, for debugging",
                _draw_countable,
            ),
        )
    }
)


def make_inputs(
    distribution: str,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> QKV:
    """Draw Q, K and V of one named distribution.

    The same arguments give the same values on one device and one torch release.

    Returns:
        Q, K and V, each (batch, seq_len, n_heads, d_head), contiguous, of `dtype`, on `device`.

    Raises:
        ValueError: `distribution` is not a key of DISTRIBUTIONS.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(
            f"inputs {distribution!r} are not known: choose one of {', '.join(DISTRIBUTIONS)}"
        )
    generator = torch.Generator(device=device).manual_seed(seed)
    q, k, v = DISTRIBUTIONS[distribution].draw(shape, generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)
