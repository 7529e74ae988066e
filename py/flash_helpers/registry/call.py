"""A call as data: everything that running a config on a problem needs, except for the memory.

The library, the driver and the simulator run it: they allocate its buffers and add the addresses of
tensors and buffers (`Launch.bind`). Sweep, bounds and time estimates read it. Standard library
only.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from flash_helpers.gpu import WARP
from flash_helpers.registry.problem import Element

TENSOR_MAP_BYTES = 128  # of a CUtensorMap: 64-byte aligned up to CUDA 12, since then 128


@dataclass(frozen=True)
class Kind:
    """C type of a member. `code`: format character of `struct`, in standard sizes. `align`:
    bytes."""

    code: str
    align: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return struct.calcsize(f"<{self.code}")

    @property
    def count(self) -> int:
        """Number of the member's values."""
        return len(struct.unpack(f"<{self.code}", bytes(self.size)))


INT = Kind("i", 4)
FLOAT = Kind("f", 4)
POINTER = Kind("Q", 8)
LONG = Kind("q", 8)
STRIDES = Kind("3q", 8)  # TensorStrides: batch, row, head
TENSOR_MAP = Kind(f"{TENSOR_MAP_BYTES}s", TENSOR_MAP_BYTES)


@dataclass(frozen=True)
class Member:
    """A member of a struct and its offset."""

    name: str
    kind: Kind
    offset: int


@dataclass(frozen=True)
class StructLayout:
    """A C struct by the rules of the x86-64 ABI: each member at the next multiple of its alignment.

    `name`: the C++ name. `kinds`: types of the members by name, in order.
    """

    name: str
    kinds: Mapping[str, Kind]

    @property
    def members(self) -> Iterator[Member]:
        """The members, in order."""
        end = 0
        for name, kind in self.kinds.items():
            offset = -(-end // kind.align) * kind.align
            yield Member(name, kind, offset)
            end = offset + kind.size

    @property
    def size(self) -> int:
        """Size in bytes, padding at the end included."""
        *_, last = self.members
        return -(-(last.offset + last.kind.size) // self.alignment) * self.alignment

    @property
    def alignment(self) -> int:
        """Alignment in bytes."""
        return max(kind.align for kind in self.kinds.values())

    def offset(self, name: str) -> int:
        """Return the offset of a member in bytes."""
        return next(member.offset for member in self.members if member.name == name)

    def pack(self, values: Mapping[str, tuple[float, ...]]) -> bytes:
        """Return the struct's bytes; members that have no value are zeros, as the padding is."""
        data = bytearray(self.size)
        for member in self.members:
            if member.name in values:
                struct.pack_into(f"<{member.kind.code}", data, member.offset, *values[member.name])
        return bytes(data)

    def assertions(self) -> str:
        """Return C++ assertions that compile only if the C++ struct has this layout."""
        checks = [f"sizeof({self.name}) == {self.size}"]
        checks += [
            f"offsetof({self.name}, {member.name}) == {member.offset} && "
            f"sizeof({self.name}::{member.name}) == {member.kind.size}"
            for member in self.members
        ]
        return "\n".join(f"static_assert({check});" for check in checks)


@dataclass(frozen=True)
class TensorMap:
    """Boxes of a tensor that TMA copies, in the terms of cuTensorMapEncodeTiled (CUDA driver API).

    `dims`: elements, innermost first. `strides`: bytes, of all dimensions but the innermost. `box`:
    elements of each dimension that one copy takes. `swizzle`: bytes of the pattern in shared
    memory, 0, 32, 64 or 128. `l2_promotion`: bytes that a copy fetches to L2 at once, 0, 64, 128 or
    256. Elements outside of the tensor are read as 0. `offset`: bytes from the tensor's first
    element to that at coordinates 0, which may lie before the tensor.
    """

    tensor: str
    element: Element
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    offset: int = 0
    l2_promotion: int = 256

    @property
    def data_type(self) -> int:
        """The element type as cuda.h numbers it (CUtensorMapDataType)."""
        return _MAP_TYPES[self.element]

    @property
    def swizzle_mode(self) -> int:
        """The swizzle as cuda.h numbers it (CUtensorMapSwizzle)."""
        return (0, 32, 64, 128).index(self.swizzle)

    @property
    def promotion_mode(self) -> int:
        """The L2 promotion as cuda.h numbers it (CUtensorMapL2promotion)."""
        return (0, 64, 128, 256).index(self.l2_promotion)


_MAP_TYPES = {
    Element.FP16: 6,
    Element.BF16: 9,
    Element.FP32: 7,
    Element.INT32: 3,
    Element.FP8: 0,
}


@dataclass(frozen=True)
class Address:
    """A member of the arguments that points into a tensor or into a buffer of the call.

    `member`: its offset in the arguments. `offset`: into the tensor. Both in bytes.
    """

    member: int
    tensor: str
    offset: int = 0


# Returns the 128 bytes of a tensor map, whose coordinates 0 are at an address.
EncodeTensorMap = Callable[[TensorMap, int], bytes]


class Template:
    """Bytes that are ready except for the parts that depend on tensors' addresses, which are filled
    in fast."""

    def __init__(
        self,
        data: bytes,
        addresses: Iterable[Address],
        tensor_maps: Iterable[tuple[int, TensorMap]] = (),
    ) -> None:
        found = sorted(addresses, key=lambda address: address.member)
        ends = [0, *(address.member + POINTER.size for address in found)]
        begins = [*(address.member for address in found), len(data)]
        constant = [data[end:begin] for end, begin in zip(ends, begins, strict=True)]
        # what is packed: constant bytes and addresses in turn
        self._pack = struct.Struct(f"<{POINTER.code.join(f'{len(x)}s' for x in constant)}").pack
        self._parts: list[bytes | int] = [0] * (2 * len(found) + 1)
        self._parts[::2] = constant
        self._numbers: Callable[[Mapping[str, int]], Iterable[int]]
        if len(found) > 1 and not any(address.offset for address in found):
            self._numbers = operator.itemgetter(*(address.tensor for address in found))
        else:
            self._numbers = lambda begins: [begins[x.tensor] + x.offset for x in found]
        self._tensor_maps = [*tensor_maps]

    def fill(self, addresses: Mapping[str, int], encode: EncodeTensorMap | None = None) -> bytes:
        """Return the bytes for memory that begins at these addresses, by name of the tensor.

        `encode`: needed where there are tensor maps.
        """
        parts = self._parts.copy()
        parts[1::2] = self._numbers(addresses)
        data = self._pack(*parts)
        for member, tensor_map in self._tensor_maps:
            assert encode is not None, f"{tensor_map.tensor} takes a tensor map"
            encoded = encode(tensor_map, addresses[tensor_map.tensor] + tensor_map.offset)
            data = data[:member] + encoded + data[member + TENSOR_MAP_BYTES :]
        return data


@dataclass(frozen=True)
class Buffer:
    """Device memory that the launches of a call share. No other call touches it while they run.
    `zeroed`: it is all zeros when the first launch begins. `left_zeroed`: it is again when the last
    launch ends, so that a later call may have the same memory as it is."""

    name: str
    bytes: int
    zeroed: bool
    left_zeroed: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    `kernel`: the kernel's name, as the library registers it. `grid`, `cluster`: blocks in x, y, z;
    a cluster divides the grid. `block`: threads. `shared_bytes`: dynamic shared memory per block.
    `layout`, `values`: the kernel's one parameter and its members, but for addresses and tensor
    maps. `tensor_maps`: tensor maps by their offset in the arguments. `outputs`: all that it
    writes, by name; empty if another launch reads something of it. `programmatic`: blocks may begin
    before the launch before it on the stream has ended, since the kernel waits for that itself.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    layout: StructLayout
    values: Mapping[str, tuple[float, ...]]
    addresses: tuple[Address, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    tensor_maps: tuple[tuple[int, TensorMap], ...] = ()
    outputs: tuple[str, ...] = ()
    programmatic: bool = False

    @cached_property
    def arguments(self) -> bytes:
        """The kernel's one parameter, with zeros where addresses and tensor maps belong."""
        return self.layout.pack(self.values)

    @property
    def n_blocks(self) -> int:
        """Thread blocks of the grid."""
        return math.prod(self.grid)

    @property
    def n_warps(self) -> int:
        """Warps of a block."""
        return -(-self.block // WARP)

    def bind(self, addresses: Mapping[str, int], encode: EncodeTensorMap | None = None) -> bytes:
        """Return the arguments for memory that begins at these addresses, by name of the tensor or
        buffer.

        `encode`: needed where there are tensor maps.
        """
        return Template(self.arguments, self.addresses, self.tensor_maps).fill(addresses, encode)


def starts(size: int, most: int) -> Iterator[int]:
    """Yield the number of the first item of each launch, where one launch takes `most` items."""
    first = 0
    while first < size:
        yield first
        first += most


@dataclass(frozen=True)
class Call:
    """The launches of a config on a problem, in order, and the buffers that they share."""

    launches: tuple[Launch, ...]
    buffers: tuple[Buffer, ...] = ()

    def of_outputs(self, wanted: Collection[str]) -> Call:
        """Return the call without the launches that write other outputs alone."""
        kept = (x for x in self.launches if not x.outputs or {*x.outputs}.intersection(wanted))
        return replace(self, launches=tuple(kept))

    @property
    def n_blocks(self) -> int:
        """Thread blocks of all launches."""
        return sum(launch.n_blocks for launch in self.launches)
