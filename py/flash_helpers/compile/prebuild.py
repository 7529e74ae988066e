"""Kernels that a wheel brings compiled, so that nothing is compiled where it is installed: a cache
in the package, of what FLASH_ATTENTION_PREBUILD names. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from flash_helpers.compile.build import requested_jobs
from flash_helpers.compile.cache import Cache
from flash_helpers.compile.codegen import listed_configs
from flash_helpers.compile.compilers import find_compiler
from flash_helpers.compile.jit import FOREVER, Jit, units_of
from flash_helpers.compile.sources import Unit
from flash_helpers.compile.toolchain import BuildError, requested_architectures
from flash_helpers.registry.selection import UsageError, parse_steps

VARIABLE = "FLASH_ATTENTION_PREBUILD"


def prebuild(
    root: Path,
    folder: Path,
    report: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Compile the listed configs of the steps that FLASH_ATTENTION_PREBUILD names ("all", or as
    `--kernel` takes them) into a cache at `folder`: PTX for the simulator, and machine code for
    each of the requested architectures. Without the variable nothing is made.

    Raises BuildError, OSError and ValueError.
    """
    names = environ.get(VARIABLE, "").split()
    if not names:
        return
    try:
        steps = parse_steps(names)
    except UsageError as error:
        raise BuildError(f"{VARIABLE}: {error}") from error
    wanted: list[tuple[Unit, str]] = []
    for config in listed_configs(root):
        if config.step in steps:
            family = config.family
            targets = [f"sm_{t}" for t in family.targets_for(requested_architectures(environ))]
            for unit in units_of(config):
                wanted += [(unit, target) for target in (f"compute_{family.targets[0]}", *targets)]
    jit = Jit(root, Cache(folder), lambda: find_compiler(environ), requested_jobs(environ))
    units, each_target = [unit for unit, _ in wanted], [target for _, target in wanted]
    for number, outcome in enumerate(jit.each(units, each_target, FOREVER), start=1):
        if outcome.compiled is None:
            raise BuildError(f"{outcome.unit.name} for {outcome.target}: {outcome.log}")
        report(f"[{number}/{len(wanted)}] {outcome.unit.name} for {outcome.target}")
