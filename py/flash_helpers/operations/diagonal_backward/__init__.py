"""Gradients of a diagonal matrix times a matrix: memory-bound, measured beside a copy."""

from __future__ import annotations

from flash_helpers.operations.diagonal_backward.problem import DiagonalBackward
from flash_helpers.operations.diagonal_backward.problems import (
    DISTRIBUTIONS,
    MEASURED_WIDTHS,
    measured,
)
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch": "PyTorch's operators in fp32",
    "compiled_gradients": "the same in torch.compile",
    "copy": "a copy of as many bytes, the measured ceiling",
}

OPERATION = Operation(
    name="diagonal_backward",
    title="gradients of a diagonal matrix times a matrix",
    problem=DiagonalBackward,
    small=DiagonalBackward(rows=8, width=1000, db=True),
    usual=DiagonalBackward(rows=4096, width=4096, db=True),
    debugged=DiagonalBackward(rows=4, width=1000, db=True),
    counted=DiagonalBackward(rows=8, width=4096, db=True),
    counted_within=DiagonalBackward(rows=8, width=4096, db=True),
    swept="width",
    measured=measured,
    measured_at=MEASURED_WIDTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    short_names={"compiled_gradients": "torch.compile"},
    ceiling="copy",
    metric=GBPS,
    families=("diagonal_backward:DIAGONAL_BACKWARD",),
    # 13 ms for the 3 * 8000 operations of (8, 1000), measured
    simulated_ns=13e6 / (3 * 8 * 1000),
)
