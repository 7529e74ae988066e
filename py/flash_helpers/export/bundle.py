"""A bundle: a folder with the launches of a module's forward, their kernels and its weights, which
a program runs by the CUDA driver alone.

`bundle.txt` is text instead of JSON, so that a program in C++ reads it word by word with the
operator >> and needs no parser, and one program runs every bundle without being compiled for it.
Words are separated by white space, numbers are decimal, offsets and sizes in bytes. A PLACE is a
buffer and an offset in it. The buffers are arena, weights, zeros, input:NAME and output:NAME. The
first word of a line is its kind:

- flash_attention_bundle 1. A change that breaks a reader raises the number.
- target sm_90a MAJOR MINOR EXACT: what the cubins are for. EXACT 1: they run on this compute
  capability alone; 0: on later minor versions as well.
- sms N: streaming multiprocessors that the launches are made for, the least that a GPU must have.
- alignment N: addresses of inputs and outputs are its multiples.
- arena BYTES, of any content. zeros BYTES: zeros before the first run; each run leaves them so.
  weights BYTES, the file weights.bin.
- input NAME DTYPE BYTES RANK SIZE…, output NAME DTYPE BYTES RANK SIZE…: contiguous tensors of the
  caller, dtypes as in torch. Inputs stay as they are.
- kernel NAME SYMBOL THREADS SHARED: NAME.cubin and NAME.ptx, which the driver compiles; dynamic
  shared memory of a block.

and then, in the order in which a run has them:

- zero PLACE BYTES: a buffer that is filled with zeros.
- launch KERNEL X Y Z CX CY CZ PROGRAMMATIC BYTES ADDRESSES MAPS ARGUMENTS: grid and cluster in
  blocks, KERNEL the number of a kernel, PROGRAMMATIC 1 if the launch may have the attribute
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION. ARGUMENTS are the BYTES of the kernel's one
  parameter in hexadecimal digits, with zeros for what the next lines tell:
- address MEMBER PLACE: an address, which belongs at this byte of the arguments; ADDRESSES lines.
- map MEMBER PLACE DATA_TYPE SWIZZLE L2_PROMOTION RANK DIMS… STRIDES… BOX…: a tensor map, as
  cuTensorMapEncodeTiled takes it; MAPS lines. Enumerators are as cuda.h numbers them, RANK dims and
  boxes innermost first, and RANK - 1 strides. Element strides are 1, there is no interleaving, and
  outside are zeros.

Launches that nothing has to run before may be on a second stream, from the first step on:

- side: the second stream waits for what is before, and the next launches are on it.
- main: the next launches are on the first stream again.
- join: the first stream waits for all launches of the second one.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from flash_helpers.gpu import capability_of
from flash_helpers.kernel_configs import Config
from flash_helpers.registry.call import Launch, TensorMap

VERSION = 1
ARENA, WEIGHTS, ZEROS = "arena", "weights", "zeros"


@dataclass(frozen=True)
class Place:
    """Memory from a byte of a buffer on."""

    buffer: str
    offset: int = 0

    def behind(self, offset: int) -> Place:
        """Return the place that is so many bytes behind this one."""
        return Place(self.buffer, self.offset + offset)

    def __str__(self) -> str:
        return f"{self.buffer} {self.offset}"


@dataclass(frozen=True)
class Port:
    """An input or an output: a contiguous tensor of the caller. `dtype`: as in torch."""

    name: str
    dtype: str
    bytes: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        sizes = " ".join(map(str, (len(self.shape), *self.shape)))
        return f"{self.name} {self.dtype} {self.bytes} {sizes}"


@dataclass(frozen=True)
class Zeroing:
    """Memory that is filled with zeros."""

    place: Place
    bytes: int


@dataclass(frozen=True)
class PlacedLaunch:
    """A launch, and the places of its tensors and buffers, by name."""

    launch: Launch
    places: Mapping[str, Place]


class Change(Enum):
    """A change of the stream that launches are on, or a wait for the second one."""

    SIDE = "side"
    MAIN = "main"
    JOIN = "join"


Step: TypeAlias = "Zeroing | PlacedLaunch | Change"


@dataclass(frozen=True)
class Bundle:
    """All of a bundle but the machine code and the weights.

    `sms`: streaming multiprocessors of the GPU that launches are made for. `kernels`: config and
    function of each kernel, by its name. `steps`: in order.
    """

    target: str
    sms: int
    alignment: int
    arena_bytes: int
    zeros_bytes: int
    weights_bytes: int
    inputs: Sequence[Port]
    outputs: Sequence[Port]
    kernels: Mapping[str, tuple[Config, str]]
    steps: Sequence[Step]

    @property
    def launches(self) -> list[PlacedLaunch]:
        """The launches, in order."""
        return [step for step in self.steps if isinstance(step, PlacedLaunch)]

    def text(self, symbols: Mapping[str, str]) -> str:
        """Return the content of bundle.txt. symbols: names of the kernels in their machine code."""
        return "".join(f"{line}\n" for line in self._lines(symbols))

    def _lines(self, symbols: Mapping[str, str]) -> Iterator[str]:
        major, minor = divmod(capability_of(self.target), 10)
        yield f"flash_attention_bundle {VERSION}"
        yield f"target {self.target} {major} {minor} {int(not self.target[-1].isdigit())}"
        yield f"sms {self.sms}"
        yield f"alignment {self.alignment}"
        yield f"arena {self.arena_bytes}"
        yield f"zeros {self.zeros_bytes}"
        yield f"weights {self.weights_bytes}"
        yield from (f"input {port}" for port in self.inputs)
        yield from (f"output {port}" for port in self.outputs)
        shared = {step.launch.kernel: step.launch for step in self.launches}
        for name in self.kernels:
            launch = shared[name]
            yield f"kernel {name} {symbols[name]} {launch.block} {launch.shared_bytes}"
        numbers = {name: number for number, name in enumerate(self.kernels)}
        for step in self.steps:
            if isinstance(step, Zeroing):
                yield f"zero {step.place} {step.bytes}"
            elif isinstance(step, Change):
                yield step.value
            else:
                yield from _launch_lines(step, numbers[step.launch.kernel])


def _launch_lines(step: PlacedLaunch, kernel: int) -> Iterator[str]:
    launch = step.launch
    blocks = " ".join(map(str, (*launch.grid, *launch.cluster)))
    counts = f"{len(launch.arguments)} {len(launch.addresses)} {len(launch.tensor_maps)}"
    programmatic = int(launch.programmatic)
    yield f"launch {kernel} {blocks} {programmatic} {counts} {launch.arguments.hex()}"
    for address in launch.addresses:
        yield f"address {address.member} {step.places[address.tensor].behind(address.offset)}"
    for member, found in launch.tensor_maps:
        yield f"map {member} {step.places[found.tensor].behind(found.offset)} {_map_words(found)}"


def _map_words(found: TensorMap) -> str:
    kinds = (found.data_type, found.swizzle_mode, found.promotion_mode, len(found.dims))
    return " ".join(map(str, (*kinds, *found.dims, *found.strides, *found.box)))
