"""All families, and the lookups that go through all of them. Standard library only."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from types import MappingProxyType
from typing import Any

from flash_helpers import operations
from flash_helpers.registry.config import Config, differing_fields
from flash_helpers.registry.family import Family, Step
from flash_helpers.registry.operation import Operation
from flash_helpers.registry.problem import Element, Problem


def _found_operations() -> Iterator[Operation]:
    """Yield the operations, one for each folder of `flash_helpers.operations`."""
    for module in pkgutil.iter_modules(operations.__path__):
        yield importlib.import_module(f"{operations.__name__}.{module.name}").OPERATION


def _families_of(operation: Operation) -> Iterator[Family[Any]]:
    for name in operation.families:
        module, _, attribute = name.partition(":")
        yield getattr(importlib.import_module(f"flash_helpers.registry.{module}"), attribute)


_FOUND = sorted(
    (family for operation in _found_operations() for family in _families_of(operation)),
    key=lambda family: family.rank,
)
FAMILIES: Mapping[str, Family[Any]] = MappingProxyType({family.name: family for family in _FOUND})
OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {family.operation.name: family.operation for family in _FOUND}
)
STEPS: Mapping[str, Step] = MappingProxyType(
    {step.id: step for family in _FOUND for step in family.steps.values()}
)
_FIRST = _FOUND[0]


def problem_from_record(record: Mapping[str, Any]) -> Problem:
    """Return the problem of a record, of any operation.

    Raises ValueError for an operation that does not exist, and as `Problem.from_record` does.
    """
    operation = OPERATIONS.get(record.get("operation", ""))
    if operation is None:
        raise ValueError(
            f"operation {record.get('operation')!r} is not one of {', '.join(OPERATIONS)}"
        )
    return operation.problem.from_record(record)


_DEMANGLED = re.compile(r"\b(?P<namespace>\w+)::(?P<kernel>\w+)<\s*(?P<short_form>\w+)\s*>")
_MANGLED = re.compile(r"_ZN(?P<rest>\d+\w+)")


def config_from_short_form(text: str) -> Config:
    """Return the config of any family that a short form names.

    Raises ValueError for a text that is no short form, or whose config is impossible.
    """
    for family in FAMILIES.values():
        if moved := family.successor(text):
            raise ValueError(f"{text!r}: {moved}")
    for family in FAMILIES.values():
        if re.match(rf"{family.prefix}\d", text):
            return family.config.from_short_form(text)
    examples = ", ".join(family.config.example for family in FAMILIES.values())
    raise ValueError(f"{text!r} is not a config's short form; examples are {examples}")


def config_from_dict(values: Mapping[str, object]) -> Config:
    """Return the config of the family whose fields these are.

    Raises ValueError as `Config.from_dict` does.
    """
    kinds: list[type[Config]] = [family.config for family in FAMILIES.values()]
    own = next((kind for kind in kinds if fields(kind)[0].name in values), _FIRST.config)
    return own.from_dict(values)


def names_in_symbol(symbol: str) -> tuple[str, str, str] | None:
    """Return namespace, function and template argument of `namespace::function<argument>`; None for
    a symbol of another form."""
    if found := _DEMANGLED.search(symbol):
        return found["namespace"], found["kernel"], found["short_form"]
    # Itanium C++ ABI: N <length>name <length>name I <length>name E E
    if (found := _MANGLED.search(symbol)) is None:
        return None
    names, rest = [], found["rest"]
    while match := re.match(r"I?(\d+)", rest):
        end = match.end() + int(match[1])
        names.append(rest[match.end() : end])
        rest = rest[end:]
    return (names[0], names[1], names[2]) if len(names) > 2 else None


def config_from_symbol(symbol: str) -> Config:
    """Return the config of a kernel's symbol, demangled or as the object file has it.

    Raises ValueError for a symbol that is no kernel of this library.
    """
    names = names_in_symbol(symbol)
    functions = {function for family in FAMILIES.values() for function in family.kernels}
    if names is None or names[1] not in functions:
        raise ValueError(
            f"{symbol!r} is not the symbol of a kernel of this library (step::function<config>)"
        )
    config = config_from_short_form(names[2])
    if names[1] not in config.functions:
        raise ValueError(f"{symbol!r}: {config.step.id} has no kernel {names[1]}")
    if config.step.namespace != names[0]:
        raise ValueError(
            f"{symbol!r} instantiates a config of {config.step.id} in namespace {names[0]}"
        )
    return config


def find_config(symbol: str) -> Config | None:
    """Return the config of a kernel's symbol; None if it is no kernel of this library."""
    try:
        return config_from_symbol(symbol)
    except ValueError:
        return None


def read_configs(document: object) -> list[Config]:
    """Return the configs of a parsed JSON document: a list, or {"configs": list}.

    An item is a short form or an object with the config's fields.
    Raises ValueError, naming the item, for anything else.
    """
    items = document.get("configs") if isinstance(document, dict) else document
    if not isinstance(items, list):
        raise ValueError('expected a list of configs, or an object with a list called "configs"')
    configs = []
    for index, item in enumerate(items):
        try:
            if isinstance(item, str):
                configs.append(config_from_short_form(item))
            elif isinstance(item, dict):
                configs.append(config_from_dict(item))
            else:
                raise ValueError(f"{item!r} is neither a short form nor an object of fields")
        except ValueError as error:
            raise ValueError(f"config {index}: {error}") from error
    return configs


def nearest_config(config: Config, candidates: Iterable[Config]) -> Config:
    """Return the candidate that differs from `config` in the fewest fields; one of its own family,
    if there is any.

    Among equals the config of the same dtype wins, then the one of the nearest step, then the first
    in order. Raises ValueError without candidates.
    """

    def distance(other: Config) -> tuple[object, ...]:
        if other.family is not config.family:
            return (True, 0, False, 0, other)
        differing = differing_fields(config, other)
        steps = abs(other.step.number - config.step.number)
        return (False, len(differing), "dtype" in differing, steps, other)

    return min(candidates, key=distance)


def fixed_configs(operation: Operation, dtype: str) -> list[Config]:
    """Return every step of an operation at its fixed config, in order, whether it is listed or not.

    `dtype`: short name; families that do not have it are left out.
    """
    return [
        family.fixed_config(step, Element.from_name(dtype))
        for family in FAMILIES.values()
        if family.operation is operation and dtype in {known.short for known in family.dtypes}
        for step in family.steps.values()
    ]


def progression() -> list[Config]:
    """Return every step of every family at its fixed config, in each dtype that it is listed in, in
    order."""
    return [config for family in FAMILIES.values() for config in family.progression()]


@cache  # to try all combinations takes half a second
def sweep() -> tuple[Config, ...]:
    """Return every possible config that a sweep tries, for every step with tunable options."""
    return tuple(config for family in FAMILIES.values() for config in family.sweep())


def with_siblings(configs: Iterable[Config]) -> list[Config]:
    """Return the configs and those that may replace them at a launch; sorted, unique."""
    return sorted({sibling for config in configs for sibling in config.siblings()})


def listed_configs() -> list[Config]:
    """Return the configs that the registry lists, sorted. Any other valid config can be called,
    too."""
    more = (config for family in FAMILIES.values() for config in family.also_listed())
    return with_siblings([*progression(), *more])
