"""Adaptive layer norm of gated sums of a sequence and its context: memory-bound."""

from __future__ import annotations

from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm
from flash_helpers.operations.adaptive_norm.problems import MEASURED_LENGTHS, measured
from flash_helpers.operations.norm.problems import DISTRIBUTIONS
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch_adaptive": "PyTorch's product, sum, layer_norm, scale and shift of each stream",
    "compiled_adaptive": "the same in torch.compile",
}
_SMALL = AdaptiveNorm(2, 5, 72, context=3, context_width=40, change=True, sum=True)

OPERATION = Operation(
    name="adaptive_norm",
    title="adaptive layer norm of gated sums",
    problem=AdaptiveNorm,
    small=_SMALL,
    usual=measured(186),
    debugged=_SMALL,
    counted=_SMALL,
    counted_within=_SMALL,
    swept="length",
    measured=measured,
    measured_at=MEASURED_LENGTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    short_names={"pytorch_adaptive": "PyTorch", "compiled_adaptive": "torch.compile"},
    metric=GBPS,
    families=("adaptive_norm:ADAPTIVE_NORM",),
    simulated_ns=70e6 / _SMALL.operations,
)
