"""Draws dO, Q, K and V by the name of their distribution, and the O and LSE that belong to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_forward import inputs as forward
from flash_helpers.operations.attention_forward.problems import MEAN
from flash_helpers.operations.attention_forward.reference import attention_of

# Of the seed: dO is drawn apart from Q, K and V.
_OF_DO = 0x9E3779B9


def _draw_do(
    distribution: str, shape: tuple[int, ...], device: torch.device, seed: int
) -> torch.Tensor:
    """Return dO in float32: normal with the mean MEAN and deviation 1, or for "countable" small
    integers."""
    if distribution == "countable":
        every = (torch.arange(n, device=device) for n in shape)
        _, seq, head, column = torch.meshgrid(*every, indexing="ij")
        return ((3 * seq + head + 5 * column) % 11 - 5).float()
    generator = torch.Generator(device=device).manual_seed(seed ^ _OF_DO)
    return torch.randn(shape, generator=generator, device=device).add_(MEAN)


def draw(
    distribution: str,
    problem: AttentionBackward,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the inputs of a problem by name, in its dtype, and the LSE in float32.

    O and the LSE are the float64 results of the forward pass, rounded. Raises as
    `attention_forward.inputs.make_inputs` does.
    """
    found = forward.draw(distribution, problem, device, seed)
    o, lse = attention_of(problem, found)
    do = _draw_do(distribution, problem.o_shape, found["q"].device, seed)
    return arranged(
        {**found, "do": do.to(found["q"].dtype), "o": o.to(found["q"].dtype), "lse": lse.float()}
    )


def arranged(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors in the order of the problem's axes."""
    return {name: tensors[name] for name in AttentionBackward.axes if name in tensors}
