"""The problems of rows_backward that are checked and measured, and distributions of inputs by name.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.rows import problems as forward
from flash_helpers.operations.rows_backward.problem import RowsBackward

MEASURED_WIDTHS = (64, 256, 1024, 4096, 16384, 65536)
FAR_MEAN = 50.0  # of dy, far from zero: dy - Σ y · dy cancels

# in words
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        **{
            name: text if name == "countable" else f"y is softmax of x, which is {text}"
            for name, text in forward.DISTRIBUTIONS.items()
        },
        "masked": "y is softmax of x, of which "
        f"{forward.DISTRIBUTIONS['masked'].removeprefix('a ')}",
        "far_mean": f"dy is normal with mean {FAR_MEAN:g} and deviation 1",
        "special": "dy has elements of NaN and infinities",
    }
)


def measured(width: int) -> RowsBackward:
    """Return the problem of one width that is measured, as for softmax. Raises ValueError as
    `RowsBackward` does."""
    return RowsBackward(forward.measured(width).rows, width)
