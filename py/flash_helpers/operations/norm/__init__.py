"""Layer norm and RMS norm along the rows of a matrix: memory-bound, measured beside a copy."""

from __future__ import annotations

from flash_helpers.operations.norm.problem import Norm
from flash_helpers.operations.norm.problems import DISTRIBUTIONS, MEASURED_WIDTHS, measured
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch_norm": "PyTorch's layer_norm or rms_norm",
    "compiled_norm": "the same under torch.compile",
    "triton_norm": "a program of Triton per row",
    "liger_norm": "Liger's layer norm or RMS norm, in Triton",
    "copy": "a copy of x, the measured ceiling",
}

OPERATION = Operation(
    name="norm",
    title="layer norm and RMS norm along rows",
    problem=Norm,
    small=Norm(rows=8, width=1000, weight=True, bias=True),
    usual=Norm(rows=4096, width=4096, weight=True, bias=True),
    debugged=Norm(rows=4, width=1000, weight=True, bias=True),
    counted=Norm(rows=8, width=4096, weight=True, bias=True),
    counted_within=Norm(rows=8, width=4096, weight=True, bias=True),
    swept="width",
    measured=measured,
    measured_at=MEASURED_WIDTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    ceiling="copy",
    short_names={
        "pytorch_norm": "PyTorch",
        "compiled_norm": "torch.compile",
        "triton_norm": "Triton",
        "liger_norm": "Liger",
    },
    metric=GBPS,
    families=("norm:LAYER_NORM", "norm:RMS_NORM", "norm_cluster:NORM_CLUSTER"),
    # 32 ms for the 7 * 8000 operations of (8, 1000), the mean of n1 to n4, measured
    simulated_ns=32e6 / (7 * 8 * 1000),
)
