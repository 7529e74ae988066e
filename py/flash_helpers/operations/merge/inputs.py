"""Draws o_parts and lse_parts by the name of their distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.merge.problem import Merge
from flash_helpers.operations.merge.problems import (
    DISTRIBUTIONS,
    FAR_MEAN,
    LARGE_STD,
    MASKED_SHARE,
    MEAN,
)

Pair = tuple[torch.Tensor, torch.Tensor]


def _draw_normal(problem: Merge, generator: torch.Generator) -> Pair:
    o, lse = (
        torch.randn(problem.tensor(name).shape, generator=generator, device=generator.device)
        for name in ("o_parts", "lse_parts")
    )
    return o.add_(MEAN), lse.add_(MEAN)


def _draw_far_mean(problem: Merge, generator: torch.Generator) -> Pair:
    o, lse = _draw_normal(problem, generator)
    return o.add_(FAR_MEAN - MEAN), lse


def _draw_large_lse(problem: Merge, generator: torch.Generator) -> Pair:
    o, lse = _draw_normal(problem, generator)
    return o, lse.sub_(MEAN).mul_(LARGE_STD)


def _draw_equal_lse(problem: Merge, generator: torch.Generator) -> Pair:
    o, lse = _draw_normal(problem, generator)
    return o, lse[:1].expand_as(lse).contiguous()


def _draw_countable(problem: Merge, generator: torch.Generator) -> Pair:
    part, row, head = (
        torch.arange(size, device=generator.device)
        for size in (problem.parts, problem.rows, problem.heads)
    )
    column = torch.arange(problem.d_head, device=generator.device)
    place = part[:, None, None] + row[:, None] + head
    return ((place[..., None] + column) % 8).float(), (place % 3).float()


def _draw_masked(problem: Merge, generator: torch.Generator) -> Pair:
    o, lse = _draw_normal(problem, generator)
    hidden = torch.rand(lse.shape, generator=generator, device=generator.device) < MASKED_SHARE
    hidden[:, -1] = True
    return o.masked_fill_(hidden[..., None], math.nan), lse.masked_fill_(hidden, -math.inf)


def _draw_special(problem: Merge, generator: torch.Generator) -> Pair:
    o, lse = _draw_normal(problem, generator)
    for first, value in enumerate((math.nan, math.inf, -math.inf)):
        o.view(-1)[5 * first + 1 :: 211] = value
        lse.view(-1)[2 * first + 1 :: 17] = value
    return o, lse


_DRAW: Mapping[str, Callable[[Merge, torch.Generator], Pair]] = MappingProxyType(
    {
        "normal": _draw_normal,
        "far_mean": _draw_far_mean,
        "large_lse": _draw_large_lse,
        "equal_lse": _draw_equal_lse,
        "countable": _draw_countable,
        "masked": _draw_masked,
        "special": _draw_special,
    }
)


def draw(
    distribution: str,
    problem: Merge,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return o_parts, in the problem's dtype, and lse_parts, contiguous.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    generator = torch.Generator(device=device).manual_seed(seed)
    o, lse = _DRAW[distribution](problem, generator)
    return {"o_parts": o.to(getattr(torch, problem.dtype.torch_name)), "lse_parts": lse}
