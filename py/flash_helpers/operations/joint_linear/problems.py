"""The problems of linear layers of a sequence and its context that are checked and measured, and
distributions of inputs by name. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.joint_linear.problem import JointLinear

MEASURED_LENGTHS = (64, 128, 186, 256, 512)
MEASURED_BATCH, MEASURED_CONTEXT, MEASURED_WIDTH = 64, 64, 128

MEAN = 0.5  # of x and of a bias
LARGE = 60.0
OUTLIER_PERIOD, OUTLIER_FACTOR = 13, 30.0

# in words; W is normal, divided by the square root of the input features
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"x is normal with mean {MEAN} and deviation 1",
        "large": f"x is normal with mean {LARGE:g} and deviation {LARGE:g}",
        "outliers": f"one input feature in {OUTLIER_PERIOD} is {OUTLIER_FACTOR:g} times as large "
        "in x",
        "constant_rows": "each token of x is one value, and each row of W",
        "countable": "small integers known from their position, for debugging",
    }
)


def measured(length: int) -> JointLinear:
    """Return the problem of one length that is measured: Q, K and V of a sequence and its context.
    Raises ValueError as `JointLinear` does."""
    return JointLinear(
        *(MEASURED_BATCH, length, MEASURED_WIDTH, 3 * MEASURED_WIDTH), context=MEASURED_CONTEXT
    )
