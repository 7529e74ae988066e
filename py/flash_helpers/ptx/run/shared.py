"""Shared memory of a batch of blocks, and the watcher over it.

For every granule the watcher keeps when, by which lane and by which instruction it was last
written, and for every warp when it last read it, and which of its lanes. Two accesses by different
lanes, one of them a write, race unless the earlier one is known to the lane that makes the later
one (`order`), or both are strong. That holds for every schedule of the threads, not only for the
one that the simulator happened to choose.

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
)
from flash_helpers.ptx.run.faults import FaultLog, Geometry
from flash_helpers.ptx.run.memory import Region, Selection
from flash_helpers.ptx.run.order import WEAK, Order, Strength

# A code says when and where: time above, the instruction's position below.
_SITE_BITS = 20
_SITE_MASK = (1 << _SITE_BITS) - 1
_PENDING = 1 << 61
_UNWRITTEN = 1 << 62

_CONFLICTS = {
    ("read", False): ("strong write",),
    ("read", True): (),
    ("write", False): ("read", "matrix read", "strong read", "strong write"),
    ("write", True): ("read", "matrix read"),
}
"""With which accesses one conflicts, besides weak writes; whether it is strong (PTX ISA 9.0,
"Conflict and Data-races": two strong ones do not race)."""


class SharedMemory(Region):
    """Shared memory of all blocks of a batch, side by side. size: bytes of one block. granule:
    bytes of the narrowest access of the kernel."""

    def __init__(self, geometry: Geometry, size: int, granule: int, log: FaultLog) -> None:
        self.geometry = geometry
        self.log = log
        self.granule = granule
        self.stride = max(128, -(-size // 128) * 128)
        blocks, warps = len(geometry.blocks), geometry.warps_per_cluster
        self.lane_ids = np.arange(geometry.lanes)
        base = geometry.block_of(self.lane_ids) * self.stride
        super().__init__(np.zeros(blocks * self.stride, np.uint8), size, base, "shared memory")
        granules = blocks * self.stride // granule
        self.order = Order(geometry)
        self.place = geometry.place_of(self.lane_ids).astype(np.uint16)
        self.warp_place = self.place // WARP
        self._lane_bits = np.uint32(1) << (self.lane_ids % WARP).astype(np.uint32)
        self._written = np.full(granules, _UNWRITTEN, np.int64)
        self._writer = np.zeros(granules, np.uint16)
        self._histories = {
            name: _History(warps * granules, name)
            for name in ("read", "matrix read", "strong read", "strong write")
        }
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
        strength: Strength = WEAK,
    ) -> np.ndarray | None:
        """Checks and records what lanes do, or are about to do, to words of `size` bytes.

        action: "read"; "matrix read", which all lanes of a warp make; "write", of `value`;
        "copy", a write of words that are pending until `end_copy`, where lanes that name one word
        must have one `value`; "atomic access". rows: index of each lane's word in `words(size)`.
        Returns which granules of each word the lanes get to see, but nothing has written, (words,
        granules), or None.
        """
        view = self._view(size)
        told = {"copy": "write", "matrix read": "read"}.get(action, action)
        access = _Access(told, position, rows, view, selection, action == "matrix read")
        written = view.written[rows]
        # Memory that nobody wrote may be written: only codes of writes and copies matter then.
        is_first = written >= _UNWRITTEN if action in ("write", "copy") else None
        unwritten = self._check_written(
            access,
            written if is_first is None else np.where(is_first, 0, written),
            value if action == "write" else None,
        )
        kind = "read" if action in ("read", "matrix read") else "write"
        for name in _CONFLICTS[kind, strength.is_strong]:
            self._check_history(access, self._histories[name])
        if strength.is_strong:
            self._order_flags(access, strength, kind)
            if is_first is not None and is_first.any():
                # Not in `_written`: what is strong does not race with its like.
                view.written[rows] = np.where(is_first, 0, written)
            self._mark(access, self._histories[f"strong {kind}"])
        elif kind == "read":
            self._mark(access, self._histories[action])
        else:
            self.order.weak_write(rows, view.width)
            view.written[rows] = _PENDING | position if action == "copy" else self._code(position)
            self._check_simultaneous(access, value)
        if is_first is not None and strength.observes and is_first.any():
            unwritten = is_first.reshape(rows.size, -1)
        return unwritten

    def is_written(self, granules: np.ndarray) -> np.ndarray:
        """Whether granules of `data` were written, or are being copied to."""
        return self._written[granules] < _UNWRITTEN

    def initialise(self, start: int, size: int) -> None:
        """Marks zeros in the shared memory of every block as written before the launch."""
        granules = self._written.reshape(-1, self.stride // self.granule)
        granules[:, start // self.granule : (start + size) // self.granule] = 0

    def end_copy(self, position: int, rows: np.ndarray, size: int) -> None:
        """Marks words as written now by the copy that was issued at a position."""
        self._view(size).written[rows] = self._code(position)

    def _order_flags(self, access: _Access, strength: Strength, kind: str) -> None:
        lanes, words = self.lane_ids[access.selection], access.rows * access.view.width
        if kind == "read":
            self.order.strong_read(lanes, words, acquires=strength.acquires)
        else:
            self.order.strong_write(lanes, words, strength)

    def _code(self, position: int) -> int:
        return self.order.now << _SITE_BITS | position

    @property
    def _floor(self) -> int:
        """No code up to this one is unknown to anybody."""
        return self.order.floor << _SITE_BITS | _SITE_MASK

    def _view(self, size: int) -> _Views:
        if size not in self._views:
            self._views[size] = _Views(self, size // self.granule)
        return self._views[size]

    def _check_simultaneous(self, access: _Access, value: np.ndarray) -> None:
        """Records the writer; two lanes in one instruction race, unless they write one value: which
        of them performs the final write is undefined (CUDA Programming Guide, "SIMT
        Architecture")."""
        view, rows = access.view, access.rows
        lanes = self.place[access.selection]
        lanes = lanes[:, None] if view.width > 1 else lanes
        view.writer[rows] = lanes
        lost = np.flatnonzero((view.writer[rows] != lanes).reshape(rows.size, -1).any(axis=1))
        if not lost.size:
            return
        winners = view.writer[rows[lost]].reshape(lost.size, -1)[:, 0]
        chosen = self.lane_ids[access.selection]
        index_of = np.zeros(self.lane_ids.size, np.int64)
        index_of[chosen] = np.arange(chosen.size)
        clusters = self.geometry.cluster_of(chosen[lost])
        won = index_of[self.geometry.lane_at(clusters, winners.astype(np.int64))]
        differ = np.flatnonzero((value[lost] != value[won]).reshape(lost.size, -1).any(axis=1))
        if differ.size:
            first = int(lost[differ[0]])
            who = self._name(access, first, int(winners[differ[0]]))
            text = (
                f" and write of another value by {who}\n    in the same instruction: which of the "
                "two stays is undefined"
            )
            self._report(RaceError, access, first, 0, int(differ.size), text)

    def _check_written(
        self, access: _Access, codes: np.ndarray, value: np.ndarray | None
    ) -> np.ndarray | None:
        """Checks an access against the last weak writes; which granules there is none of, or
        None."""
        if int(codes.max()) <= self._floor:
            return None
        # Some granule was not written before the last barrier of all warps.
        n = access.rows.size
        codes = codes.reshape(n, -1)
        writer = access.view.writer[access.rows].reshape(n, -1)
        known_to = self.order.known_to_all if access.is_of_warp else self.order.known
        known = known_to(self.lane_ids[access.selection], writer)
        bad = (codes >> _SITE_BITS) > known
        if value is not None and bad.any():
            # As in `_check_simultaneous`, where the lanes came at different times.
            words = self.words(access.view.width * self.granule)[access.rows]
            same = (words == value).reshape(n, -1).all(axis=1)
            bad &= ~(same[:, None] & (codes & _SITE_MASK == access.position) & (codes < _PENDING))
        for kind, chosen in (
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
                other = f"write by {self._name(access, first, int(writer[first, column]))}"
                self._report_race(access, first, column, other, site, count)
                continue
            text = (
                f", which the cp.async at {self.log.site(site)}\n    will write: its thread has "
                "not waited for it"
            )
            self._report(kind, access, first, column, count, text)
        unwritten = codes >= _UNWRITTEN
        return unwritten if unwritten.any() else None

    def _check_history(self, access: _Access, history: _History) -> None:
        """Checks an access against those of one kind by other lanes of the block."""
        if history.newest <= self._floor:
            return
        all_codes, all_masks = access.view.of(history)
        for warp in range(self.geometry.warps_per_cluster):
            index = access.view.warp_rows[warp] + access.rows
            codes = all_codes[index]
            if int(codes.max()) <= self._floor:
                continue
            codes = codes.reshape(access.rows.size, -1)
            masks = None if all_masks is None else all_masks[index].reshape(codes.shape)
            lanes = self.lane_ids[access.selection]
            bad = self.order.unknown(lanes, warp, codes >> _SITE_BITS, masks)
            hit = bad.any(axis=1)
            if not hit.any():
                continue
            # A race between warps tells more than one within a warp.
            apart = hit & (self.warp_place[lanes] != warp)
            first = int((apart if apart.any() else hit).argmax())
            column = int(bad[first].argmax())
            code = int(codes[first, column])
            own = warp == self.warp_place[lanes[first]]
            who = "all lanes of the same warp" if own else f"warp {warp}"
            if own and masks is not None:
                each = masks[first, column] & self._lane_bits[:WARP, None]
                times = np.full(each.shape, code >> _SITE_BITS)
                other = self.order.unknown(lanes[first].repeat(WARP), warp, times, each).argmax()
                who = f"lane {other} of the same warp"
            site, count = code & _SITE_MASK, int(hit.sum())
            self._report_race(access, first, column, f"{history.action} by {who}", site, count)

    def _mark(self, access: _Access, history: _History) -> None:
        """Records an access by one or more lanes of each warp."""
        code = self._code(access.position)
        codes, masks = access.view.of(history)
        index = access.view.lane_rows[access.selection] + access.rows
        if masks is None:
            codes[index] = history.newest = code
            return
        bits = self._lane_bits[access.selection]
        bits = bits[:, None] if access.view.width > 1 else bits
        before = None
        if history.newest > self._floor:
            before = codes[index], masks[index]
        codes[index] = history.newest = code
        masks[index] = bits
        if (masks[index] != bits).any():
            # Lanes that read one granule together.
            masks[index] = 0
            np.bitwise_or.at(masks, index, bits)
        if before is not None:
            self._keep_unknown(access, index, *before, codes, masks)

    def _keep_unknown(
        self,
        access: _Access,
        index: np.ndarray,
        old_codes: np.ndarray,
        old_masks: np.ndarray,
        codes: np.ndarray,
        masks: np.ndarray,
    ) -> None:
        """Adds to what was recorded the earlier accesses by other lanes of the warp that the new
        ones do not know: who knows the new ones need not know those. The time is then the first."""
        lanes, shape = self.lane_ids[access.selection], (access.rows.size, -1)
        old_masks = old_masks & ~masks[index]
        times = np.where(old_masks != 0, old_codes >> _SITE_BITS, 0).reshape(shape)
        if int(times.max()) <= self.order.floor:
            return
        keep = np.zeros(times.shape, bool)
        for warp in np.unique(self.warp_place[lanes]).tolist():
            mine = np.flatnonzero(self.warp_place[lanes] == warp)
            others = old_masks.reshape(shape)[mine]
            keep[mine] = self.order.unknown(lanes[mine], warp, times[mine], others)
        if keep.any():
            i, j = np.nonzero(keep)
            flat = (index.reshape(-1)[i] * access.view.width) + j
            codes.reshape(-1)[flat] = old_codes.reshape(shape)[i, j]
            masks.reshape(-1)[flat] |= old_masks.reshape(shape)[i, j]

    def _report_race(
        self, access: _Access, first: int, column: int, other: str, site: int, count: int
    ) -> None:
        """other: the earlier access, in words."""
        barrier = "__syncwarp" if "same warp" in other else "barrier"
        text = f" and {other} at {self.log.site(site)}\n    with no {barrier} between them"
        self._report(RaceError, access, first, column, count, text)

    def _name(self, access: _Access, first: int, other: int) -> str:
        """A lane of the block, as seen from the lane that makes an access."""
        warp, lane = divmod(other, WARP)
        own = self.warp_place[access.selection][first]
        return f"lane {lane} of the same warp" if warp == own else f"warp {warp}"

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


class _History:
    """When and where granules were last accessed in one way, a row of them for every warp, and by
    which of its lanes. Matrix reads are made by all lanes."""

    def __init__(self, size: int, name: str) -> None:
        self.action = "read" if name != "strong write" else "write"
        self.codes = np.zeros(size, np.int64)
        self.masks = None if name == "matrix read" else np.zeros(size, np.uint32)
        self.newest = 0


class _Views:
    """The watcher's arrays seen as rows of the granules of one access width."""

    def __init__(self, shared: SharedMemory, width: int) -> None:
        def rows(array: np.ndarray) -> np.ndarray:
            return array if width == 1 else array.reshape(-1, width)

        self.width = width
        self.written = rows(shared._written)
        self.writer = rows(shared._writer)
        self._histories = {
            history: (rows(history.codes), None if history.masks is None else rows(history.masks))
            for history in shared._histories.values()
        }
        per_warp = len(self.written)
        self.lane_rows = shared.warp_place.astype(np.int64) * per_warp
        self.warp_rows = np.arange(shared.geometry.warps_per_cluster) * per_warp

    def of(self, history: _History) -> tuple[np.ndarray, np.ndarray | None]:
        """Codes and masks."""
        return self._histories[history]


@dataclass(frozen=True)
class _Access:
    """What some lanes do to words of one width. rows: index of each lane's word. is_of_warp: all
    lanes of each warp do it, whichever of them gives the address."""

    action: str
    position: int
    rows: np.ndarray
    view: _Views
    selection: Selection
    is_of_warp: bool
