"""Product of a diagonal matrix and a matrix: a scaling of rows, measured beside a copy."""

from __future__ import annotations

from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.operations.diagonal.problems import DISTRIBUTIONS, MEASURED_WIDTHS, measured
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch": "a[:, None] * B",
    "diag": "torch.diag(a) @ B",
    "copy": "a copy of B, the measured ceiling",
}

OPERATION = Operation(
    name="diagonal",
    title="a diagonal matrix times a matrix",
    problem=Diagonal,
    small=Diagonal(rows=8, width=1000),
    usual=Diagonal(rows=4096, width=4096),
    debugged=Diagonal(rows=4, width=1000),
    counted=Diagonal(rows=8, width=4096),
    counted_within=Diagonal(rows=8, width=4096),
    swept="width",
    measured=measured,
    measured_at=MEASURED_WIDTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    ceiling="copy",
    metric=GBPS,
    families=("diagonal:DIAGONAL",),
    # 16 ms for the 8000 products of (8, 1000), measured
    simulated_ns=16e6 / (8 * 1000),
)
