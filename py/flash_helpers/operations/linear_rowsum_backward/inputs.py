"""Draws dy, x and weight by the name of their distribution."""

from __future__ import annotations

import torch

from flash_helpers.operations.linear_rowsum import inputs as forward
from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.operations.linear_rowsum_backward.problems import DY_MEAN


def draw(
    distribution: str,
    problem: LinearRowsumBackward,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return dy, (rows,), and x and weight as for linear_rowsum, contiguous, in the problem's
    dtype.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    sizes = (problem.rows, problem.in_features, problem.out_features)
    drawn = forward.draw(distribution, LinearRowsum(*sizes, problem.dtype), device, seed)
    if distribution == "countable":
        dy = torch.arange(problem.rows, device=device).float() % 4
    else:
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        dy = torch.randn(problem.rows, generator=generator, device=device).add_(DY_MEAN)
    return {"dy": dy.to(drawn["x"].dtype), **drawn}
