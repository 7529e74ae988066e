"""Pieces of a shard as calls of the kernels, with a batch or with sequences of various lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from flash_attention._backward import gradients
from flash_attention._forward import attention_into
from flash_attention._varlen import varlen_attention
from flash_attention.distributed._pieces import Piece


@dataclass(frozen=True)
class Options:
    """Those of `attention` that a mask's bounds leave."""

    softcap: float
    softmax_scale: float | None
    deterministic: bool


class Rows:
    """Some rows of tensors, along any dimension: all, or adjacent ones, or those of an index."""

    def __init__(self, total: int, begin: int, end: int, index: torch.Tensor | None = None) -> None:
        self._range = begin, end
        self.is_all = index is None and (begin, end) == (0, total)
        self._index = index

    def take(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return these rows of a tensor: a view of it, unless they are those of an index."""
        if self._index is not None:
            return x.index_select(dim, self._index)
        begin, end = self._range
        return x if self.is_all else x.narrow(dim, begin, end - begin)

    def put(self, x: torch.Tensor, dim: int, rows: torch.Tensor) -> None:
        """Write these rows of a tensor."""
        if self._index is not None:
            x.index_copy_(dim, self._index, rows)
        else:
            self.take(x, dim).copy_(rows)

    def add(self, x: torch.Tensor, dim: int, rows: torch.Tensor) -> None:
        """Add to these rows of a tensor."""
        if self._index is not None:
            self.put(x, dim, self.take(x, dim).add_(rows))
        else:
            self.take(x, dim).add_(rows)


@dataclass(frozen=True)
class Lengths:
    """Sequences of various lengths: where each begins, and the longest."""

    begins_q: torch.Tensor
    begins_k: torch.Tensor
    longest_q: int
    longest_k: int


@dataclass(frozen=True)
class Call:
    """A piece of each sequence of a shard, on which kernels are called once.

    lengths: None for a batch of sequences of one length.
    """

    rows: Rows
    keys: Rows
    left: int | None
    right: int | None
    lengths: Lengths | None

    @property
    def dim(self) -> int:
        """The dimension of rows and keys in q, k, v and o; in an LSE it is the last."""
        return 1 if self.lengths is None else 0

    @property
    def _window(self) -> tuple[int, int]:
        left, right = (-1 if bound is None else bound for bound in (self.left, self.right))
        return left, right

    def forward(
        self,
        q: torch.Tensor,
        held: Sequence[torch.Tensor],
        options: Options,
        o: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write o and LSE of the piece's rows on its keys. q, o, lse: of the whole shard. held: k
        and v, likewise."""
        q = self.rows.take(q, self.dim)
        k, v = (self.keys.take(x, self.dim) for x in held)
        asked: dict[str, Any] = {
            "causal": self.right == 0,
            "window_size": self._window,
            "softcap": options.softcap,
            "softmax_scale": options.softmax_scale,
        }
        if (own := self.lengths) is None:
            of_rows = attention_into(q, k, v, self.rows.take(o, self.dim), **asked)
        else:
            lengths = own.begins_q, own.begins_k, own.longest_q, own.longest_k
            found, of_rows = varlen_attention(q, k, v, *lengths, **asked, return_lse=True)
            self.rows.put(o, self.dim, found)
        self.rows.put(lse, lse.ndim - 1, of_rows)

    def backward(
        self,
        given: Sequence[torch.Tensor],
        held: Sequence[torch.Tensor],
        options: Options,
    ) -> tuple[torch.Tensor, ...]:
        """Return the parts of dq of the piece's rows, and of dk and dv of its keys.

        given: do, q, o and lse of the whole shard of queries, the last two over all keys. held: k
        and v of a shard.
        """
        *own, lse = given
        do, q, o = (self.rows.take(x, self.dim) for x in own)
        lse = self.rows.take(lse, lse.ndim - 1).contiguous()
        k, v = (self.keys.take(x, self.dim) for x in held)
        begins = None if self.lengths is None else (self.lengths.begins_q, self.lengths.begins_k)
        bounds = self.right == 0, self.left, self.right
        scale = options.softcap, options.softmax_scale, options.deterministic
        return gradients((do, q, k, v, o, lse), begins, *bounds, *scale)


def calls_of_batch(pieces: Sequence[Piece], len_q: int, len_k: int) -> list[Call]:
    """Return the calls for pieces of sequences of one length."""
    return [
        Call(Rows(len_q, *piece.rows), Rows(len_k, *piece.keys), piece.left, piece.right, None)
        for piece in pieces
        if not piece.is_empty
    ]


def calls_of_sequences(
    pieces: Sequence[Sequence[Piece]], lengths: Sequence[int], device: torch.device
) -> list[Call]:
    """Return the calls for pieces of each of several sequences, of as many queries as keys.

    pieces: of each sequence, equally many, with equal masks at the same place. lengths: of each
    sequence, in a shard.
    """
    found = []
    for of_place in zip(*pieces, strict=True):
        if all(piece.is_empty for piece in of_place):
            continue
        rows, longest_q, begins_q = _packed([piece.rows for piece in of_place], lengths, device)
        keys, longest_k, begins_k = _packed([piece.keys for piece in of_place], lengths, device)
        masks = {(piece.left, piece.right) for piece in of_place if not piece.is_empty}
        ((left, right),) = masks  # one for all sequences
        own = Lengths(begins_q, begins_k, longest_q, longest_k)
        found.append(Call(rows, keys, left, right, own))
    return found


def _packed(
    ranges: Sequence[tuple[int, int]], lengths: Sequence[int], device: torch.device
) -> tuple[Rows, int, torch.Tensor]:
    """Return the rows of a range of each sequence, the longest range, and where the ranges begin
    one after the other."""
    sizes = [end - begin for begin, end in ranges]
    begins = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32).to(device, non_blocking=True)
    total, longest = sum(lengths), max(sizes, default=0)
    if sizes == [*lengths]:
        return Rows(total, 0, total), longest, begins
    starts = [first for first, _ in pairwise([0, *accumulate(lengths)])]
    index = torch.cat(
        [torch.arange(s + a, s + b) for s, (a, b) in zip(starts, ranges, strict=True)]
    )
    return Rows(total, 0, 0, index.to(device, non_blocking=True)), longest, begins
