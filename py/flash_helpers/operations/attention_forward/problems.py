"""The problems of attention that are checked and measured, and distributions of inputs by name.

Each distribution brings out errors that another would hide; `inputs` draws them. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.supports import AttentionSupports

MEASURED_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
N_HEADS = 16
MAX_HEADS = 256  # batch * heads
MAX_ROWS = 2**20  # batch * heads * seq_len

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


def default_shape(
    seq_len: int,
    heads: int = N_HEADS,
    kv_heads: int | None = None,
    causal: bool = False,
    batch: int | None = None,
) -> AttentionForward:
    """Return the problem of one length that is measured.

    Its batch follows from MAX_HEADS and MAX_ROWS. With 16 heads the batch is 16, or 65536 tokens;
    with twice as many heads it is half of that, so that the size of Q and the work stay the same.

    `kv_heads`: as many as heads if None. `batch`: batch instead of the above. Raises ValueError as
    `AttentionForward` does.
    """
    if batch is None:
        batch = max(1, min(MAX_HEADS, MAX_ROWS // seq_len) // max(1, heads))
    kv_heads = heads if kv_heads is None else kv_heads
    return AttentionForward(batch, heads, seq_len, kv_heads=kv_heads, causal=causal)


def counted_problem(supports: AttentionSupports, size: int, heads: int = 1) -> AttentionForward:
    """Return a small problem that a config takes: the given heads, and a sequence of `size` over
    the square root of the heads, so that the time does not depend on the heads."""
    block = supports.whole
    seq_len = max(block, int(size / heads**0.5) // block * block)
    return supports.problem(1, heads, seq_len, seq_len)
