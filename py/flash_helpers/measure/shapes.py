"""The problems that are measured. Standard library only."""

from __future__ import annotations

from flash_helpers.kernel_configs import AttentionForward, Config

DEFAULT_SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
N_HEADS = 16
MAX_HEADS = 256  # batch * heads
MAX_ROWS = 2**20  # batch * heads * seq_len


def default_shape(
    seq_len: int,
    heads: int = N_HEADS,
    kv_heads: int | None = None,
    causal: bool = False,
    batch: int | None = None,
) -> AttentionForward:
    """The problem of one length, with a batch of what MAX_HEADS and MAX_ROWS leave: of 16 heads 16,
    or 65536 tokens; of twice as many heads half of it, so that Q and the work are of one size.

    kv_heads: as many as heads if None. batch: instead of that. Raises ValueError as
    `AttentionForward` does.
    """
    if batch is None:
        batch = max(1, min(MAX_HEADS, MAX_ROWS // seq_len) // max(1, heads))
    return AttentionForward(batch, heads, seq_len, kv_heads=kv_heads, causal=causal)


def tuning_shape(config: Config, seq_len: int) -> AttentionForward:
    """The problem of one length that a config is tuned on: causal if it takes no others."""
    return default_shape(seq_len, causal=config.supports.causal)
