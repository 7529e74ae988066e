"""The problems that are measured. Standard library only."""

from __future__ import annotations

from flash_helpers.kernel_configs import AttentionForward

DEFAULT_SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
N_HEADS = 16
MAX_BATCH = 16
MAX_TOKENS = 65536  # batch * seq_len


def default_shape(seq_len: int) -> AttentionForward:
    """The problem of one length: 16 heads, a batch of 16 or what MAX_TOKENS leaves."""
    return AttentionForward(max(1, min(MAX_BATCH, MAX_TOKENS // seq_len)), N_HEADS, seq_len)
