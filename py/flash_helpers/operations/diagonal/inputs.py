"""Draws a and b by the name of their distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.operations.diagonal.problems import DISTRIBUTIONS, FAR_MEAN, LARGE_STD, MEAN

Pair = tuple[torch.Tensor, torch.Tensor]


def _noise(problem: Diagonal, generator: torch.Generator) -> Pair:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    return draw(problem.rows), draw(problem.rows, problem.width)


def _draw_normal(problem: Diagonal, generator: torch.Generator) -> Pair:
    a, b = _noise(problem, generator)
    return a.add_(MEAN), b.add_(MEAN)


def _draw_far_mean(problem: Diagonal, generator: torch.Generator) -> Pair:
    a, b = _noise(problem, generator)
    return a.add_(MEAN), b.add_(FAR_MEAN)


def _draw_large(problem: Diagonal, generator: torch.Generator) -> Pair:
    a, b = _noise(problem, generator)
    return a.mul_(LARGE_STD), b.mul_(LARGE_STD)


def _draw_constant_rows(problem: Diagonal, generator: torch.Generator) -> Pair:
    a, b = _draw_normal(problem, generator)
    return a, b[:, :1].expand_as(b).contiguous()


def _draw_countable(problem: Diagonal, generator: torch.Generator) -> Pair:
    row = torch.arange(problem.rows, device=generator.device)
    column = torch.arange(problem.width, device=generator.device)
    return (row % 5 + 1).float(), ((row[:, None] + column) % 8).float()


def _draw_special(problem: Diagonal, generator: torch.Generator) -> Pair:
    a, b = _draw_normal(problem, generator)
    flat = b.view(-1)
    for first, value in enumerate((math.nan, math.inf, -math.inf, 0.0)):
        flat[3 * first + 1 :: 53] = value
    a[0] = math.inf
    a[-1] = 0.0
    return a, b


_DRAW: Mapping[str, Callable[[Diagonal, torch.Generator], Pair]] = MappingProxyType(
    {
        "normal": _draw_normal,
        "far_mean": _draw_far_mean,
        "large": _draw_large,
        "constant_rows": _draw_constant_rows,
        "countable": _draw_countable,
        "special": _draw_special,
    }
)


def draw(
    distribution: str,
    problem: Diagonal,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return a, (rows,), and b, (rows, width), contiguous, in the problem's dtype.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype.torch_name)
    a, b = _DRAW[distribution](problem, generator)
    return {"a": a.to(dtype), "b": b.to(dtype)}
