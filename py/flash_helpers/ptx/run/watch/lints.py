"""Legal but suspicious uses of the copies and products of a batch: `errors.Lint`.

- Bytes of a box that lie outside of its tensor are filled with zeros (PTX ISA 9.0, "Tensors: Tiled
  Mode"). A product or a load of them takes them for data.
- Bytes that TMA delivers and that are never read are lost time, or a sign of a forgotten read.
- `wgmma.wait_group` waits for the groups of "the executing threads" ("wgmma.wait_group"). On the
  hardware a warp that has waited may release bytes that the other warps of its warpgroup read too;
  the ISA does not say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import EarlyReleaseLint, NeverReadLint, UnfencedInitLint, ZeroFillLint
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.boxes import CHUNK, Box, Span
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.layouts import MATRIX_ROWS, Layouts
from flash_helpers.ptx.run.watch.order import Knowledge, Order

_NOT_YET = np.iinfo(np.int64).max


class _Arrived(Protocol):
    """An mbarrier object (`Phased`), of which only the last arrival counts here."""

    arrived: tuple[int, int] | None


@dataclass(eq=False, repr=False)
class Lints:
    """The marks on shared memory that the lints need. `passed`: as in `Phases`. `granule`,
    `stride`: as in `SharedMemory`."""

    geometry: Geometry
    order: Order
    passed: Mapping[int, _Arrived]
    log: FaultLog
    granule: int
    stride: int

    def __post_init__(self) -> None:
        geometry, size = self.geometry, len(self.geometry.blocks) * self.stride
        # For each granule: the copy that delivered it, while it has not been read, and the copy
        # that filled it. 0 for none.
        self._unread = np.zeros(size // self.granule, np.int32)
        self._filled = np.zeros(size // self.granule, np.int32)
        # Position and lane of each copy, and whether any of its bytes was found unread.
        self._copies: list[tuple[int, int]] = [(0, 0)]
        self._told: set[int] = set()
        # Of each warp of a block and chunk: which of its groups read it last, counted from 1. Of
        # each chunk, the last product; of each warp and group, when the warp had waited for it.
        self._groups = np.zeros((geometry.warps_per_block, size // CHUNK), np.int32)
        self._products = np.zeros(size // CHUNK, np.int32)
        self._waited = np.full((geometry.warps, 16), _NOT_YET)
        self._done = np.zeros(geometry.warps, np.int64)
        self.layouts = Layouts(geometry, self.log, self.stride)

    # -- what lanes do -----------------------------------------------------------------------------

    def touch(
        self,
        action: str,
        position: int,
        rows: np.ndarray,
        width: int,
        lanes: np.ndarray,
        is_of_warp: bool,
    ) -> None:
        """An access as in `LaneWatch.note`. `width`: granules per word."""
        is_matrix = is_of_warp and rows.size % MATRIX_ROWS == 0
        granules = (rows[:, None] * width + np.arange(width)).reshape(-1)
        if action not in ("write", "copy"):
            self._read_as_data(position, granules, lanes.repeat(width))
            self._unread[granules] = 0
        if action != "read":
            self._overwrite(granules, position)
        if is_matrix and action == "read":
            self.layouts.load(position, lanes, rows.reshape(-1, MATRIX_ROWS))
        elif action == "read" and not is_of_warp:
            self.layouts.read(position, lanes, rows * (width * self.granule))
        elif is_matrix:
            self.layouts.write(position, rows.reshape(-1, MATRIX_ROWS))

    # -- what agents do ----------------------------------------------------------------------------

    def issue(self, position: int, lane: int, granules: np.ndarray, issued: Knowledge) -> None:
        """A copy to shared memory begins, issued by a lane with the knowledge `issued`."""
        self._overwrite(granules, position)
        self._check_release(position, lane, granules, issued)

    def count_at(
        self, position: int, lane: int, made: tuple[int, int, int, int], issued: Knowledge
    ) -> None:
        """The bytes of a bulk copy count at an mbarrier object. `made`: as in `Phased`."""
        time, maker, made_at, agent = made
        if self.order.stacked([issued])[1, 0, agent] < time:
            self.log.lint(
                UnfencedInitLint,
                f"the mbarrier of this copy, which warp {self.geometry.warp_of(maker)} has made at "
                f"{self.log.site(made_at)}\n    with no fence.mbarrier_init or fence.proxy.async "
                "between the two",
                position,
                self.geometry.thread(lane),
            )

    def deliver(
        self, position: int, lane: int, granules: np.ndarray, piece: Box | Span | None
    ) -> None:
        """Its bytes have come. `piece`: their piece of global memory, None if they come from
        elsewhere."""
        number = len(self._copies)
        self._copies.append((position, lane))
        self._unread[granules] = number
        if isinstance(piece, Box):
            self.layouts.deliver(position, self._chunks(granules), piece)
        if isinstance(piece, Box) and not piece.is_whole:
            outside = granules[piece.filled.reshape(granules.size, -1).any(axis=1)]
            self._unread[outside] = 0
            self._filled[outside] = number

    def copy_out(
        self,
        position: int,
        lane: int,
        granules: np.ndarray,
        piece: Box | Span | None = None,
    ) -> None:
        """A bulk copy reads granules. `piece`: the piece of global memory that it writes, if it
        writes any."""
        self._unread[granules] = 0
        if isinstance(piece, Box):
            self.layouts.store(position, lane, self._chunks(granules), piece)

    def multiply(
        self, position: int, warps: np.ndarray, groups: np.ndarray, granules: np.ndarray
    ) -> None:
        """A product of warps, (n,), of groups reads granules (n, m)."""
        self._read_as_data(position, granules.reshape(-1), (warps * WARP).repeat(granules.shape[1]))
        self._unread[granules] = 0
        chunks = granules[:, :: CHUNK // self.granule] * self.granule // CHUNK
        places = warps // len(self.geometry.blocks)
        self._groups[places[:, None], chunks] = groups[:, None] + 1
        self._products[chunks] = position

    def wait(self, warps: np.ndarray, limits: np.ndarray) -> None:
        """Warps have waited for all groups before a limit."""
        most = int(limits.max(initial=0))
        if most > self._waited.shape[1]:
            more = np.full((self.geometry.warps, max(most, self._waited.shape[1])), _NOT_YET)
            self._waited = np.concatenate([self._waited, more], axis=1)
        for warp, limit in zip(warps.tolist(), limits.tolist(), strict=True):
            if limit > self._done[warp]:
                self._waited[warp, self._done[warp] : limit] = self.order.now
                self._done[warp] = limit

    def finish(self) -> None:
        """All threads have ended."""
        self.layouts.readers.finish()
        self._report_unread(np.flatnonzero(self._unread), "when its block ends")

    # -- what is said of it ------------------------------------------------------------------------

    def _read_as_data(self, position: int, granules: np.ndarray, lanes: np.ndarray) -> None:
        filled = self._filled[granules]
        if not filled.any():
            return
        first = int((filled != 0).argmax())
        site = self.log.site(self._copies[filled[first]][0])
        address = self._address(granules[first])
        self.log.lint(
            ZeroFillLint,
            f"read of shared address {address}, which lies outside of the tensor that the copy at "
            f"{site}\n    has a box of: it holds what such bytes are filled with",
            position,
            self.geometry.thread(lanes[first]),
            address,
        )

    def _overwrite(self, granules: np.ndarray, position: int) -> None:
        unread = granules[self._unread[granules] != 0]
        if unread.size:
            self._report_unread(unread, f"when they are overwritten at {self.log.site(position)}")
            self._unread[unread] = 0
        self._filled[granules] = 0
        self.layouts.forget(granules * self.granule // CHUNK)

    def _report_unread(self, granules: np.ndarray, when: str) -> None:
        """Reports unread bytes, once per copy."""
        copies, first, counts = np.unique(
            self._unread[granules], return_index=True, return_counts=True
        )
        for copy, at, count in zip(copies.tolist(), first.tolist(), counts.tolist(), strict=True):
            if copy in self._told:
                continue
            self._told.add(copy)
            position, lane = self._copies[copy]
            address = self._address(granules[at])
            self.log.lint(
                NeverReadLint,
                f"{count * self.granule} of the bytes that this copy brings, the first at shared "
                f"address {address},\n    have not been read {when}",
                position,
                self.geometry.thread(lane),
                address,
            )

    def _check_release(
        self, position: int, lane: int, granules: np.ndarray, issued: Knowledge
    ) -> None:
        """Checks that each warp whose products read the overwritten bytes has waited for these
        products before."""
        chunks = self._chunks(granules)
        groups = self._groups[:, chunks]
        numbers = np.flatnonzero(groups.any(axis=1))
        if not numbers.size:
            return
        geometry = self.geometry
        block = int(chunks[0]) * CHUNK // self.stride
        last = groups[numbers].max(axis=1) - 1
        warps = numbers * len(geometry.blocks) + block
        waited = np.where(
            last < self._done[warps],
            self._waited[warps, np.minimum(last, self._waited.shape[1] - 1)],
            _NOT_YET,
        )
        known = self.order.warps_in(issued)
        late = waited > known[block % geometry.cluster * geometry.warps_per_block + numbers]
        if not late.any():
            return
        worst = int(late.argmax())
        column = int(groups[numbers[worst]].argmax())
        address = int(chunks[column]) * CHUNK % self.stride
        names = ", ".join(map(str, numbers[late].tolist()))
        product, load = (
            self.log.site(int(self._products[chunks[column]])),
            self.log.site(position),
        )
        passed = self.passed.get(lane)
        if passed is not None and passed.arrived is not None:
            lane, position = passed.arrived
        self.log.lint(
            EarlyReleaseLint,
            f"shared address {address} is released to the copy at {load}\n"
            f"    though warps {names} of its block have not said that they have waited for the "
            f"product at {product}:\n    another warp of the warpgroup has, for itself",
            position,
            geometry.thread(lane),
            address,
        )

    def _chunks(self, granules: np.ndarray) -> np.ndarray:
        """The chunks of granules that are those of whole chunks."""
        return granules[:: CHUNK // self.granule] * self.granule // CHUNK

    def _address(self, granule: int | np.integer) -> int:
        return int(granule) * self.granule % self.stride
