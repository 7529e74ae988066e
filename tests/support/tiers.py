"""The rule that sorts the tests of kernels into tiers.

The first tier, which the README's command runs, simulates each step once, at one problem, and the
leading configs on everything: the first, the last and the fastest step of each family, in each
dtype, and at the corners in one, where a variant with more abilities stands for one with fewer.
What there is besides of configs, dtypes, distributions and corners has the marker `matrix`, with
the name of the family. On a GPU likewise, where the first step is like any other.
"""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from flash_helpers.compile.codegen import BEST_PATTERN, CONFIG_FOLDER, listed_configs
from flash_helpers.kernel_configs import FAMILIES, STEPS, Config, Element, config_from_short_form
from flash_helpers.registry.family import Family
from flash_helpers.registry.operation import Operation
from flash_helpers.tune.winners import BestConfig, load_best

ROOT = Path(__file__).resolve().parents[2]


def committed(operation: Operation) -> list[Config]:
    """Return an operation's configs in the committed maps: the registry's, and the winners of
    sweeps."""
    return [c for c in listed_configs(ROOT) if c.family.operation is operation]


def fastest_configs(family: Family[Any], folder: Path = ROOT / CONFIG_FOLDER) -> list[Config]:
    """Return, for each dtype, the family's winner with the highest speed on any GPU that a sweep
    has run on: the mean over sizes, in percent of the first library there, on problems without
    options such as a mask. A family that no sweep has tuned has none."""
    winners: dict[str, list[BestConfig]] = {}
    for path in sorted(folder.glob(BEST_PATTERN)):
        for entry in load_best(path).best:
            if _is_of(family, entry) and not any(entry.options.values()):
                winners.setdefault(entry.dtype, []).append(entry)
    fastest = [
        max(winners[dtype.short], key=lambda entry: entry.of_first)
        for dtype in family.dtypes
        if dtype.short in winners
    ]
    return [config_from_short_form(entry.config) for entry in fastest]


def _is_of(family: Family[Any], entry: BestConfig) -> bool:
    return entry.step in STEPS and STEPS[entry.step].family == family.name


@functools.cache
def leading_configs(name: str) -> frozenset[Config]:
    """Return the configs of a family that the first tier tests on everything: the fixed ones of the
    first and the last step, the fastest ones, and of the last step those variants of the fixed ones
    that are listed and take the same head size, such as the causal one."""
    family = FAMILIES[name]
    listed = {*committed(family.operation)}
    steps = [*family.steps.values()]
    first, last = (
        [family.fixed_config(step, dtype) for dtype in family.dtypes]
        for step in (steps[0], steps[-1])
    )
    variants = [
        variant
        for fixed in last
        for variant in fixed.variants()
        if variant in listed and _head_sizes(variant) == _head_sizes(fixed)
    ]
    return frozenset([*first, *variants, *fastest_configs(family)])


def _head_sizes(config: Config) -> tuple[Any, ...]:
    return getattr(config, "d_head", None), getattr(config, "d_v", None)


def stands_for_its_step(config: Config) -> bool:
    """Whether it is the config with which the first tier simulates the step once: the fixed one, in
    bf16, which the tables show, where the family has it."""
    return config == config.family.fixed_config(config.step, usual_dtype(config.family))


def usual_dtype(family: Family[Any]) -> Element:
    """Return the dtype that the tables show: bf16, where the family has it."""
    return Element.BF16 if Element.BF16 in family.dtypes else family.dtypes[0]


def abilities(config: Config) -> frozenset[str]:
    """Return what a config can, with the options that are compiled into it, such as a mask."""
    supports = config.supports
    fixed = (name for name, value in supports.options.items() if value)
    return frozenset([*getattr(supports, "abilities", ()), *fixed])


def is_first_at_corners(config: Config) -> bool:
    """Whether the first tier tests a config at its corners: the leading ones in the usual dtype,
    without the variants all of whose abilities another variant has, and more."""
    family = config.family
    usual = [c for c in leading_configs(family.name) if c.dtype is usual_dtype(family)]
    is_own = stands_for_its_step(config) or config in fastest_configs(family)
    of_step = (abilities(other) for other in usual if other.step is config.step)
    return config in usual and (is_own or not any(abilities(config) < each for each in of_step))


def is_of_first_tier(config: Config, *, once: bool = False) -> bool:
    """Whether the first tier runs a test of a config. once: it is the test that simulates each step
    once, at one problem."""
    return config in leading_configs(config.family.name) or (once and stands_for_its_step(config))


def is_of_gpu_tier(config: Config, *, once: bool = False) -> bool:
    """Whether a run with `-m gpu` has a test of a config. once: it is a test of one problem, for
    which each step has a case."""
    family = config.family
    first = next(iter(family.steps.values()))
    is_first = config.step is first and len(family.steps) > 1
    leads = config in leading_configs(family.name) and not is_first
    return leads or (once and stands_for_its_step(config))


def matrix_mark(config: Config) -> pytest.MarkDecorator:
    """Return the mark of a matrix test of a config."""
    return pytest.mark.matrix(config.family.name)


def marks_of(
    config: Config, *, once: bool = False, at_corners: bool = False
) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a test of a config: `matrix` unless the first tier runs it."""
    is_first = is_first_at_corners(config) if at_corners else is_of_first_tier(config, once=once)
    return () if is_first else (matrix_mark(config),)


def each(
    configs: Iterable[Config], *, once: bool = False, at_corners: bool = False
) -> pytest.MarkDecorator:
    """Return the marker of a test of each config, in argument `config`, that sorts it into its
    tier. at_corners: it is a test of the corners that the config declares."""
    return pytest.mark.parametrize(
        "config",
        [
            pytest.param(
                config,
                marks=marks_of(config, once=once, at_corners=at_corners),
                id=config.short_form(),
            )
            for config in configs
        ],
    )


def each_name(names: Iterable[str], config_of: Callable[[str], Config]) -> pytest.MarkDecorator:
    """Return the marker of a test of each name, in argument `name`, that sorts it into the tier of
    the config that the name stands for."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks_of(config_of(name)), id=name) for name in names]
    )
