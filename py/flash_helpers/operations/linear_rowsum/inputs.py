"""Draws x, weight and bias by the name of their distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.operations.linear_rowsum.problems import (
    DISTRIBUTIONS,
    FAR_MEAN,
    LARGE_STD,
    MEAN,
    OUTLIER_FACTOR,
    OUTLIER_PERIOD,
)

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SMALL_SHARE = 0.05  # of a row of W that its negative does not cancel


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _draw_normal(problem: LinearRowsum, generator: torch.Generator) -> Triple:
    x = _noise(generator, problem.rows, problem.in_features).add_(MEAN)
    weight = _noise(generator, problem.out_features, problem.in_features).add_(MEAN)
    bias = _noise(generator, problem.out_features).add_(MEAN)
    return x, weight.div_(problem.in_features), bias


def _draw_far_mean(problem: LinearRowsum, generator: torch.Generator) -> Triple:
    x, weight, bias = _draw_normal(problem, generator)
    return x.add_(FAR_MEAN - MEAN), weight, bias


def _draw_large(problem: LinearRowsum, generator: torch.Generator) -> Triple:
    x, weight, bias = _draw_normal(problem, generator)
    return x.sub_(MEAN).mul_(LARGE_STD), weight, bias


def _draw_constant_rows(problem: LinearRowsum, generator: torch.Generator) -> Triple:
    x, weight, bias = _draw_normal(problem, generator)
    x, weight = (m[:, :1].expand_as(m).contiguous() for m in (x, weight))
    return x, weight, bias


def _draw_outliers(problem: LinearRowsum, generator: torch.Generator) -> Triple:
    x, weight, bias = _draw_normal(problem, generator)
    scores = torch.rand(problem.in_features, generator=generator, device=generator.device)
    chosen = scores.topk(-(-problem.in_features // OUTLIER_PERIOD)).indices
    x[:, chosen] *= OUTLIER_FACTOR
    return x, weight, bias


def _draw_cancelling(problem: LinearRowsum, generator: torch.Generator) -> Triple:
    x, weight, bias = _draw_normal(problem, generator)
    pairs = problem.out_features // 2
    own = weight[0 : 2 * pairs : 2]
    weight[1 : 2 * pairs : 2] = own * (SMALL_SHARE - 1)
    return x, weight, bias


def _draw_countable(problem: LinearRowsum, generator: torch.Generator) -> Triple:
    row, feature, out = (
        torch.arange(size, device=generator.device)
        for size in (problem.rows, problem.in_features, problem.out_features)
    )
    x, weight = (row[:, None] + feature) % 3, (out[:, None] + 2 * feature) % 2
    return x.float(), weight.float(), (out % 4).float()


_DRAW: Mapping[str, Callable[[LinearRowsum, torch.Generator], Triple]] = MappingProxyType(
    {
        "normal": _draw_normal,
        "far_mean": _draw_far_mean,
        "large": _draw_large,
        "constant_rows": _draw_constant_rows,
        "outliers": _draw_outliers,
        "cancelling": _draw_cancelling,
        "countable": _draw_countable,
    }
)


def draw(
    distribution: str,
    problem: LinearRowsum,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return x, (rows, in_features), weight, (out_features, in_features), and where the problem has
    one the bias, (out_features,), contiguous, in the problem's dtype.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype.torch_name)
    x, weight, bias = _DRAW[distribution](problem, generator)
    drawn = {"x": x.to(dtype), "weight": weight.to(dtype)}
    return drawn | ({"bias": bias.to(dtype)} if problem.bias else {})
