"""The problems of norm and rotary embedding of Q and K that are checked and measured, and
distributions of inputs by name. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.qk_norm_rope.problem import QkNormRope

MEASURED_LENGTHS = (256, 1024, 4096)
MEASURED_BATCH, MEASURED_HEADS, MEASURED_CONTEXT = 2, 24, 154

MEAN = 0.5  # away from zero
LARGE = 1000.0

# in words
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"normal with mean {MEAN} and deviation 1, weights near 1",
        "large": f"{LARGE:g} times as large",
        "constant_rows": "all elements of a row are equal",
        "countable": "small integers known from their position, for debugging",
    }
)


def measured(length: int) -> QkNormRope:
    """Return the problem of one length that is measured: 24 heads of 128, with a context and rotary
    embedding. Raises ValueError as `QkNormRope` does."""
    return QkNormRope(MEASURED_BATCH, MEASURED_HEADS, length, context=MEASURED_CONTEXT, rotary=True)
