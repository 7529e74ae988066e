"""Kernels that a wheel brings compiled, so that nothing is compiled where it is installed: a cache
in the package, of what FLASH_ATTENTION_PREBUILD names. Standard library only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from flash_helpers.compile.build import requested_jobs
from flash_helpers.compile.cache import Cache
from flash_helpers.compile.codegen import listed_configs
from flash_helpers.compile.compilers import Compiler, find_compiler
from flash_helpers.compile.jit import FOREVER, Jit, units_of
from flash_helpers.compile.sources import Unit
from flash_helpers.compile.toolchain import BuildError, requested_architectures
from flash_helpers.registry.families import with_siblings
from flash_helpers.registry.selection import ALL, UsageError, parse_dtypes, select_kernels

VARIABLE = "FLASH_ATTENTION_PREBUILD"


def prebuild(
    root: Path,
    folder: Path,
    report: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
    find: Callable[[Mapping[str, str]], Compiler] = find_compiler,
) -> None:
    """Make `folder` a cache of the kernels that FLASH_ATTENTION_PREBUILD names, as `--kernel` takes
    them, and of no others: PTX for the simulator, and machine code for each of the requested
    architectures. Without the variable there is no folder.

    `find`: finds the compiler.

    Raises BuildError, OSError and ValueError.
    """
    names = environ.get(VARIABLE, "").split()
    if not names:
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        chosen = select_kernels(listed_configs(root), names, parse_dtypes(ALL))
    except UsageError as error:
        raise BuildError(f"{VARIABLE}: {error}") from error
    wanted: list[tuple[Unit, str]] = []
    for config in with_siblings(chosen):
        family = config.family
        targets = [f"sm_{t}" for t in family.targets_for(requested_architectures(environ))]
        for unit in units_of(config):
            wanted += [(unit, target) for target in (f"compute_{family.targets[0]}", *targets)]
    cache = Cache(folder, is_required=True)
    jit = Jit(root, cache, lambda: find(environ), requested_jobs(environ))
    units, each_target = [unit for unit, _ in wanted], [target for _, target in wanted]
    made = set()
    for number, outcome in enumerate(jit.each(units, each_target, FOREVER), start=1):
        if outcome.compiled is None:
            raise BuildError(
                f"{outcome.unit.name} for {outcome.target}: {outcome.failure}\n{outcome.log}"
            )
        made.add(outcome.compiled.folder)
        report(f"[{number}/{len(wanted)}] {outcome.unit.name} for {outcome.target}")
    for entry in cache.entries():
        if entry.folder not in made:  # of an earlier build
            cache.remove(entry)
