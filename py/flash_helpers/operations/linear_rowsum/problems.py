"""The problems of linear_rowsum that are checked and measured, and distributions of inputs by name.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.linear_rowsum.problem import LinearRowsum

MEASURED_FEATURES = (1024, 4096, 16384)
MEASURED_ROWS = 4096  # of x, and of W

MEAN = 0.5  # of x, and of W before it is scaled
FAR_MEAN = 20.0
LARGE_STD = 60.0
OUTLIER_PERIOD = 61
OUTLIER_FACTOR = 6.0

# in words; W is divided by the number of input features, so that y stays in the range of fp16
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"normal with mean {MEAN} and deviation 1",
        "far_mean": f"x is normal with mean {FAR_MEAN:g} and deviation 1",
        "large": f"x is normal with deviation {LARGE_STD:g}",
        "constant_rows": "each row of x is one value, and each row of W",
        "outliers": f"one input feature in {OUTLIER_PERIOD}, at random, is {OUTLIER_FACTOR:g} "
        "times as large in x",
        "cancelling": "each second row of W is the negative of the row before it, and a little: "
        "outputs cancel in the sum",
        "countable": "small integers known from their position, for debugging",
    }
)


def measured(in_features: int) -> LinearRowsum:
    """Return the problem of one number of input features that is measured. Raises ValueError as
    `LinearRowsum` does."""
    return LinearRowsum(MEASURED_ROWS, in_features, MEASURED_ROWS, bias=True)
