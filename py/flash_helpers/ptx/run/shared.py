"""Shared memory of a batch of blocks, and the watcher over it.

Order between warps is tracked with vector clocks (Lamport 1978; FastTrack, Flanagan and Freund
2009): time is the number of barriers released so far, and ``clock[w, v]`` is the last time up to
which everything that warp ``v`` of the same block did happened before what warp ``w`` does now.
For every granule the watcher keeps when, by which warp and by which instruction it was last
written, and for every warp when it last read it. Two accesses by different warps, one of them a
write, race unless the earlier one is known to the later one's clock. That holds for every schedule
of the warps, not only for the one that the simulator happened to choose.

A granule is as wide as the narrowest shared access of the kernel, so no two accesses that touch
different bytes can be taken for a conflict.
"""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.errors import (
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    RaceError,
    UninitialisedReadError,
)
from flash_helpers.ptx.run.faults import FaultLog, Geometry
from flash_helpers.ptx.run.memory import word_view

_SITE_BITS = 20
_SITE_MASK = (1 << _SITE_BITS) - 1
_OWN = 1 << 40
_PENDING = 1 << 61
_UNWRITTEN = 1 << 62

Selection = slice | np.ndarray
ALL = slice(None)


class SharedMemory:
    """Shared memory of all blocks of a batch, side by side.

    Args:
        size: bytes of one block.
        granule: bytes of the narrowest access of the kernel.
    """

    def __init__(
        self, geometry: Geometry, size: int, granule: int, log: FaultLog, atomics: bool
    ) -> None:
        self.geometry = geometry
        self.size = size
        self.log = log
        self.granule = granule
        self.stride = max(128, -(-size // 128) * 128)
        blocks, warps = len(geometry.blocks), geometry.warps_per_block
        self.bytes = np.zeros(blocks * self.stride, np.uint8)
        granules = blocks * self.stride // granule
        lanes = np.arange(geometry.lanes)
        self.lane_block = lanes // geometry.lanes_per_block
        self.lane_base = self.lane_block * self.stride
        self.lane_warp = lanes // 32
        self.warp_in_block = self.lane_warp % warps
        self._written = np.full(granules, _UNWRITTEN, np.int64)
        self._writer = np.zeros(granules, np.uint8)
        self._read = np.full(warps * granules, -1, np.int64)
        self._atomic = np.full(warps * granules, -1, np.int64) if atomics else None
        self._granules = granules
        self.now = 0
        self._clock = np.zeros((geometry.warps, warps), np.int64)
        self._clock[np.arange(geometry.warps), np.arange(geometry.warps) % warps] = _OWN
        self._block_floor = np.zeros(blocks, np.int64)
        if warps == 1:
            self._block_floor[:] = _OWN
        self._floor = 0
        self._set_floor()
        self._views: dict[int, _Views] = {}

    # -- addresses -------------------------------------------------------------------------

    def words(self, size: int) -> np.ndarray:
        return word_view(self.bytes, size)

    def rows(
        self, position: int, addresses: np.ndarray, size: int, selection: Selection
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Index of each lane's word in ``words(size)``, and which lanes may access it.

        The second value is None when all may; otherwise the rows of the others are meaningless.
        """
        flat = addresses + self.lane_base[selection]
        shift = size.bit_length() - 1
        if (
            int(addresses.max()) + size <= self.size
            and int(addresses.min()) >= 0
            and not int(np.bitwise_or.reduce(addresses)) & (size - 1)
        ):
            return flat >> shift, None
        inside = (addresses >= 0) & (addresses + size <= self.size)
        aligned = addresses & (size - 1) == 0
        if not inside.all():
            bad = np.flatnonzero(~inside)
            self.log.report(
                OutOfBoundsError,
                f"{size} bytes at shared address {int(addresses[bad[0]])}, "
                f"but the block has {self.size} bytes of shared memory",
                position,
                self.geometry.thread(self._lanes(selection)[bad[0]]),
                int(addresses[bad[0]]),
                bad.size,
            )
        elif not aligned.all():
            bad = np.flatnonzero(~aligned)
            self.log.report(
                MisalignedError,
                f"{size} bytes at shared address {int(addresses[bad[0]])}, "
                f"which is not a multiple of {size}",
                position,
                self.geometry.thread(self._lanes(selection)[bad[0]]),
                int(addresses[bad[0]]),
                bad.size,
            )
        return flat >> shift, inside & aligned

    def _lanes(self, selection: Selection) -> np.ndarray:
        return np.arange(self.geometry.lanes)[selection]

    # -- the watcher -----------------------------------------------------------------------

    def _view(self, size: int) -> _Views:
        views = self._views.get(size)
        if views is None:
            views = self._views[size] = _Views(self, size // self.granule)
        return views

    def note_read(self, position: int, rows: np.ndarray, size: int, selection: Selection) -> None:
        """Checks and records that lanes read words of ``size`` bytes."""
        view = self._view(size)
        codes = view.written[rows]
        if int(codes.max()) > self._floor:
            self._inspect_writes(position, rows, codes, view, selection, "read")
        if view.atomic is not None:
            self._inspect_others(position, rows, view.atomic, view, selection, "read", "an atomic")
        view.read[view.lane_reads[selection] + rows] = self.now << _SITE_BITS | position

    def note_write(
        self,
        position: int,
        rows: np.ndarray,
        size: int,
        selection: Selection,
        value: np.ndarray,
    ) -> None:
        """Checks and records that lanes are about to write ``value``, words of ``size`` bytes."""
        view = self._view(size)
        self._check_write(position, rows, view, selection)
        view.written[rows] = self.now << _SITE_BITS | position
        self._check_simultaneous(position, rows, view, selection, value)

    def note_atomic(self, position: int, rows: np.ndarray, size: int, selection: Selection) -> None:
        """Checks and records an atomic access: it races with plain ones, not with its like."""
        view = self._view(size)
        codes = view.written[rows]
        if int(codes.max()) > self._floor:
            self._inspect_writes(position, rows, codes, view, selection, "atomic access")
        self._inspect_others(position, rows, view.read, view, selection, "atomic access", "read")
        view.atomic[view.lane_reads[selection] + rows] = self.now << _SITE_BITS | position

    def begin_copy(self, position: int, rows: np.ndarray, size: int, selection: Selection) -> None:
        """Checks that lanes may overwrite words, and marks these as pending."""
        view = self._view(size)
        self._check_write(position, rows, view, selection)
        view.written[rows] = _PENDING | position
        self._check_simultaneous(position, rows, view, selection)

    def end_copy(self, position: int, rows: np.ndarray, size: int) -> None:
        """Marks words as written now by the copy that was issued at ``position``."""
        self._view(size).written[rows] = self.now << _SITE_BITS | position

    def _check_write(
        self, position: int, rows: np.ndarray, view: _Views, selection: Selection
    ) -> None:
        codes = view.written[rows]
        # Memory that nobody wrote may be written: only codes of writes and copies matter here.
        codes = np.where(codes >= _UNWRITTEN, 0, codes)
        if int(codes.max()) > self._floor:
            self._inspect_writes(position, rows, codes, view, selection, "write")
        self._inspect_others(position, rows, view.read, view, selection, "write", "read")
        if view.atomic is not None:
            self._inspect_others(position, rows, view.atomic, view, selection, "write", "an atomic")

    def _check_simultaneous(
        self,
        position: int,
        rows: np.ndarray,
        view: _Views,
        selection: Selection,
        value: np.ndarray | None = None,
    ) -> None:
        """Records the writer; two warps in one instruction race, unless they write one value."""
        warps = self.warp_in_block[selection].astype(np.uint8)
        warps = warps[:, None] if view.width > 1 else warps
        view.writer[rows] = warps
        if self.geometry.warps_per_block == 1:
            return
        lost = (view.writer[rows] != warps).reshape(rows.size, -1).any(axis=1)
        if not lost.any():
            return
        if value is not None:
            words = self.words(view.width * self.granule)
            words[rows] = value
            lost &= (words[rows] != value).reshape(rows.size, -1).any(axis=1)
        if lost.any():
            lane = int(np.flatnonzero(lost)[0])
            other = int(view.writer[rows[lane]].max())
            self._report_race(position, rows, lane, selection, "write", other, position, view)

    def _inspect_writes(
        self,
        position: int,
        rows: np.ndarray,
        codes: np.ndarray,
        view: _Views,
        selection: Selection,
        action: str,
    ) -> None:
        """The slow path: some granule was not written before the last barrier of all warps."""
        n = rows.size
        codes = codes.reshape(n, -1)
        writer = view.writer[rows].reshape(n, -1)
        warps = self.lane_warp[selection]
        known = self._clock[warps[:, None], writer]
        bad = (codes >> _SITE_BITS) > known
        if not bad.any():
            return
        lanes = self._lanes(selection)
        for kind, chosen in (
            (UninitialisedReadError, bad & (codes >= _UNWRITTEN)),
            (PendingCopyError, bad & (codes >= _PENDING) & (codes < _UNWRITTEN)),
            (RaceError, bad & (codes < _PENDING)),
        ):
            hit = chosen.any(axis=1)
            if not hit.any():
                continue
            first = int(np.flatnonzero(hit)[0])
            column = int(np.flatnonzero(chosen[first])[0])
            site = int(codes[first, column]) & _SITE_MASK
            address = self._address(rows[first], column, lanes[first], view)
            if kind is UninitialisedReadError:
                detail = f"{action} of shared address {address}, which nothing has written"
            elif kind is PendingCopyError:
                detail = (
                    f"{action} of shared address {address}, which the cp.async at "
                    f"{self.log.site(site)}\n    will write: its thread has not waited for it"
                )
            else:
                other = int(writer[first, column])
                self._report_race(
                    position, rows, first, selection, action, other, site, view, int(hit.sum())
                )
                continue
            self.log.report(
                kind,
                detail,
                position,
                self.geometry.thread(lanes[first]),
                address,
                int(hit.sum()),
            )

    def _inspect_others(
        self,
        position: int,
        rows: np.ndarray,
        marks: np.ndarray,
        view: _Views,
        selection: Selection,
        action: str,
        other_action: str,
    ) -> None:
        """Checks an access against the marks of every other warp of the block."""
        for other in range(self.geometry.warps_per_block):
            codes = marks[view.warp_reads[other] + rows]
            if int(codes.max()) <= self._floor:
                continue
            known = self._clock[self.lane_warp[selection], other]
            codes = codes.reshape(rows.size, -1)
            bad = ((codes >> _SITE_BITS) > known[:, None]).any(axis=1)
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                site = int(codes[first].max()) & _SITE_MASK
                self._report_race(
                    position,
                    rows,
                    first,
                    selection,
                    action,
                    other,
                    site,
                    view,
                    int(bad.sum()),
                    other_action,
                )

    def _report_race(
        self,
        position: int,
        rows: np.ndarray,
        first: int,
        selection: Selection,
        action: str,
        other: int,
        site: int,
        view: _Views,
        count: int = 1,
        other_action: str = "write",
    ) -> None:
        lane = self._lanes(selection)[first]
        address = self._address(rows[first], 0, lane, view)
        self.log.report(
            RaceError,
            f"{action} of shared address {address} and {other_action} by warp {other} at "
            f"{self.log.site(site)}\n    with no barrier between them",
            position,
            self.geometry.thread(lane),
            address,
            count,
        )

    def _address(self, row: np.integer, column: int, lane: np.integer, view: _Views) -> int:
        granule = int(row) * view.width + column
        return granule * self.granule - int(self.lane_base[lane])

    # -- time ------------------------------------------------------------------------------

    def barrier_all(self) -> None:
        """All warps of all blocks pass a barrier."""
        self._clock[:] = self.now
        warps = np.arange(self.geometry.warps)
        self._clock[warps, warps % self.geometry.warps_per_block] = _OWN
        self._block_floor[:] = _OWN if self.geometry.warps_per_block == 1 else self.now
        self._set_floor()

    def arrive(self, block: int, warps: np.ndarray) -> np.ndarray:
        """What warps of a block know when they arrive at a barrier: a time for every warp."""
        per_block = self.geometry.warps_per_block
        known = self._clock[block * per_block + warps].copy()
        known[np.arange(warps.size), warps] = self.now
        # What a warp does after it arrived without waiting is not part of what it knows.
        self._set_floor()
        return known.max(axis=0)

    def release(self, block: int, knowledge: np.ndarray, warps: np.ndarray) -> None:
        """Warps of a block leave a barrier, knowing what all that arrived there knew."""
        per_block = self.geometry.warps_per_block
        clock = self._clock[block * per_block : (block + 1) * per_block]
        clock[warps] = np.maximum(clock[warps], knowledge)
        clock[warps, warps] = _OWN
        self._block_floor[block] = clock.min()
        self._set_floor()

    def _set_floor(self) -> None:
        self.now += 1
        self._floor = int(self._block_floor.min()) << _SITE_BITS | _SITE_MASK


class _Views:
    """The watcher's arrays seen as rows of the granules of one access width."""

    def __init__(self, shared: SharedMemory, width: int) -> None:
        def rows(array: np.ndarray) -> np.ndarray:
            return array if width == 1 else array.reshape(-1, width)

        self.width = width
        self.written = rows(shared._written)
        self.writer = rows(shared._writer)
        self.read = rows(shared._read)
        self.atomic = None if shared._atomic is None else rows(shared._atomic)
        per_warp = shared._granules // width
        self.lane_reads = shared.warp_in_block * per_warp
        self.warp_reads = np.arange(shared.geometry.warps_per_block) * per_warp
