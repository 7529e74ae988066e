"""Softmax along the rows of a matrix: memory-bound, measured beside a copy."""

from __future__ import annotations

from flash_helpers.operations.rows.problem import Rows
from flash_helpers.operations.rows.problems import DISTRIBUTIONS, MEASURED_WIDTHS, measured
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch": "torch.softmax",
    "compiled_softmax": "torch.softmax under torch.compile",
    "triton_softmax": "a program of Triton per row",
    "liger_softmax": "Liger's softmax, in Triton",
    "copy": "a copy of x, the measured ceiling",
}

OPERATION = Operation(
    name="rows",
    title="softmax along rows",
    problem=Rows,
    small=Rows(rows=8, width=1000),
    usual=Rows(rows=4096, width=4096),
    debugged=Rows(rows=4, width=1000),
    counted=Rows(rows=8, width=4096),
    counted_within=Rows(rows=8, width=4096),
    swept="width",
    measured=measured,
    measured_at=MEASURED_WIDTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    ceiling="copy",
    short_names={
        "pytorch": "PyTorch",
        "compiled_softmax": "torch.compile",
        "triton_softmax": "Triton",
        "liger_softmax": "Liger",
    },
    metric=GBPS,
    families=("rows:SOFTMAX", "softmax_cluster:SOFTMAX_CLUSTER"),
    # 32 ms for the 5 * 8000 operations of (8, 1000), measured
    simulated_ns=32e6 / (5 * 8 * 1000),
)
