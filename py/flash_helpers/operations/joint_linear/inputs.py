"""Draws the inputs of linear layers of a sequence and its context by the name of their
distribution."""

from __future__ import annotations

import math

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.operations.joint_linear.problems import (
    DISTRIBUTIONS,
    LARGE,
    MEAN,
    OUTLIER_FACTOR,
    OUTLIER_PERIOD,
)


def _countable(shape: tuple[int, ...], name: str, device: torch.device) -> torch.Tensor:
    places = sum(
        (n + 1) * torch.arange(size, device=device).view(-1, *[1] * (len(shape) - n - 1))
        for n, size in enumerate(shape)
    )
    assert isinstance(places, torch.Tensor)
    return (places % 2 + 1 if name.endswith("norm_weight") else places % 3 - 1).float()


def _drawn(
    shape: tuple[int, ...], name: str, distribution: str, generator: torch.Generator
) -> torch.Tensor:
    """Return one of the inputs in fp32."""
    if distribution == "countable":
        return _countable(shape, name, generator.device)
    is_equal = distribution == "constant_rows" and len(shape) > 1
    drawn = (*shape[:-1], 1) if is_equal else shape
    noise = torch.randn(drawn, generator=generator, device=generator.device).expand(shape)
    if name.endswith("norm_weight"):
        return 1 + noise / 8
    if name.endswith("weight"):
        return noise / math.sqrt(shape[-1])
    if name.endswith("x") and distribution == "large":
        return LARGE * (noise + 1)
    noise = noise + MEAN
    if name.endswith("x") and distribution == "outliers":
        noise[..., ::OUTLIER_PERIOD] *= OUTLIER_FACTOR
    return noise


def draw(
    distribution: str,
    problem: JointLinear,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the inputs of a problem by name, contiguous, in the problem's dtype.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype.torch_name)
    return {
        tensor.name: _drawn(tensor.shape, tensor.name, distribution, generator)
        .to(dtype)
        .contiguous()
        for tensor in problem.inputs
    }
