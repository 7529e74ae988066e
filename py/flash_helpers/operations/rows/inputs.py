"""Draws x by the name of its distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows.problems import (
    DISTRIBUTIONS,
    LARGE_LOGIT_STD,
    MASKED_SHARE,
    MEAN,
    OUTLIER_FACTOR,
    OUTLIER_PERIOD,
)


def _noise(problem: Rows, generator: torch.Generator, width: int | None = None) -> torch.Tensor:
    shape = (problem.rows, problem.width if width is None else width)
    return torch.randn(shape, generator=generator, device=generator.device)


def _draw_normal(problem: Rows, generator: torch.Generator) -> torch.Tensor:
    return _noise(problem, generator).add_(MEAN)


def _draw_large_logits(problem: Rows, generator: torch.Generator) -> torch.Tensor:
    return _noise(problem, generator).mul_(LARGE_LOGIT_STD)


def _draw_constant_rows(problem: Rows, generator: torch.Generator) -> torch.Tensor:
    one_value = _noise(problem, generator, width=1).add_(MEAN)
    return one_value.expand(-1, problem.width).contiguous()


def _draw_outliers(problem: Rows, generator: torch.Generator) -> torch.Tensor:
    x = _draw_normal(problem, generator)
    scores = torch.rand(problem.width, generator=generator, device=generator.device)
    chosen = scores.topk(-(-problem.width // OUTLIER_PERIOD)).indices
    x[:, chosen] *= OUTLIER_FACTOR
    return x


def _draw_countable(problem: Rows, generator: torch.Generator) -> torch.Tensor:
    row = torch.arange(problem.rows, device=generator.device)
    column = torch.arange(problem.width, device=generator.device)
    return ((row[:, None] + column) % 8).float()


def _draw_masked(problem: Rows, generator: torch.Generator) -> torch.Tensor:
    x = _draw_normal(problem, generator)
    scores = torch.rand(x.shape, generator=generator, device=generator.device)
    hidden = scores < MASKED_SHARE
    hidden.scatter_(1, scores.argmax(1, keepdim=True), False)  # one of a row stays
    if problem.rows > 1:
        hidden[-1] = True
    return x.masked_fill_(hidden, -math.inf)


_DRAW: Mapping[str, Callable[[Rows, torch.Generator], torch.Tensor]] = MappingProxyType(
    {
        "normal": _draw_normal,
        "large_logits": _draw_large_logits,
        "constant_rows": _draw_constant_rows,
        "outliers": _draw_outliers,
        "countable": _draw_countable,
        "masked": _draw_masked,
    }
)


def draw(
    distribution: str,
    problem: Rows,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return x, (rows, width), contiguous, in the problem's dtype.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    generator = torch.Generator(device=device).manual_seed(seed)
    x = _DRAW[distribution](problem, generator)
    return {"x": x.to(getattr(torch, problem.dtype.torch_name))}
