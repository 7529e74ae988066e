"""The problems of rows that are checked and measured, and distributions of inputs by name.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.rows.problem import Rows

MEASURED_WIDTHS = (256, 1024, 4096, 8192, 32768, 131072)
MEASURED_ELEMENTS = 2**27  # 2^28 bytes of x in 16 bits, five times the L2 of an H100

MEAN = 0.5  # away from zero: a maximum that begins at 0 would not show otherwise
LARGE_LOGIT_STD = 60.0
OUTLIER_PERIOD = 61
OUTLIER_FACTOR = 6.0
MASKED_SHARE = 0.25

# in words
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"normal with mean {MEAN} and deviation 1",
        "large_logits": f"normal with deviation {LARGE_LOGIT_STD:g}: softmax picks single elements",
        "constant_rows": "each row is one value: softmax is uniform",
        "outliers": f"one column in {OUTLIER_PERIOD}, at random, is {OUTLIER_FACTOR:g} times as "
        "large: the running maximum jumps",
        "countable": "small integers known from their position, for debugging",
        "masked": f"a share of {MASKED_SHARE:g} is -inf, and all of the last of several rows",
    }
)


def measured(width: int) -> Rows:
    """Return the problem of one width that is measured: MEASURED_ELEMENTS elements of x, or one
    row. Raises ValueError as `Rows` does."""
    return Rows(max(1, MEASURED_ELEMENTS // max(1, width)), width)
