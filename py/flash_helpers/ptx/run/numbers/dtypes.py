"""How NumPy holds values of PTX types."""

from __future__ import annotations

import numpy as np

from flash_helpers.ptx.read.types import B128, SCALAR_TYPES

_CODES = {"s": "i", "u": "u", "b": "u", "f": "f", "x": "u"}  # of NumPy, by kind

_DTYPES = {
    B128: np.dtype(np.uint64),
    **{
        name: np.dtype(bool if scalar.kind == "p" else f"{_CODES[scalar.kind]}{scalar.size}")
        for name, scalar in SCALAR_TYPES.items()
    },
}


def dtype_of(name: str) -> np.dtype:
    """The dtype of one value of a PTX type; for B128, the dtype of one of its two words."""
    return _DTYPES[name]
