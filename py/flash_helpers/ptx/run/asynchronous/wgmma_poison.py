"""Poison of the registers of wgmmas, by rows and columns of their matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flash_helpers.ptx.run.asynchronous.wgmma_fragments import as_fragment, as_matrix
from flash_helpers.ptx.run.watch.poison import COUNTS, Codes, Poison


def counted(codes: Codes) -> Codes:
    """Poison of values that were computed, not only moved."""
    return np.where(codes, codes | COUNTS, 0)


def codes_of_fragment(
    poison: Poison, names: Sequence[str], together: int, columns: int, lanes: np.ndarray
) -> Codes | None:
    """Codes of the elements of A or D, (warps, 16, columns); None if all are clean. `names`: names
    of its registers. `together`, `columns`: elements per register, and that a lane holds side by
    side."""
    held = [poison.of(name, lanes) for name in names]
    if all(codes is None for codes in held):
        return None
    elements = np.zeros((len(names), lanes.size, together), np.int64)
    for i, codes in enumerate(held):
        if codes is not None:
            elements[i] = codes.reshape(together, -1, lanes.size).max(axis=1).T
    return counted(as_matrix(elements, columns))


def store_codes(
    poison: Poison, names: Sequence[str], together: int, lanes: np.ndarray, codes: Codes | None
) -> None:
    """The inverse of `codes_of_fragment`."""
    parts = [None] * len(names)
    if codes is not None:
        parts = [part.T.repeat(4 // together, axis=0) for part in as_fragment(codes, together)]
    for name, part in zip(names, parts, strict=True):
        poison.put(name, lanes, part)
