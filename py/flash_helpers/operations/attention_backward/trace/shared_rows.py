"""The rows of tensors that lie in shared memory, while the simulator runs a kernel.

Each 16 bytes of a block's shared memory have the number of the 16 bytes of a tensor that the last
copy into them has brought: cp.async by its own addresses, TMA by the box of its tensor map. So what
a product reads is known by name, batch, head, row and columns, wherever a kernel keeps its tiles.
Bytes that a copy fills with zeros are those of no tensor. Those that threads store have a number
that says what was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from flash_helpers.gpu import WARP
from flash_helpers.ptx import Observation
from flash_helpers.ptx.read.module import Address, Instruction
from flash_helpers.ptx.run.instructions.access import access_size, addresses_of, space_of
from flash_helpers.ptx.run.memory.boxes import CHUNK, swizzled
from flash_helpers.ptx.run.memory.regions import WINDOWS
from flash_helpers.registry.call import Launch

NONE = -1
"""The number of 16 bytes that are those of no tensor. Numbers below are those of stored bytes."""
PER_CHUNK = 8
"""Elements of 16 bytes."""
Block = tuple[int, int, int]


class Chunks:
    """The 16-byte chunks of some tensors, numbered in the order of their addresses.

    `tensors`: (batch, length, heads, d_head) of 16 bits. `addresses`: of their first elements in
    the simulated memory. For each number, `tensor` is an index of `names`, and `batch`, `row`,
    `head` and `column` are the place of the first element.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], addresses: Mapping[str, int]) -> None:
        self.names = (*tensors,)
        parts = []
        for number, (name, x) in enumerate(tensors.items()):
            index = np.indices((*x.shape[:3], x.shape[3] // PER_CHUNK)).reshape(4, -1)
            index[3] *= PER_CHUNK
            found = addresses[name] + x.element_size() * (np.array(x.stride()) @ index)
            parts.append(np.stack([np.full(found.size, number), *index, found]))
        table = np.concatenate(parts, axis=1)
        table = table[:, table[-1].argsort(kind="stable")]
        self.tensor, self.batch, self.row, self.head, self.column, self._addresses = table

    def at(self, addresses: np.ndarray) -> np.ndarray:
        """Return the number of the chunk at each address of global memory."""
        found = self._addresses.searchsorted(addresses).clip(max=self._addresses.size - 1)
        return np.where(self._addresses[found] == addresses, found, NONE)


class SharedRows:
    """The chunks in the shared memory of a launch's blocks. `addresses`: of tensors in the
    simulated memory."""

    def __init__(self, chunks: Chunks, launch: Launch, addresses: Mapping[str, int]) -> None:
        self.chunks = chunks
        self._addresses = addresses
        self._maps = dict(launch.tensor_maps)
        self._labels: dict[Block, np.ndarray] = {}

    @staticmethod
    def wants(instruction: Instruction) -> bool:
        """Whether an instruction writes to shared memory."""
        if instruction.name == "cp":
            return instruction.has("async") and _copies(instruction)
        return SharedRows.stores(instruction)

    @staticmethod
    def stores(instruction: Instruction) -> bool:
        """Whether an instruction stores registers in shared memory."""
        return instruction.name in ("st", "stmatrix") and space_of(instruction) == "shared"

    def labels(self, block: Block, addresses: np.ndarray) -> np.ndarray:
        """Return the number of the chunk at each address of a block's shared memory."""
        own = self._labels.get(block)
        return np.full(addresses.shape, NONE) if own is None else own[addresses // CHUNK]

    def copy(self, seen: Observation) -> None:
        """Take note of a copy."""
        instruction = seen.instruction
        to, source, *rest = instruction.operands
        for block, _, some in by_warp(seen):
            labels = self._own(seen, block)
            lanes = seen.lanes[some]
            places = addresses_of(seen.machine, to)(lanes)
            origins = addresses_of(seen.machine, source)(lanes)
            if instruction.has("tensor"):
                assert isinstance(source, Address)
                coordinates = np.stack([seen.value(c, "s32")[some] for c in source.coordinates])
                for place, at, first in zip(places, origins, coordinates.T, strict=True):
                    self._load(labels, int(place), int(at) - WINDOWS["param"], first)
            else:
                sizes = seen.value(rest[1], "u32")[some] if len(rest) > 1 else CHUNK
                found = np.where(sizes == CHUNK, self.chunks.at(origins), NONE)
                labels[places // CHUNK] = found

    def store(self, seen: Observation, number_of: Callable[[Block, int, int], int]) -> None:
        """Take note of a store. `number_of`: the number of what is stored, by block, warp and line
        of the PTX text."""
        instruction = seen.instruction
        size = CHUNK if instruction.name == "stmatrix" else access_size(instruction)
        for block, warp, some in by_warp(seen):
            places = addresses_of(seen.machine, instruction.operands[0])(seen.lanes[some])
            labels, number = self._own(seen, block), number_of(block, warp, instruction.line)
            for offset in range(0, size, CHUNK):
                labels[(places + offset) // CHUNK] = number

    def _own(self, seen: Observation, block: Block) -> np.ndarray:
        return self._labels.setdefault(block, np.full(seen.machine.shared.size // CHUNK, NONE))

    def _load(self, labels: np.ndarray, place: int, member: int, first: np.ndarray) -> None:
        """A box comes to a place in a block's shared memory. `member`: offset of its tensor map in
        the arguments. `first`: coordinates of its first element."""
        box = self._maps[member]
        counts = (box.box[0] // PER_CHUNK, *box.box[1:])
        index = np.indices(counts[::-1]).reshape(len(counts), -1)[::-1]  # dimension 0 is fastest
        index[0] *= PER_CHUNK
        at = first[:, None] + index
        inside = ((at >= 0) & (at < np.array(box.dims)[:, None])).all(0)
        steps = np.array([box.element.bytes, *box.strides])
        found = self.chunks.at(self._addresses[box.tensor] + box.offset + steps @ at)
        chunks = swizzled(place + CHUNK * np.arange(found.size), box.swizzle) // CHUNK
        labels[chunks] = np.where(inside, found, NONE)


def _copies(instruction: Instruction) -> bool:
    """Whether an asynchronous copy takes bytes of a tensor to shared memory."""
    if instruction.has("bulk"):
        spaces = [m for m in instruction.modifiers if m in ("shared::cluster", "shared", "global")]
        return instruction.has("tensor") and spaces[:1] != ["global"]
    return len(instruction.operands) > 2


def by_warp(seen: Observation) -> Iterator[tuple[Block, int, np.ndarray]]:
    """Each warp of an observation: its block, its number in it, and which lanes are its own."""
    geometry = seen.machine.geometry
    warps = seen.lanes // WARP
    for warp in np.unique(warps):
        some = np.flatnonzero(warps == warp)
        lane = seen.lanes[some[0]]
        yield geometry.blocks[geometry.block_of(lane)], int(geometry.warp_of(lane)), some
