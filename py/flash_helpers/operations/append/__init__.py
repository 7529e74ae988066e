"""Append of keys and values to a cache, with rotary embedding: bound by launches and by memory,
measured beside a copy."""

from __future__ import annotations

from flash_helpers.operations.append.problem import Append
from flash_helpers.operations.append.problems import DISTRIBUTIONS, MEASURED_NEW, measured
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch_append": "PyTorch's operators",
    "compiled_append": "the same in torch.compile",
    "copy": "a copy of as many bytes, the measured ceiling",
}

_SMALL = Append(
    *(3, 2, 2, 24),
    d_head=64,
    page_size=8,
    rotary_dim=32,
    len_q=2,
    heads=4,
)

OPERATION = Operation(
    name="append",
    title="append of keys and values to a cache, with rotary embedding",
    problem=Append,
    small=_SMALL,
    usual=measured(1),
    debugged=_SMALL,
    counted=_SMALL,
    counted_within=_SMALL,
    swept="len_new",
    measured=measured,
    measured_at=MEASURED_NEW,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    short_names={"pytorch_append": "PyTorch", "compiled_append": "torch.compile"},
    ceiling="copy",
    metric=GBPS,
    families=("append:APPEND",),
    # 12 ms for the 3456 operations of the small problem, measured
    simulated_ns=12e6 / 3456,
)
