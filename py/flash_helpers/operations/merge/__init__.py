"""Attention on parts of the keys, merged into attention on all: measured beside a copy."""

from __future__ import annotations

from flash_helpers.operations.merge.problem import Merge
from flash_helpers.operations.merge.problems import DISTRIBUTIONS, MEASURED_PARTS, measured
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch": "PyTorch's operators",
    "compiled_merge": "the same in torch.compile",
    "copy": "a copy of as many bytes, the measured ceiling",
}

_SMALL = Merge(parts=3, rows=5, heads=4, d_head=64)

OPERATION = Operation(
    name="merge",
    title="attention on parts of the keys, merged",
    problem=Merge,
    small=_SMALL,
    usual=Merge(parts=4, rows=1024, heads=32, d_head=128),
    debugged=_SMALL,
    counted=Merge(parts=4, rows=16, heads=4, d_head=128),
    counted_within=Merge(parts=4, rows=16, heads=4, d_head=128),
    swept="parts",
    measured=measured,
    measured_at=MEASURED_PARTS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    short_names={"compiled_merge": "torch.compile"},
    ceiling="copy",
    metric=GBPS,
    families=("merge_states:MERGE_STATES",),
    # 12 ms for the 7680 operations of the small problem, measured
    simulated_ns=12e6 / 7680,
)
