"""Linear layers of a sequence and its context, with the RMS norm of their outputs."""

from __future__ import annotations

from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.operations.joint_linear.problems import (
    DISTRIBUTIONS,
    MEASURED_LENGTHS,
    measured,
)
from flash_helpers.registry.operation import GBPS, Operation

LIBRARIES = {
    "pytorch_linear": "PyTorch's linear and rms_norm, a call for each stream",
    "compiled_linear": "the same in torch.compile",
}
_SMALL = JointLinear(
    *(2, 19, 72, 136), context=7, context_in=40, context_out=128, bias=True, norm=False
)

OPERATION = Operation(
    name="joint_linear",
    title="linear layers of a sequence and its context",
    problem=JointLinear,
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
    short_names={"pytorch_linear": "PyTorch", "compiled_linear": "torch.compile"},
    metric=GBPS,
    families=("joint_linear:JOINT_LINEAR",),
    simulated_ns=90e6 / _SMALL.operations,
)
