"""Longest common subsequences, by bits of Python's whole numbers: exact and quick."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence


def common_subsequence(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """A longest common subsequence, as pairs of an index into `a` and one into `b`, ascending.

    Source: H. Hyyrö, "Bit-parallel LCS-length computation revisited" (2004): a row of the table is
    one number, in which bit j is 0 where the length grows between j and j + 1 elements of `b`. A
    row costs a few operations on len(b) bits, so two kernels of 2000 instructions take
    milliseconds.
    """
    all_ones = (1 << len(b)) - 1
    where: dict[Hashable, int] = {}
    for j, element in enumerate(b):
        where[element] = where.get(element, 0) | 1 << j
    rows = [all_ones]
    for element in a:
        row = rows[-1]
        matching = row & where.get(element, 0)
        rows.append((row + matching | row - matching) & all_ones)

    def length(i: int, j: int) -> int:
        return (~rows[i] & (1 << j) - 1).bit_count()

    pairs = []
    i, j = len(a), len(b)
    while i and j:
        if rows[i] >> j - 1 & 1:
            j -= 1
        elif length(i - 1, j) == length(i, j):
            i -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


def gaps(pairs: Sequence[tuple[int, int]], n_a: int, n_b: int) -> list[tuple[range, range]]:
    """The stretches of both sequences between consecutive pairs, those that are empty left out."""
    bounds = [(-1, -1), *pairs, (n_a, n_b)]
    found = [
        (range(i + 1, next_i), range(j + 1, next_j))
        for (i, j), (next_i, next_j) in itertools.pairwise(bounds)
    ]
    return [(in_a, in_b) for in_a, in_b in found if in_a or in_b]
