"""Attention, forward: softmax(Q K^T · scale) V for every batch and head."""

from __future__ import annotations

from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.operations.attention_forward.problems import (
    DISTRIBUTIONS,
    MEASURED_LENGTHS,
    default_shape,
)
from flash_helpers.registry.operation import TFLOPS, Operation

LIBRARIES = {
    "pytorch_flash": "PyTorch's flash backend",
    "pytorch_cudnn": "PyTorch's cuDNN backend",
    "flash_attn": "the flash_attn package",
    "fa3": "FlashAttention-3 (fa3_fwd)",
}

SHORT_NAMES = {"pytorch_flash": "flash", "pytorch_cudnn": "cuDNN", "fa3": "FA3"}

OPERATION = Operation(
    name="attention_forward",
    title="attention, forward",
    problem=AttentionForward,
    small=AttentionForward(batch=1, heads=1, len_q=512),
    small_variant=AttentionForward(batch=1, heads=2, kv_heads=1, len_q=512),
    usual=AttentionForward(batch=16, heads=16, len_q=2048),
    debugged=AttentionForward(batch=1, heads=1, len_q=256),
    counted=AttentionForward(batch=1, heads=1, len_q=512),
    counted_within=AttentionForward(batch=1, heads=16, len_q=512),
    swept="len_q",
    measured=default_shape,
    measured_at=MEASURED_LENGTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    short_names=SHORT_NAMES,
    metric=TFLOPS,
    families=("ampere:AMPERE", "overlap:OVERLAP", "hopper:HOPPER", "general:GENERAL"),
    # 4 ms for one thread block's pass over 64 x 64 scores at d_head 128, measured
    simulated_ns=4.0e6 / (4 * 64 * 64 * 128),
    has_trace=True,
)
