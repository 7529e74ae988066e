"""Bulk copies: cp.async.bulk, with tensor maps and without, and cp.reduce.async.bulk (PTX ISA 9.0,
"Data Movement and Conversion Instructions: Bulk copy" and "Tensor copy").

Each lane that executes one issues one copy, independent of the other lanes. Lanes of a warp with
equal operands are taken together: what one lane should do, all lanes of many kernels do. Operands
that the ISA leaves undefined are a fault, and the copy is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import (
    BulkCopyError,
    MisalignedError,
    OutOfBoundsError,
    ProxyError,
    RaceError,
    RepeatedWorkLint,
    SimulatorError,
)
from flash_helpers.ptx.read.module import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Special,
    parts,
)
from flash_helpers.ptx.read.types import size_of
from flash_helpers.ptx.run.asynchronous.transfers import Reduction, Request
from flash_helpers.ptx.run.instructions.access import (
    ATOMICS,
    Port,
    access_size,
    addresses_of,
    vector_length,
)
from flash_helpers.ptx.run.instructions.arrivals import places_of
from flash_helpers.ptx.run.instructions.forms import MEMORY, Form
from flash_helpers.ptx.run.machine import Action, Compute, Machine, pick
from flash_helpers.ptx.run.memory.boxes import CHUNK, Box, Span, shared_chunks
from flash_helpers.ptx.run.memory.regions import ARENA_BASE, WINDOW_SIZE, WINDOWS, Selection
from flash_helpers.ptx.run.numbers.dtypes import dtype_of
from flash_helpers.ptx.run.numbers.rounding import flush, on_registers
from flash_helpers.ptx.tensor_map import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, TensorMap

_BOX_ALIGNMENT = 128
"""Alignment of a box in shared memory ("Tensors": without an interleaved layout)."""

_SPACES = ("shared", "shared::cluster", "global")
_REDUCTIONS: Mapping[str, str] = {
    "add": "u32 s32 u64 f32 f64 f16 bf16",
    **dict.fromkeys(("min", "max"), "u32 s32 u64 s64 f16 bf16"),
    **dict.fromkeys(("inc", "dec"), "u32"),
    **dict.fromkeys(("and", "or", "xor"), "b32 b64"),
}
"""Element types of each reduction to global memory. For a tensor an H200 takes the same types, and
the logic operations on u32, s32 and u64; any other pair is an illegal instruction."""
_REDUCED = " ".join(sorted({name for names in _REDUCTIONS.values() for name in names.split()}))


_Traffic = tuple[int, int]
"""The size of a copy: bytes of shared memory, sectors of global memory."""


class _Refused(Exception):
    """A copy that its operands do not allow. `address`: the address at fault, if there is one."""

    def __init__(self, kind: type[SimulatorError], detail: str, address: int | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.address = address

    def report(self, machine: Machine, position: int, lane: int, count: int = 1) -> None:
        """Makes a fault of it. `count`: lanes that ask for the same copy."""
        thread = machine.geometry.thread(lane)
        machine.log.report(self.kind, self.detail, position, thread, self.address, count)


def _bulk(machine: Machine, instruction: Instruction) -> Action:
    """The action of any bulk instruction."""
    if instruction.has("commit_group"):
        commit = machine.transfers.commit
        return machine.from_some(lambda selection: commit(machine.lanes_of(selection)))
    if instruction.has("wait_group"):
        return _wait(machine, instruction)
    if instruction.has("prefetch"):
        return _Copy(machine, instruction).prefetch()
    copy = _Copy(machine, instruction)
    spaces = [m for m in instruction.modifiers if m in _SPACES]
    if len(spaces) != 2:
        raise machine.unsupported("a destination and a source are due, of shared and global memory")
    if spaces[0] == "global":
        return copy.out()
    if instruction.has("reduce"):
        raise machine.unsupported("reductions to shared memory are not simulated")
    return copy.into(spaces[1])


def _store_async(machine: Machine, instruction: Instruction) -> Action:
    """st.async: each lane writes a value whose bytes an mbarrier object counts (PTX ISA 9.0,
    "st.async")."""
    if not instruction.has("mbarrier::complete_tx::bytes"):
        raise machine.unsupported("only with .mbarrier::complete_tx::bytes")
    address, value, barrier = instruction.operands
    type_name, size = f"b{8 * size_of(instruction.types[-1])}", access_size(instruction)
    elements = machine.elements(value, vector_length(instruction))
    sources = [machine.source(e, type_name) for e in elements]
    addresses, port = addresses_of(machine, address), Port(machine, instruction, size)
    objects, position = places_of(machine, instruction, barrier), machine.position

    def run_some(selection: Selection) -> None:
        requests = []
        for lane in machine.lanes_of(selection).tolist():
            lanes = np.array([lane])
            (_, places, _), (_, wheres, _) = port.places(addresses(lanes), lanes), objects(lanes)
            if not (places.size and wheres.size):
                continue
            try:
                _check_blocks(machine, int(places[0]), int(wheres[0]))
            except _Refused as refusal:
                refusal.report(machine, position, lane)
                continue
            words = np.stack([pick(source, lanes) for source in sources])
            read = partial(_bytes, words)
            requests.append(Request(lane, int(wheres[0]), places // size, read))
        machine.transfers.load(position, size, requests)

    return machine.from_some(run_some)


def _check_blocks(machine: Machine, place: int, where: int) -> None:
    """Refuses a copy to a place in shared memory whose mbarrier object is in another block (PTX ISA
    9.0, "cp.async.bulk", "st.async": both are of one block)."""
    stride, blocks = machine.shared.stride, machine.geometry.blocks
    to, counts = blocks[place // stride], blocks[where // stride]
    if to != counts:
        raise _Refused(
            BulkCopyError,
            f"the mbarrier object is in block {counts}, the destination in block {to}: it must be "
            "the same",
            where % stride,
        )


def _bytes(words: np.ndarray) -> np.ndarray:
    return words.reshape(-1).view(np.uint8)


def _wait(machine: Machine, instruction: Instruction) -> Action:
    groups = instruction.operands[0] if len(instruction.operands) == 1 else None
    allowed = groups.integer if isinstance(groups, Immediate) else None
    if allowed is None or allowed < 0:
        raise machine.unsupported("the number of groups must be a literal")
    position, is_read_only = machine.position, instruction.has("read")

    def run_some(selection: Selection) -> None:
        lanes = machine.lanes_of(selection)
        machine.transfers.wait(position, lanes, allowed, is_read_only=is_read_only)

    return machine.from_some(run_some)


class _Copy:
    """One instruction, while it is bound and when it is run."""

    def __init__(self, machine: Machine, instruction: Instruction) -> None:
        self.machine = machine
        self.instruction = instruction
        self.position = machine.position
        self.operands = list(instruction.operands)
        self.is_tensor = instruction.has("tensor")
        self.rank = next((int(m[0]) for m in instruction.modifiers if m in _RANKS), 0)
        if self.is_tensor != bool(self.rank):
            raise machine.unsupported("the number of dimensions is due")

    # -- operands ----------------------------------------------------------------------------------

    def _next(self) -> Operand:
        if not self.operands:
            raise self.machine.unsupported("an operand is missing")
        return self.operands.pop(0)

    def _source(self, type_name: str) -> np.ndarray:
        return self.machine.source(self._next(), type_name)

    def _size(self) -> Callable[[np.ndarray], int]:
        """The number of bytes that an operand gives."""
        source = self._source("u32")

        def size(lanes: np.ndarray) -> int:
            found = int(pick(source, lanes)[0])
            if found % CHUNK:
                raise _Refused(BulkCopyError, f"{found} bytes: give a multiple of {CHUNK}")
            return found

        return size

    def _box_operand(self, *, is_stored: bool = False) -> Callable[[np.ndarray], Box]:
        """The box that an operand `[map, {x, y, ...}]` names."""
        operand = self._next()
        if not isinstance(operand, Address) or len(operand.coordinates) != self.rank:
            raise self.machine.unsupported(f"a tensor map with {self.rank} coordinates is due")
        sources = [self.machine.source(c, "s32") for c in operand.coordinates]
        maps = addresses_of(self.machine, operand)

        def box(lanes: np.ndarray) -> Box:
            coordinates = [int(pick(source, lanes)[0]) for source in sources]
            address = int(maps(lanes)[0])
            found = self._box(address, coordinates, is_stored=is_stored)
            if not _is_parameter(address):
                self._check_fenced(address, int(lanes[0]))
            return found

        return box

    def _end(self) -> None:
        """The end of the operands, where a cache policy may stand; it has no effect."""
        if self.instruction.has("L2::cache_hint"):
            self._next()
        if self.operands:
            raise self.machine.unsupported(f"{len(self.operands)} operands too many")

    # -- directions --------------------------------------------------------------------------------

    def into(self, source_space: str) -> Action:
        """To shared memory."""
        to = self._shared(self._next())
        if self.is_tensor:
            box = self._box_operand()
        else:
            origin = self._next()
            start, near = addresses_of(self.machine, origin), self._shared(origin)
            size = self._size()
        objects = places_of(self.machine, self.instruction, self._next())
        mask = self._source("u16") if self.instruction.has("multicast::cluster") else None
        self._end()
        machine, shared = self.machine, self.machine.shared
        requests: list[Request] = []

        def issue(alike: np.ndarray) -> _Traffic | None:
            lane, lanes = int(alike[0]), alike[:1]
            place = int(to(lanes)[0])
            mine, wheres, _ = objects(lanes)
            if not mine.size:
                return None
            where, source = int(wheres[0]), None
            piece: Box | Span | None = None
            if self.is_tensor:
                piece = box(lanes)
                chunks = self._chunks_of(piece, place)
            else:
                count = size(lanes)
                chunks = self._chunks(place, count)
                if source_space == "shared":
                    source = self._chunks(int(near(lanes)[0]), count)
                else:
                    piece = self._span(int(start(lanes)[0]), count)
            if source is not None and shared.geometry.block_of(lane) == place // shared.stride:
                raise _Refused(
                    BulkCopyError, "the destination is in the block itself: it must be in another"
                )
            _check_blocks(machine, place, where)

            def read() -> np.ndarray:
                if piece is None:
                    return shared.words(CHUNK)[source]
                return piece.read(machine.memory.words(1), ARENA_BASE)

            if piece is not None:
                self._check_launch_order("read", alike, piece)
            if alike.size > 1:
                self._report_alike(alike, place)
            destinations = self._destinations(lanes, mask, place)
            for by in destinations:
                to_object, to_chunks = by * shared.stride, by * (shared.stride // CHUNK)
                begun = (lane, where + to_object, chunks + to_chunks, read)
                requests.append(Request(*begun, source, piece, alike.size))
            sectors, times = 0 if piece is None else piece.sectors, len(destinations)
            return times * chunks.size * CHUNK, times * sectors

        def begin() -> None:
            machine.transfers.load(self.position, CHUNK, requests)
            requests.clear()

        return self._each(issue, begin)

    def out(self) -> Action:
        """To global memory: a copy, or a reduction."""
        if self.is_tensor:
            box = self._box_operand(is_stored=True)
            start = self._shared(self._next())
        else:
            to, start = addresses_of(self.machine, self._next()), self._shared(self._next())
            size = self._size()
        self._end()
        operation, type_name = None, "u8"
        if self.instruction.has("reduce"):
            operation = self.machine.one_of(_REDUCTIONS)
            if not self.is_tensor:
                types = _REDUCTIONS[operation].split()
                type_name = self.instruction.types[-1] if self.instruction.types else ""
                if type_name not in types:
                    raise self.machine.unsupported(f"{operation} has the types {', '.join(types)}")
        transfers = self.machine.transfers

        def issue(alike: np.ndarray) -> _Traffic:
            lanes = alike[:1]
            place, element = int(start(lanes)[0]), type_name
            target: Box | Span
            if self.is_tensor:
                target = box(lanes)
                chunks = self._chunks_of(target, place)
                element = target.map.dtype
                if operation is not None:
                    element = _element_of(operation, target.map)
            else:
                count = size(lanes)
                chunks = self._chunks(place, count)
                target = self._span(int(to(lanes)[0]), count)
            self._check_launch_order("write", alike, target)
            reduction = None if operation is None else _reduction(operation, element)
            transfers.store(self.position, alike, chunks, target, dtype_of(element), reduction)
            self._lint_alike(alike)
            return chunks.size * CHUNK, target.sectors

        return self._each(issue)

    def prefetch(self) -> Action:
        """To the L2 cache, which is not simulated: operands are checked, nothing moves."""
        if self.is_tensor:
            box = self._box_operand()
        else:
            start, size = addresses_of(self.machine, self._next()), self._size()
        self._end()

        def issue(alike: np.ndarray) -> _Traffic:
            lanes = alike[:1]
            if self.is_tensor:
                box(lanes)
            else:
                count = size(lanes)
                self._span(int(start(lanes)[0]), count)
            self._lint_alike(alike)
            return 0, 0

        return self._each(issue)

    def _each(
        self,
        issue: Callable[[np.ndarray], _Traffic | None],
        begin: Callable[[], None] | None = None,
    ) -> Action:
        """Lanes issue copies one after the other, those of a warp with equal operands together.
        `issue`: returns None if it made none. `begin`: begins all that were issued, if they do not
        begin at once."""
        machine, position = self.machine, self.position
        named = {o for operand in self.instruction.operands for o in parts(operand)}
        operands = [
            machine.register(o) if isinstance(o, Register) else machine.special(o.name)
            for o in named
            if isinstance(o, Register | Special)
        ]

        def run_some(selection: Selection) -> None:
            warps = set()
            for lanes in _alike(machine.lanes_of(selection), operands):
                try:
                    traffic = issue(lanes)
                    if traffic is not None:
                        warp = int(lanes[0]) // WARP
                        machine.tally.bulk_copy(
                            position, *traffic, lanes.size, is_request=warp not in warps
                        )
                        warps.add(warp)
                except _Refused as refusal:
                    refusal.report(machine, position, int(lanes[0]), lanes.size)
            if begin is not None:
                begin()

        return machine.from_some(run_some)

    def _report_alike(self, lanes: np.ndarray, place: int) -> None:
        """Reports lanes that copy the same bytes to the same place in shared memory."""
        address = place % self.machine.shared.stride
        self.machine.log.report(
            RaceError,
            f"write of shared address {address} by {lanes.size} copies in no order:\n"
            f"    {lanes.size} lanes of this instruction do the same: elect one",
            self.position,
            self.machine.geometry.thread(int(lanes[0])),
            address,
            lanes.size,
        )

    def _lint_alike(self, lanes: np.ndarray) -> None:
        if lanes.size > 1 and self.machine.launch.lints:
            self.machine.log.lint(
                RepeatedWorkLint,
                f"{lanes.size} lanes of this instruction do the same: elect one",
                self.position,
                self.machine.geometry.thread(int(lanes[0])),
            )

    # -- shared memory -----------------------------------------------------------------------------

    def _shared(self, operand: Operand) -> Callable[[np.ndarray], np.ndarray]:
        """Places in `shared.data` that an operand names."""
        addresses, shared = addresses_of(self.machine, operand), self.machine.shared

        def places(lanes: np.ndarray) -> np.ndarray:
            at = addresses(lanes)
            if not (0 <= at[0] <= shared.size or shared.inside(at, 0).all()):
                raise _Refused(OutOfBoundsError, shared.outside(int(at[0]), CHUNK), int(at[0]))
            return shared.offsets(at, lanes)

        return places

    def _destinations(
        self, lanes: np.ndarray, mask: np.ndarray | None, place: int
    ) -> Sequence[int]:
        """Distance in blocks from a lane's own block to each destination of a copy."""
        if mask is None:
            return (0,)
        cluster = self.machine.geometry.cluster
        own = place // self.machine.shared.stride % cluster
        chosen = int(pick(mask, lanes)[0])
        if not chosen or chosen >> cluster:
            raise _Refused(
                BulkCopyError,
                f"the mask {chosen:#x} of a cluster of {cluster} blocks: it names the ranks of the "
                f"blocks that get the copy, from 0 to {cluster - 1}",
            )
        return [rank - own for rank in range(cluster) if chosen >> rank & 1]

    def _chunks_of(self, box: Box, place: int) -> np.ndarray:
        shared = self.machine.shared
        address = place % shared.stride
        self._check_aligned(address, _BOX_ALIGNMENT, "a box in shared memory")
        chunks = shared_chunks(address, box.map)
        self._check_inside(address, (int(chunks.max()) + 1) * CHUNK - address)
        return chunks + (place - address) // CHUNK

    def _chunks(self, place: int, size: int) -> np.ndarray:
        address = place % self.machine.shared.stride
        self._check_aligned(address, CHUNK, "shared memory")
        self._check_inside(address, size)
        return np.arange(place // CHUNK, (place + size) // CHUNK)

    def _check_inside(self, address: int, size: int) -> None:
        shared = self.machine.shared
        if address + size > shared.size:
            raise _Refused(OutOfBoundsError, shared.outside(address, size), address)

    def _check_aligned(self, address: int, alignment: int, what: str) -> None:
        if address % alignment:
            raise _Refused(
                MisalignedError,
                f"{what} at address {address:#x}, which is not a multiple of {alignment}",
                address,
            )

    # -- global memory -----------------------------------------------------------------------------

    def _check_launch_order(self, action: str, alike: np.ndarray, piece: Box | Span) -> None:
        before = self.machine.launch_before
        if before is not None and not piece.is_outside:
            before.check(action, self.position, alike, np.broadcast_to(piece.address, alike.shape))

    def _span(self, address: int, size: int) -> Span:
        self._check_aligned(address, CHUNK, "global memory")
        span = Span(address, size)
        self._check_allocated(span, "")
        return span

    def _box(self, address: int, coordinates: Sequence[int], *, is_stored: bool) -> Box:
        """The box of the tensor map at an address."""
        tensor_map = self._map(address)
        if tensor_map.rank != self.rank:
            raise _Refused(
                BulkCopyError,
                f"{self.rank} coordinates for a {tensor_map}, which has {tensor_map.rank} "
                "dimensions",
                address,
            )
        box = Box(tensor_map, coordinates, is_stored=is_stored)
        if box.coordinates[0] * tensor_map.element_bytes % CHUNK:
            raise _Refused(
                BulkCopyError,
                f"a box at {box.coordinates} of a {tensor_map}: its rows begin "
                f"{box.coordinates[0] * tensor_map.element_bytes} bytes behind those of the "
                f"tensor, which must be a multiple of {CHUNK}",
            )
        if not box.is_outside:
            self._check_allocated(box, f" of a {tensor_map}")
        if is_stored and min(box.coordinates) < 0:
            raise _Refused(
                BulkCopyError,
                f"a box at {box.coordinates} of a {tensor_map}: coordinates of a store must not be "
                "negative",
            )
        return box

    def _check_allocated(self, piece: Box | Span, of: str) -> None:
        memory = self.machine.memory
        limits = memory.extent(piece.address)
        if limits is None or piece.end > limits[1]:
            size = piece.end - piece.address
            address = piece.address if limits is None else limits[1]
            detail = f"{size} bytes{of} from {piece.address:#x} on, {memory.nearest(address)}"
            raise _Refused(OutOfBoundsError, detail, piece.address)

    def _check_fenced(self, address: int, lane: int) -> None:
        """Refuses a map that the kernel has changed and not handed to the copies' proxy."""
        machine = self.machine
        missing = machine.changed_maps.missing(address, machine.geometry.block_of(lane))
        if missing is not None:
            position, fence = missing
            where = "" if position is None else f" at {machine.log.site(position)}"
            raise _Refused(
                ProxyError,
                f"tensor map at {address:#x}, which the kernel has changed{where}\n"
                f"    with no {fence} since",
                address,
            )

    def _map(self, address: int) -> TensorMap:
        """The tensor map at a generic address, in parameters, constant or global memory."""
        self._check_aligned(address, TENSOR_MAP_ALIGNMENT, "a tensor map")
        machine, size = self.machine, TENSOR_MAP_BYTES
        if _is_parameter(address):
            region, data = "param", machine.regions["param"].words(1)
            offset = address - WINDOWS["param"]
            inside = offset + size <= data.size
        else:
            region, data, offset = "global", machine.memory.words(1), address - ARENA_BASE
            limits = machine.memory.extent(address)
            inside = limits is not None and address + size <= limits[1]
        if not inside:
            detail = f"a tensor map at {address:#x}, {machine.memory.nearest(address)}"
            raise _Refused(OutOfBoundsError, detail, address)
        try:
            return _decoded(data[offset : offset + size].tobytes())
        except ValueError as error:
            detail = f"at {address:#x}, in {region} memory: {error}"
            raise _Refused(BulkCopyError, detail, address) from None


def _alike(lanes: np.ndarray, operands: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Lanes in their order, those of one warp together whose operands are equal."""
    if lanes.size == 1:
        yield lanes
        return
    groups: dict[tuple[int, ...], list[int]] = {}
    columns = zip(lanes.tolist(), *(operand[lanes].tolist() for operand in operands), strict=True)
    for lane, *values in columns:
        groups.setdefault((lane // WARP, *values), []).append(lane)
    yield from map(np.array, groups.values())


_RANKS = ("1d", "2d", "3d", "4d", "5d")


def _is_parameter(address: int) -> bool:
    return WINDOWS["param"] <= address < WINDOWS["param"] + WINDOW_SIZE


@lru_cache(maxsize=256)
def _decoded(record: bytes) -> TensorMap:
    return TensorMap.decode(record)


def _element_of(operation: str, tensor_map: TensorMap) -> str:
    """The type of the elements that an operation reduces."""
    name, types = tensor_map.dtype, _REDUCTIONS[operation].split()
    if types[0].startswith("b"):
        types = ["u32", "s32", "u64"]
    if name in types:
        return name
    raise _Refused(BulkCopyError, f"{operation} of a {tensor_map}: it has {', '.join(types)}")


def _reduction(operation: str, type_name: str) -> Reduction:
    function: Compute = {"min": np.fmin, "max": np.fmax}.get(operation, ATOMICS[operation])
    if type_name == "f32":
        # "flushes subnormal inputs and results to sign-preserving zero"
        return lambda old, new: flush(flush(old) + flush(new))
    if type_name in ("f16", "bf16"):
        return on_registers(type_name, function)
    return function


_TAKEN = (
    f"{' '.join(_SPACES)} tensor {' '.join(_RANKS)} multicast::cluster L2::cache_hint prefetch "
    f"commit_group wait_group read reduce {' '.join(_REDUCTIONS)}"
)
_IGNORED = "async tile L2 mbarrier::complete_tx::bytes bulk_group noftz"
_STORED = "shared shared::cluster v2 v4 mbarrier::complete_tx::bytes"

FORMS = (
    Form("cp", _bulk, (), (), _TAKEN, _IGNORED, having="bulk"),
    Form("cp", _bulk, (), (_REDUCED,), _TAKEN, f"{_IGNORED} bulk", having="reduce"),
    Form("st", _store_async, (3,), (MEMORY,), _STORED, "weak", having="async"),
)
