"""Pairing of the elements of two sequences: longest common subsequences, by bits of Python's whole
numbers, exact and quick; and matching in rounds, with moved elements told apart."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

Keys = Sequence[Sequence[Hashable | None]]  # of the elements of both sequences


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


class Matching:
    """Pairs of elements of two sequences, found round by round; an index stands for an element.

    `partner`: for elements of the second sequence, their partners in the first. `moved`: elements
    of the second sequence whose partner stands elsewhere. `free`: for each sequence, the elements
    without a partner. In every round a key of None matches nothing.
    """

    def __init__(
        self, phases: Sequence[Sequence[Hashable]], orders: Sequence[Sequence[int]]
    ) -> None:
        """`phases`: the phase of each element of each sequence. `orders`: the indices of each
        sequence in the order in which moved elements are searched."""
        self._phases, self._orders = phases, orders
        self.free = [set(order) for order in orders]
        self.partner: dict[int, int] = {}
        self.moved: set[int] = set()

    def _waiting(self, keys: Keys, stretches: Sequence[Iterable[int]]) -> Iterator[list[int]]:
        """The free elements with a key of each sequence, in the order of a stretch of indices."""
        for free, of, stretch in zip(self.free, keys, stretches, strict=True):
            yield [n for n in stretch if n in free and of[n] is not None]

    def _take(self, pairs: Iterable[tuple[int, int]]) -> None:
        for i, j in pairs:
            self.partner[j] = i
            self.free[0].remove(i)
            self.free[1].remove(j)

    def align(self, keys: Keys) -> None:
        """Match free elements with equal keys, phase by phase, in order: no new pair crosses a pair
        that is in place already."""
        before, after = self._phases
        placed = sorted((i, j) for j, i in self.partner.items() if j not in self.moved)
        for stretches in gaps(placed, len(before), len(after)):
            a, b = self._waiting(keys, stretches)
            found = common_subsequence(
                [(before[i], keys[0][i]) for i in a], [(after[j], keys[1][j]) for j in b]
            )
            self._take((a[i], b[j]) for i, j in found)

    def release(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Part pairs again."""
        for i, j in pairs:
            del self.partner[j]
            self.moved.discard(j)
            self.free[0].add(i)
            self.free[1].add(j)

    def relocate(self, keys: Keys) -> None:
        """Match free elements with equal keys wherever they stand, pairs within one phase first."""
        before, after = self._phases
        for same_phase in (True, False):
            a, b = self._waiting(keys, self._orders)
            candidates: dict[Hashable, list[int]] = defaultdict(list)
            for i in a:
                candidates[keys[0][i], same_phase and before[i]].append(i)
            found = []
            for j in b:
                if there := candidates[keys[1][j], same_phase and after[j]]:
                    found.append((there.pop(0), j))
            self._take(found)
            self.moved.update(j for _, j in found)
