"""The problems of append that are checked and measured, and distributions of inputs by name.
Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.append.problem import Append

MEASURED_NEW = (1, 2, 8, 64, 512)
MEASURED_BATCH, MEASURED_PAGE = 64, 16
MEASURED_ROOM = 64  # at least; nothing but the new rows of a cache is touched
MEASURED_KV_HEADS, MEASURED_HEADS, MEASURED_D_HEAD = 8, 32, 128

MEAN = 0.5  # away from zero
LARGE_STD = 1000.0

# in words
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"normal with mean {MEAN} and deviation 1",
        "large": f"normal with deviation {LARGE_STD:g}",
        "special": "elements of NaN, infinities and 0",
        "countable": "small integers known from their position, for debugging",
    }
)


def measured(len_new: int, batch: int = MEASURED_BATCH) -> Append:
    """Return the problem of as many new keys per sequence that is measured: in pages, with a query
    for each. One is a step of decode. Raises ValueError as `Append` does."""
    pages = -(-max(len_new, MEASURED_ROOM) // MEASURED_PAGE)
    return Append(
        *(batch, MEASURED_KV_HEADS, len_new, pages * MEASURED_PAGE, MEASURED_D_HEAD),
        page_size=MEASURED_PAGE,
        rotary_dim=MEASURED_D_HEAD,
        len_q=len_new,
        heads=MEASURED_HEADS,
    )
