"""Draws y and dy by the name of their distribution."""

from __future__ import annotations

import math

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.rows import inputs as forward
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows.problems import DISTRIBUTIONS as FORWARD
from flash_helpers.operations.rows.problems import MEAN
from flash_helpers.operations.rows_backward.problem import RowsBackward
from flash_helpers.operations.rows_backward.problems import DISTRIBUTIONS, FAR_MEAN
from flash_helpers.registry.problem import Element


def draw(
    distribution: str,
    problem: RowsBackward,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return y and dy, (rows, width), contiguous, in the problem's dtype.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    of_x = distribution if distribution in FORWARD else "normal"
    rows = Rows(problem.rows, problem.width, Element.FP32)
    x = forward.draw(of_x, rows, device, seed)["x"]
    if distribution == "countable":
        y, dy = x, (x + 3) % 5
    else:
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        noise = torch.randn(x.shape, generator=generator, device=device)
        y, dy = torch.softmax(x, -1), noise + (FAR_MEAN if distribution == "far_mean" else MEAN)
    if distribution == "special":
        for first, value in enumerate((math.nan, math.inf, -math.inf)):
            dy[first::4, -1] = value
    dtype = getattr(torch, problem.dtype.torch_name)
    return {"y": y.to(dtype), "dy": dy.to(dtype)}
