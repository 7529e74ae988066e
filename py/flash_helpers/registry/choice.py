"""Which kernel computes a problem when nobody names one. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flash_helpers.registry.config import Config
from flash_helpers.registry.families import FAMILIES
from flash_helpers.registry.family import Family, Step
from flash_helpers.registry.problem import AttentionForward


def preferred_steps(
    capability: tuple[int, int] | None, families: Iterable[Family] = FAMILIES.values()
) -> list[Step]:
    """The last step of each family that runs on a device, the newest family first.

    capability: of a GPU, such as (9, 0); None is the CPU, where the families are simulated that
    need no architecture's own instructions.
    """
    runs = [f for f in families if (f.is_portable if capability is None else f.runs_on(capability))]
    return [[*family.steps.values()][-1] for family in reversed(runs)]


def first_that_takes(problem: AttentionForward, configs: Sequence[Config]) -> Config:
    """The first of the configs that supports a problem.

    Raises ValueError if none does, with the refusal of the nearest: the one that lacks the fewest
    abilities, then the one that takes the shortest sequences.
    """
    for config in configs:
        if not config.refusal(problem):
            return config
    nearest = min(configs, key=lambda c: (len(c.supports.lacking(problem)), c.supports.shortest))
    raise ValueError(
        f"no kernel for this device takes {problem}; the nearest: {nearest.refusal(problem)}"
    )
