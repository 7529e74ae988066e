"""The choice of a kernel for a problem when the call names none. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flash_helpers.registry.config import Config
from flash_helpers.registry.families import FAMILIES
from flash_helpers.registry.family import Family, Step
from flash_helpers.registry.operation import Operation
from flash_helpers.registry.problem import Problem


def preferred_steps(
    operation: Operation,
    capability: tuple[int, int] | None,
    families: Iterable[Family[Any]] = FAMILIES.values(),
) -> list[Step]:
    """Return the preferred steps of each family of an operation that runs on a device, the newest
    family first. A problem that asks for the same bits in every call is refused by the configs of
    those steps that do not give them.

    `capability`: that of a GPU, such as (9, 0). None is the CPU, which simulates the families that
    need no instructions of a single architecture.
    """
    own = (family for family in families if family.operation is operation)
    runs = [f for f in own if (f.is_portable if capability is None else f.runs_on(capability))]
    return [step for family in reversed(runs) for step in family.preferred]


def first_that_takes(problem: Problem, configs: Sequence[Config]) -> Config:
    """Return the first of the configs that supports a problem.

    Raises ValueError if none does, with the refusal of the nearest: the config that lacks the
    fewest abilities, then the one whose sizes the problem can be padded to with the fewest zeros,
    then the one that takes the smallest problems.
    """
    for config in configs:
        if not config.refusal(problem):
            return config
    nearest = min(configs, key=lambda config: _distance(config, problem))
    raise ValueError(
        f"no kernel of {problem.operation} for this device takes {problem}; the nearest: "
        f"{nearest.refusal(problem)}"
    )


def _distance(config: Config, problem: Problem) -> tuple[int, ...]:
    """Return how far a config is from a problem: abilities and sizes that it lacks, sizes that are
    too small, how far all sizes are apart, the smallest problem that it takes."""
    supports = config.supports
    padding = [size - getattr(problem, name) for name, size in supports.sizes.items()]
    too_small = sum(zeros < 0 for zeros in padding)
    return len(supports.lacking(problem)), too_small, sum(map(abs, padding)), supports.smallest
