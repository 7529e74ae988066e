"""Where each part of a block runs: in a kernel, by the registry, or in PyTorch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from flash_helpers.console.tables import Table
from flash_helpers.gpu import MOST_SMS, Device, largest_device
from flash_helpers.kernel_configs import FAMILIES, AttentionForward
from flash_helpers.operations.adaptive_norm.problem import AdaptiveNorm
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.operations.joint_linear.problem import JointLinear
from flash_helpers.operations.qk_norm_rope.problem import QkNormRope
from flash_helpers.registry.problem import Problem
from flash_helpers.tune.best import config_for

PYTORCH = "PyTorch"
_BATCH, _LENGTH, _CONTEXT, _WIDTH = 64, 186, 64, 128
_HIDDEN, _PARTS = 512, 6  # hidden features; shift, scale and gate, twice
_D_HEADS = (16, 64, 128)


@dataclass(frozen=True)
class Place:
    """Where a part of a block runs. gpus: architectures, such as "sm_90". place: the short form of
    the kernel's config, or "PyTorch"; reason: then why, in the registry's words."""

    part: str
    gpus: tuple[str, ...]
    place: str
    reason: str = ""

    @property
    def where(self) -> str:
        """The id of the kernel's step, or "PyTorch"."""
        return self.place.partition("_")[0]


def parts() -> dict[str, Problem]:
    """Return the problem that each part of a block poses to the registry.

    Problems are those of joint attention in bf16: batch 64, sequence 186, context 64, width 128 or
    one head.
    """
    found: dict[str, Problem] = {}
    for d_head in _D_HEADS:
        heads, length = max(_WIDTH // d_head, 1), _LENGTH + _CONTEXT
        forward = AttentionForward(_BATCH, heads, length, d_head)
        found[f"attention, heads of {d_head}"] = forward
        found[f"its gradients, heads of {d_head}"] = AttentionBackward.of(forward)
    found["QK-RMSNorm, RoPE and attention, heads of 16"] = JointAttention(
        *(_BATCH, _WIDTH // 16, _LENGTH), context=_CONTEXT, rotary=True
    )
    tokens = (_BATCH, _LENGTH, _WIDTH)
    found["projections to Q, K and V"] = JointLinear(*tokens, 3 * _WIDTH, context=_CONTEXT)
    found["projections of outputs, RMSNorm"] = JointLinear(
        *tokens, _WIDTH, context=_CONTEXT, norm=True
    )
    found["QK-RMSNorm, RoPE, heads of 128"] = QkNormRope(
        *(_BATCH, 1, _LENGTH), context=_CONTEXT, rotary=True
    )
    of_norm = AdaptiveNorm(*tokens, context=_CONTEXT)
    found["adaptive layer norms"] = of_norm
    found["gated sums, adaptive layer norms"] = replace(of_norm, change=True, sum=True)
    found["gated sums"] = replace(of_norm, change=True, norm=False)
    # Conditions are tokens of one sequence, and of its context
    found["modulation"] = JointLinear(
        *(1, _BATCH, _WIDTH, _PARTS * _WIDTH), context=_BATCH, bias=True, silu=True
    )
    hidden = JointLinear(*tokens, _HIDDEN, context=_CONTEXT, bias=True, gelu=True)
    found["feed-forward, first layer and GELU"] = hidden
    found["feed-forward, second layer"] = JointLinear(
        *(_BATCH, _LENGTH, _HIDDEN, _WIDTH), context=_CONTEXT, bias=True
    )
    return found


def gpus() -> list[Device]:
    """Return the largest GPU of each architecture that a family of kernels runs on."""
    devices = (largest_device(capability) for capability in MOST_SMS)
    return [d for d in devices if any(f.runs_on(d.capability) for f in FAMILIES.values())]


def _place(problem: Problem, gpu: Device) -> tuple[str, str]:
    try:
        return config_for(problem, gpu).short_form(), ""
    except (RuntimeError, ValueError) as error:
        return PYTORCH, str(error)


@functools.cache
def places() -> tuple[Place, ...]:
    """Return where each part runs, GPUs with the same answer together. On a CPU and on MPS PyTorch
    runs all parts."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for part, problem in parts().items():
        for gpu in gpus():
            found.setdefault((part, *_place(problem, gpu)), []).append(gpu.name)
    return tuple(
        Place(part, tuple(names), place, reason) for (part, place, reason), names in found.items()
    )


def places_table() -> Table:
    """Return a row for each part: the step of its kernel, or "PyTorch", by architecture."""
    names = [gpu.name for gpu in gpus()]
    rows: dict[str, dict[str, str]] = {}
    for place in places():
        rows.setdefault(place.part, {}).update(dict.fromkeys(place.gpus, place.where))
    return Table(
        ("part of a multimodal block, bf16", *names),
        [[part, *(where[name] for name in names)] for part, where in rows.items()],
        align="l" * (1 + len(names)),
    )
