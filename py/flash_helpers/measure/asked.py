"""The problems that a command line asks to be measured. Standard library only."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields

from flash_helpers.console.command_line import positive
from flash_helpers.kernel_configs import OPERATIONS, Config, Element, Problem
from flash_helpers.registry.operation import Operation
from flash_helpers.registry.selection import (
    UsageError,
    add_problem_options,
    asked_problem,
    require_options_of,
    select_kernels,
)

_SEVERAL = "_several"  # behind a field's name: its values, where an option takes several


def add_measured_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of the operations' problems; those that benchmarks vary take
    several values."""
    swept: dict[str, list[Operation]] = {}
    for operation in OPERATIONS.values():
        swept.setdefault(operation.swept, []).append(operation)
    names = {f.name for o in OPERATIONS.values() for f in fields(o.problem) if "help" in f.metadata}
    for name, operations in swept.items():
        first = operations[0]
        usual = "; ".join(f"{o.name}: {' '.join(map(str, o.measured_at))}" for o in operations)
        parser.add_argument(
            swept_option(first),
            dest=name + _SEVERAL,
            nargs="+",
            type=positive,
            metavar="N",
            help=f"{first.size_field.metadata['help']} (default: {usual})",
        )
    add_problem_options(parser, *sorted(names - swept.keys()))


def swept_option(operation: Operation) -> str:
    """Return the option for the sizes that an operation is measured at, such as --seq."""
    return f"--{operation.size_name}"


def asked_sizes(arguments: argparse.Namespace, operation: Operation) -> list[int]:
    """Return the sizes asked for, each once and ascending; the operation's own by default.

    Raises UsageError for an option of another operation.
    """
    require_options_of(arguments, [operation.name])
    for other in OPERATIONS.values():
        given = getattr(arguments, other.swept + _SEVERAL, None)
        if other.swept != operation.swept and given is not None:
            raise UsageError(
                f"{swept_option(other)} is an option of {other.name}, and the kernels compute "
                f"{operation.name}: use {swept_option(operation)}"
            )
    given = getattr(arguments, operation.swept + _SEVERAL, None)
    return sorted(set(operation.measured_at if given is None else given))


def measured_problem(
    arguments: argparse.Namespace, operation: Operation, size: int | None = None
) -> Problem:
    """Return the problem that is measured at a size, with the options asked for. Fields that depend
    on them are set too, such as the batch, which depends on the number of heads.

    size: None takes the option's size, or else the usual problem's. Raises ValueError as the
    problem's class does.
    """
    if size is None:
        asked = getattr(arguments, operation.swept, None)
        size = getattr(operation.usual, operation.swept) if asked is None else asked
    if size < 1:
        raise UsageError(f"{swept_option(operation)} {size} is not positive: use 1 or more")
    _, *known = inspect.signature(operation.measured).parameters
    given = {name: getattr(arguments, name, None) for name in known}
    own = {name: value for name, value in given.items() if value is not None}
    return asked_problem(arguments, operation.measured(size, **own))


def one_operation(configs: Iterable[Config]) -> Operation:
    """Return the operation of some configs. Raises UsageError if they have several."""
    found = {config.family.operation.name: config.family.operation for config in configs}
    if len(found) != 1:
        raise UsageError(f"the kernels compute {', '.join(found)}: name those of one operation")
    return next(iter(found.values()))


def chosen_operation(
    built: Sequence[Config], selectors: Sequence[str], dtypes: Iterable[Element]
) -> Operation:
    """Return the operation of the built kernels that the selectors name; without selectors, the
    first operation.

    Raises UsageError as `select_kernels` does, and if the kernels are of several operations.
    """
    if not selectors:
        return next(iter(OPERATIONS.values()))
    return one_operation(select_kernels(built, selectors, dtypes))


def problem_options(problem: Problem) -> list[str]:
    """Return the options that ask for a problem on a command line, without the dtype
    (`selection.add_problem_options`)."""
    found = []
    for field in fields(problem):
        if "help" not in field.metadata:
            continue
        value = getattr(problem, field.name)
        option = "--" + field.metadata.get("name", field.name).replace("_", "-")
        if isinstance(value, bool):
            found += [option] * value
        elif value is not None:
            found += [option, str(value)]
    return found
