"""Draws the inputs of append by the name of their distribution."""

from __future__ import annotations

import math

import torch

from flash_helpers.check.distributions import check_distribution
from flash_helpers.operations.append.problem import Append
from flash_helpers.operations.append.problems import DISTRIBUTIONS, LARGE_STD, MEAN
from flash_helpers.operations.joint_attention.inputs import rotary_table
from flash_helpers.registry.problem import Role

_SPECIAL = (math.nan, math.inf, -math.inf, 0.0)
_EVERY = 5  # elements of which one is special


def _drawn(shape: tuple[int, ...], distribution: str, generator: torch.Generator) -> torch.Tensor:
    if distribution == "countable":
        places = torch.arange(math.prod(shape), device=generator.device)
        return (places % 61 - 30).float().view(shape)
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if distribution == "large":
        return noise * LARGE_STD
    noise += MEAN
    if distribution == "special":
        flat = noise.view(-1)[::_EVERY]
        flat.copy_(
            torch.tensor(_SPECIAL, device=noise.device).repeat(len(flat) // 4 + 1)[: len(flat)]
        )
    return noise


def draw(
    distribution: str,
    problem: Append,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the inputs of a problem by name, contiguous, but for the caches: a check fills these
    with NaN. Each sequence has keys before the new ones, and the first and the last as few and as
    many as there is room for; pages and rows of the cache are in any order.

    The same arguments give the same values on one device and one torch release. Raises ValueError
    for a distribution that is not a key of DISTRIBUTIONS.
    """
    check_distribution(distribution, DISTRIBUTIONS)
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype.torch_name)
    found = {
        name: _drawn(problem.tensor(name).shape, distribution, generator).to(dtype)
        for name in "kvq"
        if problem.tensor(name).role is Role.IN
    }
    if problem.rotary_dim:
        tables = rotary_table(problem.positions, problem.rotary_dim, device)
        of_table = torch.float32 if problem.fp32_tables else dtype
        found |= {
            name: part.contiguous().to(of_table)
            for name, part in zip(("cos", "sin"), tables.unbind(-1), strict=True)
        }
    most = max(problem.room - problem.len_new, 0)

    def lengths(most: int) -> torch.Tensor:
        drawn = torch.randint(most + 1, (problem.batch,), generator=generator, device=device)
        drawn[0], drawn[-1] = 0, most
        return drawn.int()

    found["cache_seqlens"] = lengths(most)
    if problem.rotary_seqlens:
        found["rotary_seqlens"] = lengths(max(problem.positions - problem.len_new, 0)).flip(0)
    order = torch.randperm(problem.rows, generator=generator, device=device).int()
    if problem.page_size:
        entries = torch.arange(problem.batch * problem.blocks, device=device) % problem.rows
        found["block_table"] = order[entries].view(problem.batch, problem.blocks)
    elif problem.caches:
        found["cache_batch_idx"] = order[torch.arange(problem.batch, device=device) % problem.rows]
    return found
