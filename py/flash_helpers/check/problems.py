"""What kernels are checked on: shapes, and input distributions by name. Standard library only.

Each distribution brings out errors that another would hide; `check.inputs` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.kernel_configs import AttentionForward

DEFAULT_SHAPE = AttentionForward(batch=16, heads=16, len_q=2048)
SMALL_SHAPE = AttentionForward(batch=1, heads=1, len_q=512)

# Away from zero, so that an averaged V is a signal and not the noise that averaging leaves.
MEAN = 0.5
# Standard deviation of the scaled logits of `large_logits`: the largest of a few million is about
# five times that, and float32 still resolves it to 1e-4.
LARGE_LOGIT_STD = 60.0
OUTLIER_PERIOD = 61
OUTLIER_K_FACTOR = 6.0
OUTLIER_V_FACTOR = 8.0

# in words
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": f"normal with mean {MEAN} and deviation 1",
        "large_logits": f"scaled logits with deviation {LARGE_LOGIT_STD:g}: softmax picks single "
        "keys",
        "constant_rows": "each row of Q is one value and all keys are equal: softmax is uniform",
        "outliers": f"one key in {OUTLIER_PERIOD}, at random, is {OUTLIER_K_FACTOR:g} times as "
        "long: the running maximum jumps",
        "countable": "small integers known from their position, for debugging",
    }
)
