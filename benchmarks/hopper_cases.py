"""Launches of the kernels in tests/ptx/kernels/hopper_*.cu, with their inputs and expected outputs.

hopper_kernels.py runs them on a GPU, and the tests run them in the simulator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flash_helpers.ptx.tensor_map import TensorMap

BYTES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}  # of a swizzle
SCALES = {"bf16": 5e-3, "f16": 6e-4, "f32": 1e-6}


@dataclass(frozen=True)
class Map:
    """A tensor map of a buffer. fields: of `TensorMap`, without the address."""

    buffer: str
    fields: Mapping[str, Any]

    def at(self, address: int) -> TensorMap:
        """Return the tensor map of a buffer at this address."""
        return TensorMap(address=address, **self.fields)


Argument = str | Map | bytes
"""An argument of a kernel: a buffer's name for its address, a tensor map, or the bytes of any other
value."""


@dataclass(frozen=True)
class Case:
    """One launch.

    module: a file of tests/ptx/kernels, without its ending.
    grid, block, shared_bytes, cluster: of the launch.
    buffers: contents of global memory before the launch.
    output: name of the output buffer. dtype: of its elements; "bf16" and "f16" are kept as bits.
    expected: contents of the output buffer after the launch, in float64.
    bound: on the relative Frobenius norm of the difference; 0 if the output must match bit by bit.
    kept: every kept-th row of the GPU's output is recorded; 0 records none, since an exact output
    needs no record.
    """

    module: str
    kernel: str
    grid: tuple[int, int, int]
    block: int
    buffers: Mapping[str, np.ndarray]
    arguments: tuple[Argument, ...]
    output: str
    expected: np.ndarray
    dtype: str = ""
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    bound: float = 0.0
    kept: int = 0

    def bind(
        self, addresses: Mapping[str, int], encode: Callable[[TensorMap], bytes]
    ) -> list[bytes]:
        """Return the kernel's parameters. addresses: of the buffers."""
        bound = []
        for argument in self.arguments:
            if isinstance(argument, Map):
                bound.append(encode(argument.at(addresses[argument.buffer])))
            elif isinstance(argument, str):
                bound.append(addresses[argument].to_bytes(8, "little"))
            else:
                bound.append(argument)
        return bound

    def error(self, found: np.ndarray) -> float:
        """Relative Frobenius norm of the difference; for an exact output the share of the elements
        that differ in any bit."""
        if not self.bound:
            wanted = self.expected.astype(found.dtype)
            return float((integers(found) != integers(wanted)).mean())
        wanted = self.expected
        return float(np.linalg.norm(values(found, self.dtype) - wanted) / np.linalg.norm(wanted))


# -- numbers ---------------------------------------------------------------------------------------


def bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to "bf16" or "f16"; return 16-bit integers."""
    if dtype == "f16":
        return x.astype(np.float16).view(np.uint16)
    raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((raw + 0x7FFF + (raw >> 16 & 1)) >> 16).astype(np.uint16)


def values(x: np.ndarray, dtype: str) -> np.ndarray:
    """Convert to float64. x: bits if the type is "bf16" or "f16"."""
    if dtype == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (x.view(np.float16) if dtype == "f16" else x).astype(np.float64)


def integers(x: np.ndarray) -> np.ndarray:
    """The bits of each element."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def normal(seed: int, dtype: str, *shape: int) -> np.ndarray:
    """Bits of random numbers around 0.3, the same with every NumPy (NEP 19)."""
    return bits(np.random.RandomState(seed).standard_normal(shape) + 0.3, dtype)


def i32(*numbers: int) -> bytes:
    """Bytes of int parameters, or of members of a structure."""
    return np.array(numbers, np.int32).tobytes()


# -- matrix products -------------------------------------------------------------------------------


def tiles(buffer: str, array: np.ndarray, dtype: str, *box: int) -> Map:
    """Tensor map of a row-major matrix. box: columns, rows."""
    rows, columns = array.shape
    size = array.itemsize
    fields = {"dtype": dtype, "dims": (columns, rows), "strides": (columns * size,), "box": box}
    return Map(buffer, {**fields, "swizzle": "128B"})


def gemm(kernel: str, dtype: str, stages: int, m: int, n: int, k: int) -> Case:
    """Case of gemm_bf16 or gemm_f16."""
    A, B = normal(m, dtype, m, k), normal(n, dtype, n, k)
    C = np.zeros((m, n), np.uint16)
    return Case(
        *("hopper_gemm", kernel, (-(-n // 128), -(-m // 64), 1), 160, {"A": A, "B": B, "C": C}),
        arguments=(
            *(tiles("A", A, dtype, 64, 64), tiles("B", B, dtype, 64, 128)),
            *(tiles("C", C, dtype, 64, 64), i32(k)),
        ),
        output="C",
        expected=values(A, dtype) @ values(B, dtype).T,
        dtype=dtype,
        shared_bytes=stages * 24576 + 16384,
        bound=SCALES[dtype],
        kept=2,
    )


def gemm_a_registers(m: int, n: int, k: int) -> Case:
    """Case of C = A B in fp32, with A in registers."""
    A, B = normal(m, "bf16", m, k), normal(n, "bf16", k, n)
    C = np.zeros((m, n), np.float32)
    return Case(
        *("hopper_gemm", "gemm_a_registers", (-(-n // 128), -(-m // 64), 1), 128),
        buffers={"A": A, "B": B, "C": C},
        arguments=(
            *(tiles("A", A, "bf16", 64, 64), tiles("B", B, "bf16", 64, 64)),
            *("C", i32(m), i32(n), i32(k)),
        ),
        output="C",
        expected=values(A, "bf16") @ values(B, "bf16"),
        dtype="f32",
        shared_bytes=49152,
        bound=SCALES["f32"],
        kept=4,
    )


def epilogue(lanes: str, tiles_down: int, tiles_across: int) -> Case:
    """Case of an epilogue whose stores are issued by "one_lane" or by "all_lanes" of a warp."""
    rows, columns = np.indices((64 * tiles_down, 64 * tiles_across))
    C = np.zeros(rows.shape, np.uint16)
    return Case(
        *("hopper_epilogue", f"epilogue_{lanes}", (tiles_down, 1, 1), 128, {"C": C}),
        arguments=(tiles("C", C, "bf16", 64, 64), i32(tiles_across)),
        output="C",
        expected=bits((rows + 2 * columns) % 251, "bf16"),
        dtype="bf16",
        shared_bytes=2 * 8192,
    )


def gemm_cluster(dtype: str, m: int, n: int, k: int, clusters: int) -> Case:
    """Case of the GEMM by clusters of two blocks, each of which takes tile after tile."""
    A, B = normal(m, dtype, m, k), normal(n, dtype, n, k)
    C = np.zeros((m, n), np.uint16)
    return Case(
        *("hopper_gemm_cluster", f"gemm_cluster_{dtype}", (2 * clusters, 1, 1), 384),
        buffers={"A": A, "B": B, "C": C},
        arguments=(
            *(tiles("A", A, dtype, 64, 128), tiles("B", B, dtype, 64, 64)),
            *(tiles("C", C, dtype, 64, 64), i32(m), i32(n), i32(k)),
        ),
        output="C",
        expected=values(A, dtype) @ values(B, dtype).T,
        dtype=dtype,
        shared_bytes=3 * 32768 + 32768,
        cluster=(2, 1, 1),
        bound=SCALES[dtype],
        kept=4,
    )


# -- tiles by descriptor ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """Layout of an operand's 16-bit elements in shared memory, as in a matrix descriptor (PTX ISA,
    "Matrix descriptor format" and "Canonical layouts").

    rows: m or n. start, leading, stride: bytes. step: bytes to the next 16 elements of k.
    """

    is_k_major: bool
    swizzle: str
    rows: int
    start: int
    leading: int
    stride: int
    step: int
    base_offset: int = 0

    def descriptor(self) -> int:
        """The 64 bits of the descriptor, with addresses from the start of the image."""
        mode = {"none": 0, "128B": 1, "64B": 2, "32B": 3}[self.swizzle]
        fields = ((self.start >> 4, 0), (self.leading >> 4, 16), (self.stride >> 4, 32))
        word = sum(value << shift for value, shift in fields)
        return word | self.base_offset << 49 | mode << 62

    def addresses(self, steps: int) -> np.ndarray:
        """Bytes of each element from the start of the image, of shape (rows, 16 * steps)."""
        row, k = np.arange(self.rows)[:, None], np.arange(16 * steps)[None, :]
        step, k = k // 16 * self.step, k % 16
        width = BYTES[self.swizzle] or 16
        major, minor = (k, row) if self.is_k_major else (row, k)
        if self.is_k_major:
            other = k * 2 // width * self.leading
            place = row // 8 * self.stride + row % 8 * width + major * 2 % width + other
        elif self.swizzle == "none":
            place = row // 8 * self.stride + row % 8 * 2 + k // 8 * self.leading + k % 8 * 16
        else:
            place = major * 2 // width * self.leading + major * 2 % width
            place = place + minor // 8 * self.stride + minor % 8 * width
        return swizzled(self.start + step + place, self.swizzle, self.base_offset)


def swizzled(address: np.ndarray, swizzle: str, base_offset: int = 0) -> np.ndarray:
    """Swizzled address of a byte of a tile, given its address without a swizzle. Bits 4 to 6
    (128B), 4 to 5 (64B) or 4 (32B) are XORed with as many bits from bit 7 on. Addresses for these
    are counted from 128 times base_offset.
    """
    return address ^ (address - 128 * base_offset >> 3 & max(BYTES[swizzle] - 1, 0) & 0x70)


def operand(kind: str, swizzle: str, rows: int, start: int, apart: int) -> Operand:
    """Operand of 64 elements of k. kind: the major dimension, "k" or "mn". apart: 1 places its
    parts side by side, 2 leaves a gap of a part's length between them."""
    width, eights = BYTES[swizzle], -(-rows // 8)
    if not width:  # blocks of 8 x 8
        leading = apart * eights * 128
        return Operand(kind == "k", swizzle, rows, start, leading, 128, 2 * leading)
    if kind == "k":  # rows as wide as the swizzle: at 32 bytes, 16 of k are all of it
        stride = apart * 8 * width
        step = 32 if width > 32 else eights * stride
        return Operand(True, swizzle, rows, start, 16, stride, step)
    return Operand(False, swizzle, rows, start, apart * 64 * width, 8 * width, 16 * width)


def tile(kernel: str, A: Operand, B: Operand, numbers: np.ndarray, steps: int) -> Case:
    """Case of D = 1 + A B^T. numbers: the image of 48 KiB, in float64. steps: of 16 elements of k
    each."""
    dtype = kernel.split("_")[1]
    a, b = (numbers[o.addresses(steps) // 2] for o in (A, B))
    u64 = [np.uint64(x) for x in (A.descriptor(), B.descriptor(), A.step >> 4, B.step >> 4)]
    return Case(
        *("hopper_gemm", kernel, (1, 1, 1), 128),
        buffers={"image": bits(numbers, dtype), "D": np.zeros((A.rows, B.rows), np.float32)},
        arguments=("image", "D", *(x.tobytes() for x in u64), i32(steps)),
        output="D",
        expected=1 + a @ b.T,
        dtype="f32",
        shared_bytes=49152,
    )


TILES = {
    "tile_bf16_n64_k_k": ("k", "k", 64),
    "tile_bf16_n64_m_k": ("mn", "k", 64),
    "tile_f16_n64_k_n": ("k", "mn", 64),
    "tile_f16_n64_m_n": ("mn", "mn", 64),
    "tile_f16_n24_k_k": ("k", "k", 24),
    "tile_bf16_n24_m_n": ("mn", "mn", 24),
}
"""Major dimensions of A and of B, and n."""


OFFSETS = (
    *(("k", "128B", 512, 0), ("k", "128B", 512, 4), ("k", "128B", 128, 1), ("k", "128B", 0, 3)),
    *(("k", "64B", 256, 2), ("mn", "128B", 256, 2), ("mn", "128B", 384, 0), ("mn", "32B", 128, 1)),
)
"""Operands that begin inside of their swizzle pattern: major dimension, swizzle, start, base
offset."""


def tile_cases() -> Iterator[tuple[str, Case]]:
    """Cases of small integers: each kernel with each swizzle, and with two pairs of different
    swizzles. Then cases whose sums are rounded, of one step and of several."""
    swizzles = (*((s, s) for s in BYTES), ("128B", "none"), ("32B", "64B"))
    for seed, (kernel, pair) in enumerate(itertools.product(TILES, swizzles)):
        a, b, n = TILES[kernel]
        apart = 1 + seed % 2
        A, B = operand(a, pair[0], 64, 0, apart), operand(b, pair[1], n, 24576, apart)
        numbers = np.random.RandomState(seed).randint(-3, 4, 24576).astype(np.float64)
        steps = 2 if any(o.is_k_major and o.swizzle == "64B" for o in (A, B)) else 4
        yield f"{kernel} {' '.join(pair)} {apart}", tile(kernel, A, B, numbers, steps)
    for kind, swizzle, start, base_offset in OFFSETS:
        kernel = "tile_bf16_n64_k_k" if kind == "k" else "tile_bf16_n64_m_k"
        A = replace(operand(kind, swizzle, 64, 0, 1), start=start, base_offset=base_offset)
        numbers = np.random.RandomState(start).randint(-3, 4, 24576).astype(np.float64)
        case = tile(kernel, A, operand("k", "128B", 64, 24576, 1), numbers, 2)
        yield f"{kernel} {swizzle} at {start} offset {base_offset}", case
    for kernel, steps in (
        ("tile_bf16_n64_k_k", 1),
        ("tile_bf16_n64_k_k", 4),
        ("tile_f16_n64_m_n", 1),
    ):
        dtype, (a, b, n) = kernel.split("_")[1], TILES[kernel]
        numbers = values(normal(steps, dtype, 24576), dtype)
        A, B = operand(a, "128B", 64, 0, 1), operand(b, "128B", n, 24576, 1)
        case = tile(kernel, A, B, numbers, steps)
        yield f"{kernel} rounded {steps}", replace(case, bound=SCALES["f32"], kept=2)


# -- attention -------------------------------------------------------------------------------------


def attention(name: str, B_c: int, seq_len: int, heads: int, batches: int, blocks: int) -> Case:
    """Case of one attention kernel. blocks: thread blocks of the grid, which share the tiles of 128
    rows."""
    dtype = name.split("_")[0]
    shape = (batches, seq_len, heads, 128)
    grow = np.linspace(0.5, 2, seq_len)[:, None, None]  # so that the maxima change
    q, k, v = (
        bits(np.random.RandomState(seed).standard_normal(shape) * grow + 0.3, dtype)
        for seed in range(3)
    )
    strides = (256, heads * 256, seq_len * heads * 256)

    def rows(buffer: str, box: int) -> Map:
        dims = (128, heads, seq_len, batches)
        fields = {"dtype": dtype, "dims": dims, "strides": strides, "box": (64, 1, box, 1)}
        return Map(buffer, {**fields, "swizzle": "128B"})

    scale = np.float32(math.log2(math.e) / math.sqrt(128))
    x, y, z = (values(a, dtype) for a in (q, k, v))
    scores = np.einsum("bihd,bjhd->bhij", x, y) / math.sqrt(128)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = np.einsum("bhij,bjhd->bihd", p / p.sum(axis=-1, keepdims=True), z)
    return Case(
        *("hopper_attention", f"attention_{name}", (blocks, 1, 1), 384),
        buffers={"Q": q, "K": k, "V": v, "O": np.zeros(shape, np.uint16)},
        arguments=(
            *(rows("Q", 128), rows("K", B_c), rows("V", B_c), rows("O", 16)),
            *(i32(seq_len), i32(heads), i32(batches), scale.tobytes()),
        ),
        output="O",
        expected=expected,
        dtype=dtype,
        shared_bytes=65536 + 4 * B_c * 256,
        bound=SCALES[dtype],
        kept=4,
    )


# -- copies ----------------------------------------------------------------------------------------

KINDS = {
    "u8": np.uint8, "u16": np.uint16, "f16": np.float16, "bf16": np.uint16, "u32": np.uint32,
    "s32": np.int32, "f32": np.float32, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
"""NumPy's types by the types of tensor maps."""
NAN = b"\xf7\x7f"
"""The byte pattern with which "nan" fills the outside of a tensor, for any type."""


@dataclass(frozen=True)
class Box:
    """A box of a tensor. dims, box, element_strides, strides: as in `TensorMap`, dimension 0 first.
    place: of the box's first element. Any element of the box may lie outside of the tensor."""

    dtype: str
    dims: tuple[int, ...]
    box: tuple[int, ...]
    strides: tuple[int, ...]
    element_strides: tuple[int, ...]
    place: tuple[int, ...]
    swizzle: str = "none"
    fill: str = "zeros"

    @property
    def map(self) -> Map:
        """Tensor map of the buffer "tensor"."""
        names = ("dtype", "dims", "box", "strides", "element_strides", "swizzle", "fill")
        return Map("tensor", {name: getattr(self, name) for name in names})

    @property
    def coordinates(self) -> bytes:
        """Bytes of the place, as the kernels take it."""
        return i32(*self.place, *[0] * (5 - len(self.place)))

    @property
    def size(self) -> int:
        """Bytes per element."""
        return np.dtype(KINDS[self.dtype]).itemsize

    @property
    def tensor_bytes(self) -> int:
        """Bytes from the first element of the tensor to its end, rounded up to a multiple of 16."""
        spans = zip(self.dims, (self.size, *self.strides), strict=True)
        return -(-(sum((n - 1) * stride for n, stride in spans) + self.size) // 16) * 16

    def offsets(self, is_stored: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """For the box's elements in the order of shared memory: bytes from the tensor's first
        element, and whether the element is copied. Elements inside of the tensor are copied. A
        store also copies elements that share 16 bytes of a row with one inside."""
        shape = tuple(-(-n // e) for n, e in zip(self.box, self.element_strides, strict=True))
        offset, inside = np.zeros(shape[::-1], np.int64), np.ones(shape[::-1], bool)
        for axis, stride in enumerate((self.size, *self.strides)):
            index = self.place[axis] + self.element_strides[axis] * np.arange(shape[axis])
            index = index.reshape(-1, *[1] * axis)
            offset = offset + index * stride
            end = self.dims[axis]
            if is_stored and axis == 0:
                end = -(-end * self.size // 16) * 16 // self.size
            inside = inside & (index >= 0) & (index < end)
        return offset.ravel(), inside.ravel()

    @property
    def box_bytes(self) -> int:
        """Bytes that a copy moves."""
        return self.offsets()[0].size * self.size

    @property
    def pitch(self) -> int:
        """Bytes from row to row of dimension 0 in shared memory."""
        return max(self.box[0] * self.size, BYTES[self.swizzle])

    @property
    def window_bytes(self) -> int:
        """Bytes of shared memory that a box takes."""
        return self.box_bytes // (self.box[0] * self.size) * self.pitch

    def in_shared(self, at: int = 0) -> np.ndarray:
        """Offset in elements of each element of the box from the window's first element. The window
        begins `at` bytes after a multiple of 1024."""
        row, column = np.divmod(np.arange(self.box_bytes // self.size), self.box[0])
        return (
            swizzled(at + row * self.pitch + column * self.size, self.swizzle) - at
        ) // self.size


def patterned(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Elements that differ from their neighbours; integers use all bits."""
    raw = np.random.RandomState(seed).bytes(count * np.dtype(KINDS[dtype]).itemsize)
    if dtype[0] in "us":
        return np.frombuffer(raw, KINDS[dtype])
    numbers = np.random.RandomState(seed).randint(-128, 128, count)
    return bits(numbers, "bf16") if dtype == "bf16" else numbers.astype(KINDS[dtype])


def load_box(box: Box, at: int = 0) -> Case:
    """Case of a copy into shared memory, `at` bytes after its start."""
    tensor = patterned(box.tensor_bytes // box.size, box.dtype)
    offset, inside = box.offsets()
    outside = NAN if box.fill == "nan" else b"\0\0"
    expected = np.frombuffer(outside * (box.box_bytes // 2), KINDS[box.dtype]).copy()
    expected[inside] = tensor[offset[inside] // box.size]
    placed = np.frombuffer(b"\xff" * box.window_bytes, KINDS[box.dtype]).copy()
    placed[box.in_shared(at)] = expected
    return Case(
        *("hopper_copy", f"load_box_{len(box.dims)}d", (1, 1, 1), 64),
        buffers={"tensor": tensor, "out": np.zeros_like(placed)},
        arguments=(
            *(box.map, box.coordinates, i32(at), "out"),
            *(i32(box.window_bytes), i32(box.box_bytes)),
        ),
        output="out",
        expected=placed,
        shared_bytes=at + box.window_bytes,
    )


def _store(box: Box, kernel: str, change: Callable[..., Any], *parameters: Argument) -> Case:
    tensor = patterned(box.tensor_bytes // box.size, box.dtype, 1)
    sent = patterned(box.window_bytes // box.size, box.dtype, 2)
    offset, inside = box.offsets(is_stored=True)
    expected = tensor.copy()
    chosen = offset[inside] // box.size
    expected[chosen] = change(tensor[chosen], sent[box.in_shared()][inside])
    return Case(
        *("hopper_copy", kernel, (1, 1, 1), 64),
        buffers={"tensor": tensor, "in": sent},
        arguments=(box.map, *parameters, "in", i32(box.window_bytes)),
        output="tensor",
        expected=expected,
        shared_bytes=box.window_bytes,
    )


def store_box(box: Box) -> Case:
    """Case of a copy out of shared memory."""
    kernel = f"store_box_{len(box.dims)}d"
    return _store(box, kernel, lambda old, new: new, box.coordinates)


OPERATIONS: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "inc": lambda old, new: np.where(old >= new, 0, old + 1).astype(old.dtype),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
"""Functions from an element and the value sent to the element's new value, by reduction."""


def reduce_box(box: Box, operation: str) -> Case:
    """Case of a reduction into a tensor of two dimensions. Elements of bf16 are added as numbers,
    not as bits."""
    change = OPERATIONS[operation]
    if box.dtype == "bf16":

        def change(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            result = OPERATIONS[operation](values(old, "bf16"), values(new, "bf16"))
            return bits(result, "bf16")

    number = list(OPERATIONS).index(operation)
    return _store(box, "reduce_box_2d", change, i32(number), i32(box.place[0]), i32(box.place[1]))


def random_box(seed: int, is_stored: bool) -> Box:
    """A small box, partly outside of the tensor in about half of the cases; a stored box begins
    inside."""
    choose = np.random.RandomState(seed)
    rank = 1 + seed % 5
    dtype = sorted(KINDS)[choose.randint(len(KINDS))]
    swizzle = sorted(BYTES)[choose.randint(4)]
    chunk = 16 // np.dtype(KINDS[dtype]).itemsize
    row = choose.randint(1, (BYTES[swizzle] or 128) // 16 + 1) * chunk
    most = (0, 12, 6, 4, 3)[rank - 1]
    box = (int(row), *(int(n) for n in choose.randint(1, most + 1, rank - 1)))
    steps = (1, *(int(n) for n in choose.choice([1, 1, 2, 3], rank - 1)))
    dims = tuple(int(choose.randint(max(1, n // 2), 2 * n + 2)) for n in box)
    strides, reach = [], dims[0] * 16 // chunk
    for n in dims[1:]:
        strides.append(-(-reach // 16) * 16 + 16 * int(choose.randint(2)))
        reach = n * strides[-1]
    first = [0 if is_stored else -(n // 2) for n in box]
    x, *others = (int(choose.randint(low, n)) for low, n in zip(first, dims, strict=True))
    fill = "nan" if dtype in ("f16", "bf16", "f32", "f64") and choose.randint(2) else "zeros"
    place = (x // chunk * chunk, *others)
    return Box(dtype, dims, box, tuple(strides), steps, place, swizzle, fill)


def box_cases() -> Iterator[tuple[str, Case]]:
    """Cases of loads, stores and reductions of single boxes."""
    for seed in range(60):
        yield f"load_box {seed}", load_box(random_box(seed, False), 128 * (seed % 8))
        yield f"store_box {seed}", store_box(random_box(seed, True))
    for operation in OPERATIONS:
        kinds = {"add": "u32 s32 u64 f32 f16 bf16", "inc": "u32", "dec": "u32"}
        few = "u32 s32 u64 s64 f16 bf16" if operation in ("min", "max") else "u32 u64"
        for dtype in kinds.get(operation, few).split():
            row = 64 // np.dtype(KINDS[dtype]).itemsize
            box = Box(dtype, (row * 5 // 4, 9), (row, 6), (96,), (1, 1), (row // 2, 4), "64B")
            yield f"reduce_box {operation} {dtype}", reduce_box(box, operation)


# -- tensor maps -----------------------------------------------------------------------------------


def map_variants() -> Iterator[dict[str, Any]]:
    """Fields of the `TensorMap`s that cuTensorMapEncodeTiled is asked about: a plain map, maps that
    differ from it in one field, and combinations with rules of their own."""
    plain = {
        **{"dtype": "f32", "address": 1 << 30, "dims": (64, 64), "box": (32, 32)},
        **{"strides": (256,), "element_strides": (1, 1), "swizzle": "none", "fill": "zeros"},
    }
    yield plain
    others = {
        "address": (0, 4, 8, 16, 32, 48, 1 << 40),
        "dims": ((0, 64), (1, 64), (3, 64), (1 << 32, 1), (1 + (1 << 32), 1), (64, 0), (31, 5)),
        "strides": ((n,) for n in (0, 8, 16, 24, 128, 240, 264, (1 << 40) - 16, 1 << 40)),
        "box": ((x, 32) for x in (0, 1, 2, 3, 4, 5, 6, 8, 255, 256, 257)),
        "element_strides": ((1, 0), (1, 2), (1, 8), (1, 9), (0, 1), (2, 1), (9, 1)),
    }
    for name, alternatives in others.items():
        for value in alternatives:
            yield {**plain, name: value}
    for y in (0, 1, 227, 228, 229, 256, 257):  # rows of 1 KiB
        yield {**plain, "box": (256, y)}
        yield {**plain, "box": (256, y), "element_strides": (1, 2)}
    for dtype, swizzle, chunks in itertools.product(KINDS, BYTES, (1, 2, 3, 4, 5, 8, 9)):
        box = (chunks * 16 // np.dtype(KINDS[dtype]).itemsize, 8)
        yield {**plain, "dtype": dtype, "swizzle": swizzle, "box": box}
    for dtype in KINDS:
        yield {**plain, "dtype": dtype, "box": (16, 8), "fill": "nan"}
    for rank, side in itertools.product(range(1, 7), (8, 16)):
        strides = tuple(256 * 64**n for n in range(rank - 1))
        shape = {"dims": (64,) * rank, "box": (side,) * rank, "element_strides": (1,) * rank}
        yield {**plain, **shape, "strides": strides}


# -- the other kernels -----------------------------------------------------------------------------


def copy_bytes() -> Case:
    """Case of a ring of 1-D copies."""
    blocks, chunks = 2, 7
    data = np.random.RandomState(0).randint(0, 256, blocks * chunks * 2048).astype(np.uint8)
    return Case(
        *("hopper_copy", "copy_bytes", (blocks, 1, 1), 32),
        buffers={"in": data, "out": np.zeros_like(data)},
        arguments=("in", "out", i32(chunks)),
        output="out",
        expected=data,
        shared_bytes=4 * 2048,
    )


def scale_tiles() -> Case:
    """Case of a ring whose tiles are changed in shared memory."""
    x = np.random.RandomState(0).standard_normal((100, 80)).astype(np.float32)

    def boxes(buffer: str) -> Map:
        return tiles(buffer, x, "f32", 32, 32)

    return Case(
        *("hopper_copy", "scale_tiles", (3, 1, 1), 160),
        buffers={"in": x, "out": np.zeros_like(x)},
        arguments=(boxes("in"), boxes("out"), np.float32(1.5).tobytes(), i32(len(x))),
        output="out",
        expected=x * np.float32(1.5),
        shared_bytes=3 * 4096,
    )


def reduce_bytes() -> Case:
    """Case of a reduction of whole numbers, so that the order does not matter."""
    x = np.random.RandomState(0).randint(-99, 99, (6, 256)).astype(np.float32)
    return Case(
        *("hopper_copy", "reduce_bytes", (6, 1, 1), 32),
        buffers={"in": x, "out": np.ones(256, np.float32)},
        arguments=("in", "out", i32(1024)),
        output="out",
        expected=1 + x.sum(axis=0),
        shared_bytes=1024,
    )


def cluster_softmax() -> Case:
    """Case of two rows."""
    x = np.random.RandomState(0).standard_normal((2, 1024)).astype(np.float32) * 4
    p = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return Case(
        *("hopper_cluster", "cluster_softmax", (8, 1, 1), 128),
        buffers={"x": x, "y": np.zeros_like(x)},
        arguments=("x", "y"),
        output="y",
        expected=p / p.sum(axis=1, keepdims=True),
        dtype="f32",
        cluster=(4, 1, 1),
        bound=SCALES["f32"],
        kept=1,
    )


def cluster_shift() -> Case:
    """Case of two clusters."""
    x = np.random.RandomState(0).randint(0, 1 << 31, (2, 4, 129 * 4)).astype(np.uint32)
    return Case(
        *("hopper_cluster", "cluster_shift", (8, 1, 1), 128),
        buffers={"in": x, "out": np.zeros_like(x)},
        arguments=("in", "out"),
        output="out",
        expected=np.roll(x, 1, axis=1),
        cluster=(4, 1, 1),
    )


def hand_over() -> Case:
    """Case of five rounds."""
    x = np.arange(160, dtype=np.uint32)
    return Case(
        *("hopper_cluster", "hand_over", (1, 1, 1), 64),
        buffers={"in": x, "out": np.zeros_like(x)},
        arguments=("in", "out", i32(5)),
        output="out",
        expected=x.reshape(5, 32)[:, ::-1].ravel(),
    )


WHOLE: Mapping[str, Case] = {
    "copy_bytes": copy_bytes(),
    "scale_tiles": scale_tiles(),
    "reduce_bytes": reduce_bytes(),
    "gemm_bf16": gemm("gemm_bf16", "bf16", 4, 96, 160, 408),
    "gemm_f16": gemm("gemm_f16", "f16", 3, 64, 136, 64),
    "gemm_a_registers": gemm_a_registers(72, 136, 200),
    "gemm_cluster_bf16": gemm_cluster("bf16", 200, 136, 408, 1),
    "gemm_cluster_f16": gemm_cluster("f16", 520, 128, 64, 2),
    "attention_bf16": attention("bf16", 128, 256, 1, 1, 1),
    "attention_f16_ping_pong": attention("f16_ping_pong", 64, 128, 3, 2, 2),
    "attention_bf16_ping_pong_overlap": attention("bf16_ping_pong_overlap", 128, 384, 1, 1, 2),
    "cluster_softmax": cluster_softmax(),
    "cluster_shift": cluster_shift(),
    "hand_over": hand_over(),
}
"""Cases of whole kernels, with more than one instruction under test."""

CASES: Mapping[str, Case] = {**WHOLE, **dict(tile_cases()), **dict(box_cases())}
