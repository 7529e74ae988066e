"""Loads, stores, atomics, and the checks that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from flash_helpers.ptx.errors import (
    BulkCopyError,
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    SimulatorError,
    UnsupportedInstruction,
)
from flash_helpers.ptx.read.module import Address, Instruction, Operand, Register, Symbol
from flash_helpers.ptx.read.types import B128, SCALAR_TYPES, TYPE_NAMES, size_of
from flash_helpers.ptx.run.instructions.forms import (
    CACHE_HINTS,
    HALVES,
    MEMORY,
    OPERATIONS,
    SCOPES,
    SPACES,
    VECTORS,
    Form,
)
from flash_helpers.ptx.run.machine import Action, Compute, Machine, pick
from flash_helpers.ptx.run.memory.regions import (
    ALL,
    RANK_SHIFT,
    WINDOW_SIZE,
    WINDOWS,
    DeviceMemory,
    Region,
    Selection,
    empty_words,
    word_view,
)
from flash_helpers.ptx.run.numbers.dtypes import dtype_of
from flash_helpers.ptx.run.numbers.rounding import flush, on_registers
from flash_helpers.ptx.run.watch.order import Strength
from flash_helpers.ptx.tensor_map import TENSOR_MAP_BYTES

SHARED_CLUSTER = "shared::cluster"
"""Shared memory of all blocks of the cluster; `shared` is that of the lane's own block alone."""
STRONG = frozenset({"volatile", "relaxed", "acquire", "release"})
"""Accesses with one of these modifiers do not race with each other (PTX ISA 9.0, "Morally
Strong")."""

# The memory as words, the index of each lane's word, and which lanes may access it; None for all.
Located = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def space_of(instruction: Instruction) -> str:
    """The state space that an instruction names, "generic" if none."""
    if instruction.has(SHARED_CLUSTER):
        return "shared"
    return instruction.first(SPACES.split()) or "generic"


def vector_length(instruction: Instruction) -> int:
    """Elements that one lane moves."""
    return int((instruction.first(("v2", "v4", "v8")) or "v1")[1:])


def access_size(instruction: Instruction) -> int:
    """Bytes that one lane moves. Raises UnsupportedInstruction for an instruction that names no
    type, or more than 32 bytes."""
    reason = "it has no type"
    if instruction.types and instruction.types[-1] in TYPE_NAMES:
        size = vector_length(instruction) * size_of(instruction.types[-1])
        if size <= 32:
            return size
        reason = f"an access of {size} bytes"
    raise UnsupportedInstruction(instruction.opcode, instruction.line, reason)


def _signed(value: int) -> int:
    """An address or offset as int64 holds it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def addresses_of(machine: Machine, operand: Operand) -> Callable[[Selection], np.ndarray]:
    """The operand `[base + offset]` as int64 addresses, one for each selected lane.

    A register of 32 bits plus its offset is an address of 32 bits: the sum is taken modulo 2^32, as
    in `LDS R0, [R1+0x84]`. PTX ISA 9.0, "Addresses as Operands", also truncates a register of 64
    bits to the width of its state space. Here it stays whole: a generic address in place of one of
    shared memory, whose low half may look like one, is then reported. An instruction without a
    state space takes the generic address of a symbol.
    """
    if not isinstance(operand, Address):
        raise machine.unsupported("an address in brackets is expected")
    base, offset = operand.base, operand.offset
    if isinstance(base, Register):
        array = machine.register(base)
        if array.ndim == 2 or array.dtype == bool:
            raise machine.unsupported("a register of this type holds no address")
    else:
        start = machine.symbol(base) if isinstance(base, Symbol) else base.integer
        if start is None:
            raise machine.unsupported("a literal of floating point is no address")
        if isinstance(base, Symbol) and space_of(machine.instruction()) == "generic":
            start += machine.launch.windows.get(base.name, 0)
        array = np.broadcast_to(np.array(_signed(start), np.int64), (machine.lanes,))
    if not offset:
        return lambda selection: array[selection].astype(np.int64)
    if array.dtype.itemsize == 4:
        added = np.uint32(offset & 0xFFFF_FFFF)
        return lambda selection: (array[selection] + added).astype(np.int64)
    offset = _signed(offset)
    return lambda selection: array[selection].astype(np.int64) + offset


class Port:
    """Reads and writes of one instruction, with words of one size: checked, watched and counted."""

    def __init__(self, machine: Machine, instruction: Instruction, size: int) -> None:
        self.machine = machine
        self.position = machine.position
        self.name = ".".join(instruction.opcode.split(".")[:2])
        self.size = size
        self.shift = size.bit_length() - 1
        self.space = space_of(instruction)
        self.reaches_others = instruction.has(SHARED_CLUSTER) or self.space == "generic"
        self.is_of_warp = instruction.name in ("ldmatrix", "stmatrix")
        self.strength = _strength(instruction)

    def parts(
        self, addresses: np.ndarray, selection: Selection
    ) -> Iterator[tuple[str, np.ndarray, Selection, Selection]]:
        """Addresses by state space: the space, the addresses in it, the lanes, and the indices
        among the given ones."""
        if self.space != "generic":
            yield self.space, addresses, selection, ALL
            return
        rest = np.ones(addresses.shape, bool)
        for space, start in (*WINDOWS.items(), ("global", 0)):
            hit = rest
            if start:
                hit = (addresses >= start) & (addresses < start + WINDOW_SIZE)
                rest = rest & ~hit
            if hit.all():
                yield space, addresses - start, selection, ALL
            elif hit.any():
                yield space, addresses[hit] - start, self.machine.lanes_of(selection)[hit], hit

    def places(
        self, addresses: np.ndarray, selection: Selection
    ) -> tuple[np.ndarray, np.ndarray, Selection]:
        """Places in `shared.data` of words that must lie in shared memory. Returns the lanes whose
        words do, their places, and their indices among the selected lanes."""
        machine, lanes = self.machine, self.machine.lanes_of(selection)
        places, good = np.zeros(lanes.size, np.int64), np.zeros(lanes.size, bool)
        for space, part, some, chosen in self.parts(addresses, selection):
            if space != "shared":
                self._not_shared(part, some)
                continue
            checked = self._check(machine.shared, part, some)
            if checked is None and part is addresses and machine.geometry.cluster == 1:
                return lanes, machine.shared.offsets(part, some), ALL
            good[chosen] = True if checked is None else checked
            places[chosen] = machine.shared.offsets(part, some)
        which = np.flatnonzero(good)
        lanes, places = lanes[which], places[which]
        machine.shared.presence.check(self.name, self.position, lanes, *machine.shared.at(places))
        return lanes, places, which

    def _not_shared(self, addresses: np.ndarray, selection: Selection) -> None:
        machine = self.machine
        address, lane = int(addresses[0]), machine.lanes_of(selection)[0]
        machine.log.report(
            OutOfBoundsError,
            f"{self.size} bytes at the generic address {address:#x}, which is not one of shared "
            "memory",
            self.position,
            machine.geometry.thread(lane),
            address,
            addresses.size,
        )

    def locate(
        self,
        space: str,
        addresses: np.ndarray,
        selection: Selection,
        action: str,
        value: np.ndarray | None = None,
    ) -> Located:
        """Places of the words. `action`: an action of `LaneWatch.note`. `value`: the words that are
        written, one per lane."""
        machine, position, size = self.machine, self.position, self.size
        region = machine.regions[space]
        good = self._check(region, addresses, selection)
        lanes = selection
        if good is not None:
            addresses, lanes = addresses[good], machine.lanes_of(selection)[good]
            value = value if value is None else value[good]
        rows = region.offsets(addresses, lanes) >> self.shift
        unwritten = None
        if action == "read" and space in machine.tensor_maps:
            self._check_maps(machine.tensor_maps[space], addresses, lanes)
        if rows.size and space == "shared":
            own: Selection = ALL
            mine = lanes
            if machine.geometry.cluster > 1:
                addresses, own, mine = self._reach(action, addresses, lanes)
            unwritten = machine.shared.lanes.note(
                action,
                position,
                rows,
                size,
                lanes,
                value,
                self.strength,
                is_of_warp=self.is_of_warp,
            )
            if addresses[own].size:
                machine.tally.shared_access(position, addresses[own], size, machine.counted(mine))
        elif rows.size and space == "global":
            if machine.launch_before is not None:
                lanes_here, kind = machine.lanes_of(lanes), "read" if action == "copy" else action
                machine.launch_before.check(kind, position, lanes_here, addresses)
            if machine.copies.pending and action not in ("read", "copy"):
                self._check_sources(action, addresses, lanes)
            if machine.transfers.is_busy:
                self._check_transfers(action, addresses, lanes)
            if machine.transfers.writes is not None and action != "read":
                mine = machine.lanes_of(lanes)
                machine.transfers.writes.note(position, mine, addresses, size)
            machine.tally.global_access(position, addresses, size, machine.counted(lanes))
        elif rows.size and space == "local":
            unwritten = machine.local.note(action, rows, size)
        if rows.size and (unwritten is not None or machine.poison.active):
            machine.poison.touch(action, position, space, addresses, rows, size, lanes, unwritten)
        return region.words(size), rows, good

    def _reach(
        self, action: str, addresses: np.ndarray, selection: Selection
    ) -> tuple[np.ndarray, Selection, Selection]:
        """Checks accesses to other blocks of the cluster. Returns the addresses without ranks,
        which of them are of the own block, and the lanes of these."""
        if not int(addresses.max()) >> RANK_SHIFT:
            return addresses, ALL, selection
        machine, lanes = self.machine, self.machine.lanes_of(selection)
        blocks, addresses = machine.shared.resolve(addresses, lanes)
        for tell in (machine.shared.presence.check, machine.shared.presence.record):
            tell(action, self.position, lanes, blocks, addresses)
        own = blocks == machine.geometry.block_of(lanes)
        return addresses, own, lanes[own]

    def read(self, space: str, addresses: np.ndarray, selection: Selection) -> np.ndarray:
        """The words at the addresses, zeros for lanes that may not read."""
        words, rows, good = self.locate(space, addresses, selection, "read")
        return words[rows] if good is None else _fill(words[rows], good)

    def write(
        self, space: str, addresses: np.ndarray, selection: Selection, value: np.ndarray
    ) -> None:
        """Writes one word per lane, except for lanes that may not write."""
        words, rows, good = self.locate(space, addresses, selection, "write", value)
        words[rows] = value if good is None else value[good]

    def _check_sources(self, action: str, addresses: np.ndarray, selection: Selection) -> None:
        """Reports writes to global memory that a pending copy reads."""
        machine = self.machine
        hit, text = machine.copies.sources_at(addresses, self.size)
        if text:
            first = int(np.flatnonzero(hit)[0])
            machine.log.report(
                PendingCopyError,
                f"{action} of {self.size} bytes of global memory, which the cp.async at {text}",
                self.position,
                machine.geometry.thread(machine.lanes_of(selection)[first]),
                int(addresses[first]),
                int(hit.sum()),
            )

    def _check_transfers(self, action: str, addresses: np.ndarray, selection: Selection) -> None:
        """Reports accesses to global memory that a pending bulk copy writes, and writes to memory
        that it reads."""
        hit, text = self.machine.transfers.pending_at(
            addresses, self.size, is_read=action == "read", is_atomic=self.strength.updates
        )
        if text:
            first = int(np.flatnonzero(hit)[0])
            self.machine.log.report(
                PendingCopyError,
                f"{action} of {self.size} bytes of global memory, which a bulk copy {text}",
                self.position,
                self.machine.geometry.thread(self.machine.lanes_of(selection)[first]),
                int(addresses[first]),
                int(hit.sum()),
            )

    def _check_maps(self, maps: np.ndarray, addresses: np.ndarray, selection: Selection) -> None:
        """Reports loads of bytes of tensor maps. `maps`: their addresses."""
        hit = (addresses[:, None] < maps + TENSOR_MAP_BYTES) & (
            addresses[:, None] + self.size > maps
        )
        lanes = self.machine.lanes_of(selection)[hit.any(axis=1)]
        if lanes.size:
            self.machine.log.report(
                BulkCopyError,
                f"load of {self.size} bytes of a tensor map: it is opaque, only its address may be "
                "used (as a parameter, it must be const __grid_constant__)",
                self.position,
                self.machine.geometry.thread(lanes[0]),
                int(addresses[hit.any(axis=1)][0]),
                lanes.size,
            )

    def _check(
        self, region: Region | DeviceMemory, addresses: np.ndarray, selection: Selection
    ) -> np.ndarray | None:
        """Reports accesses that are not inside the memory, or not aligned; returns the lanes that
        may go on, None for all."""
        size, machine = self.size, self.machine
        low, high = int(addresses.min()), int(addresses.max())
        start, end = region.extent(low) or (0, 0)
        is_aligned = not int(np.bitwise_or.reduce(addresses)) & (size - 1)
        if start <= low and high + size <= end and is_aligned:
            return None
        inside, aligned = region.inside(addresses, size), addresses & (size - 1) == 0
        kind: type[SimulatorError] = OutOfBoundsError
        bad, detail = np.flatnonzero(~inside), region.outside
        if region is machine.shared and not self.reaches_others and not bad.size:
            inside &= ~machine.shared.is_remote(addresses, machine.lanes_of(selection))
            bad, detail = np.flatnonzero(~inside), machine.shared.beyond
        if not bad.size:
            kind, bad, detail = MisalignedError, np.flatnonzero(~aligned), region.misaligned
        if not bad.size:
            return None
        address = int(addresses[bad[0]])
        thread = machine.geometry.thread(machine.lanes_of(selection)[bad[0]])
        machine.log.report(kind, detail(address, size), self.position, thread, address, bad.size)
        return inside & aligned


def _strength(instruction: Instruction) -> Strength:
    is_atomic = instruction.name in ("atom", "red")
    order = instruction.first(("acquire", "release", "acq_rel"))
    return Strength(
        is_strong=is_atomic or instruction.first(STRONG) is not None,
        acquires=order in ("acquire", "acq_rel"),
        releases=order in ("release", "acq_rel"),
        updates=is_atomic,
        observes=instruction.name == "atom",
    )


def _fill(rows: np.ndarray, good: np.ndarray) -> np.ndarray:
    """Rows of the good lanes, with zeros for the others in between."""
    full = np.zeros((good.size, *rows.shape[1:]), rows.dtype)
    full[good] = rows
    return full


def _load(machine: Machine, instruction: Instruction) -> Action:
    """ld, ldu and ld.global.nc, scalar and vector."""
    target, address = instruction.operands[:2]
    type_name, size = instruction.types[-1], access_size(instruction)
    if type_name != B128 and SCALAR_TYPES[type_name].kind == "f":
        # A register may be wider: then the bits are extended, not the number.
        type_name = f"b{SCALAR_TYPES[type_name].bits}"
    registers = machine.elements(target, vector_length(instruction))
    destinations = [machine.destination(e, type_name) for e in registers]
    addresses = addresses_of(machine, address)
    port = Port(machine, instruction, size)
    dtype = dtype_of(type_name)

    def run_some(selection: Selection) -> None:
        at = addresses(selection)
        value = empty_words(at.size, size)
        for space, part, lanes, chosen in port.parts(at, selection):
            value[chosen] = port.read(space, part, lanes)
        rows = value.view(dtype).reshape(at.size, len(destinations), -1)
        for i, destination in enumerate(destinations):
            destination[selection] = rows[:, i].reshape(at.size, *destination.shape[1:])

    return machine.from_some(run_some)


def _store(machine: Machine, instruction: Instruction) -> Action:
    """st, scalar and vector."""
    address, source = instruction.operands[:2]
    if space_of(instruction) in ("param", "const"):
        raise machine.unsupported("this space is read-only in a kernel")
    type_name, size = instruction.types[-1], access_size(instruction)
    if type_name != B128 and not SCALAR_TYPES[type_name].is_float:
        type_name = f"u{SCALAR_TYPES[type_name].bits}"
    elements = machine.elements(source, vector_length(instruction))
    for element in elements:
        if type_name == "f32" and machine.width(element) > 32:
            # The ISA chops the bits ("Operand Size Exceeding Instruction-Type Size"), ptxas 13.0
            # converts an integer of 64 bits to f32.
            raise machine.unsupported("a register of 64 bits for an f32")
    sources = [machine.source(e, type_name) for e in elements]
    addresses = addresses_of(machine, address)
    port = Port(machine, instruction, size)
    dtype = dtype_of(type_name)

    def run_some(selection: Selection) -> None:
        at = addresses(selection)
        rows = np.empty((at.size, len(sources), *sources[0].shape[1:]), dtype)
        for i, element in enumerate(sources):
            rows[:, i] = pick(element, selection)
        value = word_view(rows.reshape(-1).view(np.uint8), size)
        for space, part, lanes, chosen in port.parts(at, selection):
            port.write(space, part, lanes, value[chosen])

    return machine.from_some(run_some)


# -- atomics ---------------------------------------------------------------------------------------


def _swapped(old: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.where(old == b, c, old)


ATOMICS: Mapping[str, Compute] = {
    **OPERATIONS,
    "exch": lambda old, b: b,
    "cas": _swapped,
    "inc": lambda old, b: np.where(old >= b, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - old.dtype.type(1)),
}
"""The new value from the old one and the sources."""


def _turns(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Lanes that meet at one word take turns: turn n is every word's n-th lane."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    turn = np.empty(rows.size, np.int64)
    turn[order] = np.arange(rows.size) - np.repeat(starts, np.diff(np.r_[starts, rows.size]))
    for n in range(int(turn.max()) + 1 if rows.size else 0):
        yield np.flatnonzero(turn == n)


# PTX ISA 9.0, "atom": the elements of a vector, by type, and what is done to them.
_IN_VECTORS: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "f32": ((2, 4), ("add",)),
    **dict.fromkeys(("f16", "bf16"), ((2, 4, 8), ("add", "min", "max"))),
    **dict.fromkeys(("f16x2", "bf16x2"), ((2, 4), ("add", "min", "max"))),
}


def _added_with_flush(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    return flush(flush(old) + flush(b))


def _updated(machine: Machine, instruction: Instruction, name: str, count: int) -> Compute:
    """The function of an atomic of `count` elements."""
    type_name = instruction.types[-1]
    if count > 1:
        counts, names = _IN_VECTORS.get(type_name, ((), ()))
        if count not in counts or name not in names or space_of(instruction) != "global":
            raise machine.unsupported(f"{name} of {count} elements of {type_name}")
    elif type_name in HALVES.split() and name != "add":
        raise machine.unsupported("only addition for 16-bit floats")
    if not SCALAR_TYPES[type_name].is_float:
        return ATOMICS[name]
    if name in ("and", "or", "xor"):
        raise machine.unsupported("a logic operation of floats")
    return on_registers(type_name, {"min": np.fmin, "max": np.fmax}.get(name, ATOMICS[name]))


def _atomic(machine: Machine, instruction: Instruction) -> Action:
    """atom and red: lanes act one after the other, in the order of their numbers.

    PTX ISA 9.0, "atom": an addition of .f32 "on global memory flushes subnormal inputs and results
    to sign-preserving zero", one in shared memory does not.
    """
    operands = list(instruction.operands)
    type_name, count = instruction.types[-1], vector_length(instruction)
    name = machine.one_of(ATOMICS)
    function = _updated(machine, instruction, name, count)
    in_global = _added_with_flush if (name, type_name) == ("add", "f32") else function
    destinations = []
    if instruction.name == "atom":
        elements = machine.elements(operands.pop(0), count)
        destinations = [machine.destination(e, type_name) for e in elements]
    given = 2 if name == "cas" else 1
    if len(operands) <= given:
        raise machine.unsupported(f"{name} has {given} sources")
    addresses = addresses_of(machine, operands[0])
    sources = [
        [machine.source(e, type_name) for e in machine.elements(o, count)]
        for o in operands[1 : 1 + given]
    ]
    dtype = dtype_of(type_name)
    port = Port(machine, instruction, dtype.itemsize * count)
    # The old value may be anything.
    action = "write" if name == "exch" else "atomic access"

    def columns(elements: list[np.ndarray], selection: Selection, lanes: int) -> np.ndarray:
        """(lanes, elements)"""
        values = [np.broadcast_to(pick(e, selection), lanes) for e in elements]
        return np.stack(values, axis=-1)

    def perform(space: str, at: np.ndarray, selection: Selection) -> np.ndarray:
        _, rows, good = port.locate(space, at, selection, action)
        words = machine.regions[space].words(dtype.itemsize).view(dtype)
        places = rows[:, None] * count + np.arange(count)
        values = [columns(elements, selection, at.size) for elements in sources]
        if good is not None:
            values = [v[good] for v in values]
        update = in_global if space == "global" else function
        old = np.zeros(places.shape, dtype)
        for mine in _turns(rows):
            old[mine] = words[places[mine]]
            new = update(old[mine].reshape(-1), *[v[mine].reshape(-1) for v in values])
            words[places[mine]] = new.reshape(-1, count)
        return old if good is None else _fill(old, good)

    def run_some(selection: Selection) -> None:
        at = addresses(selection)
        old = np.zeros((at.size, count), dtype)
        for space, part, lanes, chosen in port.parts(at, selection):
            old[chosen] = perform(space, part, lanes)
        for i, destination in enumerate(destinations):
            destination[selection] = old[:, i]

    return machine.from_some(run_some)


_ALL = f"{MEMORY} {B128}"
_SIZED = f"{SPACES} {VECTORS}"
_IGNORED = f"{SCOPES} {CACHE_HINTS} weak mmio"
_ATOMIC = f"global shared shared::cluster {VECTORS} relaxed release and or xor add min max inc dec"

FORMS = (
    # An operand more is a cache policy, which has no effect.
    Form("ld ldu", _load, (2, 3), (_ALL,), f"{_SIZED} volatile relaxed acquire", _IGNORED),
    Form("st", _store, (2, 3), (_ALL,), f"{_SIZED} volatile relaxed release", _IGNORED),
    Form(
        "atom",
        _atomic,
        (3, 4, 5),
        (MEMORY,),
        f"{_ATOMIC} acquire acq_rel exch cas",
        f"{_IGNORED} noftz",
    ),
    Form("red", _atomic, (2, 3, 4), (MEMORY,), _ATOMIC, f"{_IGNORED} noftz"),
)
