"""Attention, backward: the gradients of Q, K and V for every batch and head."""

from __future__ import annotations

from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_backward.problems import (
    DISTRIBUTIONS,
    MEASURED_LENGTHS,
    measured,
)
from flash_helpers.registry.operation import TFLOPS, Operation

LIBRARIES = {
    "pytorch_flash": "PyTorch's flash backend",
    "pytorch_cudnn": "PyTorch's cuDNN backend",
}

OPERATION = Operation(
    name="attention_backward",
    title="attention, backward",
    problem=AttentionBackward,
    small=AttentionBackward(batch=1, heads=1, len_q=256),
    small_variant=AttentionBackward(batch=1, heads=2, kv_heads=1, len_q=256),
    usual=AttentionBackward(batch=4, heads=16, len_q=2048),
    debugged=AttentionBackward(batch=1, heads=1, len_q=128),
    counted=AttentionBackward(batch=1, heads=1, len_q=256),
    counted_within=AttentionBackward(batch=1, heads=16, len_q=256),
    swept="len_q",
    measured=measured,
    measured_at=MEASURED_LENGTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    short_names={"pytorch_flash": "flash", "pytorch_cudnn": "cuDNN"},
    metric=TFLOPS,
    families=(
        "backward_sync:BACKWARD_SYNC",
        "backward:BACKWARD",
        "backward_wide:BACKWARD_WIDE",
    ),
    # as the forward pass: a block of 64 x 64 scores at d_head 128 in 4 ms per two products
    simulated_ns=4.0e6 / (4 * 64 * 64 * 128),
    has_trace=True,
)
