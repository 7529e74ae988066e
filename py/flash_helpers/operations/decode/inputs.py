"""Draws Q, K and V by the name of their distribution, and puts K and V into a cache.

Keys and values behind a sequence's end, and in pages of no sequence, are NaN. Entries of
block_table that no key needs name no page. A kernel that reads too much shows.
"""

from __future__ import annotations

import math

import torch

from flash_helpers.operations.attention_forward import inputs as forward
from flash_helpers.operations.decode.problem import Decode

LENGTH_DEVIATION = 0.8  # of the logarithm of lengths


def draw_lengths(problem: Decode, seed: int = 0) -> list[int]:
    """Return the keys of each sequence: all have len_k; or lognormal lengths that have total_k keys
    together, where of three or more sequences the first has none, and the second all that it can
    have."""
    batch, room = problem.batch, problem.len_k
    if problem.total_k is None:
        return [room] * batch
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(batch, generator=generator).mul_(LENGTH_DEVIATION).exp_().tolist()
    left = problem.total_k
    lengths = [0] * batch
    own = range(batch)
    if batch > 2 and left < batch * room:
        lengths[1] = min(room, left)
        left -= lengths[1]
        own = range(2, batch)
    if left > len(own) * room:  # the first has to take what the others have no room for
        lengths[0] = left - len(own) * room
        left -= lengths[0]
    # largest weights first, so that what exceeds the room is shared among the others
    for place, n in enumerate(sorted(own, key=lambda n: -weights[n])):
        rest = sorted((weights[m] for m in own), reverse=True)[place:]
        behind = (len(rest) - 1) * room
        share = math.floor(left * weights[n] / sum(rest))
        lengths[n] = min(room, max(share, left - behind)) if len(rest) > 1 else left
        left -= lengths[n]
    return lengths


def draw(
    distribution: str,
    problem: Decode,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the inputs of a problem by name, in its dtype. Raises as `forward.make_inputs` does.

    Pages, and rows of a shared cache, are in random order.
    """
    own = problem.contiguous(problem.len_k)
    found = forward.draw(distribution, own, device, seed)
    lengths = draw_lengths(problem, seed)
    generator = torch.Generator().manual_seed(seed)
    if problem.total_k is not None:
        found["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    for name in ("k", "v"):
        for row, length in zip(found[name], lengths, strict=True):
            row[length:] = torch.nan
        if problem.fp8_cache:
            found |= _scaled(problem, name, found[name])
    if problem.page_size:
        found |= _in_pages(problem, found["k"], found["v"], lengths, generator)
    elif problem.caches:
        found |= _in_rows(problem, found["k"], found["v"], generator)
    if problem.fp8_cache:  # in another element type PyTorch moves few tensors
        found |= {name: found[name].to(torch.float8_e4m3fn) for name in "kv"}
    return found


def _scaled(problem: Decode, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return K or V with numbers that e4m3 holds, and the scales, (batch, kv_heads); without scales
    the numbers are cut. The largest number of one sequence and head in four is the largest of e4m3,
    and those of the others are 2 to 4 times smaller, so that no scale can stand for another."""
    most = torch.finfo(torch.float8_e4m3fn).max
    if not getattr(problem, f"{name}_scale"):
        return {name: x.clamp(-most, most)}
    scale = x.float().nan_to_num(0.0).abs().amax((1, 3)).clamp(min=1e-3) / most
    scale *= 1 + torch.arange(scale.numel(), device=x.device).view_as(scale) % 4
    return {
        name: (x / scale[:, None, :, None]).clamp(-most, most).to(x.dtype),
        f"{name}_scale": scale,
    }


def _in_pages(
    problem: Decode,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """Return K and V in pages, and the table of these.

    Raises ValueError if there are too few pages.
    """
    needed = [-(-length // problem.page_size) for length in lengths]
    if sum(needed) > problem.pages:
        raise ValueError(
            f"pages {problem.pages}: the sequences have {sum(needed)} of {problem.page_size} keys: "
            f"pass pages={sum(needed)} or more"
        )
    numbers = torch.randperm(problem.pages, generator=generator)
    table = k.new_full((problem.batch, problem.blocks), -1, dtype=torch.int32)
    found = {name: k.new_full(problem.kv_shape, torch.nan) for name in "kv"}
    for sequence, pages in enumerate(needed):
        own = numbers[len(numbers) - pages :].to(k.device)
        numbers = numbers[: len(numbers) - pages]
        table[sequence, :pages] = own
        for name, x in (("k", k), ("v", v)):
            rows = x[sequence, : pages * problem.page_size]
            found[name][own] = rows.unflatten(0, (pages, problem.page_size))
    return {**found, "block_table": table}


def _in_rows(
    problem: Decode, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return K and V in rows of a cache, and the numbers of these; where sequences are more than
    rows, several have one and the same, with the keys of the first and the length of each."""
    rows = torch.arange(problem.batch) % problem.caches
    numbers = torch.randperm(problem.caches, generator=generator)[rows].tolist()
    found = {}
    for name, x in (("k", k), ("v", v)):
        found[name] = torch.full(problem.kv_shape, torch.nan, dtype=x.dtype, device=x.device)
        for sequence, number in enumerate(numbers):
            row = found[name][number]
            row.copy_(torch.where(row.isnan(), x[sequence], row))
    indices = torch.tensor(numbers, dtype=torch.int32, device=k.device)
    return {**found, "cache_batch_idx": indices}
