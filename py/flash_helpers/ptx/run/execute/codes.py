"""Arithmetic on codes of poison (`poison.Codes`); None stands for all clean."""

from __future__ import annotations

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.run.watch.poison import COUNTS, Codes


def union(*several: Codes | None) -> Codes | None:
    """The union of codes by byte; a single row counts for all bytes."""
    result = None
    for codes in several:
        if codes is not None:
            result = codes if result is None else np.maximum(result, codes)
    return result


def worst(*several: Codes | None) -> Codes | None:
    """One row: the poison of a lane if any byte of any source has some."""
    return counted(union(*(c.max(axis=0, keepdims=True) for c in several if c is not None)))


def counted(codes: Codes | None) -> Codes | None:
    """Poison of values that were computed, not only moved."""
    return None if codes is None else np.where(codes, codes | COUNTS, 0)


def halves(codes: Codes | None) -> Codes | None:
    """Codes of the two halves of four bytes, two rows: each half's poison."""
    return None if codes is None else counted(codes.reshape(2, 2, -1).max(axis=1))


def from_halves(codes: Codes | None) -> Codes | None:
    """The inverse of `halves`: four bytes."""
    return None if codes is None else codes.repeat(2, axis=0)


def full(codes: Codes | None, size: int, lanes: int) -> Codes:
    """The codes of `size` bytes, zeros for None."""
    if codes is None:
        return np.zeros((size, lanes), np.int64)
    return codes[:size] if len(codes) >= size else np.broadcast_to(codes, (size, lanes))


def octets(values: np.ndarray, lanes: int) -> np.ndarray:
    """The bytes of one value per lane, or of one value for all: (bytes, lanes)."""
    whole = np.ascontiguousarray(np.broadcast_to(values, (lanes,)))
    return whole.view(np.uint8).reshape(lanes, -1).T


def over_warps(codes: Codes | None, lanes: np.ndarray) -> Codes | None:
    """One row: the worst code of a warp, for each of its lanes."""
    if codes is None:
        return None
    warps, index = np.unique(lanes // WARP, return_inverse=True)
    most = np.zeros(warps.size, np.int64)
    np.maximum.at(most, index, codes.max(axis=0))
    return most[index][None]


def transposed(codes: Codes | None) -> Codes | None:
    """Codes of the transpose of an 8 x 8 matrix of 16-bit elements: lane (g, t) holds columns 2t
    and 2t + 1 of row g."""
    if codes is None:
        return None
    matrix = codes.T.reshape(-1, 8, 8, 2).swapaxes(1, 2)
    return matrix.reshape(-1, 4).T
