"""The backward pass of layer norm and RMS norm: memory-bound, measured beside a copy."""

from __future__ import annotations

from typing import Any

from flash_helpers.operations.norm.problems import DISTRIBUTIONS, MEASURED_WIDTHS
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.operations.norm_backward.problems import measured
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch_norm": "PyTorch's operator behind the gradients of layer_norm or rms_norm",
    "compiled_norm": "the formulas of the gradients under torch.compile",
    "liger_norm": "Liger's gradients, in Triton",
    "copy": "copies that move the bytes of dy, x and dx, the measured ceiling",
}
_ALL: dict[str, Any] = {"weight": True, "dweight": True, "dbias": True}

OPERATION = Operation(
    name="norm_backward",
    title="the backward pass of layer norm and RMS norm",
    problem=NormBackward,
    small=NormBackward(rows=8, width=1000, **_ALL),
    usual=NormBackward(rows=4096, width=4096, **_ALL),
    debugged=NormBackward(rows=4, width=1000, **_ALL),
    counted=NormBackward(rows=8, width=4096, **_ALL),
    counted_within=NormBackward(rows=8, width=4096, **_ALL),
    swept="width",
    measured=measured,
    measured_at=MEASURED_WIDTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    ceiling="copy",
    short_names={
        "pytorch_norm": "PyTorch",
        "compiled_norm": "torch.compile",
        "liger_norm": "Liger",
    },
    metric=GBPS,
    families=(
        "norm_backward:LAYER_NORM_BACKWARD",
        "norm_backward:RMS_NORM_BACKWARD",
        "norm_backward_staged:NORM_BACKWARD_STAGED",
        "norm_backward_cluster:NORM_BACKWARD_CLUSTER",
    ),
    # 370 ms for the 13 * 8000 operations of (8, 1000), the mean of e2 to e4, measured
    simulated_ns=370e6 / (13 * 8 * 1000),
)
