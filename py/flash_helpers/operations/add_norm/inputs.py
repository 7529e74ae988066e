"""Draws x, residual, weight and bias by the name of their distribution."""

from __future__ import annotations

import torch

from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.norm import inputs as norm


def draw(
    distribution: str,
    problem: AddNorm,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return x and residual, (rows, width), and of weight and bias, (width), those that the problem
    has; contiguous, in the problem's dtype. residual is another draw of x.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    found = norm.draw(distribution, problem.of_sum, device, seed)
    residual = norm.draw(distribution, problem.of_sum, device, seed + 1)["x"]
    return {"x": found.pop("x"), "residual": residual, **found}
