"""The two staircases of the steps: at the first steps' tile, and at the large tile.

A step is compared with its parent at the same tile, so that no step is credited with the tile's
gain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from flash_helpers.kernel_configs import (
    LARGE_TILE,
    Config,
    config_from_short_form,
)
from flash_helpers.operations.attention_forward import OPERATION as ATTENTION
from flash_helpers.registry.families import fixed_configs
from flash_helpers.registry.family import Step
from flash_helpers.registry.operation import Operation

Pair = tuple["Config | None", "Config | None"]  # a config and its parent's


@dataclass(frozen=True)
class Stair:
    """A step's kernels in one dtype.

    fixed: at the tile of the first steps; None for a step that only has the large tile.
    large: at LARGE_TILE; None for a step that cannot take that tile.
    read: as large, with the row stride read at run time; None where large reads it, too.
    """

    step: Step
    fixed: Config | None
    large: Config | None
    read: Config | None

    @property
    def configs(self) -> list[Config]:
        """All configs of the stair."""
        return [c for c in (self.fixed, self.large, self.read) if c is not None]

    @property
    def widest(self) -> Config:
        """The config at the large tile, if the step has it; else at the fixed tile."""
        return self.configs[0] if self.large is None else self.large


def large_tile(config: Config) -> Config | None:
    """The config at LARGE_TILE; None if its step does not take that tile or its family has other
    tiles."""
    known = {field.name for field in fields(config)}
    if not known >= {"B_r", "B_c", "n_warps"}:
        return None
    try:
        return config.replace(**{k: value for k, value in LARGE_TILE.items() if k in known})
    except ValueError:
        return None


def stair(config: Config) -> Stair:
    """The stair of a step, given the step's fixed config."""
    large = large_tile(config)
    read = next((c for c in large.siblings() if c != large), None) if large else None
    return Stair(config.step, None if config == large else config, large, read)


def stairs(dtype: str, operation: Operation = ATTENTION) -> dict[str, Stair]:
    """The stairs of all steps of an operation, built or not, by id, in the order of the registry.
    dtype: short name."""
    return {config.step.id: stair(config) for config in fixed_configs(operation, dtype)}


def beside_parents(
    dtype: str, operation: Operation = ATTENTION
) -> Iterator[tuple[Stair, list[Pair]]]:
    """Each step's stair, and three pairs of its config and its parent's: at the fixed tile, at the
    large tile, and at the large tile with the row stride read at run time."""
    found = stairs(dtype, operation)
    for own in found.values():
        before = found[own.step.parent] if own.step.parent else None
        yield (
            own,
            [
                (own.fixed, before.fixed if before else None),
                (own.large, before.large if before else None),
                # A parent without a static stride reads it at the large tile, too.
                (own.read, (before.read or before.large) if before else None),
            ],
        )


def parent_at_tile(config: Config) -> Config | None:
    """Config of the parent that a config on the staircases is compared with; None for other
    configs."""
    steps = beside_parents(config.dtype.short, config.family.operation)
    pairs = (pair for _, found in steps for pair in found)
    return next((parent for own, parent in pairs if own == config), None)


def tile_text(config: Config) -> str:
    """Tile shape and number of warps of a config in words; "" in a family without them."""
    words = {"B_r": "B_r {}", "B_c": "B_c {}", "n_warps": "{} warps"}
    found = {name: getattr(config, name, None) for name in words}
    return ", ".join(words[name].format(size) for name, size in found.items() if size is not None)


def measured_families(names: Iterable[str]) -> set[str]:
    """Families with a kernel among the names of contenders."""
    found = set()
    for name in names:
        with contextlib.suppress(ValueError):  # the name of a library
            found.add(config_from_short_form(name).family.name)
    return found
