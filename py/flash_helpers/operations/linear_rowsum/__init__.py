"""A linear layer whose outputs are summed by row: what algebra saves, measured beside a copy."""

from __future__ import annotations

from flash_helpers.operations.linear_rowsum.problem import LinearRowsum
from flash_helpers.operations.linear_rowsum.problems import (
    DISTRIBUTIONS,
    MEASURED_FEATURES,
    measured,
)
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch": "F.linear(x, W, b).sum(-1)",
    "algebra": "x @ W.sum(0) + b.sum()",
    "copy": "copies that move the bytes of x and W, the measured ceiling",
}

OPERATION = Operation(
    name="linear_rowsum",
    title="a linear layer, summed by row",
    problem=LinearRowsum,
    small=LinearRowsum(rows=40, in_features=72, out_features=96, bias=True),
    usual=LinearRowsum(rows=4096, in_features=4096, out_features=4096, bias=True),
    debugged=LinearRowsum(rows=10, in_features=40, out_features=70, bias=True),
    counted=LinearRowsum(rows=40, in_features=72, out_features=96, bias=True),
    counted_within=LinearRowsum(rows=40, in_features=72, out_features=96, bias=True),
    swept="in_features",
    measured=measured,
    measured_at=MEASURED_FEATURES,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    ceiling="copy",
    metric=GBPS,
    families=("linear_rowsum:LINEAR_ROWSUM",),
    # 90 ms for the 0.56 million operations of the small problem, measured
    simulated_ns=90e6 / (2 * 40 * 72 * 96),
)
