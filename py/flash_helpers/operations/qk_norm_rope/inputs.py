"""Draws the inputs of norm and rotary embedding of Q and K by the name of their distribution."""

from __future__ import annotations

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.joint_attention.inputs import rotary_table
from flash_helpers.operations.qk_norm_rope.problem import QkNormRope
from flash_helpers.operations.qk_norm_rope.problems import DISTRIBUTIONS, LARGE, MEAN
from flash_helpers.registry.problem import Element, Tensor


def _countable(shape: tuple[int, ...], name: str, device: torch.device) -> torch.Tensor:
    places = sum(
        (n + 1) * torch.arange(size, device=device).view(-1, *[1] * (len(shape) - n - 1))
        for n, size in enumerate(shape)
    )
    assert isinstance(places, torch.Tensor)
    return (places % 2 + 1 if "weight" in name else places % 7 - 2).float()


def _drawn(tensor: Tensor, distribution: str, generator: torch.Generator) -> torch.Tensor:
    """Return one of the 16-bit inputs in fp32."""
    shape, name = tensor.shape, tensor.name
    if distribution == "countable":
        return _countable(shape, name, generator.device)
    is_equal = distribution == "constant_rows" and len(shape) > 1
    drawn = (*shape[:-1], 1) if is_equal else shape
    noise = torch.randn(drawn, generator=generator, device=generator.device)
    if "weight" in name:
        return 1 + noise / 8
    scale = LARGE if distribution == "large" else 1.0
    return noise.add_(MEAN).mul_(scale).expand(shape)


def draw(
    distribution: str,
    problem: QkNormRope,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the inputs of a problem by name, contiguous; rotary is the table of positions from 0
    on.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype.torch_name)
    return {
        tensor.name: rotary_table(problem.length, problem.d_head, device)
        if tensor.element is Element.FP32
        else _drawn(tensor, distribution, generator).to(dtype).contiguous()
        for tensor in problem.inputs
    }
