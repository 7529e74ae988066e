"""The table of the steps that `attention()` takes, by head size, option and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flash_helpers.console.tables import Table
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import FAMILIES, AttentionForward, Config, Element
from flash_helpers.operations.attention_forward import OPERATION

REFUSED = "refused"

Choose = Callable[[AttentionForward, Device | None], Config]

_PLACES: Mapping[str, Device | None] = MappingProxyType(
    {
        "Hopper": largest_device(90),
        "other GPUs, from compute capability 8.0": largest_device(80),
        "CPU tensors": None,
    }
)
_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "no mask": {},
        "causal": {"causal": True},
        "window": {"window_left": 100, "window_right": 100},
        "softcap": {"softcap": 50.0},
        "sinks": {"sinks": True},
        "variable lengths": {"sequences": 8},
    }
)


def choice_table(choose: Choose) -> str:
    """Markdown of the steps that `choose` takes, in bf16 for 16 heads of 4096 queries and keys: a
    row for each head size that a kernel is built for."""
    rows = []
    for d_head, d_v in sorted(_head_sizes()):
        size = f"{d_head}" if d_head == d_v else f"{d_head}, V {d_v}"
        rows.append([size, *(_taken(choose, d_head, d_v, gpu) for gpu in _PLACES.values())])
    return Table(["d_head", *_PLACES], rows, "rlll").markdown()


def _head_sizes() -> set[tuple[int, int]]:
    families = [family for family in FAMILIES.values() if family.operation is OPERATION]
    declared = [
        variant.supports
        for family in families
        for step in family.steps.values()
        for variant in family.fixed_config(step, Element.BF16).variants()
    ]
    return {(d_head, s.d_v or d_head) for s in declared for d_head in s.d_heads}


def _taken(choose: Choose, d_head: int, d_v: int, gpu: Device | None) -> str:
    """The options by the steps that take them."""
    by_step: dict[str, list[str]] = {}
    for name, option in _OPTIONS.items():
        problem = AttentionForward(1, 16, 4096, d_head, d_v=d_v, **option)
        try:
            step = choose(problem, gpu).step.id
        except ValueError:
            step = REFUSED
        by_step.setdefault(step, []).append(name)
    if len(by_step) == 1:
        return f"all: {step}"
    return "; ".join(f"{', '.join(names)}: {step}" for step, names in by_step.items())
