"""Fragments and arithmetic of `wgmma.mma_async` with 16-bit elements.

PTX ISA 9.0, "Register Fragments" of the asynchronous warpgroup instructions. Warp w of a warpgroup
holds rows 16 w ... 16 w + 15 of A and D. Its lanes hold these rows like a row of m16n8k16 fragments
of `tensor`. Register i of D is row g + 8 (i / 2 % 2) and column 8 (i / 4) + 2 t + i % 2. With f16
one register holds both columns as its halves. An A in registers is the A of mma.m16n8k16.

Arithmetic is that of `tensor`: products are exact and are summed with D in float64, and rounded
once to the type of D by each instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.run.memory.descriptors import K
from flash_helpers.ptx.run.numbers.dtypes import dtype_of
from flash_helpers.ptx.run.numbers.rounding import odd_f32, to_floats

WARP_ROWS = 16
"""Rows of A and D that one warp holds."""
_LANE = (8, 4)  # g, t


def as_matrix(elements: np.ndarray) -> np.ndarray:
    """The matrix D, (warps, 16, N), from the contents of its fragment's registers: (registers,
    lanes, elements per register)."""
    _, lanes, together = elements.shape
    # (block of 8 columns, half of the rows, column of a register, warp, g, t, column in a register)
    raw = elements.reshape(-1, 2, 2 // together, lanes // WARP, *_LANE, together)
    return raw.transpose(3, 1, 4, 0, 5, 2, 6).reshape(lanes // WARP, WARP_ROWS, -1)


def as_fragment(matrix: np.ndarray, together: int) -> np.ndarray:
    """The inverse of `as_matrix`. `together`: elements per register."""
    warps, _, n = matrix.shape
    raw = matrix.reshape(warps, 2, 8, n // 8, 4, 2 // together, together)
    return raw.transpose(3, 1, 5, 0, 2, 4, 6).reshape(-1, WARP * warps, together)


def per_register(type_name: str) -> int:
    """Elements of D that a register holds."""
    return 4 // dtype_of(type_name).itemsize


def matrix_of_d(registers: Sequence[np.ndarray], type_name: str) -> np.ndarray:
    """The matrix D, float64 (warps, 16, N), from its fragment's registers, uint32, one element per
    lane."""
    raw = np.stack(registers).view(dtype_of(type_name))
    elements = raw.reshape(len(registers), -1, per_register(type_name))
    return as_matrix(elements).astype(np.float64)


def registers_of_d(matrix: np.ndarray, type_name: str) -> np.ndarray:
    """The fragment, uint32 (registers, lanes), of a matrix (warps, 16, N). The caller must round
    the numbers to the type of D first."""
    elements = as_fragment(matrix.astype(dtype_of(type_name)), per_register(type_name))
    return np.ascontiguousarray(elements).view(np.uint32)[:, :, 0]


def numbers(raw: np.ndarray, type_name: str) -> np.ndarray:
    """Elements of A or B as float64. `raw`: their bits, uint16."""
    return to_floats(raw.view(dtype_of(type_name)), type_name).astype(np.float64)


def product(a: np.ndarray, b: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The products of one instruction, (warps, 16, N), in float64 as their factors.

    `a`: the rows of each warp, (warps, 16, 16). `b`: the different matrices B, transposed: (n, N,
    16). `which`: index of each warp's B.
    """
    found = np.empty((*a.shape[:2], b.shape[1]))
    for i, columns in enumerate(b):
        mine = np.flatnonzero(which == i)
        found[mine] = (a[mine].reshape(-1, K) @ columns.T).reshape(mine.size, WARP_ROWS, -1)
    return found


def rounded_sum(d: np.ndarray, products: np.ndarray, type_name: str) -> np.ndarray:
    """D + products, float64, rounded to the type of D."""
    total = d + products
    if type_name == "f16":
        total = odd_f32(total)
    return total.astype(dtype_of(type_name)).astype(np.float64)
