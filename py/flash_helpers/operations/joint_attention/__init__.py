"""Joint attention of a sequence and its context, with norm and rotary embedding of Q and K."""

from __future__ import annotations

from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.operations.joint_attention.problems import (
    DISTRIBUTIONS,
    MEASURED_LENGTHS,
    measured,
)
from flash_helpers.registry.operation import TFLOPS, Operation

LIBRARIES = {
    "pytorch_joint": "PyTorch's norms, rotary embedding and scaled_dot_product_attention",
    "compiled_joint": "the same in torch.compile",
    "triton_joint": "norms with rotary embedding in Triton, attention by PyTorch",
}
_SMALL = JointAttention(batch=1, heads=2, length=20, d_head=16, context=5, rotary=True)

OPERATION = Operation(
    name="joint_attention",
    title="joint attention of a sequence and its context",
    problem=JointAttention,
    small=_SMALL,
    usual=measured(186),
    debugged=_SMALL,
    counted=JointAttention(batch=1, heads=2, length=128, d_head=16, rotary=True),
    counted_within=JointAttention(batch=1, heads=2, length=128, d_head=16, rotary=True),
    swept="length",
    measured=measured,
    measured_at=MEASURED_LENGTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    short_names={
        "pytorch_joint": "PyTorch",
        "compiled_joint": "torch.compile",
        "triton_joint": "Triton",
    },
    metric=TFLOPS,
    families=("joint:JOINT", "joint_cluster:JOINT_CLUSTER"),
    # 110 ms for the 80,000 operations of the small problem, the mean of jo1 to jo3, measured
    simulated_ns=110e6 / 80_000,
)
