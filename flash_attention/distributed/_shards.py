"""Shards of tensors: cut before a call, joined after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flash_attention._operators import refuse_derivatives
from flash_attention.distributed._group import Group, Ranks
from flash_attention.distributed._placement import (
    Placement,
    check_placement,
    order_of,
    rows_held,
)
from flash_attention.distributed._ring import begins_of
from flash_helpers.runtime.tensors import check_types

CuSeqlens = Sequence[int] | torch.Tensor | None


def shard(
    x: torch.Tensor,
    group: Group = None,
    *,
    placement: Placement = "zigzag",
    dim: int | None = None,
    cu_seqlens: CuSeqlens = None,
) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: a copy, which autograd sees.

    x: a whole sequence along `dim`: inputs such as tokens, q, k and v, or labels. A label that is
        the next token must be shifted before, because the next row of a shard need not be the next
        position. All ranks pass the same tensor, and nothing is exchanged.
    group, placement, cu_seqlens: as for `ring_attention`. `ulysses_attention` needs "contiguous".
    dim: 1, or 0 with cu_seqlens, unless it is given.

    Raises ValueError for a length that the placement does not divide, and the errors of
    `ring_attention` for a group.
    """
    check_types({"x": x})
    ranks = Ranks.of(group, "shard")
    dim = _dim(x, dim, cu_seqlens)
    begins = _begins(x.shape[dim], placement, cu_seqlens)
    held = rows_held(ranks.rank, ranks.size, begins, placement)
    return x.index_select(dim, held.to(x.device))


def unshard(
    x: torch.Tensor,
    group: Group = None,
    *,
    placement: Placement = "zigzag",
    dim: int | None = None,
    cu_seqlens: CuSeqlens = None,
) -> torch.Tensor:
    """Return the whole tensor of which each rank holds a shard, on all ranks, without a gradient.

    Arguments are those of `shard`, with a shard for x, which has one size on all ranks.
    Raises ValueError for a shard that is not what `shard` returns, RuntimeError for one that
    requires grad, outside of torch.no_grad(), and the errors of `ring_attention` for a group.
    """
    check_types({"x": x})
    refuse_derivatives("unshard", x)
    ranks = Ranks.of(group, "unshard")
    ranks.check_device({"x": x})
    dim = _dim(x, dim, cu_seqlens)
    begins = _begins(x.shape[dim] * ranks.size, placement, cu_seqlens)
    places = order_of(ranks.size, begins, placement)
    own = x.contiguous()
    shards = [torch.empty_like(own) for _ in range(ranks.size)]
    with ranks.failures("gather shards"):
        dist.all_gather(shards, own, ranks.group)
    return torch.cat(shards, dim).index_select(dim, places.to(x.device))


def positions(
    length: int,
    group: Group = None,
    *,
    placement: Placement = "zigzag",
    cu_seqlens: CuSeqlens = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the position of each row of this rank's shard, for rotary embeddings and the like:
    (shard,), int64. With cu_seqlens each sequence counts from 0.

    length: of the whole, all ranks together. Raises the errors of `shard`.
    """
    ranks = Ranks.of(group, "positions")
    begins = _begins(length, placement, cu_seqlens)
    held = rows_held(ranks.rank, ranks.size, begins, placement)
    first = torch.tensor(begins)
    of_row = torch.searchsorted(first, held, right=True) - 1
    return (held - first[of_row]).to(device)


def _dim(x: torch.Tensor, dim: int | None, cu_seqlens: CuSeqlens) -> int:
    dim = int(cu_seqlens is None) if dim is None else dim
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"dim is {dim} and x has shape {tuple(x.shape)}: pass the dimension of the sequence"
        )
    return dim


def _begins(length: int, placement: str, cu_seqlens: CuSeqlens) -> tuple[int, ...]:
    check_placement(placement)
    if cu_seqlens is None:
        return 0, length
    begins = begins_of(cu_seqlens)
    if begins[-1] != length:
        raise ValueError(
            f"cu_seqlens ends with {begins[-1]} and the whole has {length} rows: pass that total "
            "last"
        )
    return begins
