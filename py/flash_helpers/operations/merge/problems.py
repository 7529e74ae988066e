"""The problems of merge that are checked and measured, and distributions of inputs by name.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.merge.problem import Merge

MEASURED_PARTS = (2, 4, 8, 16, 64, 1024)
MEASURED_ELEMENTS = 2**27  # 2^28 bytes of o_parts in 16 bits, five times the L2 of an H100
MEASURED_HEADS = 32
MEASURED_D_HEAD = 128

MEAN = 0.5  # away from zero: a part left out would not show in a mean of 0 otherwise
FAR_MEAN = 50.0
LARGE_STD = 60.0
MASKED_SHARE = 0.4

# in words
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"normal with mean {MEAN} and deviation 1",
        "far_mean": f"outputs are normal with mean {FAR_MEAN:g} and deviation 1",
        "large_lse": f"lse has deviation {LARGE_STD:g}: one part has nearly all of a row",
        "equal_lse": "the parts of a row have one lse: o is their mean",
        "countable": "small integers known from their position, for debugging",
        "masked": f"a share of {MASKED_SHARE:g} of the parts has lse -inf and NaN in o, and all of "
        "the last row",
        "special": "lse has elements of NaN and +inf, and o of NaN and infinities",
    }
)


def measured(parts: int) -> Merge:
    """Return the problem of a number of parts that is measured: MEASURED_ELEMENTS elements of
    o_parts, or one row. Raises ValueError as `Merge` does."""
    of_row = max(1, parts) * MEASURED_HEADS * MEASURED_D_HEAD
    return Merge(parts, max(1, MEASURED_ELEMENTS // of_row), MEASURED_HEADS, MEASURED_D_HEAD)
