"""Draws dy, x and weight by the name of their distribution, and computes mean and rstd."""

from __future__ import annotations

import torch

from flash_helpers.operations.norm import inputs as forward
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.norm_backward.problems import DY_MEAN


def _draw_dy(distribution: str, problem: NormBackward, generator: torch.Generator) -> torch.Tensor:
    """Return dy. It is no constant in constant rows of x, where dx would be 0, and infinite in one
    place where x is not finite."""
    shape = (problem.rows, problem.width)
    if distribution == "countable":
        return forward.countable(*shape, generator.device) % 4
    dy = torch.randn(shape, generator=generator, device=generator.device).add_(DY_MEAN)
    if distribution == "not_finite" and problem.rows > 2:
        dy[1, problem.width // 4] = torch.inf
    return dy


def draw(
    distribution: str,
    problem: NormBackward,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return dy and x, (rows, width), and weight, (width), if the problem has it, in the problem's
    dtype; and of x the rstd, and mean but for RMS norm, (rows), correctly rounded to fp32.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    drawn = forward.draw(distribution, problem.forward, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    x = drawn["x"].double()
    mean = 0.0 if problem.rms else x.mean(-1, keepdim=True)
    rstd = (x - mean).square().mean(-1, keepdim=True).add(problem.forward.eps).rsqrt()
    found = {"dy": _draw_dy(distribution, problem, generator).to(drawn["x"].dtype), **drawn}
    found |= {"rstd": rstd[:, 0].float()}
    found |= {} if problem.rms else {"mean": x.mean(-1).float()}
    return {tensor.name: found[tensor.name] for tensor in problem.inputs}
