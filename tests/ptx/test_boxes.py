"""Boxes of tensor copies, against loops over single elements."""

import itertools
import math
from dataclasses import replace
from timeit import repeat

import numpy as np
import pytest

from flash_helpers.ptx import TensorMap
from flash_helpers.ptx.run.memory.boxes import Box, shared_chunks, swizzled
from flash_helpers.ptx.tensor_map import ELEMENT_BYTES

BASE = 0x7F00_0000_0000
OFFSET = 4096  # of the tensor in memory
RNG = np.random.default_rng(15)
MEMORY = RNG.integers(1, 256, 1 << 16, np.uint8)


def make(dims, box, dtype="u16", pads=(), **options) -> TensorMap:
    """A map of a tensor in MEMORY whose rows, planes... have gaps of `pads` bytes between them."""
    strides, size = [], ELEMENT_BYTES[dtype]
    for n, pad in zip(dims, pads, strict=False):
        size = size * n + pad
        strides.append(size)
    return TensorMap(dtype, BASE + OFFSET, dims, box, tuple(strides), **options)


def elements(tensor_map, coordinates, is_stored=False):
    """For each element that is moved, in the order of the box: its coordinates, its address, and
    whether it is inside, or shares 16 bytes with one that is."""
    sizes = list(tensor_map.dims)
    while is_stored and sizes[0] * tensor_map.element_bytes % 16:
        sizes[0] += 1
    for index in itertools.product(*(range(n) for n in reversed(tensor_map.moved))):
        position = [
            start + i * step
            for start, i, step in zip(
                coordinates, reversed(index), tensor_map.element_strides, strict=True
            )
        ]
        inside = all(0 <= x < n for x, n in zip(position, sizes, strict=True))
        strides = (tensor_map.element_bytes, *tensor_map.strides)
        address = tensor_map.address + sum(x * s for x, s in zip(position, strides, strict=True))
        yield position, address, inside


def expected(tensor_map, coordinates, fill=0) -> np.ndarray:
    size = tensor_map.element_bytes
    outside = np.array([fill], f"u{size}").view(np.uint8)
    return np.concatenate(
        [
            MEMORY[address - BASE :][:size] if inside else outside
            for _, address, inside in elements(tensor_map, coordinates)
        ]
    )


SHAPES = {
    "1d": make((50,), (16,)),
    "2d": make((40, 11), (24, 5)),
    "3d": make((24, 7, 5), (8, 3, 2), pads=(16, 32)),
    "4d": make((16, 5, 4, 3), (16, 2, 3, 2), "f32"),
    "5d": make((16, 4, 3, 3, 2), (16, 3, 2, 2, 2), "u8", pads=(16, 0, 64, 0)),
    "steps": make((32, 21, 9), (16, 8, 7), element_strides=(1, 3, 2)),
    "doubles": make((6, 9), (2, 4), "f64"),
    "odd row": make((19, 9), (16, 4), pads=(10,)),
}


def corners(tensor_map):
    """Coordinates inside of the tensor, over its edge on every side, and away from it."""
    yield (0,) * tensor_map.rank
    yield tuple(n // 2 for n in tensor_map.dims)
    for n, (size, box) in enumerate(zip(tensor_map.dims, tensor_map.box, strict=True)):
        for start in (-1, 1 - box, -box, -box - 3, size - 1, size - box + 1, size, size + 5):
            yield tuple(start if i == n else 1 for i in range(tensor_map.rank))
    yield tuple(-1 for _ in tensor_map.dims)


@pytest.mark.parametrize("tensor_map", SHAPES.values(), ids=SHAPES)
class TestEveryElement:
    def test_read(self, tensor_map):
        for at in corners(tensor_map):
            found = Box(tensor_map, at).read(MEMORY, BASE)
            assert np.array_equal(found, expected(tensor_map, at)), at

    def test_which_bytes_are_filled(self, tensor_map):
        for at in corners(tensor_map):
            inside = [inside for _, _, inside in elements(tensor_map, at)]
            box = Box(tensor_map, at)
            assert np.array_equal(box.filled, ~np.repeat(inside, tensor_map.element_bytes)), at
            assert (box.is_whole, box.is_outside) == (all(inside), not any(inside)), at

    def test_what_a_store_changes(self, tensor_map):
        size = tensor_map.element_bytes
        for at in corners(tensor_map):
            data = RNG.integers(1, 256, tensor_map.box_bytes, np.uint8)
            box, memory = Box(tensor_map, at, is_stored=True), MEMORY.copy()
            wanted = MEMORY.copy()
            if not box.is_outside:
                box.view(memory, BASE)[...] = box.inside(data)
            for i, (_, address, inside) in enumerate(elements(tensor_map, at, is_stored=True)):
                if inside:
                    wanted[address - BASE :][:size] = data[i * size :][:size]
            assert np.array_equal(memory, wanted), at

    @pytest.mark.parametrize("is_stored", [False, True])
    def test_rows_and_sectors(self, tensor_map, is_stored):
        size, row = tensor_map.element_bytes, tensor_map.moved[0]
        for at in corners(tensor_map):
            found = elements(tensor_map, at, is_stored=is_stored)
            addresses = [a if inside else -1 for _, a, inside in found]
            rows = np.array(addresses).reshape(-1, row)
            box = Box(tensor_map, at, is_stored=is_stored)
            assert box.rows.tolist() == [min(r[r >= 0]) for r in rows if (r >= 0).any()], at
            octets = {a + i for a in addresses if a >= 0 for i in range(size)}
            sectors = 0
            for r in rows:
                sectors += len({a // 32 for a in r if a >= 0})
                for is_inside, run in itertools.groupby(r, lambda a: a >= 0):
                    if not is_inside and not is_stored:
                        sectors += math.ceil(len(list(run)) * size / 32)
            assert box.sectors == sectors, at
            if octets:
                assert (box.address, box.end) == (min(octets), max(octets) + 1), at


class TestRagged:
    """Sequences of various lengths, one after the other: rows (columns, row, end), of which those
    behind the end of a sequence lie outside. Coordinates 0 are so many rows before the tensor as it
    has. Row r of a sequence that ends at row e is at row total - e + r and end e."""

    TOTAL, COLUMNS = 11, 16

    def box(self, row: int, end: int, **options: bool) -> Box:
        stride = self.COLUMNS * 2
        whole = make((self.COLUMNS, self.TOTAL, self.TOTAL + 1), (self.COLUMNS, 4, 1))
        ragged = replace(
            whole,
            address=whole.address - self.TOTAL * stride,
            strides=(stride, stride),
        )
        return Box(ragged, (0, self.TOTAL - end + row, end), **options)

    @pytest.mark.parametrize(("row", "end"), [(0, 4), (0, 3), (3, 5), (5, 5), (9, 11), (11, 11)])
    def test_boxes_end_with_the_sequence(self, row, end):
        rows = make((self.COLUMNS, end), (self.COLUMNS, 4))
        alone, found = Box(rows, (0, row)), self.box(row, end)
        assert np.array_equal(found.read(MEMORY, BASE), alone.read(MEMORY, BASE))
        assert self.box(row, end, is_stored=True).rows.tolist() == alone.rows.tolist()
        assert found.is_outside or found.address >= BASE + OFFSET


class TestFilling:
    @pytest.mark.parametrize(
        ("dtype", "view"), [("f16", np.float16), ("f32", np.float32), ("f64", np.float64)]
    )
    def test_nan(self, dtype, view):
        box = Box(make((16, 8), (8, 4), dtype, fill="nan"), (12, 6))
        values = box.read(MEMORY, BASE).view(view).reshape(4, 8)
        assert np.isnan(values[2:]).all() and np.isnan(values[:, 4:]).all()
        assert (values[2:].copy().view(np.uint16) == 0x7FF7).all()
        inside = expected(box.map, (12, 6)).view(view).reshape(4, 8)[:2, :4]
        assert np.array_equal(values[:2, :4], inside, equal_nan=True)

    def test_nan_of_bf16(self):
        box = Box(make((16, 8), (8, 4), "bf16", fill="nan"), (16, 0))
        assert (box.read(MEMORY, BASE).view(np.uint16) & 0x7FFF > 0x7F80).all()

    def test_a_box_may_be_changed_after_it_was_read(self):
        box = Box(make((16, 8), (8, 4)), (100, 0))
        box.read(MEMORY, BASE)[:] = 1
        assert not box.read(MEMORY, BASE).any()


class TestElements:
    def test_a_view_of_elements_is_the_memory(self):
        memory = np.zeros(8192, np.uint8)
        box = Box(make((8, 4), (8, 2), "u32"), (-2, 3))
        box.view(memory, BASE, "u4")[...] += box.inside(np.arange(16, dtype="u4"))
        found = memory[OFFSET:][: 8 * 4 * 4].view("u4").reshape(4, 8)
        assert found[3].tolist() == [2, 3, 4, 5, 6, 7, 0, 0] and not found[:3].any()


def rows_of(row: int, size: int, swizzle: int) -> TensorMap:
    """A map of boxes of so many bytes, in rows."""
    swizzle_name = f"{swizzle}B" if swizzle else "none"
    return TensorMap("u8", BASE, (row, 256), (row, size // row), swizzle=swizzle_name)


class TestSwizzle:
    """PTX ISA 9.0, "Swizzling Modes": which chunk of 16 bytes stands where in each row of 128."""

    @pytest.mark.parametrize(
        ("size", "rows"),
        [
            (0, ["01234567"] * 8),
            (32, ["01234567", "10325476"] * 4),
            (64, ["01234567", "10325476", "23016745", "32107654"] * 2),
            (
                128,
                [
                    "01234567", "10325476", "23016745", "32107654",
                    "45670123", "54761032", "67452301", "76543210",
                ],
            ),
        ],
    )  # fmt: skip
    def test_patterns(self, size, rows):
        for start in (0, 1024, 7 * 1024):
            chunks = shared_chunks(start, rows_of(size or 128, 1024, size))
            stands_at = np.empty(64, int)
            stands_at[chunks - start // 16] = np.arange(64)
            found = stands_at.reshape(8, 8) - 8 * np.arange(8)[:, None]
            assert ["".join(map(str, row)) for row in found] == rows

    @pytest.mark.parametrize("size", [0, 32, 64, 128])
    def test_it_is_its_own_inverse(self, size):
        addresses = np.arange(0, 1 << 14, 4)
        assert np.array_equal(swizzled(swizzled(addresses, size), size), addresses)

    @pytest.mark.parametrize("size", [32, 64, 128])
    def test_the_pattern_hangs_on_addresses(self, size):
        """A box that begins off the pattern's start has its chunks where a box would that
        begins on it."""
        whole = shared_chunks(0, rows_of(size, 4096, size))
        for start in (128, 256, 384, 896):
            part = shared_chunks(start, rows_of(size, 2048, size))
            assert np.array_equal(part, whole[start // 16 :][:128])

    def test_rows_by_hand(self):
        # Row r of 64 bf16, chunk c: at 128 r + 16 (c ^ (r % 8)).
        chunks = shared_chunks(2048, rows_of(128, 16384, 128)).reshape(128, 8)
        r, c = np.arange(128)[:, None], np.arange(8)
        assert np.array_equal(chunks * 16, 2048 + 128 * r + 16 * (c ^ r % 8))

    @pytest.mark.parametrize(
        ("row", "size", "lines"),
        [
            (64, 128, "0123.... 1032.... 2301.... 3210.... ....0123 ....1032 ....2301 ....3210"),
            (32, 128, "01...... 10...... ..01.... ..10.... ....01.. ....10.. ......01 ......10"),
            (96, 128, "012345.. 103254.. 2301..45 3210..54 45..0123 54..1032 ..452301 ..543210"),
            (32, 64, "01..01.. 10..10.. ..01..01 ..10..10"),
            (16, 32, "0.0.0.0. .0.0.0.0"),
        ],
    )
    def test_rows_narrower_than_the_swizzle(self, row, size, lines):
        """As an H200 leaves 128 bytes of shared memory after the other: eight rows of the box, and
        which chunk of its row stands where."""
        chunks = shared_chunks(2048, rows_of(row, 8 * row, size)) - 2048 // 16
        found = np.full(8 * size // 16, ".")
        found[chunks] = [str(i % (row // 16)) for i in range(chunks.size)]
        assert ["".join(line) for line in found.reshape(-1, 8)] == lines.split()


def test_a_box_takes_well_below_a_millisecond():
    tensor_map = make((128, 160), (64, 128), "bf16", swizzle="128B")
    memory = np.zeros(1 << 17, np.uint8)
    shared = np.zeros((1 << 16) // 16 * 4, np.uint32).reshape(-1, 4)

    def load():
        data = Box(tensor_map, (32, 64)).read(memory, BASE)
        chunks = shared_chunks(1024, tensor_map)
        shared[chunks] = data.view(np.uint32).reshape(-1, 4)

    load()
    assert min(repeat(load, number=10, repeat=5)) / 10 < 0.5e-3
