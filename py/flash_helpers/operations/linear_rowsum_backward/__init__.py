"""Gradients of a linear layer whose outputs are summed by row: what algebra saves, measured beside
a copy."""

from __future__ import annotations

from typing import Any

from flash_helpers.operations.linear_rowsum_backward.problem import LinearRowsumBackward
from flash_helpers.operations.linear_rowsum_backward.problems import (
    DISTRIBUTIONS,
    MEASURED_FEATURES,
    measured,
)
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch": "the gradients of F.linear(x, W, b).sum(-1) by autograd's products",
    "algebra": "dy · ΣW, Σ dy · x and Σ dy by PyTorch's operators in fp32",
    "compiled_gradients": "the same in torch.compile",
    "copy": "copies that move the bytes of x, W, dx and dW, the measured ceiling",
}
_ALL: dict[str, Any] = {"dx": True, "dweight": True, "dbias": True}
_SMALL = LinearRowsumBackward(rows=40, in_features=72, out_features=96, **_ALL)

OPERATION = Operation(
    name="linear_rowsum_backward",
    title="gradients of a linear layer, summed by row",
    problem=LinearRowsumBackward,
    small=_SMALL,
    usual=LinearRowsumBackward(rows=4096, in_features=4096, out_features=4096, **_ALL),
    debugged=LinearRowsumBackward(rows=10, in_features=40, out_features=70, **_ALL),
    counted=_SMALL,
    counted_within=_SMALL,
    swept="in_features",
    measured=measured,
    measured_at=MEASURED_FEATURES,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    short_names={"compiled_gradients": "torch.compile"},
    ceiling="copy",
    metric=GBPS,
    families=("linear_rowsum_backward:LINEAR_ROWSUM_BACKWARD",),
    # 190 ms for the 15,592 operations of the small problem, measured
    simulated_ns=190e6 / _SMALL.operations,
)
