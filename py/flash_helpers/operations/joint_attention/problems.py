"""The problems of joint attention that are checked and measured, and distributions of inputs by
name. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.joint_attention.problem import JointAttention

MEASURED_LENGTHS = (64, 128, 186, 256, 512)
MEASURED_BATCH, MEASURED_HEADS, MEASURED_CONTEXT = 64, 8, 64

MEAN = 0.5  # away from zero
LARGE_WEIGHT = 4.0

# in words
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"normal with mean {MEAN} and deviation 1, weights near 1",
        "large_logits": f"weights of Q and K are {LARGE_WEIGHT:g} times as large, and logits "
        f"{LARGE_WEIGHT**2:g} times",
        "constant_rows": "all tokens of a sample have the same q and the same k: o is the mean of "
        "v where nothing is turned",
        "countable": "small integers known from their position, for debugging",
    }
)


def measured(length: int) -> JointAttention:
    """Return the problem of one length that is measured: heads of 16, with a context and rotary
    embedding. Raises ValueError as `JointAttention` does."""
    return JointAttention(
        MEASURED_BATCH, MEASURED_HEADS, length, context=MEASURED_CONTEXT, rotary=True
    )
