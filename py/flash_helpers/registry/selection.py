"""Selection of kernels on a command line: steps, families and configs by their names.

Standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any

from flash_helpers.kernel_configs import (
    FAMILIES,
    OPERATIONS,
    STEPS,
    Config,
    Element,
    Problem,
    config_from_short_form,
    get_kernel_progression_configs,
    nearest_config,
)
from flash_helpers.registry.config import ranges_text
from flash_helpers.registry.family import Step

ALL = "all"
_DTYPES = tuple(
    element for element in Element if any(element in family.dtypes for family in FAMILIES.values())
)
DTYPE_CHOICES = (*(element.short for element in _DTYPES), ALL)
STEP_NAMES = f"a step (9 or v9), a range of steps (v7..v16), a family ({', '.join(FAMILIES)}), all"
KERNEL_NAMES = f"{STEP_NAMES}, or the short form of a config"

_DEFAULT_PREFIX = next(iter(FAMILIES.values())).prefix  # of a bare number
_STEPS = re.compile(r"([a-z]{0,2})(\d+)(?:(?:\.\.|-)([a-z]{0,2})(\d+))?")
_FILE = re.compile(r"[/\\]|\.(ptx|cubin|fatbin|so|o|cu|cuh)$")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class UsageError(ValueError):
    """A request for something that does not exist or does not fit together."""


def add_kernel_arguments(
    parser: argparse.ArgumentParser,
    default: str = "the fixed config of every step",
    dtype: str = ALL,
) -> None:
    """Add `--kernel` and `--dtype`. `default`: what is chosen without `--kernel`, in words."""
    parser.add_argument(
        "--kernel",
        nargs="+",
        action="extend",
        default=[],
        metavar="KERNEL",
        help=f"{KERNEL_NAMES}; of a step every listed config is meant, and several may be given "
        f"(default: {default})",
    )
    parser.add_argument("--dtype", choices=DTYPE_CHOICES, default=dtype, help=f"(default: {dtype})")


def parse_dtypes(name: str) -> tuple[Element, ...]:
    """Return the dtypes of one of DTYPE_CHOICES. Raises ValueError for any other name."""
    return _DTYPES if name == ALL else (Element.from_name(name),)


def find_steps(selector: str) -> list[Step] | None:
    """Return the steps that a selector names, in order; None if it has no form of STEP_NAMES.

    Raises UsageError for a step that does not exist, or for an invalid range.
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
            f"{all_steps_text()}{_nearest_text(selector)}"
        )
    if to_prefix and to_prefix != prefix:
        raise UsageError(
            f"{selector!r} goes from one family to another: name a range of each, such as "
            f"{prefix}{first}..{own[-1].id}"
        )
    numbers = range(int(first), int(last or first) + 1)
    unknown = [n for n in (int(first), int(last or first)) if not 1 <= n <= len(own)]
    if unknown:
        nearest = own[min(max(unknown[0], 1), len(own)) - 1]
        raise UsageError(
            f"{selector!r}: the steps are {all_steps_text()}; the nearest is {nearest.id}"
        )
    if not numbers:
        raise UsageError(
            f"{selector!r}: a range goes from the lower to the higher step, such as "
            f"{prefix}{last}..{prefix}{first}"
        )
    return [step for step in own if step.number in numbers]


def all_steps_text() -> str:
    """Return the steps of all families: "v1 to v16, o1 to o5"."""
    return ", ".join(ranges_text(family.steps.values()) for family in FAMILIES.values())


def _nearest_text(name: str) -> str:
    """Return the nearest known name, after a semicolon; "" if none is near."""
    near = difflib.get_close_matches(name, [*FAMILIES, *STEPS, ALL], n=1, cutoff=0.5)
    return f"; the nearest is {near[0]}" if near else ""


def parse_steps(selectors: Iterable[str]) -> list[Step]:
    """Return the steps that the selectors name, in the registry's order, each once.

    Raises UsageError for a selector that has no form of STEP_NAMES.
    """
    found: set[str] = set()
    for selector in selectors:
        steps = find_steps(selector)
        if steps is None:
            raise UsageError(f"{selector!r} is not {STEP_NAMES}{_nearest_text(selector)}")
        found.update(step.id for step in steps)
    return [step for step in STEPS.values() if step.id in found]


def named_config(selector: str) -> Config:
    """Return the config of a short form, which need not be listed. Raises UsageError."""
    if _FILE.search(selector):
        raise UsageError(
            f"kernel {selector!r} is a file, and this tool takes {KERNEL_NAMES}: debug.py --ptx "
            "FILE checks PTX of these kernels, examples/own_kernel/simulate.py counts and checks "
            "PTX of any other, and sass_report.py and compare_kernels.py read machine code "
            "(docs/own_kernel.md)"
        )
    try:
        return config_from_short_form(selector)
    except ValueError as error:
        raise UsageError(
            f"kernel {selector!r} is not {KERNEL_NAMES}: {error}{_nearest_text(selector)}"
        ) from error


def _configs_of_steps(
    listed: Sequence[Config], selector: str, steps: Iterable[Step], dtype: Element | None = None
) -> dict[str, list[Config]]:
    """Return the listed configs of each step, by its id. `dtype`: dtype of the configs; any by
    default."""
    steps = list(steps)
    of_step = {
        step.id: [c for c in listed if c.step.id == step.id and dtype in (None, c.dtype)]
        for step in steps
    }
    found = {name: configs for name, configs in of_step.items() if configs}
    missing = [step for step in steps if step.id not in found]
    several = selector == ALL or selector in FAMILIES
    if missing and not (several and found):
        of_dtype = "" if dtype is None else f" in {dtype.short}"
        others = [config for config in listed if config.step in missing]
        raise UsageError(
            f"kernel {selector!r}: no config of {ranges_text(missing)} is listed"
            f"{of_dtype}{_dtypes_text(others)}"
        )
    return found


def _dtypes_text(configs: Iterable[Config]) -> str:
    """Return the dtypes that configs are listed in, after a semicolon; "" for no config."""
    dtypes = {config.dtype for config in configs}
    names = ", ".join(element.short for element in _DTYPES if element in dtypes)
    return f"; there is {names}" if names else ""


def select_kernels(
    listed: Sequence[Config],
    selectors: Iterable[str],
    dtypes: Iterable[Element],
    default: Iterable[Config] = (),
    problems: Mapping[str, Problem] = MappingProxyType({}),
) -> list[Config]:
    """Return the listed configs that the selectors name (see KERNEL_NAMES), of the given dtypes,
    sorted. A step stands for all of its listed configs.

    `listed`: the configs to choose from, such as those of `library.kernels()`. `problems`: by
    operation; of a step whose configs are made
    for different problems, such as causal ones, only those made for such a problem. `default`:
    configs taken without any selector; those that are not listed are left out.

    Raises UsageError if a selector names nothing that is listed, or if no config is left.
    """
    selectors = list(selectors)
    wanted = set(dtypes)
    named: set[Config] = set()
    for selector in selectors:
        steps = find_steps(selector)
        if steps is None:
            named.add(named_config(selector))
            continue
        for configs in _configs_of_steps(listed, selector, steps).values():
            named.update(_made_for(problems.get(configs[0].family.operation.name), configs))
    if not selectors:
        named = set(default) & set(listed)
    chosen = sorted(config for config in named if config.dtype in wanted)
    if not chosen:
        raise UsageError(
            f"no listed kernel is left for --kernel {' '.join(selectors) or '(default)'} and dtype "
            f"{', '.join(sorted(dtype.short for dtype in wanted))}: widen one of the two"
            f"{_dtypes_text(named)}"
        )
    return chosen


def _made_for(problem: Problem | None, configs: Sequence[Config]) -> Sequence[Config]:
    """Return the configs of a step that have every ability that a problem needs; all configs if
    none has."""
    if problem is None:
        return configs
    return [config for config in configs if not config.supports.lacking(problem)] or configs


def chosen_kernels(
    arguments: argparse.Namespace,
    listed: Sequence[Config],
    problems: Mapping[str, Problem] = MappingProxyType({}),
) -> list[Config]:
    """Return `select_kernels` of the arguments of `add_kernel_arguments`, by default the
    progression.

    `problems`: problems by operation. Without `--kernel` only configs of these operations are
    taken, in the variants that are made for the problem.
    """
    progression = get_kernel_progression_configs()
    if problems:
        own = [(c, problems.get(c.family.operation.name)) for c in progression]
        variants = [(variant_for(c, problem), problem) for c, problem in own if problem]
        progression = [c for c, problem in variants if not c.supports.lacking(problem)]
    return select_kernels(
        listed, arguments.kernel, parse_dtypes(arguments.dtype), progression, problems
    )


Wanted = Config | Mapping[str, Any] | None


def choose_kernels(
    listed: Sequence[Config],
    selectors: Iterable[str],
    dtype: Element,
    wanted: Wanted = None,
) -> list[Config]:
    """Return one config of each step that the selectors name (see KERNEL_NAMES), in the order asked
    for, each once. A short form selects itself.

    `wanted`: which config of a step: the one nearest to a config; the one that has the values of
    some fields, the fixed one if there are several; None: the fixed one, or the first that is
    listed.

    Raises UsageError if a selector names nothing that is listed, or no config has the values.
    """
    chosen: dict[Config, None] = {}
    for selector in selectors:
        steps = find_steps(selector)
        if steps is None:
            chosen[named_config(selector)] = None
            continue
        for configs in _configs_of_steps(listed, selector, steps, dtype).values():
            chosen[_choose(configs, wanted)] = None
    return list(chosen)


def _choose(candidates: Sequence[Config], wanted: Wanted) -> Config:
    """Return one of the listed configs of a step in a dtype."""
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
            f"--config {asked}: no such config of {first.step.id} is listed; those that are: "
            f"{', '.join(config.short_form() for config in candidates)}"
        )
    return nearest_config(usual, matching)


def variant_for(config: Config, problem: Problem) -> Config:
    """Return the config of the same step and tile that has every ability that a problem needs, such
    as the causal one; the config itself if there is none."""
    found = (c for c in config.variants() if not c.supports.lacking(problem))
    return next(found, config)


def parse_config_option(words: Sequence[str]) -> Config | dict[str, Any]:
    """Return the value of `--config`: a short form, or pairs such as B_r=128. Raises UsageError."""
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
    """Return a short name for each kernel: its step, and its difference from other kernels of the
    step."""
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
    """Return a field's value in few letters; "" for an option that is off."""
    value = getattr(config, name)
    if isinstance(value, Element):
        return value.short
    if isinstance(value, bool):
        return name if value else ""
    return f"{config.__dataclass_fields__[name].metadata['short']}{value}"


def first_refusal(config: Config, problems: Iterable[Problem]) -> str:
    """Return the reason why a config does not take one of the problems in its dtype; "" if it takes
    all."""
    refusals = (config.refusal(problem.in_dtype(config.dtype)) for problem in problems)
    return next(filter(None, refusals), "")


def require_taken(configs: Iterable[Config], *problems: Problem) -> None:
    """Raise UsageError unless a config takes all of the problems in its dtype. The message has the
    way out for the first refusal."""
    reasons = [first_refusal(config, problems) for config in configs]
    if all(reasons):
        raise UsageError(reasons[0])


def require_supported(configs: Iterable[Config], problem: Problem) -> None:
    """Raise UsageError, with the way out, unless every config takes the problem in its dtype."""
    for config in configs:
        if reason := config.refusal(problem.in_dtype(config.dtype)):
            raise UsageError(reason)


# -- problems by their fields ----------------------------------------------------------------------


def add_problem_options(parser: argparse._ActionsContainer, *names: str) -> None:
    """Add an option for each field of the operations' problems that has a help text.

    `parser`: a parser or an argument group. `names`: names of the fields, all by default. An option
    that is not given is None.
    """
    for name, (field, operations) in _problem_fields().items():
        if names and name not in names:
            continue
        of = "" if len(operations) == len(OPERATIONS) else f" ({', '.join(operations)})"
        option, text = _option_name(field), f"{field.metadata['help']}{of}"
        if field.type == "bool":
            parser.add_argument(option, dest=name, action="store_const", const=True, help=text)
        else:
            kind = float if field.type == "float" else int
            metavar = field.metadata.get("metavar", "N")
            parser.add_argument(option, dest=name, type=kind, metavar=metavar, help=text)


def _problem_fields() -> dict[str, tuple[Field[Any], list[str]]]:
    """Return the fields that have options, and the operations whose problems have them."""
    found: dict[str, tuple[Field[Any], list[str]]] = {}
    for operation in OPERATIONS.values():
        for field in fields(operation.problem):
            if "help" in field.metadata:
                found.setdefault(field.name, (field, []))[1].append(operation.name)
    return found


def _option_name(field: Field[Any]) -> str:
    return "--" + field.metadata.get("name", field.name).replace("_", "-")


def asked_problem(arguments: argparse.Namespace, base: Problem) -> Problem:
    """Return a problem with the values of `base` and the options of the command line. Sizes that
    depend on other sizes, and are None by default, are computed anew.

    Raises ValueError as the problem's class does.
    """
    values = {f.name: getattr(base, f.name) for f in fields(base) if f.default is not None}
    for f in fields(base):
        if (asked := getattr(arguments, f.name, None)) is not None and "help" in f.metadata:
            values[f.name] = asked
    return type(base)(**values)


def require_options_of(arguments: argparse.Namespace, operations: Iterable[str]) -> None:
    """Raise UsageError for an option of a problem that none of these operations has."""
    operations = set(operations)
    for name, (field, having) in _problem_fields().items():
        if getattr(arguments, name, None) is not None and not operations & {*having}:
            raise UsageError(
                f"{_option_name(field)} is an option of {', '.join(having)}, and the kernels "
                f"compute {', '.join(sorted(operations))}: leave it out"
            )
