"""The order in which persistent thread blocks take tiles of queries. Standard library only.

A tile is B_r queries of one head; the tiles that the blocks of a cluster take together count as
one. The kernels compute the same order (`tile_index` and `take_tile` in
src/include/sm90/arguments.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.operations.attention_forward.problem import AttentionForward

COUNTED_FROM = 5  # tiles of a head: below, to zero the counter takes as long as it saves
_SHORT = 8  # tiles of a head
_GROUPS = (4, 3, 2)  # of heads whose tiles running clusters take at a time, the fastest first
_LAST_ROUNDS = 3  # tiles of a block of the last heads, at least


@dataclass(frozen=True)
class TileOrder:
    """The tiles of a problem, and which thread block of a device takes which.

    `B_r`: queries per tile. `sms`: streaming multiprocessors of the device. `persistent`: each
    block takes one tile after the other. `cluster`: blocks per cluster. `pairs_heads`: the blocks
    of a cluster take the same rows of as many heads, where these share K and V. `causal`: tiles
    differ in length, and the longest come first. `dynamic`: causal tiles may come from a counter.
    """

    problem: AttentionForward
    B_r: int
    sms: int
    persistent: bool
    cluster: int
    pairs_heads: bool
    causal: bool
    dynamic: bool

    @property
    def at_a_time(self) -> int:
        """Clusters that the device runs at a time."""
        return self.sms // self.cluster

    @property
    def cluster_heads(self) -> int:
        """Heads whose rows the blocks of a cluster take: as many as there are blocks, or one."""
        sharing = self.problem.heads // self.problem.kv_heads
        return self.cluster if self.pairs_heads and sharing % self.cluster == 0 else 1

    @property
    def q_tiles(self) -> int:
        """Tiles of one head. Sequences of various lengths have so many at most, whatever their
        lengths are; the others are empty."""
        if several := self.problem.sequences:
            return self.problem.len_q // self.B_r + several
        rows = self.cluster // self.cluster_heads * self.B_r
        return -(-self.problem.len_q // rows)

    @property
    def differ(self) -> bool:
        """Whether tiles differ in length."""
        return self.causal or self.problem.sequences > 0

    @property
    def heads(self) -> int:
        """Heads of all batches, those that a cluster takes together as one."""
        return self.problem.batch * self.problem.heads // self.cluster_heads

    @property
    def n_tiles(self) -> int:
        """Tiles of all heads and batches."""
        return self.q_tiles * self.heads

    @property
    def n_blocks(self) -> int:
        """Thread blocks of the grid."""
        clusters = min(self.n_tiles, self.at_a_time) if self.persistent else self.n_tiles
        return self.cluster * clusters

    @property
    def counts(self) -> bool:
        """Whether blocks take the tiles after their first from a counter. Where no block has a
        third tile the counter decides nothing: a block takes its second tile when it begins with
        its first."""
        is_long = -(-self.problem.len_q // self.B_r) >= COUNTED_FROM and not self._has_two_tiles
        return self.dynamic and self.differ and is_long

    @property
    def _has_two_tiles(self) -> bool:
        """Whether no cluster has more than two."""
        return self.n_tiles <= 2 * self.at_a_time

    @property
    def head_group(self) -> int:
        """Heads whose causal tiles are taken together, longest first.

        With a counter, a group has enough heads to give each running cluster one tile: the fewer K
        and V are in use, the less is fetched. Without a counter, all heads form one group if
        clusters have two tiles at most. Otherwise the measured fastest size is used: a quarter of
        the former for short sequences, twice as many heads for long ones. A third or a half where
        only that gives running clusters whole groups: tiles are handed out forwards and backwards
        in turn, so the cluster with the longest tile of a group gets the shortest next.
        """
        if self.counts:
            return max(1, self.at_a_time // self.q_tiles)
        if self.dynamic and self._has_two_tiles:
            return self.heads
        if self.q_tiles > _SHORT:
            return max(1, 2 * self.at_a_time // self.q_tiles)
        for groups in _GROUPS if self.dynamic else ():
            if self.at_a_time % (groups * self.q_tiles) == 0:
                return self.at_a_time // (groups * self.q_tiles)
        return max(1, self.at_a_time // (_GROUPS[0] * self.q_tiles))

    @property
    def last_heads(self) -> int:
        """Heads of the last group. Without a counter, the heads that are left.

        With a counter, the group is so large that each block takes several of its tiles. A block
        takes its next tile when it begins with one: a block whose last tile is long ends up to two
        tiles behind the others. The more heads the last group has, the shorter its last tiles are.
        """
        if not self.counts:
            return (self.heads - 1) % self.head_group + 1
        rounds = -(-_LAST_ROUNDS * self.at_a_time // self.q_tiles)
        return min(self.heads, max(self.head_group, rounds))

    @property
    def computed_tiles(self) -> int:
        """Tiles of B_r queries, idle blocks included. Where blocks are persistent and tiles are
        alike, every block counts as many tiles as the busiest one, for which the others wait."""
        tiles = self.cluster * self.n_tiles
        if self.persistent and not self.differ:
            at_a_time = self.at_a_time * self.cluster
            tiles = -(-tiles // at_a_time) * at_a_time
        return tiles

    def tiles(self) -> tuple[tuple[int, int], ...]:
        """Return the head (counted over all batches) and the block of rows of each block's tile, in
        the order of the tiles' numbers. The tiles of a cluster follow one another; the last tile of
        a head may have no rows. Of sequences of various lengths there must be one: its blocks of
        rows are -1 in empty tiles."""
        if self.problem.sequences:
            filled = range(-(-self.problem.len_q // self.B_r))
            slots = [*(filled[::-1] if self.causal else filled), -1][: self.q_tiles]
            return tuple((head, row) for row in slots for head in range(self.heads))
        together, q_tiles, heads = self.cluster_heads, self.q_tiles, self.heads
        group = self.head_group if self.causal else 1
        before = heads - (self.last_heads if self.causal else 0)
        rows = range(q_tiles)[::-1] if self.causal else range(q_tiles)
        groups = [range(first, min(first + group, before)) for first in range(0, before, group)]
        groups.append(range(before, heads))
        taken = ((head, row) for heads_of in groups for row in rows for head in heads_of)
        in_rows = self.cluster // together
        return tuple(
            (head * together + i % together, row * in_rows + i // together)
            for head, row in taken
            for i in range(self.cluster)
        )

    def known_tiles(self, block: int) -> tuple[int, ...]:
        """Return the numbers of a thread block's tiles, in its order; with a counter the first
        alone."""
        lot = self.n_blocks // self.cluster
        taker, rank = divmod(block, self.cluster)
        lots = range(1 if self.counts else -(-self.n_tiles // lot))
        turns = self.dynamic and self.differ
        taken = (n * lot + (lot - 1 - taker if turns and n % 2 else taker) for n in lots)
        return tuple(self.cluster * number + rank for number in taken if number < self.n_tiles)
