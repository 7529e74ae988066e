"""Draws a, b and dc by the name of their distribution."""

from __future__ import annotations

import torch

from flash_helpers.operations.diagonal import inputs as forward
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward


def draw(
    distribution: str,
    problem: DiagonalBackward,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return a and b as for diagonal, and dc, normal or countable, (rows, width), contiguous, in
    the problem's dtype. Raises ValueError for a distribution that is not a key of DISTRIBUTIONS."""
    rows = Diagonal(problem.rows, problem.width, problem.dtype)
    found = forward.draw(distribution, rows, device, seed)
    of_dc = "countable" if distribution == "countable" else "normal"
    return {**found, "dc": forward.draw(of_dc, rows, device, seed + 1)["b"]}
