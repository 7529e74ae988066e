"""The problems of diagonal that are checked and measured, and distributions of inputs by name.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.diagonal.problem import Diagonal

MEASURED_WIDTHS = (64, 256, 1024, 4096, 16384, 65536)
MEASURED_ELEMENTS = 2**27  # 2^28 bytes of B in 16 bits, five times the L2 of an H100

MEAN = 0.5  # away from zero: an a of another row would not show in a mean of 0 otherwise
FAR_MEAN = 50.0
LARGE_STD = 30.0  # products stay below the largest fp16, 65504

# in words
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"normal with mean {MEAN} and deviation 1",
        "far_mean": f"B is normal with mean {FAR_MEAN:g} and deviation 1",
        "large": f"normal with deviation {LARGE_STD:g}",
        "constant_rows": "each row of B is one value",
        "countable": "small integers known from their position, for debugging",
        "special": "B has elements of NaN, infinities and 0, and a has an infinity and a 0",
    }
)


def measured(width: int) -> Diagonal:
    """Return the problem of one width that is measured: MEASURED_ELEMENTS elements of B, or one
    row. Raises ValueError as `Diagonal` does."""
    return Diagonal(max(1, MEASURED_ELEMENTS // max(1, width)), width)
