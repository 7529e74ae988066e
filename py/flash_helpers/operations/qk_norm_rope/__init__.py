"""Norm and rotary embedding of Q and K of a sequence and its context: memory-bound, measured beside
a copy."""

from __future__ import annotations

from flash_helpers.operations.qk_norm_rope.problem import QkNormRope
from flash_helpers.operations.qk_norm_rope.problems import (
    DISTRIBUTIONS,
    MEASURED_LENGTHS,
    measured,
)
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch_qk_norm_rope": "PyTorch's rms_norm, rotary embedding and concatenations",
    "compiled_qk_norm_rope": "the same in torch.compile",
    "copy": "a copy of as many bytes, the measured ceiling",
}
_SMALL = QkNormRope(batch=2, heads=3, length=5, d_head=64, context=3, rotary=True)

OPERATION = Operation(
    name="qk_norm_rope",
    title="norm and rotary embedding of Q and K of two streams",
    problem=QkNormRope,
    small=_SMALL,
    usual=measured(1024),
    debugged=_SMALL,
    counted=_SMALL,
    counted_within=_SMALL,
    swept="length",
    measured=measured,
    measured_at=MEASURED_LENGTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    ceiling="copy",
    short_names={
        "pytorch_qk_norm_rope": "PyTorch",
        "compiled_qk_norm_rope": "torch.compile",
    },
    metric=GBPS,
    families=("qk_norm_rope:QK_NORM_ROPE",),
    simulated_ns=30e6 / _SMALL.operations,
)
