"""Layer norm and RMS norm of a sum along rows: memory-bound, measured beside a copy."""

from __future__ import annotations

from typing import Any

from flash_helpers.operations.add_norm.problem import AddNorm
from flash_helpers.operations.add_norm.problems import measured
from flash_helpers.operations.norm.problems import DISTRIBUTIONS, MEASURED_WIDTHS
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch_add_norm": "PyTorch's addition, and its layer_norm or rms_norm",
    "compiled_add_norm": "the same under torch.compile",
    "copy": "copies of x and residual, the measured ceiling",
}
_ALL: dict[str, Any] = {"weight": True, "bias": True}

OPERATION = Operation(
    name="add_norm",
    title="layer norm and RMS norm of a sum along rows",
    problem=AddNorm,
    small=AddNorm(rows=8, width=1000, **_ALL),
    usual=AddNorm(rows=4096, width=4096, **_ALL),
    debugged=AddNorm(rows=4, width=1000, **_ALL),
    counted=AddNorm(rows=8, width=4096, **_ALL),
    counted_within=AddNorm(rows=8, width=4096, **_ALL),
    swept="width",
    measured=measured,
    measured_at=MEASURED_WIDTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    ceiling="copy",
    short_names={"pytorch_add_norm": "PyTorch", "compiled_add_norm": "torch.compile"},
    metric=GBPS,
    families=("add_norm:ADD_NORM",),
    # 70 ms for the 8 * 8000 operations of (8, 1000), measured
    simulated_ns=70e6 / (8 * 8 * 1000),
)
