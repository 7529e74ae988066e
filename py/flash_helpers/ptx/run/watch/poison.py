"""Poison: bytes of registers and memory with undefined values.

They come from shared or local memory and from registers that nothing has written, and from lanes
that take no part in a shuffle. Reading them is no fault as long as nothing depends on the values: a
ragged tile is loaded whole, and the elements beyond its end are masked or never stored. So the
bytes of such a read are followed, as Memcheck follows undefined bytes (Seward and Nethercote 2005).
It is an error if one of them reaches global memory, an address, a branch that decides about more
than registers, a barrier, or the predicate of an instruction with a visible effect.

Nothing is followed until the first such read of a batch. From then on every action runs with the
rule of `spread` that says how its instruction passes poison on. Before it, only the instructions
that name registers which the kernel may read unwritten do (`read.registers.unset_registers`).

Each byte of a lane's register or of local memory, and each granule of shared memory, has a code. It
is 0 if the byte is clean, and otherwise names the origin of the poison: the instruction that read
it, and the address, the register or the lane.

Copying a structure copies its padding, which was never written. So bytes that may be padding may
reach global memory as long as they were only moved. Such bytes are unwritten bytes in an aligned
group of 2, 4 or 8 bytes. Written bytes precede them in the group, and written bytes follow before
its end or right after it. The kernel must store values as wide as the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol
from weakref import proxy

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import (
    MissingLanesError,
    SimulatorError,
    UninitialisedReadError,
    UninitialisedRegisterError,
)
from flash_helpers.ptx.read.registers import CARRY
from flash_helpers.ptx.read.types import size_of
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.run.watch.faults import FaultLog

Codes = np.ndarray
"""int64, (bytes, lanes). One row stands for all bytes."""

_SITE_BITS = 20
_SITE_MASK = (1 << _SITE_BITS) - 1
_UNREAD = _SITE_MASK
"""The site of a register that nothing has read yet."""
_ADDRESS_BITS = 39
_LAST_ADDRESS = (1 << _ADDRESS_BITS) - 1
_KIND = 1 << (_SITE_BITS + _ADDRESS_BITS)
_SHARED, _LOCAL, _LANE, _REGISTER = (kind * _KIND for kind in range(4))
_POISON = 4 * _KIND
COUNTS = 2 * _POISON
"""Bit of every code, except for padding that was only moved."""


@dataclass(frozen=True)
class Memory:
    """Knowledge of one memory. `size`, `granule`: bytes. `is_written`: whether granules were
    written, by their index."""

    size: int
    granule: int
    is_written: Callable[[np.ndarray], np.ndarray]


class Carrier(Protocol):
    """The rules by which instructions pass poison on (`spread.Spread`)."""

    def load(self, position: int, selection: Selection, codes: Codes) -> None:
        """Records that words that the instruction at a position has read are its results."""

    def widest_store(self, space: str) -> int:
        """Bytes of the widest value that the kernel stores there; 0 if it stores none."""


@dataclass(eq=False, repr=False)
class Poison:
    """The poison of a batch.

    `types`: types of registers, by name. `spaces`: the memory of each state space that may hold
    poison. `begin`: called at the first poisoned read; returns a carrier that lives on elsewhere.
    """

    geometry: Geometry
    log: FaultLog
    types: Mapping[str, str]
    spaces: Mapping[str, Memory]
    begin: Callable[[], Callable[[], Carrier] | None] | None = None

    def __post_init__(self) -> None:
        self.lane_ids = np.arange(self.geometry.lanes)
        self.registers: dict[str, Codes] = {}
        """Codes of the registers that hold poison."""
        self._unset: frozenset[str] = frozenset()
        self.active = False
        self.stored: Codes | None = None
        """Codes, over all lanes, of the words that the current instruction stores; None: all
        clean."""
        self._memory: dict[str, np.ndarray] = {}
        self._carrier: Carrier
        """From `start` on."""

    # -- registers ---------------------------------------------------------------------------------

    def of(self, name: str, selection: Selection) -> Codes | None:
        """Codes of a register; None if all of it is clean."""
        held = self.registers.get(name)
        return None if held is None else held[:, selection]

    def put(self, name: str, selection: Selection, codes: Codes | None) -> None:
        """Sets codes of a register. Fewer rows than it has bytes: it was extended by its sign."""
        held = self.registers.get(name)
        if codes is None or not codes.any():
            if held is not None:
                held[:, selection] = 0
                if not held.any():
                    del self.registers[name]
            return
        if held is None:
            size = 1 if name == CARRY else size_of(self.types[name])
            held = self.registers[name] = np.zeros((size, self.lane_ids.size), np.int64)
        held[:, selection] = codes[-1]
        held[: len(codes), selection] = codes[: len(held)]

    def add(self, name: str, selection: Selection, codes: Codes) -> None:
        """Adds poison to a register."""
        held = self.of(name, selection)
        if held is None:
            self.put(name, selection, codes)
        else:
            rows = np.repeat(codes[-1:], len(held), axis=0)
            rows[: len(codes)] = codes[: len(held)]
            self.put(name, selection, np.maximum(held, rows))

    def unset(self, names: Iterable[str], lanes: np.ndarray) -> None:
        """Poisons registers that nothing has written yet."""
        self._unset = frozenset(names)
        index = {name: i for i, name in enumerate(self.types)}
        for name in names:
            code = COUNTS | _POISON | _REGISTER | index[name] << _SITE_BITS | _UNREAD
            self.put(name, lanes, np.full((1, lanes.size), code))

    def read(self, position: int, names: Set[str], selection: Selection) -> bool:
        """An instruction is the first to read those registers of lanes that nothing has written or
        read; returns whether there are any."""
        any_first = False
        for name in self._unset & self.registers.keys() & names:
            held = self.registers[name]
            codes = held[:, selection]
            first = codes & _SITE_MASK == _UNREAD
            if first.any():
                any_first = True
                held[:, selection] = np.where(first, codes & ~_SITE_MASK | position, codes)
        return any_first

    def forget(self, names: Iterable[str], selection: Selection) -> None:
        """Registers of lanes are clean from now on, since nothing reads them before it writes
        them."""
        for name in self.registers.keys() & names:
            self.put(name, selection, None)

    def end(self, lanes: np.ndarray) -> None:
        """Lanes end."""
        self.forget(list(self.registers), lanes)

    def lost(self, position: int, lanes: np.ndarray, sources: np.ndarray, gone: np.ndarray) -> None:
        """Lanes get values from lanes that take no part in a shuffle. `sources`: these lanes.
        `gone`: which of them have ended."""
        self.start()
        origin = sources % WARP + WARP * gone
        codes = COUNTS | _POISON | _LANE | origin.astype(np.int64) << _SITE_BITS | position
        self._carrier.load(position, lanes, codes[None])

    # -- memory ------------------------------------------------------------------------------------

    def touch(
        self,
        action: str,
        position: int,
        space: str,
        addresses: np.ndarray,
        rows: np.ndarray,
        size: int,
        selection: Selection,
        unwritten: np.ndarray | None,
    ) -> None:
        """An access by lanes to words of `size` bytes, as in `LaneWatch.note`. `unwritten`: which
        granules of each word nothing has written, (lanes, granules of a word); None for none."""
        if not self.active:
            if unwritten is None:
                return
            self.start()
        stored = None
        if self.stored is not None:
            stored = self.stored[:, selection]
            stored = stored.repeat(size // len(stored), axis=0)
        if space not in self.spaces:
            if stored is not None and space == "global":
                stored = np.where(stored & COUNTS, stored, 0)
                self.report(position, selection, stored, "the value that goes to global memory")
            return
        instruction = self.log.program.instructions[position]
        is_atomic = instruction.name in ("atom", "red")
        if action in ("write", "copy") and not is_atomic:
            self._hold(space, rows, size, stored)
        else:
            old = self.in_memory(position, space, addresses, rows, size, unwritten)
            if is_atomic:
                replaces = instruction.has("exch")
                old = self._exchange(space, rows, size, old, stored, replaces=replaces)
            if old is not None and old.any():
                self._carrier.load(position, selection, old)

    def copied_out(
        self,
        position: int,
        lanes: np.ndarray,
        granules: np.ndarray,
        addresses: np.ndarray,
        unwritten: np.ndarray | None,
    ) -> None:
        """Reports unwritten granules of shared memory that a copy by each of some lanes takes to
        global memory.

        `granules`: their indices. `addresses`: address of each in its block. `unwritten`: which
        granules have never been written; None for none.
        """
        codes = self._codes_out(position, granules, addresses, unwritten)
        codes = np.where(codes & COUNTS, codes, 0)
        if codes.any():
            worst = np.full((1, lanes.size), codes.max())
            self.report(position, lanes, worst, "what goes to global memory")

    def _codes_out(
        self,
        position: int,
        granules: np.ndarray,
        addresses: np.ndarray,
        unwritten: np.ndarray | None,
    ) -> Codes:
        """Codes of granules of shared memory that a copy reads, (n,), as in `copied_out`."""
        codes = np.zeros(granules.size, np.int64)
        if "shared" in self._memory:
            codes = self._memory["shared"][granules]
        if unwritten is not None:
            began = _POISON | position | (_LAST_ADDRESS - addresses) << _SITE_BITS | COUNTS
            codes = np.where(unwritten, began, codes)
        return codes

    def copied_in(
        self,
        position: int,
        granules: np.ndarray,
        stride: int,
        source: tuple[np.ndarray, np.ndarray | None] | None,
    ) -> None:
        """A copy has written to granules of shared memory, from global memory or from other
        granules.

        `stride`: bytes per block. `source`: these other granules, and which of them nothing has
        written; None for none.
        """
        codes = None
        if source is not None:
            origin, unwritten = source
            granule = self.spaces["shared"].granule
            if unwritten is not None:
                self.start()
            codes = self._codes_out(position, origin, origin * granule % stride, unwritten)
            if codes.any() and "shared" not in self._memory:
                self._memory["shared"] = np.zeros(self.spaces["shared"].size // granule, np.int64)
        if "shared" in self._memory:
            self._memory["shared"][granules] = 0 if codes is None else codes

    def start(self) -> None:
        """Starts to follow poison, at the first read of unwritten memory."""
        if not self.active:
            begin = self.begin and self.begin()
            assert begin is not None
            self.active = True
            self._carrier = proxy(begin())

    def in_memory(
        self,
        position: int,
        space: str,
        addresses: np.ndarray,
        rows: np.ndarray,
        size: int,
        unwritten: np.ndarray | None,
    ) -> Codes | None:
        """Codes of words that the instruction at a position reads; None if all are clean. The other
        arguments are as in `touch`."""
        old = self._held(space, rows, size)
        if unwritten is None:
            return old
        began = self._began(position, space, addresses, rows, size, unwritten)
        return began if old is None else np.where(began, began, old)

    def _began(
        self,
        position: int,
        space: str,
        addresses: np.ndarray,
        rows: np.ndarray,
        size: int,
        unwritten: np.ndarray,
    ) -> Codes:
        granule = self.spaces[space].granule
        columns = granule * np.arange(size // granule)
        at = addresses[:, None] + columns
        code = _POISON | (_LOCAL if space == "local" else 0) | position
        # Where poisons meet, the larger code stays: that of the lower address.
        codes = code | (_LAST_ADDRESS - at) << _SITE_BITS
        codes |= np.where(self._is_padding(space, rows[:, None] * size + columns), 0, COUNTS)
        return np.where(unwritten, codes, 0).repeat(granule, axis=1).T

    def _is_padding(self, space: str, octets: np.ndarray) -> np.ndarray:
        """Whether unwritten bytes may be the padding of a structure. `octets`: their indices in the
        memory of all lanes."""
        memory = self.spaces[space]
        widest = self._carrier.widest_store(space)
        found = np.zeros(octets.shape, bool)
        for group in (2, 4, 8):
            if not memory.granule < group <= widest:
                continue
            before, after = np.zeros_like(found), np.zeros_like(found)
            for n in range(0, group + 1, memory.granule):
                at = octets - octets % group + n
                inside = at < memory.size
                written = inside & memory.is_written(np.where(inside, at, 0) // memory.granule)
                before |= written & (at < octets)
                after |= written & (at > octets)
            found |= before & after
        return found

    def _held(self, space: str, rows: np.ndarray, size: int) -> Codes | None:
        if space not in self._memory:
            return None
        granule = self.spaces[space].granule
        words = self._memory[space].reshape(-1, size // granule)
        return words[rows].repeat(granule, axis=1).T

    def _hold(self, space: str, rows: np.ndarray, size: int, codes: Codes | None) -> None:
        granule = self.spaces[space].granule
        if space not in self._memory:
            if codes is None or not codes.any():
                return
            self._memory[space] = np.zeros(self.spaces[space].size // granule, np.int64)
        words = self._memory[space].reshape(-1, size // granule)
        if codes is None:
            words[rows] = 0
        else:
            words[rows] = codes.reshape(-1, granule, rows.size).max(axis=1).T

    def _exchange(
        self,
        space: str,
        rows: np.ndarray,
        size: int,
        old: Codes | None,
        new: Codes | None,
        *,
        replaces: bool,
    ) -> Codes:
        """Updates the poison of words that an atomic changes; returns the poison of its results."""
        clean = np.zeros((size, rows.size), np.int64)
        old, new = (clean if codes is None else codes for codes in (old, new))
        # Lanes that meet at a word see the results of the others.
        _, word, count = np.unique(rows, return_inverse=True, return_counts=True)
        worst = np.zeros(count.size, np.int64)
        np.maximum.at(worst, word, np.maximum(old, new).max(axis=0))
        alone, worst = (count == 1)[word], np.broadcast_to(worst[word], clean.shape)
        self._hold(space, rows, size, np.where(alone & replaces, new, worst))
        return np.where(alone, old, worst)

    # -- where it must not come --------------------------------------------------------------------

    def report(self, position: int, selection: Selection, codes: Codes | None, what: str) -> None:
        """Reports poison of a value that an instruction uses."""
        if codes is None or not codes.any():
            return
        worst = codes.max(axis=0)
        hit = np.flatnonzero(worst)
        code = int(worst[hit[0]])
        origin, site = code >> _SITE_BITS & _LAST_ADDRESS, self.log.site(code & _SITE_MASK)
        kind: type[SimulatorError] = UninitialisedReadError
        address = None
        when = f"which nothing had written\n    when it was read at {site}"
        if code & (3 * _KIND) == _LANE:
            kind = MissingLanesError
            why = "which had ended" if origin >= WARP else "which its mask does not name"
            source = f"lane {origin % WARP}, {why}, by the shuffle at {site}"
            when = ""
        elif code & (3 * _KIND) == _REGISTER:
            kind = UninitialisedRegisterError
            source = f"register {list(self.types)[origin].partition('#')[0]}, {when}"
        else:
            space = "local" if code & _LOCAL else "shared"
            address = _LAST_ADDRESS - origin
            source = f"{space} memory, address {address}, {when}"
        detail = f"{what} comes from {source}"
        thread = self.geometry.thread(self.lane_ids[selection][hit[0]])
        self.log.report(kind, detail, position, thread, address, hit.size)
