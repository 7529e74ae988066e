"""Fragments and arithmetic of `wgmma.mma_async`.

PTX ISA 9.0, "Register Fragments" of the asynchronous warpgroup instructions. Warp w of a warpgroup
holds rows 16 w ... 16 w + 15 of A and D. Its lanes hold these rows like a row of m16n8 fragments of
`tensor`. Register i of D is row g + 8 (i / 2 % 2) and column 8 (i / 4) + 2 t + i % 2. With f16
one register holds both columns as its halves. An A in registers is the A of the `mma` whose
fragment has as many registers, four.

Arithmetic is that of `tensor`: products are exact and are summed with D in float64, and rounded
once to the type of D by each instruction. The hardware keeps fewer bits, fewest of all for 8-bit
floats, so only sums that are exact in few bits are the same. Sums of integers wrap, or saturate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.run.numbers.dtypes import dtype_of
from flash_helpers.ptx.run.numbers.elements import unpacked, values
from flash_helpers.ptx.run.numbers.rounding import odd_f32

WARP_ROWS = 16
"""Rows of A and D that one warp holds."""
_LANE = (8, 4)  # g, t


def as_matrix(elements: np.ndarray, columns: int = 2) -> np.ndarray:
    """The matrix, (warps, 16, columns), from the contents of its fragment's registers: (registers,
    lanes, elements per register). `columns`: columns that a lane holds side by side; of A as many
    as there are elements in a register."""
    _, lanes, together = elements.shape
    # (block of columns, half of the rows, column of a register, warp, g, t, column in a register)
    raw = elements.reshape(-1, 2, columns // together, lanes // WARP, *_LANE, together)
    return raw.transpose(3, 1, 4, 0, 5, 2, 6).reshape(lanes // WARP, WARP_ROWS, -1)


def as_fragment(matrix: np.ndarray, together: int) -> np.ndarray:
    """The inverse of `as_matrix` for D. `together`: elements per register."""
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


def matrix_of_a(registers: Sequence[np.ndarray], type_name: str) -> np.ndarray:
    """The rows of A of each warp, float64 (warps, 16, columns), from its fragment's registers, as
    in `matrix_of_d`."""
    elements = unpacked(np.stack(registers)[:, :, None], type_name)
    return values(as_matrix(elements, elements.shape[2]), type_name)


def product(a: np.ndarray, b: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The products of one instruction, (warps, 16, N), in float64 as their factors.

    `a`: the rows of each warp, (warps, 16, K). `b`: the different matrices B, transposed: (n, N,
    K). `which`: index of each warp's B.
    """
    found = np.empty((*a.shape[:2], b.shape[1]))
    counts = np.bincount(which, minlength=len(b))
    if (counts == counts[0]).all():
        by_matrix = np.argsort(which, kind="stable")
        of_each = a[by_matrix].reshape(len(b), -1, a.shape[2])
        found[by_matrix] = (of_each @ b.transpose(0, 2, 1)).reshape(found.shape)
        return found
    for i, columns in enumerate(b):
        mine = np.flatnonzero(which == i)
        rows = a[mine].reshape(-1, a.shape[2])
        found[mine] = (rows @ columns.T).reshape(mine.size, WARP_ROWS, -1)
    return found


def rounded_sum(
    d: np.ndarray, products: np.ndarray, type_name: str, *, saturates: bool = False
) -> np.ndarray:
    """D + products, float64, rounded to the type of D. `saturates`: a sum of integers beyond their
    limits becomes the limit; otherwise it wraps."""
    total = d + products
    if type_name == "f16":
        total = odd_f32(total)
    elif type_name == "s32":
        if saturates:
            return np.clip(total, -(2.0**31), 2.0**31 - 1)
        total = total.astype(np.int64)
    return total.astype(dtype_of(type_name)).astype(np.float64)
