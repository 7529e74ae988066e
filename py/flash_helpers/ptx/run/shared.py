"""Shared memory of a batch of blocks, and the watcher over it.

Order between warps is tracked with vector clocks (Lamport 1978; FastTrack, Flanagan and Freund
2009): time is the number of barriers released so far, and `clock[w, v]` is the last time up to
which everything that warp v of the same block did happened before what warp w does now. For every
granule the watcher keeps when, by which warp and by which instruction it was last written, and for
every warp when it last read it. Two accesses by different warps, one of them a write, race unless
the earlier one is known to the later one's clock. That holds for every schedule of the warps, not
only for the one that the simulator happened to choose.

A granule is as wide as the narrowest shared access of the kernel, so no two accesses that touch
different bytes can be taken for a conflict.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import (
    PendingCopyError,
    RaceError,
    SimulatorError,
    UninitialisedReadError,
)
from flash_helpers.ptx.run.faults import FaultLog, Geometry
from flash_helpers.ptx.run.memory import Region, Selection

# A code says when and where: time above, the instruction's position below.
_SITE_BITS = 20
_SITE_MASK = (1 << _SITE_BITS) - 1
_OWN = 1 << 40
_PENDING = 1 << 61
_UNWRITTEN = 1 << 62


class SharedMemory(Region):
    """Shared memory of all blocks of a batch, side by side. size: bytes of one block. granule:
    bytes of the narrowest access of the kernel."""

    def __init__(
        self, geometry: Geometry, size: int, granule: int, log: FaultLog, atomics: bool
    ) -> None:
        self.geometry = geometry
        self.log = log
        self.granule = granule
        self.stride = max(128, -(-size // 128) * 128)
        blocks, warps = len(geometry.blocks), geometry.warps_per_block
        self.lane_ids = np.arange(geometry.lanes)
        base = self.lane_ids // geometry.lanes_per_block * self.stride
        super().__init__(np.zeros(blocks * self.stride, np.uint8), size, base, "shared memory")
        granules = blocks * self.stride // granule
        self.lane_warp = self.lane_ids // WARP
        self.warp_in_block = self.lane_warp % warps
        self._written = np.full(granules, _UNWRITTEN, np.int64)
        self._writer = np.zeros(granules, np.uint8)
        self._read = np.full(warps * granules, -1, np.int64)
        self._atomic = np.full(warps * granules, -1, np.int64) if atomics else None
        self.now = 0
        self._clock = np.zeros((geometry.warps, warps), np.int64)
        self._clock[np.arange(geometry.warps), np.arange(geometry.warps) % warps] = _OWN
        self._block_floor = np.full(blocks, _OWN if warps == 1 else 0, np.int64)
        self._floor = 0
        self._set_floor()
        self._views: dict[int, _Views] = {}

    def outside(self, address: int, size: int) -> str:
        """What is said of an access outside."""
        return (
            f"{size} bytes at shared address {address}, "
            f"but the block has {self.size} bytes of shared memory"
        )

    def misaligned(self, address: int, size: int) -> str:
        """What is said of an access at an address that is not a multiple of its size."""
        return f"{size} bytes at shared address {address}, which is not a multiple of {size}"

    # -- the watcher -------------------------------------------------------------------------------

    def note(
        self,
        action: str,
        position: int,
        rows: np.ndarray,
        size: int,
        selection: Selection,
        value: np.ndarray | None = None,
    ) -> None:
        """Checks and records what lanes do, or are about to do, to words of `size` bytes.

        action: "read"; "write", of `value`; "atomic access", which races with plain ones but not
        with its like; "copy", a write of words that are pending until `end_copy`. rows: index of
        each lane's word in `words(size)`.
        """
        view, is_write = self._view(size), action in ("write", "copy")
        access = _Access("write" if is_write else action, position, rows, view, selection)
        written = view.written[rows]
        # Memory that nobody wrote may be written: only codes of writes and copies matter then.
        self._check_written(
            access, np.where(written < _UNWRITTEN, written, 0) if is_write else written
        )
        if action != "read":
            self._check_others(access, view.read, "read")
        if view.atomic is not None and action != "atomic access":
            self._check_others(access, view.atomic, "an atomic")
        if is_write:
            view.written[rows] = _PENDING | position if action == "copy" else self._code(position)
            self._check_simultaneous(access, value)
        else:
            marks = view.read if action == "read" else view.atomic
            marks[view.lane_reads[selection] + rows] = self._code(position)

    def initialise(self, start: int, size: int) -> None:
        """Marks zeros in the shared memory of every block as written before the launch."""
        granules = self._written.reshape(-1, self.stride // self.granule)
        granules[:, start // self.granule : (start + size) // self.granule] = 0

    def end_copy(self, position: int, rows: np.ndarray, size: int) -> None:
        """Marks words as written now by the copy that was issued at a position."""
        self._view(size).written[rows] = self._code(position)

    def _code(self, position: int) -> int:
        return self.now << _SITE_BITS | position

    def _view(self, size: int) -> _Views:
        if size not in self._views:
            self._views[size] = _Views(self, size // self.granule)
        return self._views[size]

    def _check_simultaneous(self, access: _Access, value: np.ndarray | None) -> None:
        """Records the writer; two warps in one instruction race, unless they write one value."""
        view, rows = access.view, access.rows
        warps = self.warp_in_block[access.selection].astype(np.uint8)
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
            self._report_race(access, lane, other, access.position)

    def _check_written(self, access: _Access, codes: np.ndarray) -> None:
        """Checks an access against the last writes."""
        if int(codes.max()) <= self._floor:
            return
        # Some granule was not written before the last barrier of all warps.
        n = access.rows.size
        codes = codes.reshape(n, -1)
        writer = access.view.writer[access.rows].reshape(n, -1)
        known = self._clock[self.lane_warp[access.selection][:, None], writer]
        bad = (codes >> _SITE_BITS) > known
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
            count = int(hit.sum())
            if kind is RaceError:
                self._report_race(access, first, int(writer[first, column]), site, count)
                continue
            reason = "nothing has written"
            if kind is PendingCopyError:
                reason = (
                    f"the cp.async at {self.log.site(site)}\n    will write: its thread has not "
                    "waited for it"
                )
            self._report(kind, access, first, column, count, f", which {reason}")

    def _check_others(self, access: _Access, marks: np.ndarray, other_action: str) -> None:
        """Checks an access against the marks of every other warp of the block."""
        for other in range(self.geometry.warps_per_block):
            codes = marks[access.view.warp_reads[other] + access.rows]
            if int(codes.max()) <= self._floor:
                continue
            known = self._clock[self.lane_warp[access.selection], other]
            codes = codes.reshape(access.rows.size, -1)
            bad = ((codes >> _SITE_BITS) > known[:, None]).any(axis=1)
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                site = int(codes[first].max()) & _SITE_MASK
                self._report_race(access, first, other, site, int(bad.sum()), other_action)

    def _report_race(
        self,
        access: _Access,
        first: int,
        other: int,
        site: int,
        count: int = 1,
        other_action: str = "write",
    ) -> None:
        text = (
            f" and {other_action} by warp {other} at {self.log.site(site)}\n    with no barrier "
            "between them"
        )
        self._report(RaceError, access, first, 0, count, text)

    def _report(
        self,
        kind: type[SimulatorError],
        access: _Access,
        first: int,
        column: int,
        count: int,
        text: str,
    ) -> None:
        """first: of the rows. column: of the granules of its word."""
        lane = self.lane_ids[access.selection][first]
        granule = int(access.rows[first]) * access.view.width + column
        address = granule * self.granule - int(self.base[lane])
        detail = f"{access.action} of shared address {address}{text}"
        thread = self.geometry.thread(lane)
        self.log.report(kind, detail, access.position, thread, address, count)

    # -- time --------------------------------------------------------------------------------------

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
        per_warp = len(self.written)
        self.lane_reads = shared.warp_in_block * per_warp
        self.warp_reads = np.arange(shared.geometry.warps_per_block) * per_warp


@dataclass(frozen=True)
class _Access:
    """What some lanes do to words of one width; rows: index of each lane's word."""

    action: str
    position: int
    rows: np.ndarray
    view: _Views
    selection: Selection
