"""Which kernels a command line means: steps, families and configs by their names.

Standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from flash_helpers.kernel_configs import (
    FAMILIES,
    STEPS,
    AttentionForward,
    Config,
    DType,
    config_from_short_form,
    get_kernel_progression_configs,
    nearest_config,
)
from flash_helpers.registry.config import ranges_text
from flash_helpers.registry.family import Step

ALL = "all"
DTYPE_CHOICES = (*(dtype.short for dtype in DType), "both")
STEP_NAMES = f"a step (9 or v9), a range of steps (v7..v16), a family ({', '.join(FAMILIES)}), all"
KERNEL_NAMES = f"{STEP_NAMES}, or the short form of a config"

_DEFAULT_PREFIX = next(iter(FAMILIES.values())).prefix  # of a bare number
_STEPS = re.compile(r"([a-z]?)(\d+)(?:(?:\.\.|-)([a-z]?)(\d+))?")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class UsageError(ValueError):
    """What was asked for does not exist or does not fit together."""


def add_kernel_arguments(
    parser: argparse.ArgumentParser,
    default: str = "the fixed config of every step",
    dtype: str = "both",
) -> None:
    """Add `--kernel` and `--dtype`. default: what is chosen without `--kernel`, in words."""
    parser.add_argument(
        "--kernel",
        nargs="+",
        action="extend",
        default=[],
        metavar="KERNEL",
        help=f"{KERNEL_NAMES}; of a step every built config is meant, and several may be given "
        f"(default: {default})",
    )
    parser.add_argument("--dtype", choices=DTYPE_CHOICES, default=dtype, help=f"(default: {dtype})")


def parse_dtypes(name: str) -> tuple[DType, ...]:
    """The dtypes of one of DTYPE_CHOICES. Raises ValueError for any other name."""
    return tuple(DType) if name == "both" else (DType.from_name(name),)


def find_steps(selector: str) -> list[Step] | None:
    """The steps that a selector names, in order; None if it has the form of none of STEP_NAMES.

    Raises UsageError for a step that does not exist, or a range that is none.
    """
    if selector == ALL:
        return list(STEPS.values())
    if selector in FAMILIES:
        return list(FAMILIES[selector].steps.values())
    match = _STEPS.fullmatch(selector)
    if match is None:
        return None
    prefix, first, to_prefix, last = match.groups()
    prefix = prefix or _DEFAULT_PREFIX
    own = [step for step in STEPS.values() if step.id == f"{prefix}{step.number}"]
    if not own:
        raise UsageError(
            f"{selector!r}: no family has steps {prefix}1, {prefix}2, …; there are "
            f"{_all_steps_text()}{_nearest_text(selector)}"
        )
    if to_prefix and to_prefix != prefix:
        raise UsageError(
            f"{selector!r} goes from one family to another: name a range of each, such as "
            f"{prefix}{first}..{own[-1].id}"
        )
    numbers = range(int(first), int(last or first) + 1)
    unknown = [n for n in (int(first), int(last or first)) if not 1 <= n <= len(own)]
    if unknown or not numbers:
        nearest = own[min(max(int(first), 1), len(own)) - 1]
        raise UsageError(
            f"{selector!r}: the steps are {ranges_text(own)}, and a range goes from the lower to "
            f"the higher one; the nearest is {nearest.id}"
        )
    return [step for step in own if step.number in numbers]


def _all_steps_text() -> str:
    return ", ".join(ranges_text(family.steps.values()) for family in FAMILIES.values())


def _nearest_text(name: str) -> str:
    """What a name that means nothing may have been meant as, after a semicolon; "" for nothing."""
    near = difflib.get_close_matches(name, [*FAMILIES, *STEPS, ALL], n=1, cutoff=0.5)
    return f"; the nearest is {near[0]}" if near else ""


def parse_steps(selectors: Iterable[str]) -> list[Step]:
    """The steps that the selectors name, in the registry's order, each once.

    Raises UsageError for what is none of STEP_NAMES.
    """
    found: set[str] = set()
    for selector in selectors:
        steps = find_steps(selector)
        if steps is None:
            raise UsageError(f"{selector!r} is not {STEP_NAMES}{_nearest_text(selector)}")
        found.update(step.id for step in steps)
    return [step for step in STEPS.values() if step.id in found]


def built_config(built: Sequence[Config], selector: str) -> Config:
    """The built config of a short form. Raises UsageError."""
    try:
        config = config_from_short_form(selector)
    except ValueError as error:
        raise UsageError(
            f"kernel {selector!r} is not {KERNEL_NAMES}: {error}{_nearest_text(selector)}"
        ) from error
    if config not in built:
        raise UsageError(
            f"kernel {selector} is not built; the nearest that is: "
            f"{nearest_config(config, built).short_form()}"
        )
    return config


def _configs_of_steps(
    built: Sequence[Config], selector: str, steps: Iterable[Step]
) -> dict[str, list[Config]]:
    """The built configs of each step, by its id."""
    of_step = {step.id: [c for c in built if c.step.id == step.id] for step in steps}
    missing = [name for name, configs in of_step.items() if not configs]
    if missing and selector != ALL and selector not in FAMILIES:
        raise UsageError(f"kernel {selector!r}: no config of {', '.join(missing)} is built")
    return {name: configs for name, configs in of_step.items() if configs}


def select_kernels(
    built: Sequence[Config],
    selectors: Iterable[str],
    dtypes: Iterable[DType],
    default: Iterable[Config] = (),
    problem: AttentionForward | None = None,
) -> list[Config]:
    """The built configs that the selectors name (see KERNEL_NAMES), of the given dtypes, sorted; of
    a step all of them.

    built: the configs of the library. problem: of a step whose configs are made for different
        problems, such as causal ones, those made for problems like this one.
    default: configs taken without any selector; those that are not built are left out.

    Raises UsageError if a selector names nothing that is built, or if no config is left.
    """
    if not built:
        raise UsageError("the library holds no kernel: generate the instantiations and build again")
    selectors = list(selectors)
    wanted = set(dtypes)
    named: set[Config] = set()
    for selector in selectors:
        steps = find_steps(selector)
        if steps is None:
            named.add(built_config(built, selector))
            continue
        for configs in _configs_of_steps(built, selector, steps).values():
            named.update(_made_for(problem, configs) if problem else configs)
    if not selectors:
        named = set(default) & set(built)
    chosen = sorted(config for config in named if config.dtype in wanted)
    if not chosen:
        raise UsageError(
            f"no built kernel is left for --kernel {' '.join(selectors) or '(default)'} and dtype "
            f"{', '.join(sorted(dtype.short for dtype in wanted))}: widen one of the two"
        )
    return chosen


def _made_for(problem: AttentionForward, configs: Sequence[Config]) -> Sequence[Config]:
    """Of a step's configs those that lack nothing that a problem asks for; all if none does."""
    return [config for config in configs if not config.supports.lacking(problem)] or configs


def chosen_kernels(
    arguments: argparse.Namespace, built: Sequence[Config], problem: AttentionForward | None = None
) -> list[Config]:
    """`select_kernels` of what `add_kernel_arguments` read, by default of the progression; if the
    problem is causal, the configs with a mask in its place."""
    progression = get_kernel_progression_configs()
    if problem and problem.causal:
        progression = [variant for c in progression if (variant := with_mask(c)) != c]
    return select_kernels(
        built, arguments.kernel, parse_dtypes(arguments.dtype), progression, problem
    )


Wanted = Config | Mapping[str, Any] | None


def choose_kernels(
    built: Sequence[Config],
    selectors: Iterable[str],
    dtype: DType,
    wanted: Wanted = None,
) -> list[Config]:
    """One config of each step that the selectors name (see KERNEL_NAMES), in the order asked for,
    each once; a short form means itself.

    wanted: which config of a step: the one nearest to a config; the one that has the values of
        some fields, the fixed one if there are several; None: the fixed one, or the first that is
        built.

    Raises UsageError if a selector names nothing that is built, or no config has the values.
    """
    chosen: dict[Config, None] = {}
    for selector in selectors:
        steps = find_steps(selector)
        if steps is None:
            chosen[built_config(built, selector)] = None
            continue
        own = [config for config in built if config.dtype == dtype]
        for configs in _configs_of_steps(own, selector, steps).values():
            chosen[_choose(configs, wanted)] = None
    return list(chosen)


def _choose(candidates: Sequence[Config], wanted: Wanted) -> Config:
    """One of the built configs of a step in a dtype."""
    if isinstance(wanted, Config):
        return nearest_config(wanted, candidates)
    first = candidates[0]
    usual = first.family.fixed_config(first.step, first.dtype)
    matching = [
        config
        for config in candidates
        if all(getattr(config, name, None) == value for name, value in (wanted or {}).items())
    ]
    if not matching:
        asked = ", ".join(f"{name}={value}" for name, value in (wanted or {}).items())
        raise UsageError(
            f"--config {asked}: no such config of {first.step.id} is built; those that are: "
            f"{', '.join(config.short_form() for config in candidates)}"
        )
    return nearest_config(usual, matching)


def with_mask(config: Config) -> Config:
    """The causal config of the same step and tile; the config itself, which then refuses causal
    problems, where there is none."""
    return next((c for c in config.variants() if c.supports.causal), config)


def parse_config_option(words: Sequence[str]) -> Config | dict[str, Any]:
    """What `--config` says: a short form, or pairs such as B_r=128. Raises UsageError."""
    if len(words) == 1 and "=" not in words[0]:
        try:
            return config_from_short_form(words[0])
        except ValueError as error:
            raise UsageError(f"--config {words[0]}: {error}") from error
    # the first field is the step, the second the dtype, which are chosen otherwise
    kinds = {f.name: f.type for family in FAMILIES.values() for f in fields(family.config)[2:]}
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in kinds:
            raise UsageError(
                f"--config {word}: expected a field and its value, such as B_r=128; the fields are "
                f"{', '.join(kinds)}"
            )
        try:
            found[name] = int(text) if kinds[name] == "int" else _TRUTH[text.lower()]
        except (KeyError, ValueError):
            wanted = "a number" if kinds[name] == "int" else "true or false"
            raise UsageError(f"--config {word}: {name} takes {wanted}, not {text!r}") from None
    return found


def names_of(configs: Sequence[Config]) -> list[str]:
    """A short name for each kernel: its step, and what tells it from others of the same one."""
    names = []
    for config in configs:
        same = [other for other in configs if other.step is config.step]
        varying = [
            f.name for f in fields(config) if len({getattr(other, f.name) for other in same}) > 1
        ]
        told = (_field_text(config, name) for name in varying)
        names.append(" ".join([config.step.id, *filter(None, told)]))
    return names


def _field_text(config: Config, name: str) -> str:
    """A field's value in few letters; "" for an option that is off."""
    value = getattr(config, name)
    if isinstance(value, DType):
        return value.short
    if isinstance(value, bool):
        return name if value else ""
    return f"{config.__dataclass_fields__[name].metadata['short']}{value}"


def first_refusal(config: Config, problems: Iterable[AttentionForward]) -> str:
    """Why a config does not take one of the problems in its dtype; "" if it takes all."""
    refusals = (config.refusal(problem.in_dtype(config.dtype)) for problem in problems)
    return next(filter(None, refusals), "")


def require_taken(configs: Iterable[Config], *problems: AttentionForward) -> None:
    """Raise UsageError, with the way out of the first, unless a config takes all of the problems in
    its dtype."""
    reasons = [first_refusal(config, problems) for config in configs]
    if all(reasons):
        raise UsageError(reasons[0])


def require_supported(configs: Iterable[Config], problem: AttentionForward) -> None:
    """Raise UsageError, with the way out, unless every config takes the problem in its dtype."""
    for config in configs:
        if reason := config.refusal(problem.in_dtype(config.dtype)):
            raise UsageError(reason)
