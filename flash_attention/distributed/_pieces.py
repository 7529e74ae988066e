"""The mask between the queries of a rank and the keys of another, as pieces that kernels take."""

from __future__ import annotations

from dataclasses import dataclass

Bound = int | None


@dataclass(frozen=True)
class Piece:
    """Rows of a shard of queries, rows of a shard of keys, and the mask between them.

    rows, keys: (begin, end), the latter without end. left, right: bounds of the window as
    `attention` takes them, aligned to the bottom right of these rows and keys; None is no bound.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    left: Bound = None
    right: Bound = None

    def moved(self, rows: int, keys: int) -> Piece:
        """Return the piece of the same size behind so many more rows and keys."""
        (a, b), (c, d) = self.rows, self.keys
        return Piece((a + rows, b + rows), (c + keys, d + keys), self.left, self.right)

    @property
    def is_empty(self) -> bool:
        """Whether there is no row or no key."""
        return self.rows[0] >= self.rows[1] or self.keys[0] >= self.keys[1]


def band(len_q: int, len_k: int, low: Bound, high: Bound) -> Piece:
    """Return the piece of queries 0 … len_q - 1 of which i sees keys i + low … i + high.

    Kernels take no bound below 0, which a mask shifted by whole rows has. So the rows and keys that
    take no part are cut off, until the last row that remains sees the last key that remains:

        striped, a later rank's keys: high = -1         cut off: row 0, the last key
            k0 k1 k2 k3                k0 k1 k2
        q0   .  .  .  .
        q1   x  .  .  .            q1   x  .  .
        q2   x  x  .  .            q2   x  x  .
        q3   x  x  x  .            q3   x  x  x     causal
    """
    if low is not None and high is not None and high < low:
        return Piece((0, 0), (0, 0))
    first_row = 0 if high is None else max(0, -high)
    end_row = len_q if low is None else min(len_q, len_k - low)
    first_key = 0 if low is None else max(0, low)
    end_key = len_k if high is None else min(len_k, len_q + high)
    if first_row >= end_row or first_key >= end_key:
        return Piece((0, 0), (0, 0))
    left = None if low is None else end_key - end_row - low
    right = None if high is None else high + end_row - end_key
    return Piece((first_row, end_row), (first_key, end_key), left, right)


def pieces_of(
    placement: str, size: int, rank: int, source: int, lengths: tuple[int, int], window: Window
) -> list[Piece]:
    """Return the pieces of a rank's queries on the keys of rank `source`, in a fixed order; those
    without rows or keys too, so that their number does not depend on the lengths.

    lengths: of both shards. window: bounds in positions of the whole sequence; a causal mask is
    (None, 0). A query in a row and a key may share one piece at most.
    """
    len_q, len_k = lengths
    left, right = window
    if left is None and right is None:
        return [Piece((0, len_q), (0, len_k))]
    if placement == "striped":
        # key j stands at j size + source, query i at i size + rank
        ahead = rank - source
        low = None if left is None else -((left - ahead) // size)
        return [band(len_q, len_k, low, None if right is None else (ahead + right) // size)]
    if placement == "contiguous":
        if window == (None, 0) and source != rank:  # without a bound that depends on the lengths
            return [Piece((0, len_q), (0, len_k)) if source < rank else Piece((0, 0), (0, 0))]
        return [_distant(len_q, (rank - source) * len_k, window)]
    half = len_q // 2
    if window == (None, 0):  # two halves that see all or nothing make one call
        if source == rank:
            return [Piece((0, len_q), (0, len_k), None, 0)]
        if source < rank:
            return [Piece((0, len_q), (0, half))]
        return [Piece((half, len_q), (0, len_k))]
    chunks_q, chunks_k = ((r, 2 * size - 1 - r) for r in (rank, source))
    return [
        _distant(half, (of_q - of_k) * half, window).moved(m * half, n * half)
        for m, of_q in enumerate(chunks_q)
        for n, of_k in enumerate(chunks_k)
    ]


Window = tuple[Bound, Bound]


def _distant(length: int, ahead: int, window: Window) -> Piece:
    """Return the piece of `length` queries that stand `ahead` positions behind as many keys."""
    left, right = window
    low = None if left is None else ahead - left
    return band(length, length, low, None if right is None else ahead + right)
