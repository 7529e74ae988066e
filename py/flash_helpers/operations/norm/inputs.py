"""Draws x, weight and bias by the name of their distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.problems import (
    BIAS_STD,
    DISTRIBUTIONS,
    FAR_MEAN,
    LARGE_STD,
    MEAN,
    OUTLIER_FACTOR,
    OUTLIER_PERIOD,
    WEIGHT_MEAN,
    WEIGHT_STD,
)


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _draw_normal(problem: Norm, generator: torch.Generator) -> torch.Tensor:
    return _noise(generator, problem.rows, problem.width).add_(MEAN)


def _draw_far_mean(problem: Norm, generator: torch.Generator) -> torch.Tensor:
    return _noise(generator, problem.rows, problem.width).add_(FAR_MEAN)


def _draw_large(problem: Norm, generator: torch.Generator) -> torch.Tensor:
    return _noise(generator, problem.rows, problem.width).mul_(LARGE_STD)


def _draw_constant_rows(problem: Norm, generator: torch.Generator) -> torch.Tensor:
    return _noise(generator, problem.rows, 1).add_(MEAN).expand(-1, problem.width).contiguous()


def _draw_outliers(problem: Norm, generator: torch.Generator) -> torch.Tensor:
    x = _draw_normal(problem, generator)
    scores = torch.rand(problem.width, generator=generator, device=generator.device)
    x[:, scores.topk(-(-problem.width // OUTLIER_PERIOD)).indices] *= OUTLIER_FACTOR
    return x


def countable(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Return integers from 0 to 7 that are known from their position, (rows, width)."""
    row, column = (torch.arange(size, device=device) for size in (rows, width))
    return ((row[:, None] + column) % 8).float()


def _draw_countable(problem: Norm, generator: torch.Generator) -> torch.Tensor:
    return countable(problem.rows, problem.width, generator.device)


def _draw_not_finite(problem: Norm, generator: torch.Generator) -> torch.Tensor:
    x = _draw_normal(problem, generator)
    if problem.rows > 1:
        x[-1, problem.width // 2] = math.inf
    x[0, problem.width // 3] = math.nan
    return x


_DRAW: Mapping[str, Callable[[Norm, torch.Generator], torch.Tensor]] = MappingProxyType(
    {
        "normal": _draw_normal,
        "far_mean": _draw_far_mean,
        "large": _draw_large,
        "constant_rows": _draw_constant_rows,
        "outliers": _draw_outliers,
        "countable": _draw_countable,
        "not_finite": _draw_not_finite,
    }
)


def draw(
    distribution: str,
    problem: Norm,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return x, (rows, width), and of weight and bias, (width), those that the problem has;
    contiguous, in the problem's dtype.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    generator = torch.Generator(device=device).manual_seed(seed)
    found = {"x": _DRAW[distribution](problem, generator)}
    # both are drawn in any case, so that the other does not depend on which of them there are
    weight = _noise(generator, problem.width).mul_(WEIGHT_STD).add_(WEIGHT_MEAN)
    bias = _noise(generator, problem.width).mul_(BIAS_STD)
    found |= {"weight": weight} if problem.weight else {}
    found |= {"bias": bias} if problem.bias else {}
    dtype = getattr(torch, problem.dtype.torch_name)
    return {name: tensor.to(dtype) for name, tensor in found.items()}
