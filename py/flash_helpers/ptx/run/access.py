"""Loads, stores, atomics, and the checks that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from flash_helpers.ptx.errors import MisalignedError, OutOfBoundsError, UnsupportedInstruction
from flash_helpers.ptx.read.module import Address, Instruction, Operand, Register, Symbol, Vector
from flash_helpers.ptx.read.types import B128, SCALAR_TYPES, size_of
from flash_helpers.ptx.run.integers import Builder
from flash_helpers.ptx.run.machine import Action, Machine, pick
from flash_helpers.ptx.run.memory import (
    ARENA_BASE,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    WINDOW_SIZE,
    word_view,
)
from flash_helpers.ptx.run.rounding import F16, bf16_to_f32, f32_to_bf16
from flash_helpers.ptx.run.shared import ALL, Selection

SPACES = ("shared", "global", "local", "param", "const")
_MORALLY_STRONG = frozenset({"volatile", "relaxed", "acquire", "release"})

Addresses = Callable[[Selection], np.ndarray]


def is_whole(selection: Selection) -> bool:
    return isinstance(selection, slice) and selection == ALL


def space_of(instruction: Instruction) -> str:
    """The state space an instruction names, ``generic`` if none."""
    return next((m for m in instruction.modifiers if m in SPACES), "generic")


def vector_length(instruction: Instruction) -> int:
    """Elements that one lane moves."""
    return next((int(m[1:]) for m in instruction.modifiers if m in ("v2", "v4", "v8")), 1)


def access_size(instruction: Instruction) -> int:
    """Bytes that one lane moves.

    Raises:
        UnsupportedInstruction: the instruction names no type.
    """
    if not instruction.types:
        raise UnsupportedInstruction(instruction.opcode, instruction.line, "it names no type")
    return vector_length(instruction) * size_of(instruction.types[-1])


def elements_of(instruction: Instruction, operand: Operand) -> tuple[Operand, ...]:
    """The registers that a load or store moves.

    Raises:
        ValueError: they are not as many as the instruction's vector has.
    """
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != vector_length(instruction):
        raise ValueError(f"{len(elements)} registers for a vector of {vector_length(instruction)}")
    return elements


def addresses_of(machine: Machine, operand: Operand) -> Addresses:
    """The operand ``[base + offset]`` as int64 addresses, one for each selected lane."""
    if not isinstance(operand, Address):
        raise machine.unsupported("an address in brackets is expected")
    offset = operand.offset
    if isinstance(operand.base, Symbol):
        fixed = np.array([machine.symbol(operand.base) + offset], np.int64)
        everywhere = np.broadcast_to(fixed, (machine.lanes,))
        return lambda selection: everywhere[selection]
    array = (
        machine.register(operand.base)
        if isinstance(operand.base, Register)
        else np.full(machine.lanes, operand.base.value, np.uint64)
    )
    if offset == 0:
        return lambda selection: array[selection].astype(np.int64)

    def compute(selection: Selection) -> np.ndarray:
        addresses = array[selection].astype(np.int64)
        addresses += offset
        return addresses

    return compute


class GlobalChecker:
    """Checks the global addresses of one instruction; remembers the allocation it last met."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.machine = machine
        self.position = machine.position
        self.size = size
        self.low = self.high = 0

    def check(self, addresses: np.ndarray, selection: Selection) -> np.ndarray | None:
        """Which lanes may access memory; None when all may."""
        low, high = int(addresses.min()), int(addresses.max())
        if low < self.low or high + self.size > self.high:
            extent = self.machine.memory.extent(low)
            if extent is not None:
                self.low, self.high = extent
        misaligned = int(np.bitwise_or.reduce(addresses)) & (self.size - 1)
        if self.low <= low and high + self.size <= self.high and not misaligned:
            return None
        inside = self.machine.memory.inside(addresses, self.size)
        aligned = addresses & (self.size - 1) == 0
        lanes = self.machine.lanes_of(selection)
        if not inside.all():
            bad = np.flatnonzero(~inside)
            where = self.machine.memory.nearest(int(addresses[bad[0]]))
            self._report(OutOfBoundsError, f"{self.size} bytes, {where}", addresses, lanes, bad)
        elif not aligned.all():
            bad = np.flatnonzero(~aligned)
            self._report(
                MisalignedError,
                f"{self.size} bytes at a global address that is not a multiple of {self.size}",
                addresses,
                lanes,
                bad,
            )
        else:
            # All lanes are right, they only lie in several allocations.
            return None
        return inside & aligned

    def _report(
        self, kind: type, detail: str, addresses: np.ndarray, lanes: np.ndarray, bad: np.ndarray
    ) -> None:
        self.machine.log.report(
            kind,
            detail,
            self.position,
            self.machine.geometry.thread(lanes[bad[0]]),
            int(addresses[bad[0]]),
            bad.size,
        )


class Port:
    """Reads and writes words of one size in one state space, for one instruction.

    ``read`` returns one row of words for each lane (zeros where an access was refused); ``write``
    takes one. Both check, watch and count.
    """

    def __init__(self, machine: Machine, instruction: Instruction, space: str, size: int) -> None:
        self.machine = machine
        self.position = machine.position
        self.size = size
        self.shift = size.bit_length() - 1
        self.watched = not any(instruction.has(m) for m in _MORALLY_STRONG)
        self.checker = GlobalChecker(machine, size)
        self.counts_global = space != "const"

    def spread(
        self, addresses: np.ndarray, selection: Selection
    ) -> list[tuple[str, np.ndarray, Selection, np.ndarray | slice]]:
        """Generic addresses by state space: space, addresses in it, lanes, which of the rows."""
        parts = []
        lanes = self.machine.lanes_of(selection)
        rest = np.ones(addresses.shape, bool)
        for space, start in (
            ("shared", SHARED_WINDOW),
            ("local", LOCAL_WINDOW),
            ("param", PARAM_WINDOW),
        ):
            hit = (addresses >= start) & (addresses < start + WINDOW_SIZE)
            if hit.any():
                everyone = hit.all()
                parts.append(
                    (
                        space,
                        addresses - start if everyone else addresses[hit] - start,
                        selection if everyone else lanes[hit],
                        ALL if everyone else hit,
                    )
                )
                rest &= ~hit
        if rest.any():
            everyone = rest.all()
            parts.append(
                (
                    "global",
                    addresses if everyone else addresses[rest],
                    selection if everyone else lanes[rest],
                    ALL if everyone else rest,
                )
            )
        return parts

    def locate(
        self,
        space: str,
        addresses: np.ndarray,
        selection: Selection,
        action: str,
        value: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The memory as words, the index of each lane's word, and which lanes may go on.

        Args:
            action: ``read``, ``write`` or ``atomic``.
            value: what is written, one word a lane.
        """
        if space == "shared":
            return self._shared(addresses, selection, action, value)
        resolve = {
            "global": self._global,
            "const": self._global,
            "local": self._local,
            "param": self._param,
        }[space]
        return resolve(addresses, selection)

    def _shared(
        self,
        addresses: np.ndarray,
        selection: Selection,
        action: str,
        value: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        shared = self.machine.shared
        rows, good = shared.rows(self.position, addresses, self.size, selection)
        lanes: Selection = selection
        if good is not None:
            rows, addresses = rows[good], addresses[good]
            lanes = self.machine.lanes_of(selection)[good]
            value = value if value is None else value[good]
        if rows.size:
            if action == "atomic" or not self.watched:
                shared.note_atomic(self.position, rows, self.size, lanes)
            elif action == "read":
                shared.note_read(self.position, rows, self.size, lanes)
            else:
                shared.note_write(self.position, rows, self.size, lanes, value)
            self.machine.tally.shared_access(
                self.position, addresses, self.size, self._whole(lanes)
            )
        return shared.words(self.size), rows, good

    def _whole(self, selection: Selection) -> np.ndarray | None:
        """None for the selection of all lanes, else the lanes: the form that counting takes."""
        return None if is_whole(selection) else self.machine.lanes_of(selection)

    def _global(
        self, addresses: np.ndarray, selection: Selection
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        good = self.checker.check(addresses, selection)
        lanes: Selection = selection
        if good is not None:
            addresses = addresses[good]
            lanes = self.machine.lanes_of(selection)[good]
        if self.counts_global and addresses.size:
            self.machine.tally.global_access(
                self.position, addresses, self.size, self._whole(lanes)
            )
        rows = (addresses - ARENA_BASE) >> self.shift
        return self.machine.memory.view(self.size), rows, good

    def _offsets(
        self, addresses: np.ndarray, selection: Selection, size: int, name: str
    ) -> np.ndarray | None:
        inside = (addresses >= 0) & (addresses + self.size <= size)
        aligned = addresses & (self.size - 1) == 0
        good = inside & aligned
        if good.all():
            return None
        bad = np.flatnonzero(~good)
        first = int(addresses[bad[0]])
        kind = MisalignedError if inside.all() else OutOfBoundsError
        self.machine.log.report(
            kind,
            f"{self.size} bytes at offset {first} of {size} bytes of {name}",
            self.position,
            self.machine.geometry.thread(self.machine.lanes_of(selection)[bad[0]]),
            first,
            bad.size,
        )
        return good

    def _local(
        self, addresses: np.ndarray, selection: Selection
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        size = self.machine.launch.local_bytes
        good = self._offsets(addresses, selection, size, "local memory")
        lanes = self.machine.lanes_of(selection)
        flat = lanes * size + addresses
        flat = flat if good is None else flat[good]
        return word_view(self.machine.local, self.size), flat >> self.shift, good

    def _param(
        self, addresses: np.ndarray, selection: Selection
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        data = self.machine.launch.parameters
        good = self._offsets(addresses, selection, data.size, "parameters")
        rows = (addresses if good is None else addresses[good]) >> self.shift
        return word_view(data, self.size), rows, good


def _fill(rows: np.ndarray, good: np.ndarray) -> np.ndarray:
    """Rows of the good lanes, with zeros for the others in between."""
    full = np.zeros((good.size, *rows.shape[1:]), rows.dtype)
    full[good] = rows
    return full


def load(machine: Machine, instruction: Instruction) -> Action:
    """ld, ldu and ld.global.nc, scalar and vector."""
    target, address = instruction.operands[:2]
    space = space_of(instruction)
    type_name = instruction.types[-1]
    size = access_size(instruction)
    destinations = [machine.destination(e, type_name) for e in elements_of(instruction, target)]
    if space == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
        return _load_parameter(machine, address, type_name, destinations)
    addresses = addresses_of(machine, address)
    port = Port(machine, instruction, space, size)
    dtype = np.dtype(np.uint64) if type_name == B128 else SCALAR_TYPES[type_name].dtype

    def fetch(where: str, at: np.ndarray, selection: Selection) -> np.ndarray:
        words, rows, good = port.locate(where, at, selection, "read")
        value = words[rows]
        return value if good is None else _fill(value, good)

    def run_some(selection: Selection) -> None:
        at = addresses(selection)
        if space == "generic":
            parts = port.spread(at, selection)
            if len(parts) == 1:
                value = fetch(*parts[0][:3])
            else:
                shape = (at.size,) if size <= 8 else (at.size, size // 4)
                value = np.zeros(shape, np.dtype(f"u{min(size, 8) if size <= 8 else 4}"))
                for where, part, lanes, chosen in parts:
                    value[chosen] = fetch(where, part, lanes)
        else:
            value = fetch(space, at, selection)
        rows = value.view(dtype)
        if type_name == B128:
            destinations[0].put_some(selection, rows)
        elif len(destinations) == 1:
            if destinations[0] is not None:
                destinations[0].put_some(selection, rows.reshape(-1))
        else:
            rows = rows.reshape(value.shape[0], -1)
            for i, destination in enumerate(destinations):
                if destination is not None:
                    destination.put_some(selection, rows[:, i])

    return Action(partial(run_some, ALL), run_some)


def _load_parameter(
    machine: Machine, address: Address, type_name: str, destinations: list
) -> Action:
    """A parameter at a known offset: the same value in all lanes."""
    start = machine.symbol(address.base) + address.offset
    data = machine.launch.parameters
    size = size_of(type_name) * len(destinations)
    if start < 0 or start + size > data.size or start % size:
        raise machine.unsupported(
            f"{size} bytes at offset {start} of {data.size} bytes of parameters"
        )
    dtype = SCALAR_TYPES[type_name].dtype
    values = data[start : start + size].view(dtype)

    def run_some(selection: Selection) -> None:
        for destination, value in zip(destinations, values, strict=True):
            if destination is not None:
                destination.put_some(selection, value)

    return machine.from_some(run_some)


def store(machine: Machine, instruction: Instruction) -> Action:
    """st, scalar and vector."""
    address, source = instruction.operands[:2]
    space = space_of(instruction)
    if space in ("param", "const"):
        raise machine.unsupported("this space is read-only in a kernel")
    type_name = instruction.types[-1]
    size = access_size(instruction)
    if type_name not in (B128,):
        scalar = SCALAR_TYPES[type_name]
        bits = type_name if scalar.is_float else f"u{scalar.bits}"
    else:
        bits = B128
    sources = [machine.source(e, bits) for e in elements_of(instruction, source)]
    addresses = addresses_of(machine, address)
    port = Port(machine, instruction, space, size)
    word = np.dtype(f"u{size}") if size <= 8 else np.dtype(np.uint32)

    def gather(selection: Selection, lanes: int) -> np.ndarray:
        if len(sources) == 1 and bits != B128:
            value = pick(sources[0], selection)
            value = np.ascontiguousarray(np.broadcast_to(value, (lanes,)))
            return value.view(word)
        if bits == B128:
            return np.ascontiguousarray(sources[0][selection]).view(np.uint32).reshape(lanes, 4)
        rows = np.empty((lanes, len(sources)), sources[0].dtype)
        for i, value in enumerate(sources):
            rows[:, i] = pick(value, selection)
        value = rows.view(word)
        return value.reshape(-1) if size <= 8 else value

    def put(where: str, at: np.ndarray, selection: Selection, value: np.ndarray) -> None:
        words, rows, good = port.locate(where, at, selection, "write", value)
        words[rows] = value if good is None else value[good]

    def run_some(selection: Selection) -> None:
        at = addresses(selection)
        value = gather(selection, at.size)
        if space != "generic":
            put(space, at, selection, value)
            return
        for where, part, lanes, chosen in port.spread(at, selection):
            put(where, part, lanes, value[chosen])

    return Action(partial(run_some, ALL), run_some)


# -- atomics -----------------------------------------------------------------------------------


def _packed_add(type_name: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def add_f16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = np.ascontiguousarray(a).view(F16), np.ascontiguousarray(b).view(F16)
        return (x.astype(np.float32) + y.astype(np.float32)).astype(F16).view(a.dtype)

    def add_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = (bf16_to_f32(np.ascontiguousarray(v).view(np.uint16)) for v in (a, b))
        return f32_to_bf16(x + y).view(a.dtype)

    return add_bf16 if type_name.startswith("bf16") else add_f16


def _atomic_function(machine: Machine, name: str, type_name: str) -> Callable[..., np.ndarray]:
    """The new value from the old one and the sources."""
    if name == "add" and type_name in ("f16", "f16x2", "bf16", "bf16x2"):
        return _packed_add(type_name)
    if type_name in ("f16x2", "bf16x2", "bf16", "f16"):
        raise machine.unsupported("only addition for 16-bit floats")
    functions: dict[str, Callable[..., np.ndarray]] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, b: b,
        "cas": lambda old, b, c: np.where(old == b, c, old),
        "inc": lambda old, b: np.where(old >= b, old.dtype.type(0), old + old.dtype.type(1)),
        "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - old.dtype.type(1)),
    }
    return functions[name]


_ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def atomic(machine: Machine, instruction: Instruction) -> Action:
    """atom and red: lanes act one after the other, in the order of their numbers."""
    operands = list(instruction.operands)
    space = space_of(instruction)
    type_name = instruction.types[-1]
    if type_name == B128 or any(instruction.has(v) for v in ("v2", "v4", "v8")):
        raise machine.unsupported("only scalar atomics of at most 64 bits")
    name = next((m for m in instruction.modifiers if m in _ATOMICS), None)
    if name is None:
        raise machine.unsupported(f"known operations are {', '.join(_ATOMICS)}")
    destination = None
    if instruction.name == "atom":
        destination = machine.destination(operands.pop(0), type_name)
    addresses = addresses_of(machine, operands[0])
    count = 2 if name == "cas" else 1
    sources = [machine.source(o, type_name) for o in operands[1 : 1 + count]]
    function = _atomic_function(machine, name, type_name)
    dtype = SCALAR_TYPES[type_name].dtype
    size = dtype.itemsize
    port = Port(machine, instruction, space, size)

    def perform(where: str, at: np.ndarray, selection: Selection) -> np.ndarray:
        words, rows, good = port.locate(where, at, selection, "atomic")
        words = words.view(dtype)
        values = [np.broadcast_to(pick(s, selection), at.shape) for s in sources]
        if good is not None:
            values = [v[good] for v in values]
        old = np.zeros(rows.shape, dtype)
        # Lanes that meet at one address take turns: turn n is every address's n-th lane.
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        turn = np.empty(rows.size, np.int64)
        turn[order] = np.arange(rows.size) - np.repeat(starts, np.diff(np.r_[starts, rows.size]))
        for n in range(int(turn.max()) + 1 if rows.size else 0):
            mine = np.flatnonzero(turn == n)
            before = words[rows[mine]]
            old[mine] = before
            words[rows[mine]] = function(before, *[v[mine] for v in values])
        return old if good is None else _fill(old, good)

    def run_some(selection: Selection) -> None:
        at = addresses(selection)
        if space != "generic":
            old = perform(space, at, selection)
        else:
            old = np.zeros(at.shape, dtype)
            for where, part, lanes, chosen in port.spread(at, selection):
                old[chosen] = perform(where, part, lanes)
        if destination is not None:
            destination.put_some(selection, old)

    return Action(partial(run_some, ALL), run_some)


OPERATIONS: Mapping[str, Builder] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
}
