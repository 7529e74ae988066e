"""Marks on shared memory: the time, the lane or agent, and the instruction of the last accesses to
each granule.

For every granule there is the last write by a lane or an agent (`order`), and for every warp its
last read, with the lanes that made it. A granule is as wide as the narrowest shared access of the
kernel, so no two accesses that touch different bytes can be taken for a conflict.

For reads by an agent there is one more row of granules, made when it first reads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import ProxyError, RaceError, SimulatorError, Site
from flash_helpers.ptx.run.memory.shared import SharedMemory
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.order import Order

# A code has the time in its upper bits and the instruction's position in its lower bits.
SITE_BITS = 20
SITE_MASK = (1 << SITE_BITS) - 1
BY_AGENT = 1 << 60
PENDING = 1 << 61
UNWRITTEN = 1 << 62

CONFLICTS = {
    ("read", False): ("strong write",),
    ("read", True): (),
    ("write", False): ("read", "matrix read", "strong read", "strong write"),
    ("write", True): ("read", "matrix read"),
}
"""Accesses with which an access conflicts, besides weak writes, and whether it is strong (PTX ISA
9.0, "Conflict and Data-races": two strong accesses do not race)."""


class Marks:
    """The marks of a batch, as arrays over the granules of all its blocks.

    `written`: codes of the last writes. `writer`: the place of each writer in its cluster, or the
    agent where the code says so. `histories`: for each kind of access that writes do not cover, one
    row per warp. `agent_reads`: codes of reads, by agent. `objects`: the agent that stands for
    mbarrier objects, -1 while there is none. `stories`: each returns what a lane should know of an
    agent's access, issued at a position, as text that follows an error about its bytes.
    `why_pending`: returns why the cp.async of a lane that was issued at a position is pending.
    """

    def __init__(self, memory: SharedMemory, order: Order, log: FaultLog) -> None:
        geometry = self.geometry = memory.geometry
        self.order = order
        self.log = log
        self.granule = memory.granule
        self.stride = memory.stride
        self.place = geometry.place_of(memory.lane_ids).astype(np.uint16)
        self.warp_place = self.place // WARP
        granules = memory.data.size // memory.granule
        self.written = np.full(granules, UNWRITTEN, np.int64)
        self.writer = np.zeros(granules, np.uint16)
        self.histories = {
            name: History(geometry.warps_per_cluster * granules, name)
            for name in ("read", "matrix read", "strong read", "strong write")
        }
        self.agent_reads: dict[int, np.ndarray] = {}
        self.objects = -1
        self.stories: list[Callable[[int, int, int], str]] = []
        self.why_pending: Callable[[int, int], str] = lambda lane, position: NOT_WAITED
        self._views: dict[int, Views] = {}

    def is_written(self, granules: np.ndarray) -> np.ndarray:
        """Whether granules of `data` were written, or are the target of a copy."""
        return self.written[granules] < UNWRITTEN

    def initialise(self, start: int, size: int) -> None:
        """Marks zeros in the shared memory of every block as written before the launch."""
        granules = self.written.reshape(-1, self.stride // self.granule)
        granules[:, start // self.granule : (start + size) // self.granule] = 0

    def end_copy(
        self, position: int, rows: np.ndarray, size: int, agent: int | None = None
    ) -> None:
        """Marks words as written now by the copy that was issued at a position. The writers are the
        lanes that have issued it, or an agent."""
        view = self.view(size)
        view.written[rows] = self.code(position)
        if agent is not None:
            view.written[rows] |= BY_AGENT
            view.writer[rows] = agent

    def code(self, position: int) -> int:
        """The code of an access that an instruction makes now."""
        return self.order.now << SITE_BITS | position

    @property
    def floor(self) -> int:
        """The largest code up to which every lane knows all accesses."""
        return self.order.floor << SITE_BITS | SITE_MASK

    def view(self, size: int) -> Views:
        """The marks, viewed by words of `size` bytes."""
        if size not in self._views:
            self._views[size] = Views(self, size // self.granule)
        return self._views[size]

    # -- what is said of them ----------------------------------------------------------------------

    def explain(self, agent: int, lane: int | np.integer, code: int) -> str:
        """Text for a lane about the access of an agent that left a code."""
        return "".join(tell(agent, int(lane), code & SITE_MASK) for tell in self.stories)

    def will_write(
        self, agent: str | None, writer: int, viewer: int | np.integer, code: int
    ) -> str:
        """Text for bytes that an agent, or a cp.async if none, has not written yet. `writer`: the
        place of the lane that issued the cp.async. `viewer`: the lane that touches the bytes."""
        site, why = self.log.site(code & SITE_MASK), "no thread has waited for it"
        if agent is None:
            cluster = self.geometry.cluster_of(np.array([int(viewer)]))
            (lane,) = self.geometry.lane_at(cluster, np.array([writer])).tolist()
            agent, why = "the cp.async", self.why_pending(lane, code & SITE_MASK)
        return f", which {agent} at {site}\n    will write: {why}"

    def read_by_agent(
        self, agent: int, codes: np.ndarray, bad: np.ndarray, lanes: np.ndarray
    ) -> tuple[int, int, int, str]:
        """The first of the reads by an agent that no thread has waited for: its row and column, the
        number of such rows, and the text about it. `lanes`: those that touch each row."""
        hit = bad.any(axis=1)
        i = int(hit.argmax())
        j = int(bad[i].argmax())
        code = int(codes[i, j])
        how = "which may still be going on" if code >= PENDING else missing_between(RaceError, True)
        site, name = self.log.site(code & SITE_MASK), self.order.agent_name(agent)
        how += self.explain(agent, lanes[i], code)
        return i, j, int(hit.sum()), f" and read by {name} at {site}\n    {how}"

    def warp_name(self, warp: int, viewer: int | np.integer) -> str:
        """A warp of the cluster, as seen from a lane of the batch."""
        rank, number = divmod(warp, self.geometry.warps_per_block)
        if rank == self.geometry.rank_of(int(viewer)):
            return f"warp {number}"
        return f"warp {number} of the block of rank {rank}"

    def name_of(self, granule: int, viewer: int | np.integer) -> tuple[str, int]:
        """The name of a granule, as seen from a lane of the batch, and its address."""
        block, address = divmod(granule * self.granule, self.stride)
        if block == self.geometry.block_of(int(viewer)):
            return f"shared address {address}", address
        rank = block % self.geometry.cluster
        return f"shared address {address} of the block of rank {rank}", address


class History:
    """The last accesses of one kind to granules: their codes, one row per warp, and the lanes of
    the warp that made them. Matrix reads are made by all lanes."""

    def __init__(self, size: int, name: str) -> None:
        self.action = "read" if name != "strong write" else "write"
        self.codes = np.zeros(size, np.int64)
        self.masks = None if name == "matrix read" else np.zeros(size, np.uint32)
        self.newest = 0


class Views:
    """The watcher's arrays seen as rows of the granules of one access width."""

    def __init__(self, marks: Marks, width: int) -> None:
        def rows(array: np.ndarray) -> np.ndarray:
            return array if width == 1 else array.reshape(-1, width)

        self.width = width
        self.written = rows(marks.written)
        self.writer = rows(marks.writer)
        self._histories = {
            history: (rows(history.codes), None if history.masks is None else rows(history.masks))
            for history in marks.histories.values()
        }
        per_warp = len(self.written)
        self.lane_rows = marks.warp_place.astype(np.int64) * per_warp
        self.warp_rows = np.arange(marks.geometry.warps_per_cluster) * per_warp

    def of(self, history: History) -> tuple[np.ndarray, np.ndarray | None]:
        """Codes and masks."""
        return self._histories[history]


NOT_WAITED = "its thread has not waited for it"


def missed_by_wait(commit: str, group: int, committed: int, allowed: int, site: Site) -> str:
    """Text for an operation of a group that a thread's wait did not complete. `commit`: the
    instruction that closes groups. `committed`: groups that were closed before the wait.
    `allowed`: groups that it left pending."""
    if group >= committed:
        return f"no {commit} stands between it and the wait at {site}"
    left = "newest group" if allowed == 1 else f"newest {allowed} groups"
    return f"the wait at {site}\n    leaves the {left} pending, and it is in one"


def object_made_at(site: Site) -> str:
    """Text for the bytes of an mbarrier object."""
    return f", where the mbarrier object lives that was made at {site}"


def missing_between(kind: type[SimulatorError], by_agent: bool) -> str:
    """Text for the synchronisation that is missing after an access, by an agent or a lane."""
    if kind is ProxyError:
        return "with no fence.proxy.async between them"
    return f"with no {'wait for it' if by_agent else 'barrier'} between them"
