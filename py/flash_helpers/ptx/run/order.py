"""What happened before what, among the lanes of a block.

Order is tracked with vector clocks (Lamport 1978; FastTrack, Flanagan and Freund 2009). Time is the
number of synchronising events so far. Everything that a lane did up to some time is known to
another lane if a chain of such events leads from the one to the other (PTX ISA 9.0, "Causality
Order"):

- `bar` and `barrier` order the warps that take part, and the lanes of each;
- `bar.warp.sync` orders the lanes of its mask;
- a release pattern on a word of shared memory orders its lane before the acquire pattern of a lane
  that reads the word, directly or through atomics of others ("Release and Acquire Patterns").

Shuffles, votes and matrix instructions make lanes wait for each other but order no memory: "These
intrinsics do not imply a memory barrier" (CUDA Programming Guide, "Warp Shuffle Functions"), and
the PTX ISA calls `ldmatrix`, which all lanes make together, a weak memory operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.run.faults import Geometry

_OWN = 1 << 40
"""Later than any time: what a lane knows of itself."""

_FULL = 0xFFFF_FFFF


@dataclass(frozen=True)
class Strength:
    """How an access takes part in synchronisation (PTX ISA 9.0, "Operation Types"). updates: reads
    and writes in one. observes: it returns what it reads, as `red` does not."""

    is_strong: bool = False
    acquires: bool = False
    releases: bool = False
    updates: bool = False
    observes: bool = False


WEAK = Strength()


@dataclass(frozen=True)
class Knowledge:
    """A time for every warp of a block; for every lane of it, where single lanes know more than
    that; and what they released by fences."""

    of_warps: np.ndarray
    of_lanes: np.ndarray | None
    fenced: np.ndarray | None


class Order:
    """What each lane of a batch knows of the other lanes of its block.

    `_warps[w, v]` is the time up to which every lane of warp w knows all lanes of warp v; where v
    is w itself, up to which its lanes know each other. Single lanes may know more: `_lanes`, made
    when this happens first, has a row for every lane, and a column for every lane of its warp; of
    its block, once flags have ordered lanes of different warps.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.now = 1
        self.floor = 0
        """Time up to which all lanes of every block know each other."""
        self._place = geometry.place_of(np.arange(geometry.lanes))
        self._own = (np.arange(geometry.warps), self._place[::WARP] // WARP)
        self._warps = np.zeros((geometry.warps, geometry.warps_per_cluster), np.int64)
        self._lanes: np.ndarray | None = None
        # What every lane knew when it last executed a fence, and has observed by strong reads.
        self._fenced: np.ndarray | None = None
        self._observed: np.ndarray | None = None
        # Of words of shared memory, by the first granule: who released it last, and what he knew.
        self._released: dict[int, tuple[int, np.ndarray]] = {}

    # -- questions ---------------------------------------------------------------------------------

    def known(self, lanes: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Up to which time lanes (n,) of the batch know other lanes (n, k) of their block."""
        known = self._warps[(lanes // WARP)[:, None], others // WARP]
        if self._lanes is not None:
            known = np.maximum(known, self._known_to(lanes[:, None], others))
        known[others == self._place[lanes][:, None]] = _OWN
        return known

    def known_to_all(self, lanes: np.ndarray, others: np.ndarray) -> np.ndarray:
        """As `known`, to all lanes of the warps of lanes, the others themselves left out."""
        known = self._warps[(lanes // WARP)[:, None], others // WARP]
        if self._lanes is None:
            return known
        warp = (lanes // WARP * WARP)[:, None] + np.arange(WARP)
        each = self._known_to(warp[:, None, :], others[:, :, None])
        each[self._place[warp][:, None, :] == others[:, :, None]] = _OWN
        return np.maximum(known, each.min(axis=2))

    def unknown(
        self, lanes: np.ndarray, warp: int, times: np.ndarray, masks: np.ndarray | None
    ) -> np.ndarray:
        """Whether accesses by lanes of one warp are unknown to lanes (n,) of the batch, other than
        those that made them.

        warp: of the block. times, masks: (n, k), when, and the lanes that made the access; None if
        all lanes of the warp did.
        """
        unknown = times > self._warps[lanes // WARP, warp][:, None]
        if not unknown.any():
            return unknown
        if masks is None:
            masks = np.full(times.shape, _FULL, np.uint32)
        own = self._own[1][lanes // WARP] == warp
        itself = np.where(own, np.uint32(1) << (lanes % WARP).astype(np.uint32), np.uint32(0))
        masks = masks & ~itself[:, None]
        unknown &= masks != 0
        if self._lanes is not None and unknown.any():
            i, j = np.nonzero(unknown)
            known = self._known_to(lanes[i][:, None], warp * WARP + np.arange(WARP))
            made = masks[i, j][:, None] >> np.arange(WARP, dtype=np.uint32) & 1
            unknown[i, j] = ((known < times[i, j][:, None]) & (made != 0)).any(axis=1)
        return unknown

    # -- barriers ----------------------------------------------------------------------------------

    def barrier_all(self) -> None:
        """All warps of all blocks pass a barrier."""
        self._warps[:] = self.floor = self.now
        self.now += 1

    def arrive(self, lanes: np.ndarray) -> Knowledge:
        """What lanes of the batch know, all of one block, when they arrive at a barrier."""
        warps = np.unique(lanes // WARP)
        known = self._warps[warps].copy()
        known[np.arange(warps.size), self._own[1][warps]] = self.now
        of_lanes = self._lanes[lanes].max(axis=0) if self._is_block_wide else None
        fenced = None if self._fenced is None else self._fenced[lanes].max(axis=0)
        # What a lane does after it arrived without waiting is not part of what it knows.
        self.now += 1
        return Knowledge(known.max(axis=0), of_lanes, fenced)

    def release(self, arrived: Sequence[Knowledge], lanes: np.ndarray) -> None:
        """Lanes of a block leave a barrier, knowing what all that arrived there knew."""
        warps = np.unique(lanes // WARP)
        of_warps = np.max([knowledge.of_warps for knowledge in arrived], axis=0)
        self._warps[warps] = np.maximum(self._warps[warps], of_warps)
        for knowledge in arrived:
            if knowledge.of_lanes is not None:
                self._lanes[lanes] = np.maximum(self._lanes[lanes], knowledge.of_lanes)
            if knowledge.fenced is not None:
                self._fenced[lanes] = np.maximum(self._fenced[lanes], knowledge.fenced)
        self.floor = int(self._warps.min())
        self.now += 1

    def sync_warps(self, lanes: np.ndarray, masks: np.ndarray) -> None:
        """Lanes of the batch pass a barrier of their warp. masks: the lanes that it orders, one
        element a lane, or one for all. Those of them that have ended count as arrived."""
        if int(masks.min()) == _FULL:
            warps = self._own[0] if lanes.size == self.geometry.lanes else np.unique(lanes // WARP)
            self._warps[warps, self._own[1][warps]] = self.now
            if self._own[1][-1] == 0:  # blocks of one warp
                self.floor = int(self._warps.min())
            if self._is_block_wide or self._fenced is not None:
                self._share(warps[:, None] * WARP + np.arange(WARP))
        else:
            all_masks = np.broadcast_to(masks, lanes.shape)
            for mask in np.unique(all_masks):
                warps = np.unique(lanes[all_masks == mask] // WARP)
                members = np.flatnonzero(int(mask) >> np.arange(WARP) & 1)
                together = warps[:, None] * WARP + members
                known = self._share(together)
                columns = self._place[together] % known.shape[1]
                known[together[:, :, None], columns[:, None, :]] = self.now
        self.now += 1

    def _share(self, together: np.ndarray) -> np.ndarray:
        """Lets the lanes of each row know what any of them knows, and has fenced."""
        known = self._lane_table()
        known[together] = known[together].max(axis=1, keepdims=True)
        if self._fenced is not None:
            self._fenced[together] = self._fenced[together].max(axis=1, keepdims=True)
        return known

    # -- flags -------------------------------------------------------------------------------------

    def fence(self, lanes: np.ndarray, *, acquires: bool, releases: bool) -> None:
        """Lanes of the batch execute a fence: what they observed by strong reads before it is known
        to them after it, and what they know is released by a strong write after it."""
        if acquires and self._observed is not None:
            known = self._block_table()
            known[lanes] = np.maximum(known[lanes], self._observed[lanes])
        if releases:
            if self._fenced is None:
                self._fenced = self._table(self.geometry.lanes_per_cluster)
            self._fenced[lanes] = self._all_known(lanes)
            self.now += 1

    def strong_read(self, lanes: np.ndarray, words: np.ndarray, *, acquires: bool) -> None:
        """Strong reads by lanes of the batch. words: the first granule of each."""
        if self._released:
            for word in np.unique(words).tolist():
                if word in self._released:
                    self._observe(lanes[words == word], self._released[word][1], acquires)

    def strong_write(
        self,
        lanes: np.ndarray,
        words: np.ndarray,
        strength: Strength,
    ) -> None:
        """Strong writes by lanes of the batch, one after the other. words: the first granule of
        each. What was released before an update stays released."""
        if not self._released and not strength.releases and self._fenced is None:
            return
        for lane, word in zip(lanes.tolist(), words.tolist(), strict=True):
            writer, before = self._released.pop(word, (None, None))
            if before is not None and strength.observes:
                self._observe(np.array([lane]), before, strength.acquires)
            known = None
            if strength.releases:
                known = self._all_known(np.array([lane]))[0]
            elif self._fenced is not None:
                known = self._fenced[lane].copy()
            if before is not None and (strength.updates or writer == lane):
                known = before if known is None else np.maximum(known, before)
            if known is not None:
                self._released[word] = lane, known
        self.now += 1

    def weak_write(self, rows: np.ndarray, width: int) -> None:
        """Words of so many granules are written so that nobody can acquire by reading them."""
        if self._released:
            words = np.array(list(self._released))
            for word in words[np.isin(words // width, rows)].tolist():
                del self._released[word]

    def _observe(self, lanes: np.ndarray, released: np.ndarray, acquires: bool) -> None:
        if self._observed is None:
            self._observed = self._table(self.geometry.lanes_per_cluster)
        self._observed[lanes] = np.maximum(self._observed[lanes], released)
        if acquires:
            known = self._block_table()
            known[lanes] = np.maximum(known[lanes], released)

    def _all_known(self, lanes: np.ndarray) -> np.ndarray:
        """What lanes of the batch know of every lane of their block: (n, lanes of a block)."""
        known = self._warps[lanes // WARP].repeat(WARP, axis=1)
        if self._lanes is not None:
            known = np.maximum(known, self._block_table()[lanes])
        known[np.arange(lanes.size), self._place[lanes]] = self.now
        return known

    # -- what single lanes know --------------------------------------------------------------------

    def _table(self, columns: int) -> np.ndarray:
        return np.zeros((self.geometry.lanes, columns), np.int64)

    @property
    def _is_block_wide(self) -> bool:
        return self._lanes is not None and self._lanes.shape[1] == self.geometry.lanes_per_cluster

    def _lane_table(self) -> np.ndarray:
        if self._lanes is None:
            self._lanes = self._table(WARP)
        return self._lanes

    def _block_table(self) -> np.ndarray:
        """`_lanes` with columns for all lanes of the block."""
        known = self._lane_table()
        if not self._is_block_wide:
            lanes = np.arange(self.geometry.lanes)[:, None]
            first = self._place[lanes] // WARP * WARP
            self._lanes = self._table(self.geometry.lanes_per_cluster)
            self._lanes[lanes, first + np.arange(WARP)] = known
        return self._lanes

    def _known_to(self, lanes: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Up to which time lanes of the batch know other lanes of their block, by `_lanes`."""
        if self._is_block_wide:
            return self._lanes[lanes, others]
        own = self._place[lanes] // WARP == others // WARP
        return np.where(own, self._lanes[lanes, others % WARP], 0)
