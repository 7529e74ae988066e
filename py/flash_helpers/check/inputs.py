"""Draws the inputs that kernels are checked on, by the name of their distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from flash_helpers.check.problems import (
    DISTRIBUTIONS,
    LARGE_LOGIT_STD,
    MEAN,
    OUTLIER_K_FACTOR,
    OUTLIER_PERIOD,
    OUTLIER_V_FACTOR,
)
from flash_helpers.kernel_configs import AttentionForward, Config

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _normal(
    shape: AttentionForward, generator: torch.Generator, mean: float = MEAN
) -> torch.Tensor:
    noise = torch.randn(shape.shape, generator=generator, device=generator.device)
    return noise.add_(mean)


def _draw_normal(shape: AttentionForward, generator: torch.Generator) -> QKV:
    return _normal(shape, generator), _normal(shape, generator), _normal(shape, generator)


def _draw_large_logits(shape: AttentionForward, generator: torch.Generator) -> QKV:
    # q . k / sqrt(d_head) of unit normals has standard deviation 1
    factor = LARGE_LOGIT_STD**0.5
    q = _normal(shape, generator, mean=0.0).mul_(factor)
    k = _normal(shape, generator, mean=0.0).mul_(factor)
    return q, k, _normal(shape, generator)


def _draw_constant_rows(shape: AttentionForward, generator: torch.Generator) -> QKV:
    one_value_a_row = replace(shape, d_head=1)
    one_value_a_head = replace(shape, seq_len=1, d_head=1)
    q = _normal(one_value_a_row, generator).expand(shape.shape).contiguous()
    k = _normal(one_value_a_head, generator).expand(shape.shape).contiguous()
    return q, k, _normal(shape, generator)


def _draw_outliers(shape: AttentionForward, generator: torch.Generator) -> QKV:
    q, k, v = _draw_normal(shape, generator)
    scores = torch.rand(shape.seq_len, generator=generator, device=generator.device)
    chosen = scores.topk(-(-shape.seq_len // OUTLIER_PERIOD)).indices
    k[:, chosen] *= OUTLIER_K_FACTOR
    v[:, chosen] *= OUTLIER_V_FACTOR
    return q, k, v


def _draw_countable(shape: AttentionForward, generator: torch.Generator) -> QKV:
    batch, seq, head, column = torch.meshgrid(
        *(torch.arange(n, device=generator.device) for n in shape.shape), indexing="ij"
    )
    q = (seq + column) % 3 - 1
    k = (seq + 2 * column + head) % 3 - 1
    v = (batch + seq + head + column) % 16
    return q.float(), k.float(), v.float()


# (shape, generator): float32 Q, K and V on the generator's device
_DRAW: Mapping[str, Callable[[AttentionForward, torch.Generator], QKV]] = MappingProxyType(
    {
        "normal": _draw_normal,
        "large_logits": _draw_large_logits,
        "constant_rows": _draw_constant_rows,
        "outliers": _draw_outliers,
        "countable": _draw_countable,
    }
)


def make_inputs(
    distribution: str,
    shape: AttentionForward,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> QKV:
    """Draw Q, K and V of one named distribution.

    Each is (batch, seq_len, heads, d_head), contiguous, of `dtype`, on `device`. The same arguments
    give the same values on one device and one torch release. Raises ValueError for a distribution
    that is not a key of DISTRIBUTIONS.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(
            f"inputs {distribution!r} are not known: choose one of {', '.join(DISTRIBUTIONS)}"
        )
    generator = torch.Generator(device=device).manual_seed(seed)
    q, k, v = _DRAW[distribution](shape, generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def tensors_for(
    config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_stride: int = 0
) -> dict[str, torch.Tensor]:
    """q, k, v and an output o of NaN by name, with a row stride for which the config itself is
    launched and none that takes over: where that is wider than the tensors' own, they are some
    heads of wider ones.

    q, k, v: (batch, seq_len, heads, d_head). row_stride: elements; 0 asks the config.
    """
    batch, seq_len, heads, d_head = q.shape
    row_stride = row_stride or config.own_row_stride(
        AttentionForward(batch, heads, seq_len, d_head)
    )
    found = {}
    for name, values in (("q", q), ("k", k), ("v", v), ("o", torch.full_like(q, torch.nan))):
        rows = values.new_zeros(batch, seq_len, max(row_stride, heads * d_head))
        found[name] = rows[..., : heads * d_head].unflatten(-1, (heads, d_head)).copy_(values)
    return found
