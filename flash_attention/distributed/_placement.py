"""Which positions of a sequence each rank holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch

Placement = Literal["contiguous", "zigzag", "striped"]
PLACEMENTS: tuple[str, ...] = get_args(Placement)


def check_placement(placement: object) -> None:
    """Raises ValueError for a name that is no placement."""
    if placement not in PLACEMENTS:
        raise ValueError(f"placement is {placement!r}: choose one of {', '.join(PLACEMENTS)}")


def parts_of(placement: str, size: int) -> int:
    """Return the number of equal parts that a sequence is cut into for `size` ranks."""
    return 2 * size if placement == "zigzag" else size


def shard_length(length: int, size: int, placement: str, name: str = "the sequence") -> int:
    """Return the number of a sequence's positions that each rank holds.

    Raises ValueError for a length that the placement does not divide.
    """
    parts = parts_of(placement, size)
    if length % parts:
        more = -length % parts
        raise ValueError(
            f"{name} has length {length}, and placement {placement!r} of {size} ranks needs a "
            f"multiple of {parts}: pad it with {more} more, to {length + more}"
        )
    return length // size


def held_by(rank: int, size: int, length: int, placement: str) -> torch.Tensor:
    """Return the positions that a rank holds, in the order in which it holds them: int64."""
    own = shard_length(length, size, placement)
    if placement == "contiguous":
        return torch.arange(rank * own, (rank + 1) * own)
    if placement == "striped":
        return torch.arange(own) * size + rank
    half = own // 2
    low, high = rank * half, (2 * size - 1 - rank) * half
    return torch.cat([torch.arange(low, low + half), torch.arange(high, high + half)])


def rows_held(rank: int, size: int, begins: Sequence[int], placement: str) -> torch.Tensor:
    """Return the rows that a rank holds of sequences that follow one another, of each in turn.

    begins: rows where each sequence begins, and the total.
    """
    found = []
    for n, (begin, end) in enumerate(pairwise(begins)):
        name = f"sequence {n}" if len(begins) > 2 else "the sequence"
        shard_length(end - begin, size, placement, name)
        found.append(begin + held_by(rank, size, end - begin, placement))
    return torch.cat(found) if found else torch.arange(0)


@functools.lru_cache(maxsize=64)
def order_of(size: int, begins: tuple[int, ...], placement: str) -> torch.Tensor:
    """Return, for each row, its place in the shards of all ranks one after the other: int64."""
    held = torch.cat([rows_held(rank, size, begins, placement) for rank in range(size)])
    places = torch.empty_like(held)
    places[held] = torch.arange(len(held))
    return places
