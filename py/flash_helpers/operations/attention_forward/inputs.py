"""Draws Q, K and V by the name of their distribution, and sinks that fit them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.problems import (
    DISTRIBUTIONS,
    LARGE_LOGIT_STD,
    MEAN,
    OUTLIER_K_FACTOR,
    OUTLIER_PERIOD,
    OUTLIER_V_FACTOR,
)

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _normal(shape: tuple[int, ...], generator: torch.Generator, mean: float = MEAN) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator, device=generator.device)
    return noise.add_(mean)


def _draw_normal(problem: AttentionForward, generator: torch.Generator) -> QKV:
    q, k, v = (
        _normal(shape, generator) for shape in (problem.shape, problem.kv_shape, problem.v_shape)
    )
    return q, k, v


def _draw_large_logits(problem: AttentionForward, generator: torch.Generator) -> QKV:
    # q . k / sqrt(d_head) of unit normals has standard deviation 1
    factor = LARGE_LOGIT_STD**0.5
    q = _normal(problem.shape, generator, mean=0.0).mul_(factor)
    k = _normal(problem.kv_shape, generator, mean=0.0).mul_(factor)
    return q, k, _normal(problem.v_shape, generator)


def _draw_constant_rows(problem: AttentionForward, generator: torch.Generator) -> QKV:
    batch, _, kv_heads, _ = problem.kv_shape
    one_value_a_row, one_value_a_head = (*problem.shape[:3], 1), (batch, 1, kv_heads, 1)
    q = _normal(one_value_a_row, generator).expand(problem.shape).contiguous()
    k = _normal(one_value_a_head, generator).expand(problem.kv_shape).contiguous()
    return q, k, _normal(problem.v_shape, generator)


def _draw_outliers(problem: AttentionForward, generator: torch.Generator) -> QKV:
    q, k, v = _draw_normal(problem, generator)
    scores = torch.rand(problem.len_k, generator=generator, device=generator.device)
    chosen = scores.topk(-(-problem.len_k // OUTLIER_PERIOD)).indices
    k[:, chosen] *= OUTLIER_K_FACTOR
    v[:, chosen] *= OUTLIER_V_FACTOR
    return q, k, v


def _draw_countable(problem: AttentionForward, generator: torch.Generator) -> QKV:
    def positions(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        every = (torch.arange(n, device=generator.device) for n in shape)
        return torch.meshgrid(*every, indexing="ij")

    _, seq, _, column = positions(problem.shape)
    q = (seq + column) % 3 - 1
    _, seq, head, column = positions(problem.kv_shape)
    k = (seq + 2 * column + head) % 3 - 1
    batch, seq, head, column = positions(problem.v_shape)
    v = (batch + seq + head + column) % 16
    return q.float(), k.float(), v.float()


# (problem, generator): float32 Q, K and V on the generator's device
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
    problem: AttentionForward,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> QKV:
    """Draw Q, K and V of one named distribution.

    Each has its shape in the problem, contiguous, of `dtype`, on `device`. The same arguments give
    the same values on one device and one torch release. Raises ValueError for a distribution that
    is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    generator = torch.Generator(device=device).manual_seed(seed)
    q, k, v = _DRAW[distribution](problem, generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _draw_sinks(problem: AttentionForward, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return, for each head, the largest logit of the first batch's last query: a sink that takes a
    part of the sum, neither nothing nor all. The last of several heads has none, which is -inf."""
    keys = k[0].repeat_interleave(problem.heads // problem.kv_heads, dim=1)
    logits = torch.einsum("hd,khd->hk", q[0, -1].double(), keys.double()) * problem.softmax_scale
    if problem.softcap:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    sinks = logits.amax(-1)
    if problem.heads > 1:
        sinks[-1] = -torch.inf
    return sinks.to(q.dtype)


def _draw_begins(
    problem: AttentionForward, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Return where the sequences begin, and the totals. Of three or more, the first has no queries
    and the second has one; the last has no keys, and the one before it has one."""
    generator = torch.Generator().manual_seed(seed)

    def begins(total: int, *known: int) -> list[int]:
        some = problem.sequences - 1 - len(known)
        drawn = torch.randint(1, max(total, 2), (some,), generator=generator).tolist()
        return [0, *sorted([*known, *drawn]), total]

    last = problem.len_k
    has_few = problem.sequences > 2
    found = {
        "cu_seqlens_q": begins(problem.len_q, *((0, 1) if has_few else ())),
        "cu_seqlens_k": begins(last, *((last - 1, last) if has_few else ())),
    }
    return {
        name: torch.tensor(values, dtype=torch.int32, device=device)
        for name, values in found.items()
    }


def draw(
    distribution: str,
    problem: AttentionForward,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the inputs of a problem by name, in its dtype. Raises as `make_inputs` does."""
    dtype = getattr(torch, problem.dtype.torch_name)
    q, k, v = make_inputs(distribution, problem, dtype, device, seed)
    found = {"q": q, "k": k, "v": v}
    found |= {"sinks": _draw_sinks(problem, q, k)} if problem.sinks else {}
    return found | (_draw_begins(problem, q.device, seed) if problem.sequences else {})
