"""The problems of norms that are checked and measured, and distributions of inputs by name.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.norm.problem import Norm

MEASURED_WIDTHS = (64, 256, 1024, 4096, 8192, 32768, 65536, 131072)
MEASURED_ELEMENTS = 2**27  # 2^28 bytes of x in 16 bits, five times the L2 of an H100

MEAN = 0.5  # away from zero: a mean that is left out would not show otherwise
FAR_MEAN = 1000.0
LARGE_STD = 1000.0
OUTLIER_PERIOD = 61
OUTLIER_FACTOR = 6.0
WEIGHT_MEAN, WEIGHT_STD = 1.0, 0.25
BIAS_STD = 0.5

# in words
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"normal with mean {MEAN} and deviation 1",
        "far_mean": f"normal with mean {FAR_MEAN:g} and deviation 1: the mean of x² less the "
        "square of the mean has no right digit",
        "large": f"normal with deviation {LARGE_STD:g}",
        "constant_rows": "each row is one value: its variance is 0",
        "outliers": f"one column in {OUTLIER_PERIOD}, at random, is {OUTLIER_FACTOR:g} times as "
        "large",
        "countable": "small integers known from their position, for debugging",
        "not_finite": "an element of the first row is NaN, and of several rows one of the last is "
        "infinite",
    }
)


def measured(width: int, rms: bool = False) -> Norm:
    """Return the problem of one width that is measured: MEASURED_ELEMENTS elements of x, or one
    row, with a weight, and of layer norm with a bias. Raises ValueError as `Norm` does."""
    rows = max(1, MEASURED_ELEMENTS // max(1, width))
    return Norm(rows, width, rms=rms, weight=True, bias=not rms)
