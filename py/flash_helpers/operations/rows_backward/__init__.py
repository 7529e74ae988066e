"""Gradients of softmax along the rows of a matrix: memory-bound, measured beside a copy."""

from __future__ import annotations

from flash_helpers.operations.rows_backward.problem import RowsBackward
from flash_helpers.operations.rows_backward.problems import (
    DISTRIBUTIONS,
    MEASURED_WIDTHS,
    measured,
)
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch": "PyTorch's gradient of softmax",
    "compiled_gradient": "the formula in torch.compile",
    "liger_softmax": "Liger's gradient of softmax, in Triton",
    "copy": "a copy of as many bytes, the measured ceiling",
}

OPERATION = Operation(
    name="rows_backward",
    title="gradients of softmax along rows",
    problem=RowsBackward,
    small=RowsBackward(rows=8, width=1000),
    usual=RowsBackward(rows=4096, width=4096),
    debugged=RowsBackward(rows=4, width=1000),
    counted=RowsBackward(rows=8, width=4096),
    counted_within=RowsBackward(rows=8, width=4096),
    swept="width",
    measured=measured,
    measured_at=MEASURED_WIDTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    short_names={"compiled_gradient": "torch.compile", "liger_softmax": "Liger"},
    ceiling="copy",
    metric=GBPS,
    families=(
        "rows_backward:SOFTMAX_BACKWARD",
        "softmax_backward_cluster:SOFTMAX_BACKWARD_CLUSTER",
    ),
    # 18 ms for the 4 * 8000 operations of (8, 1000), measured
    simulated_ns=18e6 / (4 * 8 * 1000),
)
