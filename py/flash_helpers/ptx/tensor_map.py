"""Tensor maps: the description of a tensor in global memory that a tensor copy (TMA) reads.

A kernel gets the address of 128 bytes that cuTensorMapEncodeTiled has written, and hands it to the
copy; or it makes a map of zeros, or of another map, by tensormap.replace. The format of those bytes
is not published, so the simulator has a record of its own.

`TensorMap` keeps the driver's rules (CUDA Driver API, "Tensor Map Object Management",
cuTensorMapEncodeTiled). PTX ISA 9.0, "Tensors", defines the meaning of a map.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from flash_helpers.ptx.read.types import size_of

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
TENSOR_MAP_MAGIC = b"FH-TMAP1"
"""First bytes of the record of a tensor map."""

_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16")
ELEMENT_BYTES = {name: size_of(name) for name in _TYPES}
"""Bytes of one element, by type."""

_FLOATS = ("f16", "bf16", "f32", "f64")
_REFUSED = {
    "dtype": "f32_ftz tf32 tf32_ftz u4_align8 u4_align16 u6_align16",
    "interleave": "16B 32B",
    "swizzle": "128B_atom_32B 128B_atom_32B_flip_8B 128B_atom_64B 96B",
}
_CHOICES: Mapping[str, Sequence[str]] = {
    "dtype": _TYPES,
    "interleave": ("none",),
    "swizzle": ("none", "32B", "64B", "128B"),
    "l2_promotion": ("none", "64B", "128B", "256B"),
    "fill": ("zeros", "nan"),
}

_MOST_BYTES = 228 << 10  # of a box: the shared memory of an SM; found by asking the driver
_MOST = 5  # dimensions
_RECORD = struct.Struct(f"<8s6B2xQ{_MOST}Q{_MOST - 1}Q{_MOST}H{_MOST}B")

_NUMBERS: Mapping[str, tuple[int, str, int]] = {
    "rank": (8, "B", 1),
    "global_address": (16, "Q", 1),
    "global_dim": (24, "Q", _MOST),
    "global_stride": (64, "Q", _MOST - 1),
    "box_dim": (96, "H", _MOST),
    "element_stride": (106, "B", _MOST),
}
"""Fields of tensormap.replace by name: offset in the record, format, how many there are."""

_CODES: Mapping[str, tuple[str, Sequence[str]]] = {
    "elemtype": (
        "dtype",
        (*_TYPES[:8], "f32_ftz", *_TYPES[8:], "tf32", "tf32_ftz", "u4", "u4_padded", "u6_padded"),
    ),
    "interleave_layout": ("interleave", ("none", "16B", "32B")),
    "swizzle_mode": ("swizzle", ("none", "32B", "64B", "128B", "96B")),
    "fill_mode": ("fill", ("zeros", "nan")),
    "swizzle_atomicity": ("", ("16B",)),
}
"""Likewise: the name of the choice, and the meaning of each value (PTX ISA 9.0,
"tensormap.replace")."""

CODED_FIELDS = frozenset(_CODES)
"""Fields of tensormap.replace whose values stand for one of several choices."""
FIELDS = CODED_FIELDS | set(_NUMBERS)
"""All of them."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory, and the box of it that one tensor copy moves.

    Dimension 0 is the dimension whose elements lie side by side. `dtype`: a key of `ELEMENT_BYTES`.
    `address`: address of the first element. `dims`: elements along each of one to five dimensions.
    `box`: elements along each dimension that a copy traverses. `strides`: bytes from one element to
    the next along each dimension but 0; by default those of a tensor without gaps.
    `element_strides`: distance between copied elements of the box along each dimension; 1 by
    default, and always 1 in dimension 0. `interleave`: "none". `swizzle`: "none", "32B", "64B" or
    "128B". `l2_promotion`: "none", "64B", "128B" or "256B", a hint. `fill`: value read for elements
    outside the tensor, "zeros" or "nan".

    Raises ValueError for maps that cuTensorMapEncodeTiled refuses, and for options that are not
    simulated.
    """

    dtype: str
    address: int
    dims: tuple[int, ...]
    box: tuple[int, ...]
    strides: tuple[int, ...] = ()
    element_strides: tuple[int, ...] = ()
    interleave: str = "none"
    swizzle: str = "none"
    l2_promotion: str = "none"
    fill: str = "zeros"

    def __post_init__(self) -> None:
        self._check_choices()
        if not 1 <= len(self.dims) <= _MOST:
            raise ValueError(f"{len(self.dims)} dimensions: a tensor map has 1 to {_MOST}")
        self._default("strides", self._packed_strides())
        self._default("element_strides", (1,) * self.rank)
        self._check_lengths()
        self._check_numbers()
        self._check_row()
        # The driver ignores that of dimension 0.
        object.__setattr__(self, "element_strides", (1, *self.element_strides[1:]))
        if self.box_bytes > _MOST_BYTES:
            raise ValueError(
                f"{self.box_bytes} bytes in a box: give at most {_MOST_BYTES}, split the box"
            )

    def _default(self, name: str, value: tuple[int, ...]) -> None:
        given = tuple(getattr(self, name))
        object.__setattr__(self, name, given or value)

    def _packed_strides(self) -> tuple[int, ...]:
        return tuple(self.element_bytes * math.prod(self.dims[:n]) for n in range(1, self.rank))

    # -- the driver's rules ------------------------------------------------------------------------

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value in _REFUSED.get(name, "").split():
                raise ValueError(
                    f"{name} {value!r} of a tensor map is not simulated: use one of "
                    f"{', '.join(choices)}"
                )
            if value not in choices:
                raise ValueError(f"{name} is {value!r}: give one of {', '.join(choices)}")
        if self.fill == "nan" and self.dtype not in _FLOATS:
            raise ValueError(
                f"fill 'nan' of {self.dtype}: only a tensor of {', '.join(_FLOATS)} can be filled "
                "with NaN, use 'zeros'"
            )

    def _check_lengths(self) -> None:
        for name, length in (
            ("box", self.rank),
            ("strides", self.rank - 1),
            ("element_strides", self.rank),
        ):
            found = len(getattr(self, name))
            if found != length:
                raise ValueError(
                    f"{found} numbers in {name}: {length} are due for {self.rank} dimensions"
                )

    def _check_numbers(self) -> None:
        if self.address % 16:
            raise ValueError(
                f"the tensor begins at address {self.address:#x}, which is not a multiple of 16 "
                "bytes: align it, or begin the tensor earlier and shift the coordinates"
            )
        for name, most in (("dims", 1 << 32), ("box", 256), ("element_strides", 8)):
            for n, value in enumerate(getattr(self, name)):
                if not 1 <= value <= most:
                    raise ValueError(f"{name}[{n}] is {value}: give 1 to {most}")
        for n, stride in enumerate(self.strides):
            if stride % 16 or not 0 <= stride < 1 << 40:
                raise ValueError(
                    f"strides[{n}] is {stride} bytes: give a multiple of 16 below 2^40, padding "
                    "the rows of the tensor if need be"
                )

    def _check_row(self) -> None:
        if self.row_bytes % 16:
            raise ValueError(
                f"a row of the box is {self.box[0]} x {self.element_bytes} = {self.row_bytes} "
                "bytes: give a box whose rows are a multiple of 16 bytes"
            )
        if self.swizzle_bytes and self.row_bytes > self.swizzle_bytes:
            raise ValueError(
                f"a row of the box is {self.box[0]} x {self.element_bytes} = {self.row_bytes} "
                f"bytes, but swizzle {self.swizzle} allows {self.swizzle_bytes}: split the box, "
                "or choose a wider swizzle"
            )

    # -- what follows ------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of the box that lie side by side in global memory."""
        return self.box[0] * self.element_bytes

    @property
    def swizzle_bytes(self) -> int:
        """Bytes within which the swizzle permutes, 0 for none."""
        return 0 if self.swizzle == "none" else int(self.swizzle[:-1])

    @cached_property
    def moved(self) -> tuple[int, ...]:
        """Elements that a copy moves along each dimension."""
        pairs = zip(self.box, self.element_strides, strict=True)
        return tuple(-(-size // stride) for size, stride in pairs)

    @cached_property
    def box_bytes(self) -> int:
        """Bytes of shared memory that one copy fills or reads, elements outside the tensor
        included."""
        return self.element_bytes * math.prod(self.moved)

    def __str__(self) -> str:
        def times(numbers: Iterable[int]) -> str:
            return " x ".join(map(str, numbers))

        swizzle = "" if self.swizzle == "none" else f", swizzle {self.swizzle}"
        return (
            f"tensor map of {times(self.dims)} {self.dtype} at {self.address:#x}, box "
            f"{times(self.box)}{swizzle}"
        )

    # -- the record --------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The 128 bytes that stand for the map in the simulator. A kernel gets them as an argument
        (`__grid_constant__ const CUtensorMap`), or in global or constant memory."""

        def padded(numbers: Sequence[int], size: int) -> list[int]:
            return [*numbers, *[0] * (size - len(numbers))]

        record = _RECORD.pack(
            TENSOR_MAP_MAGIC,
            self.rank,
            *(choices.index(getattr(self, name)) for name, choices in _CHOICES.items()),
            self.address,
            *padded(self.dims, _MOST),
            *padded(self.strides, _MOST - 1),
            *padded(self.box, _MOST),
            *padded(self.element_strides, _MOST),
        )
        return record.ljust(TENSOR_MAP_BYTES, b"\0")

    @staticmethod
    def replaced(record: bytes, field: str, ordinal: int, value: int) -> bytes:
        """A record with one field changed, as tensormap.replace does it.

        `record`: a map's, or zeros; it need not be complete. `field`: one of `FIELDS`. `ordinal`:
        the dimension, where there is one for each. `value`: the rank is given less one. Raises
        ValueError for bytes that are no record, and for values that no map can have.
        """
        changed = bytearray(record)
        if not any(record):
            changed[: len(TENSOR_MAP_MAGIC)] = TENSOR_MAP_MAGIC
        elif not record.startswith(TENSOR_MAP_MAGIC):
            raise ValueError(
                "the bytes are neither zeros nor a tensor map: begin with 128 zeros, or with the "
                "copy of a map"
            )
        if field in _CODES:
            name, meanings = _CODES[field]
            meaning = meanings[value] if 0 <= value < len(meanings) else ""
            choices = _CHOICES.get(name, meanings)
            if meaning not in choices:
                what = f"{field} {value}" + (f" ({meaning})" if meaning else "")
                raise ValueError(f"{what} is not simulated: use {', '.join(choices)}")
            if name:
                changed[9 + list(_CHOICES).index(name)] = choices.index(meaning)
            return bytes(changed)
        offset, letter, count = _NUMBERS[field]
        if not 0 <= ordinal < count:
            raise ValueError(f"dimension {ordinal} of {field}: there are {count}")
        size = struct.calcsize(letter)
        stored = value + (field == "rank")
        if stored >> 8 * size:
            raise ValueError(f"{field} {value} is more than a tensor map can hold")
        struct.pack_into(f"<{letter}", changed, offset + ordinal * size, stored)
        return bytes(changed)

    @classmethod
    def decode(cls, record: bytes) -> TensorMap:
        """The map that 128 bytes stand for. Raises ValueError for bytes that `encode` did not
        make."""
        if len(record) != TENSOR_MAP_BYTES or not record.startswith(TENSOR_MAP_MAGIC):
            raise ValueError(
                f"{len(record)} bytes that TensorMap.encode has not made: pass its "
                f"{TENSOR_MAP_BYTES} bytes as the kernel's tensor map"
            )
        _, rank, *numbers = _RECORD.unpack_from(record)
        if not 1 <= rank <= _MOST:
            raise ValueError(f"a tensor map of {rank} dimensions: its bytes were overwritten")
        fields: dict = {}
        for (name, choices), index in zip(_CHOICES.items(), numbers, strict=False):
            if index >= len(choices):
                raise ValueError(f"{name} {index} of a tensor map: its bytes were overwritten")
            fields[name] = choices[index]
        numbers = numbers[len(_CHOICES) :]
        fields["address"] = numbers.pop(0)
        for name, size in (("dims", 0), ("strides", -1), ("box", 0), ("element_strides", 0)):
            values, numbers = numbers[: _MOST + size], numbers[_MOST + size :]
            fields[name] = tuple(values[: rank + size])
        return cls(**fields)
