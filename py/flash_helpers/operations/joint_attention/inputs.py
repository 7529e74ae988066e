"""Draws the inputs of joint attention by the name of their distribution."""

from __future__ import annotations

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.operations.joint_attention.problems import DISTRIBUTIONS, LARGE_WEIGHT, MEAN
from flash_helpers.registry.problem import Element, Tensor

BASE = 10000.0  # of the angles


def rotary_table(length: int, d_head: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return cosine and sine, (length, d_head / 2, 2) in fp32, of position · BASE^(-2i / d_head) of
    pair i (Su et al., RoFormer, section 3.2.2)."""
    powers = torch.arange(0, d_head, 2, dtype=torch.float64) / d_head
    angles = torch.outer(torch.arange(length, dtype=torch.float64), BASE**-powers)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float().to(device)


def _countable(shape: tuple[int, ...], name: str, device: torch.device) -> torch.Tensor:
    places = sum(
        (n + 1) * torch.arange(size, device=device).view(-1, *[1] * (len(shape) - n - 1))
        for n, size in enumerate(shape)
    )
    assert isinstance(places, torch.Tensor)
    if "weight" in name:
        return (places % 2 + 1).float()
    return (places % 16 if name[-1] == "v" else places % 3 - 1).float()


def _drawn(tensor: Tensor, distribution: str, generator: torch.Generator) -> torch.Tensor:
    """Return one of the 16-bit inputs in fp32."""
    shape, name = tensor.shape, tensor.name
    if distribution == "countable":
        return _countable(shape, name, generator.device)
    is_equal = distribution == "constant_rows" and name[-1] in "qk"
    drawn = (shape[0], 1, shape[2]) if is_equal else shape
    noise = torch.randn(drawn, generator=generator, device=generator.device)
    if "weight" in name:
        return (1 + noise / 8) * (LARGE_WEIGHT if distribution == "large_logits" else 1.0)
    return noise.add_(MEAN).expand(shape)


def draw(
    distribution: str,
    problem: JointAttention,
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
