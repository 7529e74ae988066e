"""wgmma: the place of each element is computed here from the PTX ISA's figures."""

from __future__ import annotations

import numpy as np
import pytest

from flash_helpers.ptx.run.asynchronous.wgmma_fragments import (
    matrix_of_d,
    numbers,
    product,
    registers_of_d,
    rounded_sum,
)


def place_of_d(lane: int, element: int) -> tuple[int, int]:
    """PTX ISA 9.0, "Matrix Fragments for wgmma.mma_async.m64nNk16": row in the warp, column."""
    row = lane // 4 + 8 * (element // 2 % 2)
    return row, 8 * (element // 4) + 2 * (lane % 4) + element % 2


class TestFragmentOfD:
    @pytest.mark.parametrize("n", [8, 24, 128, 256])
    @pytest.mark.parametrize("type_name", ["f32", "f16"])
    def test_elements_lie_where_the_isa_says(self, type_name, n):
        dtype = {"f32": np.float32, "f16": np.float16}[type_name]
        rng = np.random.default_rng(n)
        lanes = rng.integers(-2048, 2049, (3 * 32, n // 2)).astype(dtype)  # (lane, element)
        registers = np.ascontiguousarray(lanes).view(np.uint32).T
        matrix = matrix_of_d(list(np.ascontiguousarray(registers)), type_name)
        assert matrix.dtype == np.float64 and matrix.shape == (3, 16, n)
        for lane in range(96):
            for element in range(n // 2):
                row, column = place_of_d(lane % 32, element)
                assert matrix[lane // 32, row, column] == lanes[lane, element]
        assert (registers_of_d(matrix, type_name) == registers).all()


class TestSums:
    """Each instruction rounds its exact sum once, to the nearest, a tie to even."""

    @pytest.mark.parametrize(
        "type_name, start, products, expected",
        [
            ("f32", 2.0**24, [1.5], 2.0**24 + 2),  # three sums of 0.5 would stay
            ("f32", 2.0**24, [1.0], 2.0**24),
            ("f32", 2.0**24, [1.0, 1.0], 2.0**24),  # two instructions round twice
            ("f32", 1.0, [2.0**-24 + 2.0**-50], 1 + 2.0**-23),
            ("f16", 2048.0, [1.0 + 2.0**-30], 2050.0),  # by way of f32 it would be a tie
            ("f16", 65504.0, [15.0], 65504.0),
            ("f16", 65504.0, [16.0], np.inf),
        ],
    )
    def test_once(self, type_name, start, products, expected):
        d = np.full((1, 16, 8), start)
        with np.errstate(over="ignore"):
            for x in products:
                d = rounded_sum(d, np.full(d.shape, x), type_name)
        assert (d == expected).all()


class TestProducts:
    def test_each_warp_takes_its_own_b(self):
        rng = np.random.default_rng(0)
        a = rng.integers(-8, 9, (5, 16, 16)).astype(float)
        b = rng.integers(-8, 9, (2, 24, 16)).astype(float)
        which = np.array([1, 0, 0, 1, 1])
        found = product(a, b, which)
        for warp in range(5):
            assert (found[warp] == a[warp] @ b[which[warp]].T).all()

    def test_numbers_of_both_types(self):
        bits = np.array([0x3F80, 0xC040, 0x0001], np.uint16)
        assert numbers(bits, "bf16").tolist() == [1.0, -3.0, 2.0**-133]
        assert numbers(bits, "f16").tolist() == [1.875, -2.125, 2.0**-24]
