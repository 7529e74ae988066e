"""Draws the inputs of adaptive layer norms by the name of their distribution."""

from __future__ import annotations

import torch

from flash_helpers.operations.adaptive_norm.problem import CONTEXT, AdaptiveNorm
from flash_helpers.operations.norm import inputs as norm
from flash_helpers.operations.norm.problem import Norm

_SEEDS = 10  # of one problem


def draw(
    distribution: str,
    problem: AdaptiveNorm,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the inputs of a problem by name, contiguous, in the problem's dtype. Tokens are rows
    as norms have them, and change is another draw of x. gate, scale and shift are normal with
    deviation 1/2, and whole numbers from -1 to 1 for "countable".

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    found = {}
    for n, tensor in enumerate(problem.inputs):
        own = _SEEDS * seed + n
        *rows, width = tensor.shape
        if len(rows) == 2:
            of_tokens = Norm(rows[0] * rows[1], width, problem.dtype)
            drawn = norm.draw(distribution, of_tokens, device, own)["x"]
            if distribution == "not_finite" and tensor.name.removeprefix(CONTEXT) != "x":
                drawn = norm.draw("normal", of_tokens, device, own)["x"]
        elif distribution == "countable":
            drawn = norm.countable(rows[0], width, torch.device(device)) % 3 - 1
        else:
            generator = torch.Generator(device=device).manual_seed(own)
            drawn = torch.randn(tensor.shape, generator=generator, device=generator.device) / 2
        dtype = getattr(torch, problem.dtype.torch_name)
        found[tensor.name] = drawn.view(tensor.shape).to(dtype)
    return found
