"""Tensor maps that a kernel changes: tensormap.replace, tensormap.cp_fenceproxy and the fences of
their proxy (PTX ISA 9.0, "Tensor Map Related Instructions")."""

from __future__ import annotations

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import (
    BulkCopyError,
    MisalignedError,
    SimulatorError,
    UninitialisedReadError,
)
from flash_helpers.ptx.read.module import Immediate, Instruction, Operand
from flash_helpers.ptx.run.instructions.access import Port, addresses_of
from flash_helpers.ptx.run.instructions.forms import SCOPES, WARP_WIDE, Form
from flash_helpers.ptx.run.machine import Action, Machine, pick
from flash_helpers.ptx.run.memory.boxes import CHUNK
from flash_helpers.ptx.run.memory.regions import Selection
from flash_helpers.ptx.tensor_map import (
    CODED_FIELDS,
    FIELDS,
    TENSOR_MAP_ALIGNMENT,
    TENSOR_MAP_BYTES,
    TensorMap,
)

_EVERY_LANE = np.array([0xFFFF_FFFF], np.uint32)
_CHUNKS = TENSOR_MAP_BYTES // CHUNK
_WIDE = ("global_address", "global_stride")
_WITH_ORDINAL = ("box_dim", "global_dim", "global_stride", "element_stride")


class _Records:
    """The 128 bytes that an operand names, read and written by single lanes or by warps."""

    def __init__(self, machine: Machine, instruction: Instruction, operand: Operand) -> None:
        self._machine = machine
        self._port = Port(machine, instruction, CHUNK)
        self._addresses = addresses_of(machine, operand)
        self._position = machine.position

    def at(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lanes whose address is aligned, and their addresses."""
        addresses = self._addresses(lanes)
        good = addresses % TENSOR_MAP_ALIGNMENT == 0
        if not good.all():
            text = f"a tensor map, which must lie at a multiple of {TENSOR_MAP_ALIGNMENT} bytes"
            self.report(MisalignedError, text, lanes[~good], int(addresses[~good][0]))
        return lanes[good], addresses[good]

    def read(self, space: str, addresses: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Records, uint8 (lanes, 128)."""
        if space == "shared":
            self._check_written(addresses, lanes)
        words = self._port.read(space, self._chunks(addresses), lanes.repeat(_CHUNKS))
        return np.ascontiguousarray(words).view(np.uint8).reshape(-1, TENSOR_MAP_BYTES)

    def write(
        self, space: str, addresses: np.ndarray, lanes: np.ndarray, records: np.ndarray
    ) -> None:
        """Writes records."""
        words = records.reshape(-1, CHUNK).view(np.uint32)
        self._port.write(space, self._chunks(addresses), lanes.repeat(_CHUNKS), words)

    def parts(
        self, addresses: np.ndarray, lanes: np.ndarray
    ) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Addresses by state space: the space, the addresses in it, and the lanes."""
        machine = self._machine
        found = self._port.parts(addresses, lanes)
        return [(space, part, machine.lanes_of(some)) for space, part, some, _ in found]

    def _chunks(self, addresses: np.ndarray) -> np.ndarray:
        return (addresses[:, None] + np.arange(0, TENSOR_MAP_BYTES, CHUNK)).reshape(-1)

    def _check_written(self, addresses: np.ndarray, lanes: np.ndarray) -> None:
        shared = self._machine.shared
        inside = shared.inside(addresses, TENSOR_MAP_BYTES)
        rows = shared.offsets(addresses[inside], lanes[inside])[:, None] // shared.granule
        granules = rows + np.arange(TENSOR_MAP_BYTES // shared.granule)
        written = shared.marks.is_written(granules).all(axis=1)
        if not written.all():
            text = "bytes of a tensor map that nothing has written: begin with zeros or with a map"
            first = int(addresses[inside][~written][0])
            self.report(UninitialisedReadError, text, lanes[inside][~written], first)

    def report(
        self, kind: type[SimulatorError], text: str, lanes: np.ndarray, address: int
    ) -> None:
        """Reports a fault of lanes."""
        machine = self._machine
        thread = machine.geometry.thread(lanes[0])
        machine.log.report(kind, text, self._position, thread, address, lanes.size)


def _replace(machine: Machine, instruction: Instruction) -> Action:
    field = machine.one_of(FIELDS)
    if instruction.types != ("b64" if field in _WIDE else "b32",) or not instruction.has("tile"):
        raise machine.unsupported("a .tile of .b1024, and .b64 for addresses and strides, are due")
    address, *rest = instruction.operands
    ordinal = 0
    if field in _WITH_ORDINAL:
        first = rest.pop(0)
        if not isinstance(first, Immediate) or first.integer is None:
            raise machine.unsupported("the number of a dimension must be a literal")
        ordinal = first.integer
    if len(rest) != 1:
        raise machine.unsupported(f"{len(rest)} values where 1 is due")
    if field in CODED_FIELDS:
        code = rest[0].integer if isinstance(rest[0], Immediate) else None
        if code is None:
            raise machine.unsupported(f"a literal is due for {field}")
        try:
            TensorMap.replaced(bytes(TENSOR_MAP_BYTES), field, 0, code)
        except ValueError as error:
            raise machine.unsupported(str(error)) from None
    values = machine.source(rest[0], "u64" if field in _WIDE else "u32")
    records, position = _Records(machine, instruction, address), machine.position

    def changed(record: np.ndarray, value: int, lane: int, at: int) -> np.ndarray:
        try:
            found = TensorMap.replaced(record.tobytes(), field, ordinal, value)
        except ValueError as error:
            records.report(BulkCopyError, str(error), np.array([lane]), at)
            return record
        return np.frombuffer(found, np.uint8)

    def run_some(selection: Selection) -> None:
        for space, at, lanes in records.parts(*reversed(records.at(machine.lanes_of(selection)))):
            if space not in ("shared", "global"):
                text = f"a tensor map in {space} memory, which no kernel can change"
                records.report(BulkCopyError, text, lanes, int(at[0]))
            if space not in ("shared", "global") or not lanes.size:
                continue
            given = np.broadcast_to(pick(values, lanes), lanes.shape)
            each = zip(
                records.read(space, at, lanes),
                given.tolist(),
                lanes.tolist(),
                at.tolist(),
                strict=True,
            )
            records.write(space, at, lanes, np.stack([changed(*one) for one in each]))
            if space == "global":
                blocks = machine.geometry.block_of(lanes)
                for place, block in zip(at.tolist(), blocks.tolist(), strict=True):
                    machine.changed_maps.change(place, position, block, is_released=False)

    return machine.from_some(run_some)


def _cp_fenceproxy(machine: Machine, instruction: Instruction) -> Action:
    """tensormap.cp_fenceproxy: each warp copies a map from shared to global memory, and releases
    it. The copy holds all that any of its lanes has written: Triton puts no barrier of the warp
    before it."""
    to, origin, size = instruction.operands
    spaces = [m for m in instruction.modifiers if m in ("global", "shared")]
    if spaces != ["global", "shared"] or not _is_whole(size):
        raise machine.unsupported("128 bytes from .shared::cta to .global are due")
    target, source = (_Records(machine, instruction, operand) for operand in (to, origin))
    position = machine.position

    def run_some(selection: Selection) -> None:
        machine.shared.order.sync_warps(machine.lanes_of(selection), _EVERY_LANE)
        # Of each warp one lane gives the addresses, which all of its lanes must have.
        lanes = machine.lanes_of(selection)[::WARP]
        lanes, to_addresses = target.at(lanes)
        lanes, addresses = source.at(lanes)
        if not lanes.size:
            return
        found = source.read("shared", addresses, lanes)
        target.write("global", to_addresses, lanes, found)
        blocks = machine.geometry.block_of(lanes)
        for address, block in zip(to_addresses.tolist(), blocks.tolist(), strict=True):
            machine.changed_maps.change(address, position, block, is_released=True)

    return machine.from_some(run_some)


def fence(machine: Machine, instruction: Instruction) -> Action:
    """fence.proxy.tensormap::generic"""
    maps, block_of = machine.changed_maps, machine.geometry.block_of
    if instruction.has("release"):
        return machine.from_some(
            lambda selection: maps.release(block_of(machine.lanes_of(selection)).tolist())
        )
    if len(instruction.operands) != 2 or not _is_whole(instruction.operands[1]):
        raise machine.unsupported("the address of a map and 128 are due")
    addresses = addresses_of(machine, instruction.operands[0])

    def run_some(selection: Selection) -> None:
        found = np.unique(
            np.stack([addresses(selection), block_of(machine.lanes_of(selection))]), axis=1
        )
        for address, block in found.T.tolist():
            maps.acquire(address, block)

    return machine.from_some(run_some)


def _is_whole(operand: Operand) -> bool:
    return isinstance(operand, Immediate) and operand.integer == TENSOR_MAP_BYTES


_REPLACED = f"tile b1024 global shared {' '.join(FIELDS)}"
_COPIED = f"tensormap::generic release {SCOPES} {WARP_WIDE}"

FORMS = (
    Form("tensormap", _replace, (2, 3), ("b32 b64",), _REPLACED, having="replace"),
    Form("tensormap", _cp_fenceproxy, (3,), (), "global shared", _COPIED, having="cp_fenceproxy"),
)
